"""TriAttention and TurboQuant, alone and together: `pytest tests/bench/methods/test_combined.py`."""

from __future__ import annotations

from minithink.bench.answers.sweep import SWEEPS
from minithink.bench.methods import combined, transfer


def test_its_runs_are_those_of_all_policies() -> None:
    """Each policy is one of `transfer`, with the same budgets on the same problems: nothing has to run for it."""
    for own, other in (("combined", "transfer"), ("combined-losses", "transfer-losses")):
        assert set(SWEEPS[own].policies) <= set(SWEEPS[other].policies)
        for name in ("budgets", "split", "problems", "samples", "datasets", "losses"):
            assert getattr(SWEEPS[own], name) == getattr(SWEEPS[other], name)


def test_the_prompt_is_protected_both_ways() -> None:
    """TriAttention beside R-KV: both protect the prompt, and both do not."""
    for name in ("rkv", "triattention"):
        [without] = [text for text in combined.UNPROTECTED if text.startswith(name)]
        assert transfer.CHOSEN[name] in combined.POLICIES
        assert without in combined.POLICIES
        assert without != transfer.CHOSEN[name]


def test_steps_are_beside_the_full_cache_s() -> None:
    """The shortest first, without the policies of other pages, and with what was left out."""
    rkv, _, four_bits = combined.TRANSFERS["combined"].beside
    steps = [("full", None, 2.0), (rkv, 0.25, 4.0), ("h2o", 0.25, 1.0), ("quant:fmt=nvfp4", None, 1.5)]
    result = {
        "settings": {"batch": 64, "dtype": "bfloat16", "prompt_tokens": 2048, "tokens": 768, "steps": 256},
        "left_out": [{"policy": four_bits, "why": "no room."}, {"policy": "h2o", "why": "another page."}],
        "measurements": [
            {"policy": policy, "budget": budget, "step_milliseconds": ms, "tokens_per_second": 1.0}
            for policy, budget, ms in steps
        ],
    }
    rows = [(row["policy"], row["of"], row["beside_full"]) for row in combined.steps(result)]
    assert rows == [("quant:fmt=nvfp4", "", 0.75), ("full", "", 1.0), (rkv, "25 %", 2.0)]
    said = [line for line in combined.steps_said(result) if line]
    assert said[0].startswith("64 sequences in bfloat16, random prompts of 2,048 tokens.")
    assert said[1:] == [f"`{four_bits}` is left out: no room."]
