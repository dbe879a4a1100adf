"""Bytes by retention level: what is counted is what the formats' layouts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from minithink import results
from minithink.bench import tables
from minithink.bench.__main__ import main
from minithink.bench.retention import AXES, measure

D = 128  # of a key; a scale for 16 of its channels, or for a channel of 16 keys


@pytest.mark.parametrize(("precision", "bits"), [("R4E4T4", 4), ("R2E2T2", 2)])
@pytest.mark.parametrize("axis", AXES)
def test_a_whole_segment_takes_the_same_either_way(
    precision: str, bits: int, axis: Literal["channel", "token"]
) -> None:
    m = measure(precision, 32, axis, tau=32, tokens=256)
    assert m["tokens"] == 8 * 128, "one layer, of eight heads"
    assert m["codes"] == 2 * D * bits / 8
    assert m["scales"] == 2 * D / 16


def test_who_keeps_few_tokens_pays_for_their_groups() -> None:
    """Between all of a group's scales for each token, and what a token alone has."""
    channel, token = (measure("R4E4T4", 2, axis, tau=32, tokens=512) for axis in AXES)
    assert channel["tokens"] == token["tokens"] == 8 * 2 * 8
    assert token["scales"] == 2 * D / 16
    assert D / 16 + D / 2 <= channel["scales"] <= D / 16 + D
    assert channel["codes"] == token["codes"] == D
    assert channel["bytes"] == channel["codes"] + channel["scales"]


def test_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / results.RESULTS / "retention-bytes.json"
    assert main(["retention", "--tau", "32", "--tokens", "256", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["complete"]
    assert len(result["measurements"]) == 2 * 2 * 4  # bits, axes; 32, 16, 8 and 4 tokens
    assert "2 bits,   4 of 32 kept, a scale for each channel:" in capsys.readouterr().out
    lines = tables.fill("<!-- table:retention-bytes -->\n<!-- end -->", "x.md", path.parent).splitlines()
    assert lines[1].startswith("| tokens kept of a segment | 4 bits, a scale for each channel | 4 bits, a scale for")
    assert lines[3].startswith("| 32 | **144** (16 of them scales) | **144** (16 of them scales) | **80** (16 of")
    assert main(["retention", "--tau", "32", "--tokens", "100"]) == 2
    assert "--tokens 100: give a multiple of two segments of 32 tokens" in capsys.readouterr().err
