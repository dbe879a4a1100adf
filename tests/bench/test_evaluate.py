"""The benchmark of evaluations: what it counts, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from minithink import results
from minithink.bench import tables
from minithink.bench.__main__ import main
from tests.bench.result import RESULT, says_that_there_is_no_gpu


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    says_that_there_is_no_gpu("evaluate", tmp_path)


def test_it_counts_what_was_generated(tmp_path: Path) -> None:
    path = tmp_path / "evaluate.json"
    words = ["--device", "cpu", "--limit", "2", "--num-samples", "2", "--batch-size", "4", "--max-new-tokens", "6"]
    words += ["--warm", "1", "--policies", "full,window:budget=400", "--output", str(path)]
    assert main(["evaluate", *words]) == 0
    result = results.read(path)
    assert result["complete"]
    full, window = result["measurements"]
    for m in (full, window):
        assert (m["problems"], m["sequences"], m["tokens"]) == (2, 4, 24)
        assert m["tokens_per_second"] == pytest.approx(24 / m["seconds"], rel=1e-3)
    assert "of_full" not in full
    assert window["of_full"] == pytest.approx(window["tokens_per_second"] / full["tokens_per_second"], rel=1e-3)


def test_the_first_policy_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--device", "cpu", "--policies", "kivi", "--output", str(tmp_path / "x.json")]) == 2
    assert "--policies kivi: full must come first" in capsys.readouterr().err


def test_the_table(tmp_path: Path) -> None:
    m = {
        "policy": "full", "seconds": 40.04, "sequences": 4200, "tokens": 4_200_000, "tokens_per_second": 104_895.1,
        "tokens_kept": 812.4,
    }  # fmt: skip
    other = {**m, "policy": "rkv:budget=384", "tokens_per_second": 62_937.06, "of_full": 0.6}
    results.write(tmp_path / "evaluate.json", {**RESULT, "benchmark": "evaluate", "measurements": [m, other]})
    lines = tables.fill("<!-- table:evaluate -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert lines[3] == "| `full` | 4,200 | 4,200,000 | 40.0 | **104,900** | – | 812 |"
    assert lines[4] == "| `rkv:budget=384` | 4,200 | 4,200,000 | 40.0 | **62,937** | 60% | 812 |"
