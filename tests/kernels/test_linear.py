"""The product of few rows: the kernels equal their twin for any strides and any cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.linear import FEW_ROWS, Blocks, blocks, few_rows, linear, tune_candidates
from minithink.ref import linear as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE

# of the result's number type: half a unit in the last place, twice (the interpreter truncates what it stores as
# bfloat16); float32: the order of the sum, see `tolerance`
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CUTS = [Blocks(32, 16), Blocks(16, 32, split=3, warps=2, stages=1), Blocks(64, 16, split=4), Blocks(16, 64, stages=3)]


def draw(
    n: int, inner: int, columns: int, layout: str, biased: str, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands whose surroundings in memory are poisoned."""
    # Not with NaN where torch computes: its bfloat16 product on some CPUs multiplies what lies between rows by 0.
    poison = torch.nan if n <= FEW_ROWS else 1e4
    generator = torch.Generator().manual_seed(seed)

    def inside(shape: tuple[int, int], gap: int) -> Tensor:
        x = torch.full((shape[0], shape[1] + gap), poison, dtype=dtype, device=DEVICE)[:, : shape[1]]
        return x.copy_(torch.randn(shape, generator=generator))

    x = inside((n, inner), 3)
    weight = inside((columns, inner), 0).t() if layout == "dense columns" else inside((inner, columns), 0)
    if layout == "neither":
        weight = inside((inner, 2 * columns), 5)[:, ::2]
    shape = {"": None, "bias": (1, columns), "residual": (n, columns)}[biased]
    bias = None if shape is None else inside(shape, 2)
    return x, weight, bias[0] if biased == "bias" and bias is not None else bias


def compare(name: str, got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, library: bool = False) -> None:
    """Against the product in float64: a float32 sum is off by some units of the sum of the absolute values; torch's
    may be of parts that were rounded to the number type."""
    unit = ROUNDING[x.dtype] if library else 1e-6
    want = x.double() @ weight.double() + (0 if bias is None else bias.double())
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    size = (x.double().abs() @ weight.double().abs()).max().item() + 4
    assert_close(name, got, want, atol=unit * size, rtol=ROUNDING[x.dtype])


operands = {
    "layout": st.sampled_from(["dense rows", "dense columns", "neither"]),
    "biased": st.sampled_from(["", "bias", "residual"]),
    "dtype": st.sampled_from(list(ROUNDING)),
    "seed": st.integers(0, 2**31),
}


@given(
    n=st.integers(1, FEW_ROWS + 2),
    inner=st.sampled_from([1, 15, 64, 100, 333]),
    columns=st.sampled_from([1, 16, 33, 130]),
    **operands,
)
def test_equals_its_twin(
    n: int, inner: int, columns: int, layout: str, biased: str, dtype: torch.dtype, seed: int
) -> None:
    x, weight, bias = draw(n, inner, columns, layout, biased, dtype, seed)
    own = None if bias is None else bias.clone()  # of a residual stream the result may take the memory
    compare("linear", linear(x, weight, own), x, weight, bias, library=n > FEW_ROWS)
    compare("twin", ref.linear(x.contiguous(), weight.contiguous(), bias), x, weight, bias, library=True)


@given(
    n=st.sampled_from([1, 1, 2, 7, FEW_ROWS]),
    cut=st.sampled_from(CUTS),
    inner=st.sampled_from([1, 40, 64, 100]),
    columns=st.sampled_from([1, 16, 33, 70]),
    **operands,
)
def test_any_cut(
    n: int, cut: Blocks, inner: int, columns: int, layout: str, biased: str, dtype: torch.dtype, seed: int
) -> None:
    """Several tiles, several blocks of columns, and parts of the sum, of which some may be empty."""
    x, weight, bias = draw(n, inner, columns, layout, biased, dtype, seed)
    compare(f"{cut}", few_rows(x, weight, bias, cut), x, weight, bias)


@pytest.mark.parametrize("cut", CUTS)
def test_equal_inputs_give_equal_bits(cut: Blocks) -> None:
    for n in (1, 5):
        x, weight, bias = draw(n, 300, 50, "dense rows", "bias", torch.float32, 0)
        assert_same("again", few_rows(x, weight, bias, cut), few_rows(x, weight, bias, cut))


@pytest.mark.parametrize("n", [0, 3])
def test_nothing_to_add(n: int) -> None:
    for inner, columns in ((0, 5), (5, 0)):
        x, weight = torch.ones(n, inner, device=DEVICE), torch.ones(inner, columns, device=DEVICE)
        assert_same(f"{inner}, {columns}", linear(x, weight), ref.linear(x, weight))


def test_sums_are_float32() -> None:
    """4096 products of 256 overflow float16 on the way, and a bfloat16 sum of ones stalls at 256."""
    for n in (1, 2):
        x = torch.full((n, 4096), 16.0, device=DEVICE, dtype=torch.float16)
        weight = torch.full((4096, 16), 16.0, device=DEVICE, dtype=torch.float16)
        weight[2048:] = -16
        assert linear(x, weight).eq(0).all()
        ones = torch.ones(4096, 16, device=DEVICE, dtype=torch.bfloat16)
        assert linear(torch.ones_like(ones[:n, :1]).expand(n, 4096), ones).eq(4096).all()


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_shape_has_a_cut_that_compiles(rows: int, itemsize: int) -> None:
    """Powers of two, and tiles of at least 16 both ways, which tensor cores want."""
    for inner in (64, 1536, 4096, 14336):
        for columns in (16, 256, 1536, 4096, 6144, 28672, 128256):
            for dense_columns in (False, True):
                cut = blocks(rows, inner, columns, dense_columns, itemsize)
                assert cut.k >= 16
                assert cut.n >= 16
                assert all(value & (value - 1) == 0 for value in (cut.k, cut.n, cut.split, cut.warps))
    assert len(set(tune_candidates(itemsize))) == len(tune_candidates(itemsize)) > 20


def test_many_rows_are_added_to_the_residual_stream_in_place() -> None:
    """But never where a gradient may need the stream as it was."""
    x = torch.randn(FEW_ROWS + 1, 24, device=DEVICE)
    weight = torch.randn(24, 40, device=DEVICE)
    stream = torch.randn(FEW_ROWS + 1, 40, device=DEVICE)
    want = torch.addmm(stream, x, weight)
    before = stream.clone()
    with torch.enable_grad():
        assert_same("apart", linear(x, weight, stream), want)
    assert_same("as it was", stream, before)
    with torch.no_grad():
        got = linear(x, weight, stream)
    assert_same("in place", got, want)
    assert got.data_ptr() == stream.data_ptr()
