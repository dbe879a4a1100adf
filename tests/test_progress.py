"""What a run says of how far it got."""

from __future__ import annotations

import pytest

from minithink import progress as module
from minithink.progress import duration, progress


def test_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(12, 2, "full") as advance:
        for right, seconds in ((True, 20), (False, 20), (True, 10), (True, 31), *[(False, 1)] * 6):
            now[0] += seconds
            advance(right)
    assert capsys.readouterr().err.splitlines() == [
        "full: 4 of 12 sequences; 1 of 2 right (50.0%); 2:40 left",
        "full: 6 of 12 sequences; 3 of 4 right (75.0%); 2:02 left",
        "full: 12 of 12 sequences; 3 of 10 right (30.0%)",
    ]


def test_without_a_label_and_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for silent in (False, True):
        with progress(1, 0, silent=silent) as advance:
            advance(True)
    assert capsys.readouterr().err == "1 of 1 sequences; 1 of 1 right (100.0%)\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress(4, 1, "rkv:x=[1]") as advance:
        for right in (True, False, True):
            advance(right)
    err = capsys.readouterr().err
    for said in ("rkv:x=[1]", "2 of 3 right (66.7%)", "4/4"):
        assert said in err


def test_durations() -> None:
    assert [duration(s) for s in (0, 9.6, 95, 3700)] == ["0:00", "0:10", "1:35", "1:01:40"]
