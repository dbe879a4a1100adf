"""Operations that methods choose with: what is compared first, what is said without a GPU, and the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minithink.backend import REFERENCE, triton_backend
from minithink.bench.speed import ops
from minithink.bench.tables import pages
from minithink.errors import MinithinkError
from minithink.kernels.predict import FEW_ROWS
from minithink.results import record
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


@pytest.mark.parametrize("name", ops.OPERATIONS)
def test_twins_that_are_captured_need_no_data(name: str) -> None:
    """Meta tensors have shapes and no data. A call fails if it waits for data or has shapes that depend on data."""
    operation, twin = ops.OPERATIONS[name], getattr(REFERENCE, name)
    inputs = operation.exact("meta", 16)
    if operation.capturable:
        assert all(x.is_meta for x in ops.outcome(twin, inputs))
    else:
        with pytest.raises(RuntimeError, match="meta tensors"):
            twin(*inputs)


def test_the_kernel_and_its_twin_are_each_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In microseconds: the kernel captured over all inputs, the twin from Python, and captured if it can be."""
    called: list[tuple[str, int]] = []

    def backend(name: str) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(("sparsity", "kmeans"), lambda x: called.append((name, x))))

    monkeypatch.setattr(ops, "triton_backend", lambda: backend("kernel"))
    monkeypatch.setattr(ops, "REFERENCE", backend("twin"))

    def timed(call: Callable[[int], object], count: int, repeats: int) -> float:
        assert repeats == 7
        for i in range(count):
            call(i)
        assert [x for _, x in called[-count:]] == [10, 11, 12], "inputs in turn"
        return {"kernel": 2e-6, "twin": 5e-6}[called[-1][0]]

    def elapsed(call: Callable[[], object]) -> float:
        call()
        assert called[-1] == ("twin", 10)
        return 9e-6

    monkeypatch.setattr(ops.attention, "timed", timed)
    monkeypatch.setattr(ops.attention, "elapsed", elapsed)
    for name, captured in (("sparsity", {"twin_recorded_microseconds": pytest.approx(5)}), ("kmeans", {})):
        found = ops.beside_twin(name, [(10,), (11,), (12,)], 7)  # type: ignore[list-item]
        own = {"kernel": name, "microseconds": pytest.approx(2), "twin_microseconds": pytest.approx(9)}
        assert found == own | captured


def test_the_predictor_is_timed_beyond_the_rows_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases whose rows torch multiplies say so; the last case without torch has all rows that the kernels take."""
    monkeypatch.setattr(torch, "randn", lambda *size, device, dtype=None: torch.empty(*size, device="meta"))
    cases = {inputs[0][0].shape[0]: case for case, _, inputs in ops.OPERATIONS["predict"].cases((), (), 1)}
    assert [*cases] == [1, 4, 8, 16, 20, 32, 48, 64, 128, 256]
    by_torch = [rows for rows, case in cases.items() if case.endswith("(torch)")]
    assert by_torch == [128, 256]
    assert max(cases.keys() - by_torch) == FEW_ROWS


def test_the_table(tmp_path: Path) -> None:
    m = {
        "kernel": "kmeans",
        "case": "1 × 32 segments",
        "microseconds": 98.76,
        "twin_microseconds": 54321.0,
        "bytes": 8388608,
        "share": 0.0251,
    }
    without = {"kernel": "row", "case": "64 × 1,024 tokens", "microseconds": 3.21, "bytes": 1, "share": 0.5}
    result = {**RESULT, "benchmark": "thought-kernels", "measurements": [m, without]}
    record.write(tmp_path / "thought-kernels.json", result)
    text = pages.fill("<!-- table:thought-kernels -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[3:5] == [
        "| `kmeans` | 1 × 32 segments | 98.8 µs | **2.5%** | 54,321 µs |",
        "| `row` | 64 × 1,024 tokens | 3.21 µs | **50%** | – |",
    ]


def test_the_table_has_times_of_captured_twins_if_one_was_captured() -> None:
    without = {"kernel": "kmeans", "case": "few", "microseconds": 98.76, "twin_microseconds": 54321.0, "share": 0.5}
    captured = {**without, "kernel": "predict", "twin_recorded_microseconds": 43.21}
    table = pages.TABLES["thought-kernels"]
    columns = ("kernel", "case", "time", "of bandwidth", "twin")
    line = ("`kmeans`", "few", "98.8 µs", "**50%**", "54,321 µs")
    assert pages.cells(table, [without]) == [columns, line]
    assert pages.cells(table, [without, captured]) == [
        (*columns, "twin, captured"),
        (*line, "–"),
        ("`predict`", *line[1:], "43.2 µs"),
    ]
