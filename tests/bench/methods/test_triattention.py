"""The ablations of TriAttention: `pytest tests/bench/methods/test_triattention.py`."""

from __future__ import annotations

from dataclasses import asdict

from minithink.bench.answers.sweep import SWEEPS
from minithink.policies import parse

SWEEP = SWEEPS["triattention-parts"]


def options_of(policy: str) -> dict[str, object]:
    return asdict(parse(f"{policy},budget=256"))  # type: ignore[call-overload]


def test_each_policy_differs_in_one_option() -> None:
    whole = options_of(SWEEP.beside)
    assert whole["share"] == "layers"
    found = set[tuple[str, object]]()
    for policy in SWEEP.policies:
        if policy != SWEEP.beside:
            [changed] = {(name, value) for name, value in options_of(policy).items() if value != whole[name]}
            found.add(changed)
    assert found == {
        ("trig", False),
        ("weight", False),
        ("reach", 4096),
        ("reach", 128),
        ("share", "head"),
        ("share", "all"),
    }
