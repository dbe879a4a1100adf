"""`bench model-steps` times each policy's steps. Alone: pytest tests/bench/speed/test_model_steps.py"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from minithink.bench.__main__ import main
from minithink.bench.speed import model_steps
from minithink.engine import load

SMALL = ["--device", "cpu", "--batch", "2", "--prompt-tokens", "24", "--tokens", "32", "--steps", "4"]


def test_every_policy_has_a_time_at_every_budget(tmp_path: Path) -> None:
    """A policy that cannot run is left out, with the reason, and the others go on."""
    path = tmp_path / "steps.json"
    words = ["--policies", "thinkv", "window", "kivi", "--budgets", "0.25,60", "--output", str(path)]
    assert main(["model-steps", *SMALL, *words]) == 0
    result = json.loads(path.read_text())
    found = {(m["policy"], m["budget"]): m["budget_tokens"] for m in result["measurements"]}
    assert found == {
        ("full", None): None,
        ("window", 0.25): 24 + 8,
        ("window", 60): 60,
        ("kivi", None): None,
        ("thinkv", 60): 60,
    }
    assert all(m["step_milliseconds"] > 0 for m in result["measurements"])
    [refused] = result["left_out"]
    assert refused["policy"] == "thinkv"
    assert "cannot hold" in refused["why"]
    assert not result["complete"]
    assert result["settings"]["weights"] == "e863ec45ecd678c5"


def test_steps_are_timed_after_half_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert model_steps.step_seconds(engine, "window", 40, prompts, args) > 0
    assert min(begun) >= 16
    assert max(begun) <= 16 + 2 * len(prompts), "prompts are read one after the other"
    assert [len(s.tokens) for s in streams[0].sequences] == [n + 4 for n in begun]


def test_more_steps_than_there_are_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model-steps", "--policies", "window", "--tokens", "100", "--steps", "51"]) == 2
    assert "--steps 51 is more than the second half of --tokens 100: give less." in capsys.readouterr().err
