"""Comparisons: all of them can be run, and what comes out is a table."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from minithink.bench import record, sweep, tables
from minithink.bench.__main__ import main
from minithink.evaluate.plan import plan, policy_of


@pytest.mark.parametrize("name", sorted(sweep.SWEEPS))
def test_every_policy_is_one(name: str) -> None:
    """And no comparison but the main one touches the test split."""
    one = sweep.SWEEPS[name]
    cells = plan(sweep.policies_of(one), one.budgets)
    assert [cell.policy for cell in cells[:1]] == ["full"]
    assert len(cells) == len(set(cells)) > len(one.policies)
    for cell in cells:
        policy_of(cell, None, longest=600)
    assert (one.split == "test") == (name == "main")
    assert one.problems == 200


def test_a_small_one(tmp_path: Path) -> None:
    """Both families, every policy and budget; thoughts are counted; what is there is not run again."""
    path = tmp_path / "snapkv.json"
    words = ["sweep", "snapkv", "--device", "cpu", "--limit", "1", "--batch-size", "1", "--max-new-tokens", "100"]
    words += ["--runs", str(tmp_path / "runs"), "--output", str(path)]
    drawn = find_spec("matplotlib") is not None  # an extra
    words += ["--plot", str(tmp_path)] if drawn else []
    assert main(words) == 0
    first = record.read(path)
    assert first["complete"]
    found = [(m["family"], m["policy"], m["budget"]) for m in first["measurements"]]
    policies = [("full", None), *((p, b) for p in sweep.SWEEPS["snapkv"].policies for b in (0.25, 0.5))]
    assert found == [(family, *cell) for family in ("facts", "ledger") for cell in policies]
    thinkv = [m for m in first["measurements"] if m["policy"] != "full"]
    assert all(m["case_1"] is not None for m in thinkv)
    assert sum(m["case_2"] for m in thinkv) > 0
    assert (tmp_path / "sweep-snapkv-facts.svg").is_file() == drawn
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("results.jsonl")}
    assert len(before) == 2
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("results.jsonl")} == before
    assert record.read(path)["measurements"] == first["measurements"]
    record.write(tmp_path / "sweep-snapkv.json", first)
    lines = tables.fill("<!-- table:sweep-snapkv -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert lines[1].startswith("| policy | budget | facts: right | tokens | of full's bytes | ledger: right |")
    assert lines[3].startswith("| `full` | – | **")
    assert lines[3].endswith("| 100.0% | – |")
    assert lines[4].startswith("| `thinkv` | 25 % |")
