"""Dequantize: the kernel's bits are its twin's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.dequantize import dequantize
from minithink.quant import Format, parse
from minithink.ref import dequantize as ref
from tests.kernels.device import DEVICE
from tests.kernels.formats import LEADS, assert_bits, formats, laid_out, plain_copy, tensor_scales, widths
from tests.quant.draw import DTYPES, numbers

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def check(fmt: Format, codes: Tensor, params: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Against the twin, on the CPU."""
    got = dequantize(fmt, codes.to(DEVICE), params.to(DEVICE), scale.to(DEVICE), dtype)
    assert_bits(f"{fmt}, {dtype}", got, ref.dequantize(fmt, plain_copy(codes), plain_copy(params), scale, dtype))


@given(data=st.data())
def test_equals_its_twin(data: st.DataObject) -> None:
    """Numbers that were encoded, and any codes at all."""
    fmt = data.draw(formats())
    lead, dim = data.draw(st.sampled_from(LEADS)), data.draw(widths(fmt))
    scale = data.draw(tensor_scales(fmt, lead))
    x = data.draw(numbers(*lead, dim))
    if fmt.by == "token":
        shared = bool(lead) and lead[-1] and data.draw(st.booleans())  # all tokens have one row, or each its own
        x = x if shared else x.unsqueeze(-2)
        codes, params = fmt.quantize(
            x, scale[..., 0].expand(x.shape[:-2]) if shared and scale.ndim else scale.expand(lead)
        )
        codes = codes if shared else codes.squeeze(-2)
        params = (
            params.to(DEVICE).unsqueeze(-2).expand(*codes.shape[:-1], -1) if shared else data.draw(laid_out(params))
        )
    else:
        codes, params = fmt.quantize(x, scale.expand(lead))
        params = data.draw(laid_out(params))
    if data.draw(st.booleans()):
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        codes = torch.randint(256, codes.shape, dtype=torch.uint8, generator=generator)
    check(fmt, data.draw(laid_out(codes)), params, scale, data.draw(st.sampled_from(DTYPES)))


@pytest.mark.parametrize(
    "text",
    [
        "fp8",
        "nvfp4",
        "ternary",
        "ternary_best",
        "int4s",
        "int2s",
        "int2",
        "int4",
        "int8",
        "int16",
        "tq1",
        "tq2",
        "tq4",
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code(text: str, dtype: torch.dtype) -> None:
    """With a scale near the top, so that large ones exceed FP16, and a small one."""
    fmt = parse(text)
    count = 1 << 16 if fmt.bits == 16 else 256
    codes = torch.arange(count, dtype=torch.int32).to(torch.int16 if fmt.bits == 16 else torch.uint8)
    codes = codes.view(torch.uint8).view(-1, fmt.code_bytes(64))
    pair = torch.tensor([[60000.0, -3e4], [2e-7, 1.0]], dtype=torch.float32 if fmt.bits == 16 else torch.float16)
    bits = pair.view(torch.uint8) if fmt.param_bytes > 1 else torch.tensor([[126], [1]], dtype=torch.uint8)
    params = bits[:, None].expand(2, len(codes), -1).repeat(1, 1, 64 // (fmt.group or 64))
    params = params[..., : fmt.params_bytes(64)]
    check(fmt, codes.expand(2, -1, -1), params, torch.tensor([[1000.0], [1e-3]]), dtype)


@pytest.mark.parametrize("text", ["fp32", "nvfp4", "int4:group=16", "int8:by=token", "fp8", "tq3", "tq4"])
def test_several_programs(text: str) -> None:
    fmt = parse(text)
    x = torch.randn(2, 35, 128 if text.startswith("tq") else 192, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([[0.01], [0.02]])
    codes, params = fmt.quantize(
        x if fmt.by == "channel" else x[:, :16], scale if fmt.by == "channel" else scale[:, 0]
    )
    if fmt.by == "token":
        codes, params = codes.repeat(1, 3, 1), params[:, None].expand(-1, 48, -1)
    check(fmt, codes, params, scale, torch.bfloat16)
