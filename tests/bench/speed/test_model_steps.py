"""`bench model-steps` times each policy's steps. Alone: pytest tests/bench/speed/test_model_steps.py"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from minithink.bench.__main__ import main
from minithink.bench.speed import model_steps
from minithink.engine import load
from minithink.errors import MinithinkError

SMALL = ["--device", "cpu", "--batch", "2", "--prompt-tokens", "24", "--tokens", "32", "--steps", "4"]


def test_every_policy_has_a_time_at_every_budget(tmp_path: Path) -> None:
    """A policy that cannot run, or whose budget is not full, is left out with the reason, and the others go on."""
    path = tmp_path / "steps.json"
    words = ["--policies", "thinkv", "window", "kivi", "--budgets", "0.25,45,0.9", "--output", str(path)]
    assert main(["model-steps", *SMALL, *words]) == 0
    result = json.loads(path.read_text())
    found = {(m["policy"], m["budget"]): m["budget_tokens"] for m in result["measurements"]}
    assert found == {("full", None): None, ("window", 0.25): 24 + 8, ("kivi", None): None}
    assert all(m["step_milliseconds"] > 0 for m in result["measurements"])
    why = {(left["policy"], left["budget"]): left["why"] for left in result["left_out"]}
    assert "cannot hold" in why["thinkv", "0.25"]
    assert why["window", "0.9"] == "its budget of 53 tokens is not full after 38: give more --tokens."
    assert set(why) == {("thinkv", "0.25"), ("thinkv", "45"), ("thinkv", "0.9"), ("window", "45"), ("window", "0.9")}
    assert not result["complete"]
    assert result["settings"]["weights"] == "e863ec45ecd678c5"


def test_steps_around_the_middle_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences take every timed step, though the model would have stopped."""
    args = argparse.Namespace(batch=2, prompt_tokens=24, tokens=32, steps=4)
    engine = load(None, device="cpu")
    begun = list[int]()
    streams = []
    make = engine.stream

    def stream(*words: object, **options: object) -> object:
        streams.append(make(*words, **options))  # type: ignore[arg-type]
        return streams[-1]

    monkeypatch.setattr(engine, "stream", stream)
    timed = model_steps.timed

    def watched(work: object) -> float:
        begun.extend(len(s.tokens) for s in streams[0].sequences)
        return timed(work)  # type: ignore[arg-type]

    monkeypatch.setattr(model_steps, "timed", watched)
    prompts = [[5] * 24, [6] * 24]
    assert model_steps.step_seconds(engine, "window", 30, prompts, args) > 0
    assert min(begun) >= 14
    assert max(begun) <= 14 + 2 * len(prompts), "prompts are read one after the other"
    assert [len(s.tokens) for s in streams[0].sequences] == [n + 4 for n in begun]


def test_the_first_pass_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 0.5, 8.0, 0.25])
    monkeypatch.setattr(model_steps, "step_seconds", lambda *_: next(seconds))
    path = tmp_path / "steps.json"
    assert main(["model-steps", *SMALL, "--policies", "window", "--budgets", "0.25", "--output", str(path)]) == 0
    assert [m["step_milliseconds"] for m in json.loads(path.read_text())["measurements"]] == [500.0, 250.0]


def test_fewer_steps_than_asked_for_are_no_time() -> None:
    with pytest.raises(MinithinkError, match="not all of 2 sequences took 3 steps"):
        model_steps._take(iter([2, 2]), 3, 2)
    with pytest.raises(MinithinkError, match="not all of 2 sequences took 2 steps"):
        model_steps._take(iter([2, 1, 2]), 2, 2)
    model_steps._take(iter([2, 2, 1]), 2, 2)


def test_a_text_longer_than_the_context_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    words = ["--device", "cpu", "--batch", "1", "--prompt-tokens", "8190", "--tokens", "64", "--steps", "8"]
    assert main(["model-steps", "--policies", "window", "--budgets", "40", *words, "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert not result["measurements"]
    assert "room for 2 tokens after the prompt" in result["left_out"][0]["why"]


def test_more_steps_than_there_are_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model-steps", "--policies", "window", "--tokens", "100", "--steps", "100"]) == 2
    assert "--steps 100 must be less than --tokens 100." in capsys.readouterr().err
