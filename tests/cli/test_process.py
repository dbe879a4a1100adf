"""Signals that end a command, and standard streams that are closed.

Alone: python -m pytest tests/cli/test_process.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minithink.cli.process import Signals, Stopped

SIGNALS = [signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_raised_once_and_handlers_are_restored(number: signal.Signals) -> None:
    with Signals() as signals:
        with pytest.raises(Stopped, match=number.name) as stop:
            os.kill(os.getpid(), number)
        for again in SIGNALS:
            os.kill(os.getpid(), again)
        assert signals.stopped is stop.value
        assert stop.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As `nohup` wants it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.stopped is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_commands_within_commands_leave_signals_to_the_outer_one() -> None:
    with Signals() as outer, Signals() as inner:
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        assert outer.stopped is not None
        assert inner.stopped is None


def test_processes_of_torchrun_keep_their_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_closed_streams_are_the_null_device(tmp_path: Path) -> None:
    """A file that is opened later does not get what is printed, nor what child processes print."""
    code = (
        "import os, subprocess, sys\n"
        "from minithink.cli.process import open_streams\n"
        "closed = open_streams()\n"
        "with open('file', 'w') as file:\n"
        "    print('to nobody')\n"
        "    os.write(1, b'to nobody')\n"
        "    subprocess.run(['echo', 'to nobody'], check=True)\n"
        "    print(closed, repr(sys.stdin.read()), file.fileno() > 2, file=file)\n"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "['stdin', 'stdout', 'stderr'] '' True\n"


def test_signals_keep_their_handlers_in_other_threads() -> None:
    """Python sets handlers in the main thread only."""
    seen: list[object] = []

    def command() -> None:
        with Signals() as signals:
            seen.extend([signal.getsignal(signal.SIGTERM), signals.stopped])

    thread = threading.Thread(target=command)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL, None]


def test_a_handler_of_the_users_own_stays() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stopped is None
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ("", "kept\n"),  # Python has no stream although there is one, as under pythonw
        ("os.close(0); os.close(1)", ""),  # the lowest free number is another stream's
    ],
)
def test_only_streams_that_are_closed_are_opened_anew(before: str, shown: str) -> None:
    code = f"import os, sys\nfrom minithink.cli.process import open_streams\n{before}\nsys.stdout = None\n"
    code += "closed = open_streams()\nos.write(1, b'kept\\n')\nsys.exit(0 if closed == ['stdout'] else 7)\n"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")
