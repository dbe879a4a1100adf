"""Accuracy of the full cache: an evaluation, told by length bins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minithink import results
from minithink.bench.__main__ import main
from minithink.evaluate import runner
from minithink.tasks import load_problems

torch.set_num_threads(1)
WORDS = ["accuracy", "--device", "cpu", "--dtype", "float32", "--limit", "3", "--max-new-tokens", "8"]


def test_every_problem_is_in_one_bin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    assert main([*WORDS, "--num-samples", "2", "--output", str(path)]) == 0
    result = results.read(path)
    *bins, whole = result["measurements"]
    asked = [problem.length_bin for problem in load_problems("test", "facts")[:3]]
    want = {b: asked.count(b) for b in asked} if len(set(asked)) > 1 else {}
    assert {m["bin"]: m["problems"] for m in bins} == want
    assert (whole["bin"], whole["problems"], whole["n"], whole["mean_tokens"]) == ("all", 3, 6, 8)
    assert whole["cut_off"] == 1
    assert whole["share"] == whole["right"] / whole["n"]
    assert result["complete"]
    assert (result["settings"]["family"], result["settings"]["temperature"]) == ("facts", 0.6)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"], "what was kept on the way is gone"
    assert "       all  n    6  right" in capsys.readouterr().out


def test_right_answers_are_counted() -> None:
    from minithink.bench.accuracy import measured
    from minithink.evaluate.summary import summarize
    from tests.evaluate.draw import record

    rows = summarize([record(id=x, sample=k, right=(x, k) != ("p", 1)) for x in "pq" for k in range(2)])
    assert (measured(rows[0])["right"], measured(rows[0])["share"]) == (3, 0.75)


def test_an_interrupted_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, records = tmp_path / "x.json", runner.Job.records

    def interrupted(*args: object) -> object:
        yield next(iter(records(*args)))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner.Job, "records", interrupted)
        assert main([*WORDS, "--output", str(path)]) == 130
    assert not path.exists()
    assert main([*WORDS, "--output", str(path)]) == 2, "what is there is not thrown away"
    assert main([*WORDS, "--output", str(path), "--resume"]) == 0
    assert results.read(path)["measurements"][-1]["n"] == 3
