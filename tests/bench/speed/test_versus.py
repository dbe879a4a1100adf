"""Two checkouts side by side. To run it alone: pytest tests/bench/speed/test_versus.py"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from minithink.bench.__main__ import main
from minithink.bench.speed import versus
from minithink.results import record
from minithink.results.origin import ROOT


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another checkout, with the same code."""
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("minithink", "kernels", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_both_sides_decode_in_turns(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # beside other tests, the sides would wait for each other's threads
    path = tmp_path / "x.json"
    policies = ["--policies", "none", "window:budget=200"]
    amounts = ["--batch", "2", "--steps", "2", "--turns", "3", "--processes", "2"]
    assert main(["versus", str(other), *policies, *amounts, "--output", str(path)]) == 0
    result = record.read(path)
    assert result["complete"]
    assert [(m["policy"], m["batch"]) for m in result["measurements"]] == [("none", 2), ("window:budget=200", 2)]
    for m in result["measurements"]:
        assert [len(found) for found in m["ratios"]] == [3, 3]
        assert all(ratio > 0 for found in m["ratios"] for ratio in found)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_is_measured_stays_when_it_breaks_off(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = {"here": [1.0], "there": [2.0]}
    turns = iter([pair, pair, pair])

    def next_turns(*_: object) -> dict[str, list[float]]:
        found = next(turns, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(versus, "Side", lambda root, device: Namespace(end=lambda: None))
    monkeypatch.setattr(versus, "turns_of_a_pair", next_turns)
    path = tmp_path / "x.json"
    amounts = ["--policies", "full", "--batch", "1", "2", "--processes", "2", "--output", str(path)]
    main(["versus", str(other), *amounts])
    result = record.read(path)
    assert not result["complete"]
    assert [(m["batch"], m["ratio_by_pair"]) for m in result["measurements"]] == [(1, [2.0, 2.0]), (2, [2.0])]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_side_that_begins_alternates() -> None:
    asked = list[tuple[str, int]]()

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, go: int = 0, make: object = None) -> None:
            if go:
                asked.append((self.name, go))

        def answer(self) -> float:
            return float(len(asked))

    sides = {"here": Noting("here"), "there": Noting("there")}
    found = versus.turns_of_a_pair(sides, "full", 2, Namespace(steps=5, turns=3))
    assert asked == [("here", 5), ("there", 5), ("there", 5), ("here", 5), ("here", 5), ("there", 5)]
    assert found == {"here": [1.0, 4.0, 5.0], "there": [2.0, 3.0, 6.0]}


def test_the_ratio_is_the_median_of_the_pairs_medians() -> None:
    fast = {"here": [1.0, 1.0, 1.0], "there": [2.0, 2.0, 9.0]}
    same = {"here": [2.0, 4.0, 2.0], "there": [2.0, 4.0, 2.0]}
    slow = {"here": [2.0, 2.0, 2.0], "there": [1.0, 1.0, 0.5]}
    found = versus.summary([fast, same, slow], steps=4)
    assert found["ratio_by_pair"] == [2.0, 1.0, 0.5]
    assert found["ratio"] == 1.0
    assert found["step_milliseconds"] == {"here": 500.0, "there": 500.0}


@pytest.mark.parametrize("policy", ["mine.py:Mine", "ideas.mine:Mine:budget=3", "kivi+mine.py:Mine"])
def test_a_policy_of_ones_own_is_refused(
    policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versus, "measurements", lambda *_: pytest.fail("it ran"))
    assert main(["versus", str(versus.ROOT), "--policies", "rkv:budget=256,buffer=32", policy]) == 2
    assert f"Both checkouts decode under their own policies, and '{policy}' is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "is no checkout of minithink: it has no minithink/__init__.py."),
        ("raise ValueError('no such luck')", "failed: ValueError: no such luck."),
    ],
)
def test_a_side_that_cannot_run_is_one_sentence(
    code: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "minithink").mkdir()
    if code is not None:
        (tmp_path / "minithink" / "__init__.py").write_text(code)
    assert main(["versus", str(tmp_path), "--output", str(tmp_path / "x.json")]) == (2 if code is None else 1)
    assert said in capsys.readouterr().err
