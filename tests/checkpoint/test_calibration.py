"""Calibration files: what is refused, what is told, and what ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minithink.checkpoint import calibration
from minithink.engine import TINY
from minithink.errors import MinithinkError

GOOD: dict[str, Any] = {"checkpoint": "", "layers": [0, 1], "thresholds": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "no object"),
        ({k: v for k, v in GOOD.items() if k != "checkpoint"}, "of which weights"),
        (GOOD | {"layers": []}, r"layers are \[\]"),
        (GOOD | {"layers": [True]}, "layers are"),
        (GOOD | {"layers": [-1]}, "layers are"),
        (GOOD | {"thresholds": None}, "thresholds are None"),
        (GOOD | {"thresholds": [0.1, "x"]}, "thresholds are"),
        (GOOD | {"thresholds": [0.1, float("nan")]}, "thresholds are"),
    ],
)
def test_other_json_is_no_calibration(values: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "thoughts.json").write_text(json.dumps(values))
    with pytest.raises(MinithinkError, match=said):
        calibration.read(tmp_path, "thoughts.json", tmp_path)


def test_the_command_that_makes_a_file() -> None:
    assert calibration.command("thoughts.json") == "`python -m minithink.calibrate thoughts` makes it"
    assert calibration.command("thoughts-2.json", "a/b", Path("c")) == (
        "`python -m minithink.calibrate thoughts --thoughts 2 --model a/b --dataset GSM8K --split train --output c` "
        "makes it, or with a --dataset of your own"
    )
    assert "--model 'my model'" in calibration.command("thoughts.json", "my model")
    assert "no command" in calibration.command("foreign.json")


def test_the_embedded_model_ships_calibrated() -> None:
    for name, count in (("thoughts.json", 2), ("thoughts-2.json", 1)):
        values = calibration.read(TINY, name, TINY)
        assert len(values["thresholds"]) == count
        assert values["complete"]
        assert values["settings"]["split"] == "validation"
    values = calibration.read(TINY, "steering.safetensors", TINY)
    assert values["complete"]
    assert values["settings"]["split"] == "validation"
    assert len(values["plain"]) == len(values["matched"]) > values["layer"] >= 0
    values = calibration.read(TINY, calibration.CENTERS, TINY)
    assert values["complete"]
    assert values["settings"]["split"] == "validation"
    assert values["center"].shape == (8, 8, 64)
    assert values["measurements"]["tokens"] >= 100_000
    assert not list(TINY.glob("*.jsonl"))


def test_thresholds_of_another_order_are_told() -> None:
    """ThinKV averages the attention of KV heads, and earlier versions averaged the shares of each head."""
    now = {"settings": {"average": "weights"}}
    for name in ("thoughts.json", "thoughts-2.json"):
        for values in (GOOD, GOOD | {"settings": {}}, GOOD | {"settings": None}):
            [said] = calibration.cautions(name, values)
            assert said.startswith(f"{name} was made when ThinKV counted each KV head alone")
            assert said.endswith("calibrate again")
        assert not [*calibration.cautions(name, GOOD | now)]
        assert len([*calibration.cautions(name, GOOD | now | {"fallback": True})]) == 1
        assert len([*calibration.cautions(name, GOOD | {"fallback": True})]) == 2
    assert not [*calibration.cautions(calibration.STEERING, {"layer": 1})]


def test_what_decides_is_recorded() -> None:
    """Of vectors the layer and a hash, which another vector changes."""
    assert calibration.identity("thoughts.json", GOOD | {"more": 1}) == {"layers": [0, 1], "thresholds": [0.1, 0.2]}
    values = calibration.read(TINY, "steering.safetensors", TINY)
    found = calibration.identity(calibration.STEERING, values)
    assert found["layer"] == values["layer"]
    assert json.loads(json.dumps(found)) == found
    other = values | {"matched": values["matched"] * 2}
    assert calibration.identity(calibration.STEERING, other)["vectors"] != found["vectors"]
    assert calibration.identity(calibration.STEERING, values) == found
