"""What a run says of how far it got."""

from __future__ import annotations

import pytest

from minithink.results import progress as module
from minithink.results.progress import duration, progress


def test_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(12, 2, "full") as advance:
        for right, seconds in ((True, 20), (False, 20), (True, 10), (True, 31), *[(False, 1)] * 6):
            now[0] += seconds
            advance(right)
    assert capsys.readouterr().err.splitlines() == [
        "full: 4 of 12 sequences; 1 of 4 right (25.0%); 2:40 left",
        "full: 6 of 12 sequences; 3 of 6 right (50.0%); 2:02 left",
        "full: 12 of 12 sequences; 3 of 12 right (25.0%)",
    ]


def test_what_was_there_counts_in_every_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the speed, which is that of this start."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(3, 1, "kivi", right=1, tokens=1000) as advance:
        for tokens in (40, 10):
            now[0] += 15
            advance.step(tokens)
        advance(False)
        now[0] += 10
        advance(False)
    assert capsys.readouterr().err.splitlines() == [
        "kivi: 1 of 3 sequences; 1 of 1 right (100.0%); 1,050 tokens, 1.7 tokens/s",
        "kivi: 3 of 3 sequences; 1 of 3 right (33.3%); 1,050 tokens, 1.2 tokens/s",
    ]


def test_a_line_every_half_minute_though_no_sequence_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(2, 0, "kivi") as advance:
        for _ in range(65):
            now[0] += 1
            advance.step(2)
    assert capsys.readouterr().err.splitlines() == [
        "kivi: 0 of 2 sequences; 60 tokens, 2.0 tokens/s",
        "kivi: 0 of 2 sequences; 120 tokens, 2.0 tokens/s",
    ]


def test_without_a_label_and_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for silent in (False, True):
        with progress(1, 0, silent=silent) as advance:
            advance(True)
    assert capsys.readouterr().err == "1 of 1 sequence; 1 of 1 right (100.0%)\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress(4, 1, "rkv:x=[1]") as advance:
        for right in (True, False, True):
            advance(right)
    err = capsys.readouterr().err
    for said in ("rkv:x=[1]", "2 of 4 right (50.0%)", "4/4"):
        assert said in err
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(1, 0) as advance:
        now[0] = 10
        advance.step(1234)
    assert "1,234 tokens, 123.4 tokens/s" in capsys.readouterr().err


def test_no_step_waits_for_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar changes ten times a second at most, and with every sequence that ends."""
    from rich.progress import Progress

    said = list[str]()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(Progress, "update", lambda self, task, **values: said.append(values["description"]))
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(2, 0) as advance:
        for i in range(1, 26):
            now[0] = i / 50
            advance.step(10)
        assert 3 <= len(said) <= 6
        before = len(said)
        advance(True)
        advance.step(10)
        advance(False)
        assert said[before:] == [
            "1 of 1 right (100.0%); 250 tokens, 500.0 tokens/s",
            "1 of 2 right (50.0%); 260 tokens, 520.0 tokens/s",
        ]


def test_durations() -> None:
    assert [duration(s) for s in (0, 9.6, 95, 3700)] == ["0:00", "0:10", "1:35", "1:01:40"]


def test_sequences_that_are_not_graded_have_no_share_of_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2, 1, "full", graded=0) as advance:
        advance(None)
    assert capsys.readouterr().err == "full: 2 of 2 sequences\n"
