"""The tables about calibrations, of constructed results (pytest tests/bench/methods/test_thoughts.py)."""

from __future__ import annotations

from typing import Any

import pytest

from minithink.bench.methods.thoughts import TABLES
from minithink.bench.tables.pages import lines_of


def calibration(means: list[float], shares: list[float], kappa: float) -> dict[str, Any]:
    """One rule's."""
    layers = [{"mean": mean, "share": share} for mean, share in zip(means, shares, strict=True)]
    keywords = {"kappa": kappa, "segments": 21}
    measurements = {"layers": layers, "keywords": keywords, "prompts": 3, "tokens": 2500}
    return {"layers": [0, 2], "thresholds": [0.5, 0.75], "measurements": measurements}


@pytest.mark.parametrize(("first", "other"), [("weights", "shares"), ("shares", "weights")])
def test_rules_of_averaging_have_a_row_each(first: str, other: str) -> None:
    """The first is what the others are compared with; results of earlier versions begin with `shares`."""
    types = {"own": (0.5, 0.25), "layers": (0.75, 0.6), "same": (0.25, 0.1)}
    beside = {how: {"agree": agree, "kappa": kappa} for how, (agree, kappa) in types.items()}
    result = {
        "benchmark": "averaging",
        "command": "python -m minithink.calibrate averaging",
        "complete": True,
        "commit": "0" * 40,
        "date": "2026-01-02T00:00:00Z",
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"torch": "2.0"},
        "measurements": {
            "rules": {
                first: calibration([0.9, 0.4, 0.6], [0.1, 0.3, 0.2], 0.04),
                other: calibration([0.8, 0.3, 0.6], [0.0, 0.5, 0.1], -0.01),
            },
            f"types_beside_{first}": {other: beside},
        },
    }
    lines = lines_of(TABLES["thinkv-averaging"], result)
    said = {"shares": "shares of tokens, behind the rule", "weights": "attention weights, before it: §C.2"}
    assert lines[2:4] == [
        f"| {said[first]} | 0.40 to 0.90 | 30% | 0, 2 | 0.500, 0.750 | 0.04 | – | – | – |",
        f"| {said[other]} | 0.30 to 0.80 | 50% | 0, 2 | 0.500, 0.750 | -0.01 | 50% (0.25) "
        "| 75% (0.60) | **25%** (0.10) |",
    ]
    assert "3 problems, 2,500 tokens, 21 segments." in "\n".join(lines)
