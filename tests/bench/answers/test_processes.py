"""Work in several processes: the same results as in one, whatever fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from minithink.bench.answers.processes import spread, visible_gpus
from minithink.errors import MinithinkError, UsageError


def work(x: int) -> tuple[int, int]:
    """Its square and the process that found it; some numbers fail."""
    print(f"printed of {x}")
    if x == 3:
        raise UsageError("Three is no number: give another.")
    if x == 4:
        raise ValueError("four")
    if x == 5:
        os._exit(1)
    return x * x, os.getpid()


def log_of(folder: Path, x: int) -> Path:
    return folder / "logs" / f"{x}.log"


def test_every_item_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In processes of their own, which print into logs; no more processes than items."""
    found = list(spread(work, [1, 2, 6, 7, 8], 2, partial(log_of, tmp_path)))
    results = [result for _, result in found]
    assert sorted((x, result[0]) for x, result in found if isinstance(result, tuple)) == [
        (x, x * x) for x in (1, 2, 6, 7, 8)
    ]
    processes = {result[1] for result in results if isinstance(result, tuple)}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == {
        f"{x}.log": f"printed of {x}\n" for x in (1, 2, 6, 7, 8)
    }
    assert capfd.readouterr().out == ""
    assert list(spread(work, [], 2, partial(log_of, tmp_path))) == []


def seen(x: int) -> str:
    """The GPUs that its process sees."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_processes_see_one_gpu_each_in_turns(tmp_path: Path) -> None:
    found = list(spread(seen, [1, 2, 3, 4], 4, partial(log_of, tmp_path), gpus=["5", "7"]))
    assert sorted(result for _, result in found if isinstance(result, str)) == ["5", "5", "7", "7"]


def test_gpus_are_named_as_this_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,6")
    assert visible_gpus(1) == ["3"]
    with pytest.raises(UsageError, match="--gpus is 3, and torch sees 2 GPUs: give fewer"):
        visible_gpus(3)


def test_what_fails_stops_nothing_else(tmp_path: Path) -> None:
    """An error of the project comes as it is, another with the file that has its traceback."""
    found = dict(spread(work, [3, 4, 5, 6], 2, partial(log_of, tmp_path)))
    assert isinstance(found[3], UsageError)
    assert str(found[3]) == "Three is no number: give another."
    assert isinstance(found[4], MinithinkError)
    assert str(found[4]) == f"ValueError: four; more in {tmp_path / 'logs' / '4.log'}."
    assert 'raise ValueError("four")' in (tmp_path / "logs" / "4.log").read_text()
    assert isinstance(found[5], MinithinkError)
    assert str(found[5]).startswith("Its process was killed")
    assert isinstance(found[6], tuple)


def test_what_waits_begins_when_a_result_allows_it(tmp_path: Path) -> None:
    """However many processes are idle. What is never allowed is left out."""
    ended = list[int]()

    def waits(x: int) -> bool:
        return x == 9 or (x == 7 and 2 not in ended)

    for x, result in spread(work, [9, 7, 1, 2], 3, partial(log_of, tmp_path), waits):
        assert isinstance(result, tuple)
        assert x != 7 or 2 in ended
        ended.append(x)
    assert sorted(ended) == [1, 2, 7]


def test_when_all_processes_are_killed(tmp_path: Path) -> None:
    found = spread(work, [5, 6], 1, partial(log_of, tmp_path))
    assert isinstance(next(found)[1], MinithinkError)
    with pytest.raises(MinithinkError, match="1 part of the work was not begun"):
        next(found)


INTERRUPTED = """
import sys, time
from functools import partial
from pathlib import Path
from minithink.bench.answers.processes import spread
from minithink.cli.process import Signals

def work(x):
    if x == 0:
        return "done"
    try:
        print("working", flush=True)
        time.sleep(600)
    finally:
        print("closed", flush=True)

def log_of(folder, x):
    return folder / f"{x}.log"

if __name__ == "__main__":
    try:
        with Signals():
            for item in spread(work, [0, 1, 2, 3, 4, 5], 2, partial(log_of, Path(sys.argv[1]))):
                print(item, flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[bool], subprocess.Popen[str]]]:
    """Starts the script, and waits until two processes work."""
    started = []

    def now(deaf: bool) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(INTERRUPTED)
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            # a shell makes what runs in its background deaf to interrupts
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.SIG_DFL),
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "(0, 'done')\n"
        wait_for(tmp_path, "working\n")
        return process

    yield now
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(folder: Path, text: str) -> None:
    """Until both logs hold a text."""
    logs = [folder / f"{x}.log" for x in (1, 2)]
    end = time.monotonic() + 60
    while not all(path.exists() and path.read_text() == text for path in logs):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["terminal", "one", "deaf", "all"])
def test_an_interrupt_reaches_all_processes(
    tmp_path: Path, start: Callable[[bool], subprocess.Popen[str]], way: str
) -> None:
    """From a terminal all processes get it, from elsewhere one or all. What runs may close its files, what has not
    begun never begins."""
    process = start(way == "deaf")
    if way == "terminal":
        os.killpg(process.pid, signal.SIGINT)
    elif way == "all":  # as by `timeout`
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=50)[0] == "interrupted\n"
    wait_for(tmp_path, "working\nclosed\n")
    assert not (tmp_path / "3.log").exists()


def test_who_loses_the_first_process_ends(tmp_path: Path, start: Callable[[bool], subprocess.Popen[str]]) -> None:
    """It cannot say so, because it was killed."""
    start(True).kill()
    wait_for(tmp_path, "working\nclosed\n")
