"""Hardware counters: what is said without a GPU, how ncu's table is read, and ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from minithink.bench.speed import counters
from minithink.bench.tables import pages
from minithink.results import record
from tests.bench.result import RESULT, says_that_there_is_no_gpu

METRICS = list(counters.METRICS.values())
NCU = "\n".join(
    [
        "==PROF== Connected to process 7",
        ",".join(f'"{x}"' for x in ("ID", "Kernel Name", *METRICS)),
        ",".join(f'"{x}"' for x in ("", "", "us", "%", "Gbyte", "%", "%", "inst", "inst", "register/thread")),
        '"0","_attend","1,234.5","91.5","1.5","40","55","2,000,000","7.25","128"',
        '"1","_merge","2.5","10","0.001","4","5","1,000","9","32"',
    ]
)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    says_that_there_is_no_gpu("counters", tmp_path)


def test_what_ncu_writes_is_read() -> None:
    attend, merge = counters.parse(NCU)
    assert attend == {
        "kernel": "_attend",
        "microseconds": 1234.5,
        "dram": 91.5,
        "dram_bytes": pytest.approx(1.5e9),
        "issue": 40.0,
        "warps": 55.0,
        "instructions": 2e6,
        "waiting_for_memory": 7.25,
        "registers": 128.0,
    }
    assert (merge["kernel"], merge["dram_bytes"]) == ("_merge", pytest.approx(1e6))
    assert not list(counters.parse("==ERROR== no permission"))


def test_the_table(tmp_path: Path) -> None:
    [m, _] = ({"case": "bf16", "format": "bf16", "batch": 64, "length": 4096, **k} for k in counters.parse(NCU))
    record.write(tmp_path / "counters.json", {**RESULT, "benchmark": "counters", "measurements": [m]})
    text = pages.fill("<!-- table:counters -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[3] == "| bf16: 64 × 4,096 | `_attend` | 92% | 40% | 55% | 7.2 |"
