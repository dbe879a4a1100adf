"""Comparisons of losses: a run holds the mean loss of each text, and says what it was taken of.

To run it alone: pytest tests/bench/answers/test_losses.py
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.answers import losses, pool, sweep
from minithink.engine import TINY, load
from minithink.evaluate import fixed_texts, loss_plots, texts
from minithink.evaluate.__main__ import main as evaluate
from minithink.evaluate.journal import read
from minithink.evaluate.texts import REFERENCE, read_texts
from minithink.text.tags import Tags
from tests.evaluate.test_runner import interrupt

torch.set_num_threads(1)

NAME = "transfer-losses"
WORDS = ["--device", "cpu", "--limit", "2"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with few policies, and the beginnings of reference traces."""
    whole = texts._references

    def beginnings(count: int, seed: int, tags: Tags) -> list[texts.Text]:
        return [replace(text, content=text.content[:60]) for text in whole(count, seed, tags)]

    monkeypatch.setattr(texts, "_references", beginnings)
    one = replace(sweep.SWEEPS[NAME], policies=("window", "quant:fmt=int8"), budgets=(0.5,))
    monkeypatch.setitem(sweep.SWEEPS, NAME, one)


def words_of(folder: Path, *more: str) -> list[str]:
    return ["sweep", NAME, *WORDS, "--runs", str(folder / "runs"), "--results", str(folder), *more]


def test_a_run_holds_what_evaluate_says_of_each_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it was interrupted in between."""
    monkeypatch.setattr(loss_plots, "draw", lambda *_: [])
    whole = tmp_path / "whole"
    line = ["loss", "--texts", REFERENCE, "--limit", "2", "--device", "cpu", "--output-dir", str(whole)]
    assert evaluate([*line, "--policies", "window,quant:fmt=int8", "--budgets", "0.5"]) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        assert main(words_of(tmp_path)) == 130
    said = capsys.readouterr().err
    assert "give the same command to read the rest" in said
    assert "--resume" not in said, "a sweep has no such option"
    assert not pool.read(tmp_path)
    assert main(words_of(tmp_path)) == 0
    said = capsys.readouterr().err
    assert "2 of 3: reference, window, 0.5: loss " in said
    assert "3 of 3 runs are in" in said
    records = sorted(read(whole).records, key=lambda record: record.id)
    want = {}
    for record in records:
        assert record.losses is not None
        want.setdefault((REFERENCE, record.policy, record.budget), []).append(fmean(record.losses))
    assert len(want) == 3
    runs = {run.cell: run for run in pool.read(tmp_path)}
    assert runs.keys() == want.keys()
    for cell, run in runs.items():
        assert run.row["losses"] == pytest.approx(want[cell], rel=1e-4)
        assert run.row["loss"] == pytest.approx(fmean(want[cell]), rel=1e-4)
        assert (run.key["instrument"], run.key["limit"], run.state) == ("loss", 2, "")
        assert (run.row["texts"], run.tokens[1], run.answers, run.right) == (2, 2, [], "")
    monkeypatch.setattr(losses, "measure", lambda *_: pytest.fail("it was read again"))
    assert main(words_of(tmp_path)) == 0
    capsys.readouterr()
    assert main(["tables", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} holds losses of texts alone, and tables of a folder are of answers: `bench sweep NAME" in said


def test_keys_name_the_texts() -> None:
    """The same with and without the folder of fixed texts, so a table finds the runs."""
    one = sweep.SWEEPS[NAME]
    everything = sweep.wanted_of(one)
    assert {key["dataset"] for key in everything} == {REFERENCE, "texts"}
    args = argparse.Namespace(
        model="tiny", texts=None, limit=None, plot_only=False, budgets=None, policies=None, needed=False
    )
    some = sweep.wanted_of(one, args)
    assert some == [key for key in everything if key["dataset"] == REFERENCE]
    args.texts = Path("anywhere")
    assert sweep.wanted_of(one, args) == everything
    lengths = {key["dataset"]: (key["prompt_tokens"], key["length"]) for key in everything}
    assert lengths == {REFERENCE: (None, None), "texts": (32, 1536)}
    hashes = {key["problems"] for key in everything}
    args.limit = 2
    fewer = sweep.wanted_of(one, args)
    assert len(hashes) == 2
    assert {key["problems"] for key in fewer if key["dataset"] == REFERENCE}.isdisjoint(hashes)
    elsewhere = sweep.wanted_of(replace(one, checkpoint="of another"))
    assert {key["checkpoint"] for key in elsewhere} == {"of another"}
    assert not any("calibration" in key for key in elsewhere)


def test_only_the_fixed_texts_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "fixed"
    (where / "prose").mkdir(parents=True)
    (where / ".licenses").mkdir()
    (where / ".licenses" / "one").write_text("free")
    text = where / "prose" / "one.txt"
    text.write_text("Alpha sits left of Bravo. " * 8)
    words = words_of(tmp_path, "--texts", str(where))
    assert main(words) == 2
    assert "does not hold the 20 fixed texts" in capsys.readouterr().err
    digits = hashlib.sha256(text.read_bytes()).hexdigest()
    monkeypatch.setattr(fixed_texts, "HASHES", {"prose/one.txt": digits})
    assert main(words) == 0
    runs = {run.cell: run for run in pool.read(tmp_path)}
    assert {cell[0] for cell in runs} == {REFERENCE, "texts"}
    row = runs["texts", "full", None].row
    engine = load(TINY, device="cpu")
    ids = engine.text_ids(text.read_text())
    [want] = engine.loss([ids], None, None, 32)
    assert row["losses"] == pytest.approx([fmean(want.losses)], rel=1e-4)
    (where / "prose" / "two.txt").write_text("more")
    assert main(words) == 2


def test_a_comparison_of_losses_has_no_picture_and_no_needs_and_is_not_rechecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--recheck", "--needed"):
        assert main(words_of(tmp_path, option)) == 2
        assert f"{option} is for answers, and transfer-losses compares losses" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main(words_of(tmp_path, "--plot", str(tmp_path))) == 2
    assert "--plot is for answers" in capsys.readouterr().err


def test_the_number_type_is_a_choice(tmp_path: Path) -> None:
    assert main(words_of(tmp_path, "--limit", "1", "--dtype", "bfloat16")) == 0
    assert [run.key["dtype"] for run in pool.read(tmp_path)] == ["bfloat16"] * 3


def test_reference_traces_are_of_all_families() -> None:
    limit = sweep.SWEEPS[NAME].problems
    families = [text.name.rpartition("-")[0] for text in read_texts(REFERENCE, limit=limit)]
    assert {families.count(name) for name in set(families)} == {limit // 3}
