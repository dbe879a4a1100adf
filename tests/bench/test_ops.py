"""Operations that methods choose with: what is compared first, what is said without a GPU, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minithink import results
from minithink.backend import triton_backend
from minithink.bench import ops, tables
from minithink.errors import MinithinkError
from tests.bench.result import RESULT, says_that_there_is_no_gpu
from tests.kernels.device import DEVICE


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    says_that_there_is_no_gpu("thoughts", tmp_path)


def test_kernels_are_compared_with_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    ops.check(str(DEVICE), tokens=16)
    wrong = replace(triton_backend(), kmeans=lambda x, valid, count: valid)
    monkeypatch.setattr(ops, "triton_backend", lambda: wrong)
    with pytest.raises(MinithinkError, match="kmeans and its twin differ"):
        ops.check(str(DEVICE), tokens=16)


def test_kernels_that_change_their_inputs_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(triton_backend(), carry=lambda *inputs: None)
    monkeypatch.setattr(ops, "triton_backend", lambda: wrong)
    with pytest.raises(MinithinkError, match="carry and its twin differ"):
        ops.check(str(DEVICE), tokens=16)


def test_the_table(tmp_path: Path) -> None:
    m = {"kernel": "kmeans", "case": "1 × 32 segments", "microseconds": 98.76, "twin_microseconds": 54321.0,
         "bytes": 8388608, "share": 0.0251}  # fmt: skip
    without = {"kernel": "row", "case": "64 × 1,024 tokens", "microseconds": 3.21, "bytes": 1, "share": 0.5}
    result = {**RESULT, "benchmark": "thought-kernels", "measurements": [m, without]}
    results.write(tmp_path / "thought-kernels.json", result)
    text = tables.fill("<!-- table:thought-kernels -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[3:5] == [
        "| `kmeans` | 1 × 32 segments | 98.8 µs | **2.5%** | 54,321 µs |",
        "| `row` | 64 × 1,024 tokens | 3.21 µs | **50%** | – |",
    ]
