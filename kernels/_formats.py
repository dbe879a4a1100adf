"""The cache's number formats inside kernels: points of codes, nearest codes, packing. Twin: `minithink/quant/`.

Used by `append.py`, `dequantize.py`, `flush.py`, `quantize.py`, `shrink.py`, `tri_score.py`, `_layout.py` and
`_planes.py`.

A format reaches a kernel as compile-time constants, which `constexprs` makes of a Format:

    KIND    "plain", "fp8", "nvfp4", "ternary", "int4s", "int2s", "int" for the asymmetric integers, or one of
            TurboQuant's (`_rotation.py`)
    BITS    of one code: 1, 2, 3, 4, 8, 16, 32
    GROUP   elements that share parameters; 0: a whole row does (TurboQuant), or there are none
    PARAMS  "fp16" or "fp32": of "int" and TurboQuant, what scales and minima are; of "plain" also "bf16", what the
            numbers are; of "ternary" "best", if scales are those of least squared error

No device function here loads or stores. Codes are int32 tensors, numbers are float32. If the kernel is compiled with
`enable_fp_fusion=False`, the results are the twin's bit for bit; otherwise code·scale + minimum is rounded once, not
twice. Small floats are read and rounded by integer operations, because casts to E4M3 are not exact in Triton's
interpreter. Integers are rounded by adding 1.5·2^23: the sum of two float32 is rounded to nearest, ties to even. This
takes fewer cycles than a conversion, and neither Triton nor LLVM may reorder it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED
from minithink.kernels._rotation import decode_level, encode_rotated, is_rotated

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# What a code of so many bits is loaded as; those below 8 bits share bytes.
CODES = dict.fromkeys((1, 2, 3, 4, 8), torch.uint8) | {16: torch.int16}

LARGEST = {"fp32": torch.finfo(torch.float32).max, "fp16": 65504.0, "bf16": torch.finfo(torch.bfloat16).max}
_LARGEST_FP32 = tl.constexpr(LARGEST["fp32"])
_LARGEST_FP16 = tl.constexpr(LARGEST["fp16"])
_LARGEST_BF16 = tl.constexpr(LARGEST["bf16"])
_INFINITY = tl.constexpr(float("inf"))
_WIDEST_FP16 = tl.constexpr(65504.0)  # of asymmetric integers with FP16 parameters: the largest minimum
_WIDEST_FP32 = tl.constexpr(2.0**126)  # with FP32 parameters: max − min is still finite
_ROUND = tl.constexpr(1.5 * 2**23)  # a float32 of this magnitude has no bits below the point
_ROUND_BITS = tl.constexpr(0x4B400000)
TRIED = 30  # E4M3 numbers that are tried below the usual scale, see `minithink/quant/ternary_best.py`
_TRIED = tl.constexpr(TRIED)
_INTERPRETED = tl.constexpr(INTERPRETED)


class Format(Protocol):
    """What kernels need of a `minithink.quant.Format`. Asymmetric integers and TurboQuant also have `params`, "fp16"
    or "fp32", and TurboQuant has `scale`, the rule of its scale."""

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def by(self) -> str: ...
    @property
    def param_bytes(self) -> int: ...
    @property
    def tensor_scaled(self) -> bool: ...


def constexprs(fmt: Format, prefix: str = "") -> dict[str, Any]:
    """A format as compile-time constants: KIND, BITS, GROUP and PARAMS, each name after the prefix (say "K_")."""
    kind = fmt.name
    params = getattr(fmt, "params", "")
    rule = getattr(fmt, "scale", "")
    if kind in DTYPES:
        params = kind
        kind = "plain"
    elif kind == "ternary_best":  # which is read as ternary
        params = "best"
        kind = "ternary"
    elif rule:
        kind = f"tq-{rule}"
    elif params:
        kind = "int"
    values = {"KIND": kind, "BITS": fmt.bits, "GROUP": fmt.group, "PARAMS": params}
    return {prefix + name: value for name, value in values.items()}


def params_dtype(fmt: Format) -> torch.dtype:
    """The dtype to load the parameters of a format's groups as. uint8 stands for E4M3 codes."""
    return DTYPES[getattr(fmt, "params", "")] if fmt.param_bytes > 1 else torch.uint8


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype to load the codes of a format as. uint8 holds one code or several; plain formats are numbers."""
    return DTYPES[fmt.name] if fmt.name in DTYPES else CODES[fmt.bits]


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, fp16 or bf16."""
    return next(name for name, of in DTYPES.items() if of == dtype)


def view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; copied if they are misaligned. data: [..., n·itemsize] uint8 → [..., n] of `dtype`."""
    size = dtype.itemsize
    apart = data.stride()[:-1]  # strides between rows
    if data.stride(-1) != 1 or data.storage_offset() % size or any(stride % size for stride in apart):
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)


def two_levels(lead: torch.Size, *tensors: Tensor) -> tuple[int, int, list[Tensor]]:
    """View leading axes as two, so that tensors that broadcast along different ones need not be copied.

    Args:
        lead: the leading axes, common to all.
        tensors: [*lead, ...] each, in any layout.

    Returns:
        outer, inner: their product is that of `lead`.
        tensors: [outer, inner, ...] each; a copy where there is no such view.
    """
    splits = [s for s in range(len(lead) + 1) if all(_merges(t, 0, s) and _merges(t, s, len(lead)) for t in tensors)]
    split = splits[0] if splits else max(0, len(lead) - 1)
    outer = lead[:split].numel()
    inner = lead[split:].numel()
    return outer, inner, [t.reshape(outer, inner, *t.shape[len(lead) :]) for t in tensors]


def _merges(t: Tensor, start: int, stop: int) -> bool:
    """Whether axes start … stop − 1 can be viewed as one."""
    axes = [(t.shape[i], t.stride(i)) for i in range(start, stop) if t.shape[i] != 1]
    return all(a[1] == b[0] * b[1] for a, b in pairwise(axes))


# -- small floats: a sign, EXPONENT bits of bias 2^(EXPONENT − 1) − 1, MANTISSA bits; no infinity


@triton.jit
def decode_small_float(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """int32 codes → float32, exactly; E4M3's NaNs come out as ±480."""
    magnitude = code & ((1 << (EXPONENT + MANTISSA)) - 1)
    sign = (code >> (EXPONENT + MANTISSA)) & 1
    bits = (magnitude << (23 - MANTISSA)) | (sign << 31)
    # The fields in float32's places, denormal numbers too. The power of two corrects the exponent's bias to float32's
    # 127.
    return bits.to(tl.float32, bitcast=True) * (2.0 ** (128 - (1 << (EXPONENT - 1))))


@triton.jit
def encode_small_float(x, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr):
    """float32 magnitudes and signs → int32 codes of the nearest magnitudes, at most TOP, ties to even; no sign."""
    a = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    # Normal numbers: the mantissa's low bits are rounded off, and a carry steps the exponent.
    SHIFT: tl.constexpr = 23 - MANTISSA
    normal = ((a + (1 << (SHIFT - 1)) - 1 + ((a >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Denormal ones are whole multiples of 2^(1 − BIAS − MANTISSA), which is how far apart float32 numbers are at 2^23
    # times that.
    MULTIPLES: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    MULTIPLES_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    denormal = (a.to(tl.float32, bitcast=True) + MULTIPLES).to(tl.int32, bitcast=True) - MULTIPLES_BITS
    return tl.minimum(tl.where(a < ((128 - BIAS) << 23), denormal, normal), TOP)


@triton.jit
def e4m3_decode(code):
    """int32 or uint8 codes → float32, NaN included."""
    code = code.to(tl.int32)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), decode_small_float(code, 4, 3))


@triton.jit
def e4m3_encode(x):
    """float32 → int32 codes: nearest, ties to even, saturating at 448; a NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, encode_small_float(x, 4, 3, 0x7E))
    return code | ((bits >> 24) & 0x80)


@triton.constexpr_function
def sharing(bits):
    """Codes that are packed together: into a byte, or with 3 bits into three bytes."""
    return 8 if bits == 3 else max(1, 8 // bits)


# -- points


@triton.jit
def decode_code(code, KIND: tl.constexpr, BITS: tl.constexpr, PARAMS: tl.constexpr):
    """int32 codes below 2^BITS → float32 points, still to be scaled; of "plain" the numbers, of type PARAMS."""
    if KIND == "plain":
        if PARAMS == "fp32":
            point = code.to(tl.float32, bitcast=True)
        elif PARAMS == "bf16":
            point = (code << 16).to(tl.float32, bitcast=True)
        else:
            point = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "fp8":
        point = e4m3_decode(code)
    elif KIND == "nvfp4":
        point = decode_small_float(code, 2, 1)
    elif KIND == "ternary":
        # 0x3F800000 is 1
        point = (((code & 1) * 0x3F800000) | ((code & 2) << 30)).to(tl.float32, bitcast=True)
    elif is_rotated(KIND):
        point = decode_level(code, BITS)
    elif KIND == "int":
        point = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # 2^23 + code
    else:
        # two's complement: the sign bit turned over, numbers from 0, is the number plus 2^(BITS − 1)
        SIGN: tl.constexpr = 1 << (BITS - 1)
        point = ((code ^ SIGN) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + SIGN)
    return point


@triton.jit
def encode_code(y, KIND: tl.constexpr, BITS: tl.constexpr):
    """float32 in units of the step, ±∞ too → int32 codes of the nearest points, ties to even. Not for "plain"."""
    if KIND == "fp8":
        code = e4m3_encode(y)
    elif KIND == "nvfp4":
        code = encode_small_float(y, 2, 1, 7) | tl.where(y < 0, 8, 0)
    elif KIND == "ternary":
        code = tl.where(y > 0.5, 1, tl.where(y < -0.5, 3, 0))
    else:
        LOW: tl.constexpr = -7.0 if KIND == "int4s" else (-2.0 if KIND == "int2s" else 0.0)
        HIGH: tl.constexpr = 7.0 if KIND == "int4s" else (1.0 if KIND == "int2s" else (1 << BITS) - 1.0)
        # The sum's low bits are the rounded number, in two's complement.
        rounded = tl.minimum(tl.maximum(y, LOW), HIGH) + _ROUND
        code = (rounded.to(tl.int32, bitcast=True) - _ROUND_BITS) & ((1 << BITS) - 1)
    return code


@triton.jit
def decode_scaled(code, scale, minimum, KIND: tl.constexpr, BITS: tl.constexpr, PARAMS: tl.constexpr):
    """Codes under their group's parameters → float32. Not for "plain", which `decode_code` alone decodes.

    Args:
        code: int32.
        scale: float32 that broadcasts to `code`: of "int" the scale, of "fp8" the tensor scale, else `group_step`.
        minimum: float32 likewise, of "int"; other kinds do not read it.
    """
    x = decode_code(code, KIND, BITS, PARAMS) * scale
    if KIND == "int":
        x = x + minimum
    return x


@triton.jit
def group_step(stored, tensor_scale, KIND: tl.constexpr):
    """E4M3 codes of the scales of "nvfp4", "ternary", "int4s", "int2s" → float32 steps. Only nvfp4 reads the tensor
    scale."""
    step = e4m3_decode(stored)
    if KIND == "nvfp4":
        step = step * tensor_scale
    return step


# -- whole groups


@triton.jit
def encode_group(
    x, m_valid, tensor_scale, KIND: tl.constexpr, BITS: tl.constexpr, PARAMS: tl.constexpr, AXIS: tl.constexpr
):
    """Quantize groups that run along one axis of a tile. Not for "plain".

    Args:
        x: float32 [R, C], finite, 0 where not valid.
        m_valid: bool [R, C].
        tensor_scale: float32 that broadcasts to [R, C], and to the shape of the scales.
        AXIS: 1: a group is a row; 0: a column. "fp8" has no groups, and does not read it.

    Returns:
        code: int32 [R, C]; of "int" anything where not valid.
        scale: [R, 1] or [1, C]; int32 E4M3 codes, of "int" and TurboQuant float16 or float32 as stored. "fp8": 0.
        minimum: like `scale`, of "int"; else 0.
    """
    minimum = 0
    if is_rotated(KIND):
        code, wanted = encode_rotated(x, KIND, BITS)
        scale = round_to(saturate(wanted, PARAMS), PARAMS)
    elif KIND == "fp8":
        scale = 0
        code = encode_code(tl.div_rn(x, tensor_scale), KIND, BITS)
    elif KIND == "int":
        WIDEST: tl.constexpr = _WIDEST_FP16 if PARAMS == "fp16" else _WIDEST_FP32
        x = tl.minimum(tl.maximum(x, -WIDEST), WIDEST)
        lowest = tl.min(tl.where(m_valid, x, _INFINITY), AXIS, keep_dims=True)
        highest = tl.max(tl.where(m_valid, x, -_INFINITY), AXIS, keep_dims=True)
        # + 0: of −0 and +0 the device may take either as the minimum; +0 is stored.
        lowest = tl.where(lowest < _INFINITY, lowest, 0.0) + 0.0
        minimum = round_to(saturate(lowest, PARAMS), PARAMS)
        base = minimum.to(tl.float32)
        # scale = (max − min) / (2^b − 1), from the minimum as stored
        span = highest - base
        scale = round_to(saturate(tl.div_rn(tl.where(span > 0, span, 0.0), (1 << BITS) - 1.0), PARAMS), PARAMS)
        step = scale.to(tl.float32)
        code = encode_code(tl.div_rn(x - base, tl.where(step > 0, step, _INFINITY)), KIND, BITS)
    else:
        REACH: tl.constexpr = (
            6.0 if KIND == "nvfp4" else (7.0 if KIND == "int4s" else (2.0 if KIND == "int2s" else 1.0))
        )
        # stored scale = E4M3(amax / reach / tensor scale)
        wanted = tl.div_rn(tl.max(tl.abs(x), AXIS, keep_dims=True), REACH)
        if KIND == "nvfp4":
            wanted = tl.div_rn(wanted, tensor_scale)
        scale = e4m3_encode(wanted)
        if KIND == "ternary" and PARAMS == "best":
            scale = least_error(tl.abs(x), scale, AXIS)
        step = group_step(scale, tensor_scale, KIND)
        code = encode_code(tl.div_rn(x, tl.where(step > 0, step, _INFINITY)), KIND, BITS)
    return code, scale, minimum


@triton.jit
def least_error(magnitude, usual, AXIS: tl.constexpr):
    """The scales of ternary groups that give the least squared error, as E4M3 codes; of equal errors the largest.

    Args:
        magnitude: |x|, float32 [R, C].
        usual: int32 [R, 1] or [1, C], the E4M3 codes of the largest magnitudes; the best scale is not above them.
        AXIS: as in `encode_group`.
    """
    # In float64 the sums are exact, so their order does not matter.
    magnitude = tl.minimum(magnitude, 16777216.0).to(tl.float64)  # 2^24
    best = usual
    most = saved_error(magnitude, usual, AXIS)
    for below in range(1, _TRIED + 1):
        tried = tl.maximum(usual - below, 0)
        saved = saved_error(magnitude, tried, AXIS)
        better = saved > most
        best = tl.where(better, tried, best)
        most = tl.where(better, saved, most)
    return best


@triton.jit
def saved_error(magnitude, stored, AXIS: tl.constexpr):
    """Σx² without the squared error under a scale s: s · Σ(2|x| − s) over |x| > s/2. stored: E4M3 codes."""
    scale = e4m3_decode(stored).to(tl.float64)
    terms = tl.where(magnitude > scale * 0.5, 2 * magnitude - scale, 0.0)
    return scale * tl.sum(terms, AXIS, keep_dims=True)


# -- float types


@triton.jit
def saturate(x, TYPE: tl.constexpr):
    """float32 → float32 that TYPE, "fp32", "fp16" or "bf16", can hold; ±∞ becomes the largest number, a NaN stays."""
    LARGEST: tl.constexpr = _LARGEST_FP16 if TYPE == "fp16" else (_LARGEST_BF16 if TYPE == "bf16" else _LARGEST_FP32)
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def to_fp32(x):
    """Numbers as loaded, float32, float16 or bfloat16 → float32, exactly; denormal numbers too."""
    if _INTERPRETED and x.dtype == tl.bfloat16:  # whose cast loses denormal numbers
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def round_to(x, TYPE: tl.constexpr):
    """float32 → "fp32", "fp16" or "bf16", to nearest, ties to even; denormal numbers too."""
    if TYPE == "fp16":
        y = x.to(tl.float16)
    elif TYPE == "bf16":
        if _INTERPRETED:  # whose cast truncates
            bits = x.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            y = tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            y = x.to(tl.bfloat16)
    else:
        y = x
    return y


# -- several codes in a byte


@triton.jit
def store_bytes(p, bits, m, SIZE: tl.constexpr):
    """The low bytes of integers, lowest first."""
    for i in tl.static_range(SIZE):
        tl.store(p + i, (bits >> (8 * i)) & 255, m)


@triton.jit
def load_bytes(p, m, SIZE: tl.constexpr):
    """Integers of SIZE bytes, at most three, lowest first, from pointers to uint8 → int32; 0 outside of m."""
    number = tl.load(p, m, 0).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        number = number | (tl.load(p + i, m, 0).to(tl.int32) << (8 * i))
    return number


@triton.jit
def pack(code, BITS: tl.constexpr):
    """int32 codes [R, C] below 2^BITS → int32 bytes [R, C·BITS/8], low bits first; 8 and 16 bits stay [R, C]. With 3
    bits, numbers of three bytes [R, C/8]."""
    if BITS == 1 or BITS == 3:
        # the last axis is the low bit of a code's place
        even, odd = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 8, 2, 2, 2)))
        low, high = tl.split(even | (odd << BITS))
        low, high = tl.split(low | (high << (2 * BITS)))
        code = low | (high << (4 * BITS))
    elif BITS == 4:
        low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2)))
        code = low | (high << 4)
    elif BITS == 2:
        # the last axis is the low bit of a code's place in its byte
        even, odd = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] // 4, 2, 2)))
        low, high = tl.split(even | (odd << 2))
        code = low | (high << 4)
    return code


@triton.jit
def unpack(packed, BITS: tl.constexpr):
    """The inverse: int32 [R, B] → [R, B·8/BITS]; 8 and 16 bits: their low bits, [R, B]; 3 bits: [R, 8·B]."""
    if BITS == 1 or BITS == 3:
        MASK: tl.constexpr = (1 << BITS) - 1
        even = tl.interleave(packed & MASK, (packed >> (4 * BITS)) & MASK)  # codes 0 and 4
        odd = tl.interleave((packed >> (2 * BITS)) & MASK, (packed >> (6 * BITS)) & MASK)
        first = tl.interleave(even, odd)  # codes 0, 2, 4 and 6
        even = tl.interleave((packed >> BITS) & MASK, (packed >> (5 * BITS)) & MASK)
        odd = tl.interleave((packed >> (3 * BITS)) & MASK, (packed >> (7 * BITS)) & MASK)
        code = tl.interleave(first, tl.interleave(even, odd))
    elif BITS == 4:
        code = tl.interleave(packed & 15, (packed >> 4) & 15)
    elif BITS == 2:
        even = tl.interleave(packed & 3, (packed >> 4) & 3)
        odd = tl.interleave((packed >> 2) & 3, (packed >> 6) & 3)
        code = tl.interleave(even, odd)
    elif BITS == 32:
        code = packed
    else:
        code = packed & ((1 << BITS) - 1)
    return code
