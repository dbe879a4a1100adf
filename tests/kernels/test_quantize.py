"""Quantize: the kernel's bytes are its twin's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.quantize import quantize
from minithink.quant import Format, parse
from minithink.quant.int_asymmetric import IntAsymmetric
from minithink.ref import quantize as ref
from tests.kernels.device import DEVICE
from tests.kernels.formats import LEADS, assert_bits, formats, laid_out, plain_copy, tensor_scales, widths
from tests.quant.draw import FORMATS, numbers

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

EVERY = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def check(fmt: Format, x: Tensor, scale: Tensor, valid: Tensor | None = None) -> None:
    """Against the twin, on the CPU."""
    got = quantize(fmt, x.to(DEVICE), scale.to(DEVICE), valid if valid is None else valid.to(DEVICE))
    want = ref.quantize(fmt, plain_copy(x), scale, valid)
    for name, a, b in zip(("codes", "params"), got, want, strict=True):
        assert_bits(f"{fmt} {name}", a, b)


@given(data=st.data())
def test_equals_its_twin(data: st.DataObject) -> None:
    fmt = data.draw(formats())
    lead, dim = data.draw(st.sampled_from(LEADS)), data.draw(widths(fmt))
    by_token = fmt.by == "token"
    tokens = (
        (data.draw(st.sampled_from([1, 3, 16, 17, fmt.group]).filter(lambda n: n <= fmt.group)),) if by_token else ()
    )
    if by_token:
        lead = lead[:2]  # a program for each
    x = data.draw(numbers(*lead, *tokens, dim))
    if isinstance(fmt, IntAsymmetric):
        x = x + 0.0  # of −0 and +0 the twin may take either as the minimum
    valid = None
    if by_token and data.draw(st.booleans()):
        # of each sequence, or of all
        shape = data.draw(st.sampled_from([(*lead, *tokens), tokens]))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        valid = torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 0.9]))
        x = x.where(valid[..., None], data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e4])))
    check(fmt, data.draw(laid_out(x)), data.draw(tensor_scales(fmt, lead)), valid)


@EVERY
def test_infinities_and_zeros(fmt: Format) -> None:
    rows = [
        [math.inf, -math.inf, 0.0, 1.0],
        [0.0, math.inf, 1e-38, 2.0],
        [-math.inf, -math.inf, 3.0, -1e-45],
        [0.0] * 4,
    ]
    x = torch.tensor(rows).repeat(1, 16)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for scale in (0.3, 1e37):  # under the second the largest number is not the largest code
            check(fmt, x.to(dtype) + 0.0, torch.tensor(scale))


@pytest.mark.parametrize(
    "text", ["fp16", "fp8", "nvfp4", "ternary", "ternary_best", "int4s", "int2s", "nvfp4:by=token"]
)
def test_the_sign_of_zero(text: str) -> None:
    check(parse(text), torch.tensor([[0.0, -0.0, -1e-40, 1e-40]]).repeat(3, 16), torch.tensor(1.0))
    check(parse(text), torch.tensor([[0.0, -0.0, -1e-4, 1.0]]).repeat(3, 16), torch.tensor(1.0))


def test_the_best_ternary_scale_where_two_are_nearly_as_good() -> None:
    """Equally good, better by one float32, and with a magnitude that no scale reaches."""
    x = torch.zeros(8, 16)
    x[0, :4] = torch.tensor([3.0, 1.0, 1.0, 1.0])
    x[1, :4] = torch.tensor([3.0, 1.0, 1.0 + 2.0**-23, 1.0])
    x[2, :5] = torch.tensor([1000.0, 200.0, 200.0, 200.0, 200.0])
    x[3, :4] = torch.tensor([2.0**30, 2.0**24, 300.0, 300.0])
    x[4, :9] = torch.tensor([2.0**-5, *[2.0**-9] * 8])  # scales below the smallest normal E4M3 number
    one = torch.tensor(1.0)
    check(parse("ternary_best"), x, one)
    check(parse("ternary_best:by=token"), x.T.contiguous(), one)


@pytest.mark.parametrize(
    "text",
    [
        "fp8",
        "int4:group=16",
        "tq4",
        "tq3:params=fp32",
        "nvfp4:group=64",
        "int16:by=token,group=128",
        "ternary:by=token",
        "ternary_best:group=64",
        "ternary_best:by=token",
    ],
)
def test_several_programs(text: str) -> None:
    fmt = parse(text)
    dim = 128 if text.startswith("tq") else 192
    x = torch.randn(2, 67 if fmt.by == "channel" else fmt.group, dim, generator=torch.Generator().manual_seed(0))
    check(fmt, x, torch.tensor([[0.01], [0.02]]) if fmt.by == "channel" else torch.tensor([0.01, 0.02]))


@pytest.mark.parametrize("dim", [4, 12, 20])
@pytest.mark.parametrize("text", ["nvfp4:group=128", "int2:group=32", "int16:group=32"])
def test_groups_as_long_as_a_short_row(text: str, dim: int) -> None:
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(0))
    check(parse(text).fit(dim), x, torch.tensor(0.1))


def test_fp8_keeps_nan() -> None:
    x = torch.tensor([[math.nan, 1.0, -math.nan, 500.0]], device=DEVICE)
    codes, _ = quantize(parse("fp8"), x, torch.ones((), device=DEVICE))
    assert [code & 127 for code in codes[0].tolist()] == [127, 56, 127, 126]


def test_what_does_not_fit_is_refused() -> None:
    x, one = torch.zeros(17, 24, device=DEVICE), torch.ones((), device=DEVICE)
    with pytest.raises(ValueError, match="17 tokens"):
        quantize(parse("int4:by=token"), x, one)
    with pytest.raises(ValueError, match="24 channels"):
        quantize(parse("int4"), x, one)
    with pytest.raises(ValueError, match="power of two, not 24"):
        quantize(parse("tq4"), x, one)


@pytest.mark.parametrize("first", [10.0, -40.0])
def test_the_scale_of_integers_spans_the_group_alone(first: float) -> None:
    """Not the way from 0 to the group: 16 numbers in steps of 1 have 4 bits, the scale 1 and the first as minimum."""
    x = first + torch.arange(16.0, device=DEVICE)[None]
    _, params = quantize(parse("int4:group=16,params=fp32"), x, torch.ones((), device=DEVICE))
    assert sorted(params.cpu().view(torch.float32).flatten().tolist()) == sorted([1.0, first])
