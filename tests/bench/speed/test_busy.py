"""Decoding beside programs that hold the cores. To run it alone: pytest tests/bench/speed/test_busy.py"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from minithink.bench.__main__ import main
from minithink.bench.speed import busy
from minithink.bench.tables.pages import TABLES, lines_of
from minithink.cli import cores


def test_a_process_generates_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One real run, short; the settings of this process are not those of the other."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    seen = {}
    run = subprocess.run

    def spy(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
        seen.update(env)
        return run(words, env=env, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    assert busy.speed_in_a_process({"OMP_NUM_THREADS": "1"}, batch=1, steps=3, seconds=60) > 0
    assert seen["OMP_NUM_THREADS"] == "1"
    assert not set(seen) & set(cores.OF_USERS)


def test_settings_take_turns_and_holders_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, holders = [], []
    start = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        if args[0][-1] == busy.HOLD:
            holders.append(process)
        return process

    def speed(environment: dict[str, str], batch: int, steps: int, seconds: int) -> float:
        assert all(holder.poll() is None for holder in holders[-1:])
        order.append(environment)
        return 100.0 * batch + len(order)

    monkeypatch.setattr(cores, "others_run", lambda: False)  # other tests run beside this one
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(busy, "speed_in_a_process", speed)
    path = tmp_path / "busy.json"
    words = ["--held", "0", "1", "--batch", "1", "--spins", "1000", "--repeats", "3", "--output", str(path)]
    assert main(["busy", *words]) == 0
    assert [holder.poll() is not None for holder in holders] == [True]
    names = list(busy.settings([1000]))
    forth = list(busy.settings([1000]).values())
    assert order == [*forth, *forth[::-1], *forth] * 2  # for no core held, and for one
    result = json.loads(path.read_text())
    idle, held = result["measurements"]
    assert (idle["held"], held["held"]) == (0, 1)
    assert idle["runs"]["commands"] == [101.0, 110.0, 111.0]
    assert idle["speeds"] == {name: 110.0 - i for i, name in enumerate(names)}
    table = lines_of(TABLES["busy-cpu"], result)
    assert table[0].startswith(
        "| sequences | cores held | as commands set it | OpenMP's default | `GOMP_SPINCOUNT=1000`"
    )
    assert table[2].startswith("| 1 | 0 | **110** | 109 | 108 |")
    assert any(line.startswith("Medians; load average before the lines: ") for line in table)


def test_a_run_that_fails_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--held", "0", "--batch", "1", "--steps", "3", "--output", str(tmp_path / "x.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(busy, "load_problems", lambda split: [])
        patch.setattr("sys.executable", "/bin/false")
        assert main(["busy", *words]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err == "minithink.bench: A run failed: 1."
