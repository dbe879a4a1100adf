"""Counting near ties: what another batch size may change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minithink.engine import load
from minithink.evaluate import margins as module
from minithink.evaluate.__main__ import main
from minithink.evaluate.margins import Parting, draw_margins, partings
from minithink.sampling import SamplingParams
from minithink.sequence import Track
from tests.evaluate.run import NEW, QUESTIONS
from tests.evaluate.test_runner import drawn

torch.set_num_threads(1)


def words(model: Path, problems: Path, *more: str) -> list[str]:
    base = ["--model", str(model), "--dataset", str(problems), "--device", "cpu", "--max-new-tokens", str(NEW)]
    return ["margins", *base, *more]


def test_margins_are_those_of_the_draws(model: Path) -> None:
    """Those of the steps themselves, to the rounding of a prompt that is read at once."""
    engine = load(model, device="cpu")
    want = drawn(model, 3, num_samples=1)
    stream = engine.stream("x", seed=1)
    assert not stream.sampler.params.greedy
    for number, (tokens, steps) in want.items():
        s = Track(number, number, 0, engine.prompt_ids(QUESTIONS[number]), NEW, "length", tokens=tokens)
        assert draw_margins(engine, s, stream.sampler.params) == pytest.approx(steps, abs=1e-4)
        greedy = draw_margins(engine, s, SamplingParams(temperature=0))
        assert greedy != pytest.approx(steps, abs=1e-2)
        assert min(greedy) >= 0


def test_where_sequences_part() -> None:
    def track(number: int, tokens: list[int]) -> Track:
        return Track(number, 0, 0, [1], 9, "length", tokens=tokens)

    want, got = [track(0, [1, 2, 3]), track(1, [4, 5])], [track(0, [1, 7]), track(1, [4, 5])]
    assert partings(want, got, 8, {0: [1.0, 2e-6, 3.0], 1: [1.0, 1.0]}) == [Parting(0, 8, 1, 2e-6)]


def test_the_count(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, problems, "--batch-sizes", "1,2", "--num-samples", "2")) == 0
    out = capsys.readouterr().out
    assert out.startswith("14 sequences, ")
    assert "with a margin below 1e-05; batch sizes 1, 2; float32" in out
    assert "0 of them at a larger margin" in out
    assert not list(tmp_path.iterdir())
    path = tmp_path / "results" / "margins.json"
    assert main(words(model, problems, "--batch-sizes", "1,2", "--num-samples", "2", "--output", str(path))) == 0
    assert capsys.readouterr().out == out
    result = json.loads(path.read_text())
    (m,) = result["measurements"]
    assert (m["sequences"], m["parted"], m["unexplained"], m["limit"]) == (14, [], 0, 1e-5)
    assert f"14 sequences, {m['draws']:,} draws; {m['near']} with" in out
    assert 0 <= m["smallest_margin"] < 1
    assert (m["smallest_margin"] < 1e-5) == (m["near"] > 0)
    assert result["benchmark"] == "margins"
    assert result["settings"]["batch_size"] == [1, 2]
    assert result["settings"]["num_samples"] == 2
    assert result["command"].startswith("python -m minithink.evaluate margins --model")
    # sequences that differ where no near tie is
    monkeypatch.setattr(module, "partings", lambda *_: [Parting(3, 2, 5, 1e-6), Parting(4, 2, 6, 1e-5)])
    own = words(model, problems, "--batch-sizes", "1,2", "--limit", "1")
    assert main([*own, "--output", str(path)]) == 1
    (m,) = json.loads(path.read_text())["measurements"]
    assert m["parted"][1] == {"number": 4, "batch_size": 2, "token": 6, "margin": 1e-5}
    assert m["unexplained"] == 1
    out = capsys.readouterr().out
    assert "sequence 4 differs at batch size 2 from token 6 on: margin 1e-05" in out
    assert "2 sequences differ, 1 of them at a larger margin" in out
    assert main(words(model, problems, "--batch-sizes", "1")) == 2
    assert "two are compared" in capsys.readouterr().err
    assert main(words(model, problems, "--batch-sizes", "1,2", "--limit", "8", "--temperature", "nan")) == 2
    assert "'nan' is no finite number" in capsys.readouterr().err


def test_what_there_is_less_of_and_help(model: Path, problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(model, problems, "--limit", "8", "--max-new-tokens", "1")) == 0
    assert "--limit 8 is more than the 7 problems" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["margins", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Generates the problems with the full cache at the first batch size" in said
