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
