"""`bench trace`: it counts what is there, and its page opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minithink.bench import tables
from minithink.bench.__main__ import main
from minithink.bench.browser import missing
from minithink.bench.trace import PICTURES, made_up
from minithink.trace.format import read


def test_a_made_up_trace_is_one(tmp_path: Path) -> None:
    """Every head keeps its budget."""
    made_up(tmp_path / "trace", 300, layers=2, heads=3, budget=60, prompt=50)
    trace = read(tmp_path / "trace").traces[0]
    assert (trace.tokens, trace.steps) == (300, 250)
    assert trace.kept(250).sum(1).tolist() == [60] * 6
    assert trace.kept(7).sum(1).tolist() == [57] * 6
    assert len({tuple(row) for row in trace.kept(250).tolist()}) == 6, "heads differ"


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    argv = ["trace", "--policies", "window:budget=64", "--new-tokens", "6", "--repeats", "1", "--page-tokens", "1100"]
    assert main([*argv, "--output", str(out)]) == 0
    result = json.loads(out.read_text())
    one, page = result["measurements"]
    assert result["complete"]
    assert (one["policy"], one["steps"]) == ("window:budget=64", 6)
    assert one["bytes_per_step"] == pytest.approx(one["bytes"] / 6, rel=1e-3)
    assert one["ratio"] == one["ratios"][0] > 0
    assert page["events"] == 32 * (1100 - 1024)
    assert page["page_bytes"] > 10_000
    assert 0 < page["first_scrub_seconds"] <= page["worst_seconds"]
    assert page["target_reached"] == (page["worst_seconds"] < 1)
    said = "\n".join(tables.lines_of(tables.TABLES["trace"], result))
    assert "| `window:budget=64` | **" in said
    assert f"**{page['open_seconds']:.2f} s**" in said
    capsys.readouterr()

    made_up(tmp_path / "trace", 1100)
    assert main(["trace", "--pictures", str(tmp_path / "trace"), str(tmp_path)]) == 0
    for name, *_ in PICTURES:
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
