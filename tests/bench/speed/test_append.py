"""The benchmark of appending: what it says without a GPU, and its table."""

from __future__ import annotations

from pathlib import Path

from minithink.bench.tables import pages
from minithink.results import record
from tests.bench.result import RESULT, says_that_there_is_no_gpu


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    says_that_there_is_no_gpu("append", tmp_path)


def test_the_table(tmp_path: Path) -> None:
    m = {
        "batch": 64,
        "length": 1024,
        "format": "nvfp4",
        "append_microseconds": 2.25,
        "buffer_microseconds": 0.0,
        "attention_microseconds": 53.04,
        "share": 0.0424,
        "target_reached": True,
    }
    record.write(tmp_path / "append.json", {**RESULT, "benchmark": "append", "measurements": [m]})
    text = pages.fill("<!-- table:append -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[3] == "| 64 | 1,024 | nvfp4 | 2.2 µs | 0.0 µs | 53.0 µs | **4.2%** |"
