"""Tuning: every point of a grid, the best by pass@1 and then bytes, and never on a test split."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from minithink.errors import UsageError
from minithink.evaluate import runner
from minithink.evaluate.__main__ import main
from minithink.evaluate.grading import Graded
from minithink.evaluate.summary import summarize
from minithink.evaluate.tune import allowed, grid, ranking, write
from minithink.tasks import load_problems, search
from tests.evaluate.draw import record
from tests.evaluate.run import options

pytestmark = pytest.mark.usefixtures("quick")


def test_every_combination() -> None:
    assert grid("rkv", [("lam", ["0.1", "0.5"]), ("alpha", ["4", "8"])]) == {
        "rkv:lam=0.1,alpha=4": {"lam": "0.1", "alpha": "4"},
        "rkv:lam=0.1,alpha=8": {"lam": "0.1", "alpha": "8"},
        "rkv:lam=0.5,alpha=4": {"lam": "0.5", "alpha": "4"},
        "rkv:lam=0.5,alpha=8": {"lam": "0.5", "alpha": "8"},
    }
    assert list(grid("rkv:buffer=0", [("lam", ["1"])])) == ["rkv:buffer=0,lam=1"]
    assert list(grid("kivi:group=16+rkv", [("lam", ["1"])])) == ["kivi:group=16+rkv:lam=1"], "of the last member"


def test_the_best_is_right_most_often_then_smallest() -> None:
    cells = {"a": (2, 900), "b": (3, 800), "c": (3, 700), "d": (1, 1)}
    rows = [
        record(policy=policy, budget=8, id=str(i), right=i < right, kv_bytes_mean=float(size))
        for policy, (right, size) in cells.items()
        for i in range(4)
    ]
    rows += [record(policy="full", id=str(i)) for i in range(4)]
    assert [row.policy for row in ranking(summarize(rows), cells)] == ["c", "b", "a", "d"]


@pytest.mark.parametrize(
    ("dataset", "split", "said"),
    [
        ("facts", "test", "Nothing is ever tuned on the split 'test'"),
        ("MATH-500", None, "MATH-500 without --split is its test split"),
        ("MATH-500", "test", "split 'test'"),
        ("nosuch", None, "There is no dataset 'nosuch'"),
        ("hub:a/b", None, "is its test split"),
        ("hub:a/b.json", None, "is its test split"),
        ("hub:a/b", "latest", "split 'latest'"),
        ("facts", "train", "The split 'train' does not exist"),
    ],
)
def test_no_test_split(dataset: str, split: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        allowed(dataset, split)


def test_no_test_problems_under_another_name(tmp_path: Path) -> None:
    assert allowed("facts", None) == "validation"
    assert allowed("search:2", None) == "validation"
    path = tmp_path / "mine.jsonl"
    for split in ("validation", "test"):
        problems = [load_problems("validation")[0], load_problems(split)[1]]
        lines = [json.dumps({"question": p.question + " ", "answer": p.answer}) + "\n" for p in problems]
        path.write_text("".join(lines))
        if split == "validation":
            assert allowed(str(path), None) is None
        else:
            with pytest.raises(UsageError, match=r"holds 1 problem of an embedded test split"):
                allowed(str(path), None)
            assert allowed(str(path), None, limit=1) is None
    asked = search.reworded(load_problems("test", "search")[0].question, 1)
    path.write_text(json.dumps({"question": asked, "answer": "1"}) + "\n")
    with pytest.raises(UsageError, match=r"holds 1 problem of an embedded test split"):
        allowed(str(path), None)


def test_a_table_is_written(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = ["tune", "--policy", "window", "--grid", "protect_prompt=false,true", "--budget", "0.3"]
    given = options(model, problems, tmp_path / "out", limit=3)
    # a protected prompt helps
    monkeypatch.setattr(runner, "grade", lambda *_: Graded("1", protects[-1]))
    protects = []
    stream = runner.Evaluation.stream

    def note(self: runner.Evaluation, cell: Any, mean: float) -> Any:
        protects.append("true" in cell.policy)
        return stream(self, cell, mean)

    protects.append(False)
    monkeypatch.setattr(runner.Evaluation, "stream", note)
    assert main([*tuned, *given]) == 0
    out = capsys.readouterr().out
    table = (tmp_path / "out" / "tuning.md").read_text()
    assert table in out
    lines = table.splitlines()
    assert lines[0] == "|  | protect_prompt | pass@1 | 95 % interval | KV mean | tokens |"
    assert lines[2].startswith("| **best** | true | 100.0% | 43.9% to 100.0% | ")
    assert lines[3].startswith("| ≈ | false | 0.0% | 0.0% to 56.1% | ")
    assert lines[-1].startswith("`window`, budget 30 %, ")
    result = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert (result["best"], result["budget"]) == ("window:protect_prompt=true", 0.3)
    assert [(p["protect_prompt"], p["pass_at_1"]) for p in result["points"]] == [("true", 1), ("false", 0)]
    assert main([*tuned, *given]) == 2, "it is a run like others"
    assert "add --resume" in capsys.readouterr().err
    assert main([*tuned, *given, "--resume"]) == 0


def test_what_chance_may_have_chosen_is_marked(tmp_path: Path) -> None:
    rights = {"rkv:lam=1": 20, "rkv:lam=2": 17, "rkv:lam=3": 2}
    points = {policy: {"lam": policy[-1]} for policy in rights}
    rows = [
        record(policy=policy, budget=8, id=str(i), right=i < n) for policy, n in rights.items() for i in range(20)
    ]
    args = argparse.Namespace(policy="rkv", dataset="facts", split="validation")
    text = write(tmp_path, ranking(summarize(rows), points), points, args)
    assert [line.split(" | ")[:2] for line in text.splitlines()[2:5]] == [
        ["| **best**", "1"],
        ["| ≈", "2"],
        ["| ", "3"],
    ]
    assert (tmp_path / "tuning.md").read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "lam=1", "--grid", "lam=2", "--budget", "8"], "--grid names lam twice"),
        (["--grid", "lam", "--budget", "8"], "'lam' is not FIELD=V,V"),
        (["--grid", "lam=1,,2", "--budget", "8"], "is not FIELD=V,V"),
        (["--grid", "lam=1", "--budget", "8,9"], "at one budget, and --budget names 2"),
        (["--grid", "lam=1"], "needs a budget in tokens: give --budgets, or rkv:budget="),
        (["--grid", "lam=1", "--budgets", "8,9"], "at one budget, and --budget names 2"),
        (["--grid", "mal=1", "--budget", "8"], "has no hyperparameter 'mal'"),
        (["--budget", "8"], "--grid"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], said: str, model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["tune", "--policy", "rkv", *words, *options(model, problems, tmp_path / "out")])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    err = capsys.readouterr().err
    assert (code, len(err.strip().splitlines())) == (2, 1), err
    assert said in err
    assert not (tmp_path / "out").exists()


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "Every combination of the --grid values",
        "tuning.json and tuning.md",
        "never test (default: valid",
    ):
        assert words in said
    assert "default: test" not in said
