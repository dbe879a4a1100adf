"""The formats inside kernels: every code, every tie, and the host's helpers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels import _formats as formats
from minithink.kernels import _rotation
from minithink.kernels._formats import (
    constexprs,
    decode_code,
    encode_code,
    pack,
    round_to,
    to_fp32,
    two_levels,
    view_as,
)
from minithink.quant import Format, e4m3, parse
from minithink.quant.int_asymmetric import IntAsymmetric
from minithink.quant.pack import pack as ref_pack
from minithink.quant.symmetric import Symmetric
from minithink.quant.turboquant import BOUNDARIES, LEVELS, SCALES, TurboQuant, rotate, rotate_back
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.kernels.formats import assert_bits
from tests.quant.draw import E4M3, FORMATS, POINTS

TURBO = ["tq1", "tq2", "tq3", "tq4"]


@triton.jit
def _decode(
    p_in,
    p_out,
    n,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + i, decode_code(tl.load(p_in + i, i < n, 0), KIND, BITS, PARAMS), i < n)


@triton.jit
def _encode(
    p_in,
    p_out,
    n,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + i, encode_code(tl.load(p_in + i, i < n, 0.0), KIND, BITS), i < n)


@triton.jit
def _pack(p_in, p_out, p_back, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    o_code = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    packed = pack(tl.load(p_in + o_code), BITS)
    tl.store(p_out + row * BYTES + tl.arange(0, BYTES)[None, :], packed)
    tl.store(p_back + o_code, formats.unpack(packed, BITS))


@triton.jit
def _pack_threes(p_in, p_out, p_back, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of codes of 3 bits, eight in three bytes."""
    row = tl.arange(0, ROWS)[:, None]
    o_code = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    number = pack(tl.load(p_in + o_code), 3)
    p_three = p_out + 3 * (row * (WIDTH // 8) + tl.arange(0, WIDTH // 8)[None, :])
    everywhere = number >= 0
    formats.store_bytes(p_three, number, everywhere, 3)
    tl.store(p_back + o_code, formats.unpack(number, 3))


@triton.jit
def _round(p_in, p_out, n, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + i, round_to(to_fp32(tl.load(p_in + i, i < n, 0.0)), TYPE), i < n)


def run(kernel, x: Tensor, dtype: torch.dtype, fmt: Format) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    block = min(4096, triton.next_power_of_2(x.numel()))
    kernel[triton.cdiv(x.numel(), block),](x.to(DEVICE), out, x.numel(), **constexprs(fmt), BLOCK=block)
    return out.cpu()


KINDS = ["fp8", "nvfp4", "ternary", "int4s", "int2s", "int2", "int4", "int8", "int16", "fp16", "bf16", *TURBO]
KINDS += ["ternary_best"]


def test_tables_are_those_of_the_twin() -> None:
    assert (_rotation.LEVELS, _rotation.BOUNDARIES, _rotation.SCALES) == (LEVELS, BOUNDARIES, SCALES)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_rows_are_rotated_as_the_twin_does(dim: int, back: bool) -> None:
    """Bit for bit, the sign of a zero too; also in place, in rows that lie apart, and no row at all."""
    x = torch.randn(3, 20, dim, generator=torch.Generator().manual_seed(dim))
    x[0, :10] = x[0, :10].sign() * 0.0
    want = rotate_back(x) if back else rotate(x)
    assert_bits("rows", _rotation.rotate_rows(x.to(DEVICE), back), want)
    wide = torch.cat((x, x), dim=1).to(DEVICE)
    part = wide[:, :20]
    _rotation.rotate_rows(part, back, out=part)
    assert_bits("in place", part, want)
    assert_bits("beside", wide[:, 20:], x)
    assert _rotation.rotate_rows(x[:0].to(DEVICE)).shape == (0, 20, dim)


@pytest.mark.parametrize("text", KINDS)
def test_every_code_decodes_as_defined(text: str) -> None:
    fmt = parse(text)
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32)
    got = run(_decode, codes, torch.float32, fmt)
    if isinstance(fmt, Symmetric):
        want = fmt.point(codes.to(torch.uint8))
    elif isinstance(fmt, IntAsymmetric):
        want = codes.float()
    elif isinstance(fmt, TurboQuant):
        above = LEVELS[fmt.bits]
        want = torch.tensor([*(-x for x in reversed(above)), *above])
    elif text == "fp8":
        want = e4m3.decode(codes.to(torch.uint8))
    else:
        want = codes.to(torch.int16).view({"fp16": torch.float16, "bf16": torch.bfloat16}[text]).float()
    assert_bits(text, got, want)


def test_plain_fp32_is_itself() -> None:
    x = torch.tensor([1.5, -0.0, 1e-45, math.inf, math.nan])
    assert_bits("fp32", run(_decode, x.view(torch.int32), torch.float32, parse("fp32")), x)


@pytest.mark.parametrize("text", KINDS[:9])
def test_ties_and_their_neighbours(text: str) -> None:
    """All halfway numbers, what is next to them, and what lies far outside."""
    fmt = parse(text)
    if isinstance(fmt, IntAsymmetric):
        middles = torch.arange(0, min(1 << fmt.bits, 2048)).double() + 0.5
        middles = torch.cat((middles, (1 << fmt.bits) - middles))
    else:
        points = [point for _, point in (E4M3 if text == "fp8" else POINTS[text])]
        middles = torch.tensor([float((a + b) / 2) for a, b in pairwise(sorted({*points, *(-p for p in points)}))])
    middles = middles.float()
    y = torch.cat([f(middles) for f in (lambda x: x.nextafter(x - 1), lambda x: x, lambda x: x.nextafter(x + 1))])
    y = torch.cat(
        (y, y.round(), torch.tensor([0.0, -0.0, 1e-45, -1e-45, 449.0, 464.0, -480.0, 1e38, -math.inf, math.inf]))
    )
    got = run(_encode, y, torch.int32, fmt)
    if isinstance(fmt, Symmetric):
        want = fmt.nearest(y)
    else:
        want = e4m3.encode(y) if text == "fp8" else y.round().clamp(0, fmt.top)  # type: ignore[attr-defined]
    assert_same(text, got, want.to(torch.int32))


def test_e4m3_of_many_numbers_and_nan() -> None:
    bits = torch.randint(-(2**31), 2**31, (20000,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    x = torch.cat((bits.to(torch.int32).view(torch.float32), torch.linspace(-500, 500, 20001)))
    got = run(_encode, x, torch.int32, parse("fp8"))
    assert_same("numbers", got[~x.isnan()], e4m3.encode(x[~x.isnan()]).int())
    assert (got[x.isnan()] & 127).eq(127).all()


def test_pack_of_three_bits() -> None:
    codes = torch.randint(8, (4, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    out = torch.empty(4, 12, dtype=torch.uint8, device=DEVICE)
    back = torch.empty(4, 32, dtype=torch.int32, device=DEVICE)
    _pack_threes[1,](codes.to(DEVICE), out, back, 4, 32)
    assert_same("packed", out.cpu(), ref_pack(codes, 3))
    assert_same("unpacked", back.cpu(), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_pack(bits: int) -> None:
    codes = torch.randint(1 << bits, (4, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    out = torch.empty(4, 4 * bits, dtype=torch.uint8, device=DEVICE)
    back = torch.empty(4, 32, dtype=torch.int32, device=DEVICE)
    _pack[1,](codes.to(DEVICE), out, back, bits, 4, 32, 4 * bits)
    assert_same("packed", out.cpu(), ref_pack(codes, bits))
    assert_same("unpacked", back.cpu(), codes)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_floats_round_as_torch_rounds(name: str) -> None:
    dtype = formats.DTYPES[name]
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # and halfway to the next
    for x in (every, every.float() * (1 + 2**-8), every.float() * (1 + 3 * 2**-9), every.float() * (1 + 2**-11)):
        out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
        _round[16,](x.to(DEVICE), out, x.numel(), name, 4096)
        assert_bits(name, out, x.to(dtype))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_constants_of_formats(fmt: Format) -> None:
    constants = constexprs(fmt, "V_")
    assert list(constants) == ["V_KIND", "V_BITS", "V_GROUP", "V_PARAMS"]
    kind, bits, group, params = constants.values()
    assert (bits, group) == (fmt.bits, fmt.group)
    if isinstance(fmt, IntAsymmetric):
        assert (kind, params) == ("int", fmt.params)
    elif isinstance(fmt, TurboQuant):
        assert (kind, params) == (f"tq-{fmt.scale}", fmt.params)
    elif fmt.name in formats.DTYPES:
        assert (kind, params) == ("plain", fmt.name)
    elif fmt.name == "ternary_best":
        assert (kind, params) == ("ternary", "best")
    else:
        assert (kind, params) == (fmt.name, "")


def test_bytes_are_viewed_where_they_lie_as_numbers() -> None:
    rows = torch.arange(48, dtype=torch.uint8).view(3, 16)
    for part, copied in (
        (rows, False),
        (rows[:, 4:12], False),
        (rows[:, 1:9], True),
        (rows[:, :4].mT.contiguous().mT, True),
    ):
        got = view_as(part, torch.int32)
        assert (got.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()) == copied
        assert_same("bytes", got, part.contiguous().clone().view(torch.int32))
    expanded = view_as(rows[0].expand(5, 16), torch.float16)
    assert expanded.stride(0) == 0


def test_leading_axes_become_two() -> None:
    x, scale = torch.zeros(2, 3, 5, 4), torch.zeros(2, 1, 1).expand(2, 3, 5)
    outer, inner, (a, b) = two_levels(x.shape[:-1], x, scale)
    assert (outer, inner, a.shape, b.stride()) == (2, 15, (2, 15, 4), (1, 0))
    assert two_levels(x.shape[:-1], x)[:2] == (1, 30)
    y = torch.arange(120).view(2, 3, 5, 4)
    outer, inner, (got, b) = two_levels(y.shape[:-1], y.transpose(0, 2).contiguous().transpose(0, 2), scale)
    assert_same("copied", got.reshape(y.shape), y)
    assert two_levels(torch.Size(), torch.zeros(4))[2][0].shape == (1, 1, 4)
