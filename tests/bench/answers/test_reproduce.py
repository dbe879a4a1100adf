"""A cell of a comparison, run again. Alone: pytest tests/bench/answers/test_reproduce.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.answers import pool, reproduce, sweep
from minithink.errors import MinithinkError
from minithink.evaluate.journal import Journal, Record
from minithink.evaluate.plan import Spec

torch.set_num_threads(1)
NEW = 12  # tokens of every sequence


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pool of one small comparison: two problems of a family."""
    small = replace(sweep.SWEEPS["snapkv"], policies=("window",), budgets=(0.5,), problems=2, beside="")
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", small)
    words = ["--device", "cpu", "--batch-size", "1", "--max-new-tokens", str(NEW), "--limit", "2"]
    where = ["--families", "facts", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    assert main(["sweep", "snapkv", *words, *where]) == 0
    config, own, weights = sweep._about(sweep.TINY)
    monkeypatch.setattr(sweep, "_about", lambda folder: (config, replace(own, max_new_tokens=NEW), weights))
    return tmp_path


def again(folder: Path, *words: str) -> int:
    fixed = ["--device", "cpu", "--batch-size", "1", "--families", "facts", "--results", str(folder)]
    return main(["reproduce", "snapkv", *words, *fixed])


def test_equal_answers_are_said(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (there / pool.FILE).read_bytes()
    capsys.readouterr()
    assert again(there, "window", "0.5") == 0
    family, last = capsys.readouterr().out.splitlines()[1:]
    assert family.split() == ["facts", "2", "2", "0", "0"]
    assert last.startswith("All 2 answers of window at 50 % are those that were measured at commit ")
    assert again(there, "full", "--limit", "1") == 0
    assert "The answer of full is the one that was" in capsys.readouterr().out
    assert (there / pool.FILE).read_bytes() == whole, "the pool is only read"


def test_an_answer_that_differs_is_shown(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what may have changed it: the policy's code, or another machine."""
    runs = pool.read(there)
    [run] = [run for run in runs if run.key["policy"] == "window"]
    run.answers[0][2] = "no such answer"
    run.right = "10"
    pool.add(there, runs)
    capsys.readouterr()
    assert again(there, "window", "0.5") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["facts", "2", "1", "1", "0"]
    assert out[2].endswith(", sample 0: 'no such answer' then, None now")
    assert out[3].startswith("1 of 2 answers of window at 50 % differ from those that were measured at commit ")
    assert ": both ran on " in out[3]
    run.machine = {"gpu": "Some GPU"}
    pool.add(there, runs)
    assert again(there, "window", "0.5") == 1
    said = capsys.readouterr().out
    assert "the run was on Some GPU (reference, float32, torch " in said
    assert "rounds sums differently" in said
    run.source["policy"] = "another"
    pool.add(there, runs)
    assert again(there, "window", "0.5") == 1
    assert "the code or the defaults of the policy have changed since" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("windo", "0.5"), "snapkv has no policy 'windo'; did you mean window?"),
        (("window", "0.75"), "The comparison snapkv has window with the budgets 0.5: give one of these."),
        (("window",), "The comparison snapkv has window with the budgets 0.5"),
        (("full", "0.5"), "The comparison snapkv has full with no budget"),
        (("window", "0.5,0.75"), "2 budgets were given, and one cell is run again"),
        (("window", "much"), "'much' is no budget"),
    ],
)
def test_a_cell_that_is_not_there_is_refused(
    there: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert again(there, *words) == 2
    assert said in capsys.readouterr().err


def test_cells_that_cannot_be_run_again_are_named(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a run, or of weights that do not ship."""
    capsys.readouterr()
    assert again(there / "nowhere", "window", "0.5") == 1
    assert "The pool has no answers of window in the comparison snapkv" in capsys.readouterr().err
    monkeypatch.setattr(reproduce, "checkpoint_hash", lambda folder: "another")
    assert again(there, "window", "0.5") == 1
    assert "other weights than the embedded ones" in capsys.readouterr().err


def test_a_share_needs_the_run_that_it_is_of(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the problems that run again it would be another number of tokens."""
    runs = [run for run in pool.read(there) if run.key["policy"] == "window"]
    (there / pool.FILE).unlink()
    pool.add(there, runs)
    capsys.readouterr()
    assert again(there, "window", "0.5") == 1
    assert "The pool has no run of full for 'facts', and the budget 0.5 is a share" in capsys.readouterr().err


def test_an_error_leaves_nothing_to_resume(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has no --resume, and its folder is gone when it ends."""
    append = Journal.append

    def fails_at_the_second(self: Journal, record: Record) -> None:
        if self.done:
            raise MinithinkError("no room")
        append(self, record)

    monkeypatch.setattr(Journal, "append", fails_at_the_second)
    capsys.readouterr()
    assert again(there, "window", "0.5") == 1
    said = capsys.readouterr().err
    assert "holds 1 of 2 sequences; that folder goes now, and nothing was compared; give the same command" in said
    assert "--resume" not in said
    assert "no room" in said


def test_no_answer_in_common_is_no_success(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As when the problems have other names now."""
    runs = pool.read(there)
    for run in runs:
        run.answers = [["gone", sample, answer] for _, sample, answer in run.answers]
    pool.add(there, runs)
    capsys.readouterr()
    assert again(there, "window", "0.5") == 1
    assert "None of the problems whose answers the pool has of window is there" in capsys.readouterr().err


def test_the_settings_of_a_run_are_those_of_its_key() -> None:
    """Padding depends on all prompts, so such a run is generated whole."""
    key: dict[str, Any] = {
        "policy": "window",
        "budget": 0.5,
        "dataset": "facts",
        "split": "test",
        "num_samples": 1,
        "max_new_tokens": 9,
        "limit": 200,
        "dtype": "bfloat16",
    }
    about: dict[str, Any] = {"commit": "c", "date": "2031", "machine": {}, "versions": {}, "command": "x"}
    run = pool.Run(key, {}, {}, [["a", 0, "1"], ["b", 0, None]], [9, 2], **about)
    args: Any = type("Args", (), {"limit": None, "device": "cpu", "dtype": None, "batch_size": None})
    job = reproduce.job_of(run, args)
    assert job.policies == [Spec("window")]
    assert (job.budgets, job.limit, job.dtype, job.split) == ([0.5], 2, "bfloat16", "test")
    assert (job.num_samples, job.max_new_tokens, job.padded_budget, job.group) == (1, 9, None, False)
    args.limit, args.dtype = 1, "float32"
    assert (reproduce.job_of(run, args).limit, reproduce.job_of(run, args).dtype) == (1, "float32")
    run.key |= {"padded_budget": 10, "group": True}
    job = reproduce.job_of(run, args)
    assert (job.limit, job.padded_budget, job.group) == (200, 10, True)
