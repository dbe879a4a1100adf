"""Shrink: the kernel's bytes are its twin's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.shrink import shrink
from minithink.quant import Format, parse
from minithink.quant.int_asymmetric import IntAsymmetric
from minithink.ref import shrink as ref
from tests.kernels.device import DEVICE
from tests.kernels.formats import LEADS, assert_bits, laid_out, plain_copy
from tests.quant.draw import numbers

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def check(source: Format, target: Format, codes: Tensor, params: Tensor) -> None:
    """Against the twin, on the CPU."""
    got = shrink(source, target, codes.to(DEVICE), params.to(DEVICE))
    want = ref.shrink(source, target, plain_copy(codes), plain_copy(params))
    for name, a, b in zip(("codes", "params"), got, want, strict=True):
        assert_bits(f"{source} → {target} {name}", a, b)


@given(data=st.data())
def test_equals_its_twin(data: st.DataObject) -> None:
    params = data.draw(st.sampled_from(["fp16", "fp32"]))
    by, group = data.draw(st.sampled_from(["channel", "token"])), data.draw(st.sampled_from([16, 32, 128]))
    bits = data.draw(st.sampled_from([4, 8] if params == "fp16" else [4, 8, 16]))
    to = data.draw(st.sampled_from([b for b in (2, 4, 8, 16) if b <= bits]))
    source, target = IntAsymmetric(bits, group, by, params), IntAsymmetric(to, group, by, params)
    dim = group * data.draw(st.integers(1, max(1, 64 // group)))
    lead = data.draw(st.sampled_from(LEADS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    codes = torch.randint(256, (*lead, source.code_bytes(dim)), dtype=torch.uint8, generator=generator)
    # By token tokens may share a row, which is then given once.
    rows = lead[:-1] if by == "token" and data.draw(st.booleans()) else lead
    dtype = torch.float16 if params == "fp16" else torch.float32
    scales = data.draw(numbers(*rows, source.params_bytes(dim) // dtype.itemsize, dtypes=(dtype,)))
    check(source, target, data.draw(laid_out(codes)), data.draw(laid_out(scales.view(torch.uint8))))


@pytest.mark.parametrize(("bits", "to"), [(16, 8), (16, 4), (16, 2), (8, 4), (8, 2), (4, 2)])
def test_every_code(bits: int, to: int) -> None:
    source, target = IntAsymmetric(bits, 128, params="fp32"), IntAsymmetric(to, 128, params="fp32")
    codes = torch.arange(1 << max(bits, 8), dtype=torch.int32).to(torch.int16 if bits == 16 else torch.uint8)
    codes = codes.view(torch.uint8).view(-1, source.code_bytes(128))
    check(source, target, codes, torch.tensor([0.1, -3.0]).view(torch.uint8).expand(len(codes), -1))


@pytest.mark.parametrize("scale", [65504.0, 4000.0, 3800.0, 6e-8, 0.0, math.inf])
def test_extreme_scales(scale: float) -> None:
    params = torch.tensor([scale, -65504.0], dtype=torch.float16).view(torch.uint8)
    for to in ("int4", "int2"):
        check(parse("int8"), parse(to), torch.arange(16, dtype=torch.uint8), params)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("int4", "int2:group=32"),
        ("int4", "int2:by=token"),
        ("int4", "int2:params=fp32"),
        ("int4", "int8"),
        ("int4", "int2s"),
        ("nvfp4", "int2"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_other_formats_are_refused(source: str, target: str) -> None:
    codes = torch.zeros(3, 16, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="cannot be shrunk"):
        shrink(parse(source), parse(target), codes, codes[:, :4])


@pytest.mark.parametrize("text", ["int8", "int16:by=token"])
def test_rows_in_any_layout(text: str) -> None:
    """Leading axes that are no single one: every second of some rows."""
    source = parse(text)
    target = IntAsymmetric(4, source.group, source.by, "fp32" if source.bits == 16 else "fp16")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (4, 6, source.code_bytes(32)), dtype=torch.uint8, generator=generator)
    dtype = torch.float32 if source.bits == 16 else torch.float16
    scales = torch.randn(4, 6, source.params_bytes(32) // dtype.itemsize, generator=generator).to(dtype)
    check(source, target, codes[::2, 1:4], scales.view(torch.uint8)[::2, 1:4])
