"""Evaluations of a policy of one's own, named by its file. Alone: pytest tests/evaluate/test_own.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from minithink.evaluate.__main__ import main
from minithink.policies import POLICIES
from tests.evaluate.run import evaluate, options, recorded
from tests.own_policies import MINE, unloaded

pytestmark = pytest.mark.usefixtures("quick")
TEXT = "mine.py:Mine:budget=12"


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file, in the folder where the command is called."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    with unloaded():
        yield path


def test_an_evaluation_runs_it_like_any_other(model: Path, problems: Path, tmp_path: Path) -> None:
    """`Mine` keeps what `window` keeps."""
    found = evaluate(model, problems, tmp_path / "out", policies=f"window:budget=12,{TEXT}", trace="run.trace")
    own = {key.id: {**record, "policy": ""} for key, record in found.items() if key.policy == TEXT}
    window = {key.id: {**record, "policy": ""} for key, record in found.items() if key.policy != TEXT}
    assert own == window
    assert len(own) == 7
    assert (tmp_path / "run.mine.py-Mine-budget=12.trace").is_file()
    assert f"| `{TEXT}` |" in (tmp_path / "out" / "summary.md").read_text()


def test_budgets_and_grids_apply(model: Path, problems: Path, tmp_path: Path) -> None:
    shared = {"budgets": "0.5", "reference_length": 20}
    found = evaluate(model, problems, tmp_path / "out", policies="mine.py:Mine", **shared)
    assert {(key.policy, key.budget) for key in found} == {("mine.py:Mine", 0.5)}
    words = options(model, problems, tmp_path / "tuned", policy="mine.py:Mine", grid="sign=1,-1", budget=12)
    assert main(["tune", *words]) == 0
    tuned = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert {point["policy"] for point in tuned["points"]} == {"mine.py:Mine:sign=1", "mine.py:Mine:sign=-1"}


def test_an_edited_file_runs_again(
    model: Path, problems: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"policies": f"window:budget=12,{TEXT}"}
    folder = tmp_path / "out"
    first = evaluate(model, problems, folder, **given)
    mine.write_text(
        MINE.replace("newest, or", "latest, or").replace("    def scores", "    # equal\n\n    def scores")
    )
    capsys.readouterr()
    assert evaluate(model, problems, folder, resume=True, **given) == first, "a comment and a docstring are no edits"
    assert "has changed" not in capsys.readouterr().err
    mine.write_text(MINE.replace("self.sign * step", "-self.sign * step"))
    assert main(options(model, problems, folder, **given)) == 2
    assert f"The code of {TEXT} has changed since" in capsys.readouterr().err
    second = evaluate(model, problems, folder, resume=True, **given)
    assert "replaced-1.jsonl keeps 7 sequences" in capsys.readouterr().err
    assert second != first
    assert {k: r for k, r in second.items() if k.policy != TEXT} == {
        k: r for k, r in first.items() if k.policy != TEXT
    }
    sources = json.loads((folder / "config.json").read_text())["settings"]["sources"]
    assert sources[TEXT]["policy"] != sources["window:budget=12"]["policy"]


def test_results_are_read_without_the_file(model: Path, problems: Path, mine: Path, tmp_path: Path) -> None:
    """Pictures and summaries need no code of a policy, and run none."""
    folder = tmp_path / "out"
    found = evaluate(model, problems, folder, policies=f"full,{TEXT}", trace="run.trace")
    mine.write_text("import pathlib\npathlib.Path('was-run').touch()\nraise SystemExit('was run')")
    POLICIES.pop("mine.py:Mine")
    assert main(["plot", str(folder)]) in (0, 1)  # 1: without matplotlib
    assert recorded(folder) == found
    assert main(options(model, problems, folder, policies="full", resume=True)) == 2, "another list of policies"
    assert "mine.py:Mine" not in POLICIES
    assert not Path("was-run").exists()


def test_the_loss_of_texts_is_measured_under_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Alpha sits left of Bravo. Who sits third? " * 4)
    words = ["loss", "--model", str(model), "--texts", str(tmp_path / "text.txt"), "--device", "cpu"]
    words += ["--prompt-tokens", "8", "--length", "60", "--output-dir", str(tmp_path / "out")]
    assert main([*words, "--policies", f"window:budget=12,{TEXT}"]) == 0
    found = {key.policy: record["losses"] for key, record in recorded(tmp_path / "out").items()}
    assert found[TEXT] == found["window:budget=12"] != found["full"]


def test_a_missing_file_is_one_sentence(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(model, problems, tmp_path / "out", policies="full,other.py:Mine")) == 1
    said = capsys.readouterr().err
    assert said == ("minithink.evaluate: The policy's file other.py cannot be read: No such file or directory.\n")
