"""Full precision is kept bit for bit; FP8 is E4M3 under a scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.quant import e4m3, parse
from minithink.quant.plain import DTYPES
from tests.compare import assert_close, assert_same
from tests.quant.draw import numbers, own_scale, round_trip

torch.set_num_threads(1)


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
def test_plain_is_the_number_itself(name: str, data: st.DataObject) -> None:
    dtype = DTYPES[name]
    x = data.draw(numbers(2, 3, 6, dtypes=(dtype,)))
    codes, _ = parse(name).quantize(x.mT, torch.ones(1))
    assert_same("bytes", codes, x.mT.contiguous().view(torch.uint8))
    assert_same("numbers", round_trip(parse(name), x, torch.ones(1), dtype), x)
    if dtype != torch.float32:  # widening loses nothing
        assert_same("widened", round_trip(parse(name), x, torch.ones(1), torch.float32), x.float())


@given(x=numbers(3, 8, dtypes=(torch.float32,)))
def test_plain_rounds_as_torch_and_saturates(x: torch.Tensor) -> None:
    for name, dtype in DTYPES.items():
        limit = torch.finfo(dtype).max
        want = x.clamp(-limit, limit).to(dtype)
        assert_same(name, round_trip(parse(name), x, torch.ones(1), dtype), want)
        assert_same(name, round_trip(parse("fp32"), x, torch.ones(1), dtype), want)


@given(x=numbers(1, 3, 8))
def test_fp8_error(x: torch.Tensor) -> None:
    """Half of the last of three mantissa bits: x/16 for normal numbers, 2⁻¹⁰ of the scale for others."""
    fmt = parse("fp8")
    scale = own_scale(fmt, x)
    got, x64 = round_trip(fmt, x, scale).double(), x.double()
    bound = (x64.abs() / 16).maximum(scale.double()[..., None] * 2.0**-10) * (1 + 1e-6) + 2.0**-148
    assert ((got - x64).abs() <= bound).all(), f"{x}\n{got}"


def test_fp8_example() -> None:
    x = torch.tensor([[[224.0, -1.0, 500.0, 17.0]]])
    codes, params = parse("fp8").quantize(x, torch.tensor([[0.5]]))
    assert params.shape == (1, 1, 0)
    assert_same("halves", e4m3.decode(codes)[0, 0], torch.tensor([448.0, -2.0, 448.0, 32.0]))
    got = round_trip(parse("fp8"), x, torch.tensor([[0.5]]))
    assert_same("decoded", got[0, 0], torch.tensor([224.0, -1.0, 224.0, 16.0]))


def test_fp8_error_on_gaussians() -> None:
    for sigma in (1e-3, 1.0, 1e3):
        x = sigma * torch.randn(1, 1000, 64, generator=torch.Generator().manual_seed(0))
        error = (round_trip(parse("fp8"), x, own_scale(parse("fp8"), x)) - x).norm() / x.norm()
        assert_close("relative error", error, torch.tensor(0.0265), atol=0.001)
