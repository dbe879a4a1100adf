"""Numbers into a format of the cache: groups' scales and minima, codes, packing, in one pass. Twin:
`minithink/ref/quantize.py`, byte for byte.

To use it alone, copy this file, `_common.py`, `_formats.py` and `_rotation.py`. With the GPU as torch's default
device:

    >>> from types import SimpleNamespace
    >>> import torch
    >>> from minithink.kernels.quantize import quantize
    >>> nvfp4 = SimpleNamespace(name="nvfp4", bits=4, group=16, by="channel", param_bytes=1, tensor_scaled=True)
    >>> x = torch.tensor([[0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2])  # [N, D]; float32, float16 or bfloat16
    >>> codes, scales = quantize(nvfp4, x, tensor_scale=torch.ones(1))  # uint8 [N, D/2] and [N, D/16]
    >>> [f"{byte:02x}" for byte in codes[0].tolist()]  # two codes a byte; the points have the codes 0 to 7
    ['10', '32', '54', '76', '10', '32', '54', '76']
    >>> scales.view(torch.float8_e4m3fn).float().tolist()
    [[1.0]]

Layout: by channel a tile is [BLOCK groups, elements of a group] of consecutive groups, whichever rows they are in. In
fp8 and the plain formats a row counts as one group. By token a tile is [T tokens, BLOCK channels] of one leading
index, and a group is a column. Codes lie along a row in both cases, so packing joins neighbours of a tile's last
axis, in registers. A tile is read once and written once.

Bound: arithmetic for long inputs (0.8 to 2.1 TB/s on an H200), the launch for the few tokens of a decode step. From
bf16 to 4 bits in groups of 16, 2 + 9/16 bytes are moved for each element. An IEEE division, on which the twin's bytes
depend, and the nearest code take about 25 instructions: two to three times what the memory leaves time for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2
from minithink.kernels._formats import (
    Format,
    code_dtype,
    constexprs,
    encode_group,
    pack,
    params_dtype,
    round_to,
    saturate,
    sharing,
    store_bytes,
    to_fp32,
    two_levels,
    view_as,
)
from minithink.kernels._rotation import SCALES, is_rotated

TILE = 2048  # elements of a program


@triton.jit
def _by_channel(
    p_x,
    x_outer,
    x_inner,
    p_scale,
    scale_outer,
    scale_inner,
    p_codes,
    p_params,
    groups,
    PER_ROW: tl.constexpr,
    ELEMENTS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PARAMS: tl.constexpr,
    SATURATE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    programs = tl.cdiv(groups, BLOCK)  # of an outer index, which has so many groups
    i_outer = (tl.program_id(0) // programs).to(tl.int64)
    i_group = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)[:, None]
    m_group = i_group < groups
    i_inner = (i_group // PER_ROW).to(tl.int64)
    o_group = i_outer * groups + i_group
    column = tl.arange(0, WIDTH)[None, :]
    m_x = m_group & (column < ELEMENTS)
    o_x = i_outer * x_outer + i_inner * x_inner + i_group % PER_ROW * ELEMENTS + column
    x = to_fp32(tl.load(p_x + o_x, m_x, 0.0))
    if KIND == "plain":
        if SATURATE:
            x = saturate(x, PARAMS)
        tl.store(p_codes + o_group * ELEMENTS + column, round_to(x, PARAMS), m_x)
    else:
        tensor_scale = 1.0
        if KIND == "fp8" or KIND == "nvfp4":
            tensor_scale = tl.load(p_scale + i_outer * scale_outer + i_inner * scale_inner, m_group, 1.0)
        x = saturate(x, "fp32")
        code, scale, minimum = encode_group(x, m_x, tensor_scale, KIND, BITS, PARAMS, 1)
        # Codes below 8 bits share bytes: a group has fewer of these than elements.
        SHARING: tl.constexpr = sharing(BITS)
        place = tl.arange(0, WIDTH // SHARING)[None, :]
        m_code = m_group & (place < ELEMENTS // SHARING)
        o_code = o_group * (ELEMENTS // SHARING) + place
        if BITS == 3:
            store_bytes(p_codes + o_code * 3, pack(code, BITS), m_code, 3)
        else:
            tl.store(p_codes + o_code, pack(code, BITS), m_code)
        if KIND == "int":
            tl.store(p_params + o_group * 2, scale, m_group)
            tl.store(p_params + o_group * 2 + 1, minimum, m_group)
        elif KIND != "fp8":
            tl.store(p_params + o_group, scale, m_group)


@triton.jit
def _by_token(
    p_x,
    x_outer,
    x_inner,
    x_token,
    p_scale,
    scale_outer,
    scale_inner,
    p_valid,
    valid_outer,
    valid_inner,
    valid_token,
    p_codes,
    p_params,
    inner,
    tokens,
    CHANNELS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PARAMS: tl.constexpr,
    VALID: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    i_outer = (tl.program_id(0) // inner).to(tl.int64)
    i_inner = (tl.program_id(0) % inner).to(tl.int64)
    i_row = i_outer * inner + i_inner
    i_token = tl.arange(0, LENGTH)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_token = i_token < tokens
    m_channel = channel < CHANNELS
    m_valid = m_token
    if VALID:
        p_own = p_valid + i_outer * valid_outer + i_inner * valid_inner + i_token * valid_token
        m_valid = m_token & (tl.load(p_own, m_token, 0) != 0)
    m_valid = m_valid & m_channel
    o_x = i_outer * x_outer + i_inner * x_inner + i_token.to(tl.int64) * x_token + channel
    # Invalid tokens may be NaN, so they are not read.
    x = saturate(to_fp32(tl.load(p_x + o_x, m_valid, 0.0)), "fp32")
    tensor_scale = 1.0
    if KIND == "nvfp4":
        tensor_scale = tl.load(p_scale + i_outer * scale_outer + i_inner * scale_inner)
    code, scale, minimum = encode_group(x, m_valid, tensor_scale, KIND, BITS, PARAMS, 0)
    code = tl.where(m_valid, code, 0)
    SHARING: tl.constexpr = 8 // BITS if BITS < 8 else 1
    place = tl.program_id(1) * (BLOCK // SHARING) + tl.arange(0, BLOCK // SHARING)[None, :]
    o_code = (i_row * tokens + i_token) * (CHANNELS // SHARING) + place
    tl.store(p_codes + o_code, pack(code, BITS), m_token & (place < CHANNELS // SHARING))
    o_param = i_row * CHANNELS + channel
    if KIND == "int":
        tl.store(p_params + o_param * 2, scale, m_channel)
        tl.store(p_params + o_param * 2 + 1, minimum, m_channel)
    else:
        tl.store(p_params + o_param, scale, m_channel)


def quantize(fmt: Format, x: Tensor, tensor_scale: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode rows of numbers.

    Args:
        fmt: a format of `minithink.quant`.
        x: [..., D] by channel, [..., T, D] by token with 1 ≤ T ≤ `fmt.group`; float32, float16 or bfloat16.
        tensor_scale: float32 that broadcasts to [...]; read if the format is `tensor_scaled`.
        valid: [..., T] bool, by token only: the tokens that count; None: all. Other tokens may be NaN; they do not
            change the parameters, and get codes 0.

    Returns:
        codes: uint8, [..., code_bytes] by channel, [..., T, code_bytes] by token.
        params: [..., params_bytes] uint8.
    """
    dim = x.shape[-1]
    by_token = fmt.group > 0 and fmt.by == "token"
    constants = constexprs(fmt)
    if constants["KIND"] == "plain" and code_dtype(fmt) == x.dtype:
        return x.contiguous().view(torch.uint8), x.new_empty(*x.shape[:-1], 0, dtype=torch.uint8)
    elements = dim if by_token or not fmt.group else fmt.group  # that are packed together
    if dim % elements or elements * fmt.bits % 8:
        raise ValueError(
            f"{fmt} does not divide rows of {dim} channels into groups of whole bytes: use its fit({dim})."
        )
    if is_rotated(constants["KIND"]) and dim & (dim - 1):
        raise ValueError(f"{fmt} rotates rows whose number of channels is a power of two, not {dim}.")
    if by_token and x.shape[-2] > fmt.group:
        raise ValueError(f"{x.shape[-2]} tokens were given to quantize as one group of at most {fmt.group}.")
    lead = x.shape[:-2] if by_token else x.shape[:-1]
    per_row = dim if by_token else dim // elements if fmt.param_bytes else 0
    codes = x.new_empty(*x.shape[:-1], dim * fmt.bits // 8, dtype=torch.uint8)
    params = x.new_empty(*lead, per_row * fmt.param_bytes, dtype=torch.uint8)
    if x.numel() == 0:
        return codes, params
    code_out = view_as(codes, code_dtype(fmt))
    param_out = view_as(params, params_dtype(fmt)) if fmt.param_bytes else params
    if x.stride(-1) != 1:
        x = x.contiguous()
    nothing = x[(0,) * x.ndim]  # an address for tensors that are not read
    scale = (tensor_scale if fmt.tensor_scaled else nothing).expand(lead)

    if not by_token:
        outer, inner, (x, scale) = two_levels(lead, x, scale)
        groups = inner * max(1, per_row)
        width = power_of_2(elements)
        block = max(1, min(power_of_2(groups), TILE // width))
        _by_channel[outer * triton.cdiv(groups, block),](
            p_x=x,
            x_outer=x.stride(0),
            x_inner=x.stride(1),
            p_scale=scale,
            scale_outer=scale.stride(0),
            scale_inner=scale.stride(1),
            p_codes=code_out,
            p_params=param_out,
            groups=groups,
            PER_ROW=max(1, per_row),
            ELEMENTS=elements,
            **constants,
            SATURATE=_saturates(fmt, x.dtype),
            BLOCK=block,
            WIDTH=width,
            enable_fp_fusion=False,
        )
        return codes, params

    tokens = x.shape[-2]
    # a bool is a byte, and compiled kernels address bytes
    mask = (nothing if valid is None else valid.view(torch.uint8)).expand(*lead, tokens)
    outer, inner, (x, scale, mask) = two_levels(lead, x, scale, mask)
    length = power_of_2(tokens)
    block = min(power_of_2(dim), max(16, TILE // length))
    _by_token[outer * inner, triton.cdiv(dim, block)](
        p_x=x,
        x_outer=x.stride(0),
        x_inner=x.stride(1),
        x_token=x.stride(2),
        p_scale=scale,
        scale_outer=scale.stride(0),
        scale_inner=scale.stride(1),
        p_valid=mask,
        valid_outer=mask.stride(0),
        valid_inner=mask.stride(1),
        valid_token=mask.stride(2),
        p_codes=code_out,
        p_params=param_out,
        inner=inner,
        tokens=tokens,
        CHANNELS=dim,
        **constants,
        VALID=valid is not None,
        BLOCK=block,
        LENGTH=length,
        enable_fp_fusion=False,
    )
    return codes, params


def _saturates(fmt: Format, dtype: torch.dtype) -> bool:
    """True if numbers of a dtype can exceed a plain format. If they cannot, ±∞ stays, as in the twin."""
    stored = code_dtype(fmt)
    return stored.is_floating_point and torch.finfo(stored).max <= torch.finfo(dtype).max


def variants() -> Iterator[Variant]:
    strides = dict.fromkeys(("x_outer", "x_inner", "scale_outer", "scale_inner"), "i32")
    kinds = [("fp8", 8, ""), ("nvfp4", 4, ""), ("ternary", 2, ""), ("int4s", 4, ""), ("int2s", 2, "")]
    kinds += [("ternary", 2, "best")]
    kinds += [
        ("int", bits, params)
        for bits in (2, 4, 8, 16)
        for params in ("fp16", "fp32")
        if (bits, params) != (16, "fp16")
    ]
    options = {"enable_fp_fusion": False}
    for bits, scale in product((1, 2, 3, 4), SCALES):
        dtype, params = ("bf16", "fp32") if scale == "none" else ("fp32", "fp16")
        signature = {"p_x": f"*{dtype}", "p_scale": "*fp32", **strides, "groups": "i32"}
        signature |= {"p_codes": "*u8", "p_params": f"*{params}"}
        constants = {"KIND": f"tq-{scale}", "BITS": bits, "GROUP": 0, "PARAMS": params, "SATURATE": False}
        rows = {"PER_ROW": 1, "ELEMENTS": 128, "BLOCK": 16, "WIDTH": 128}
        yield Variant(_by_channel, signature, {**constants, **rows}, options)
    for i, (kind, bits, params) in enumerate(kinds):
        dtype = ("fp32", "fp16", "bf16")[i % 3]  # which number is read changes one instruction
        constants = {"KIND": kind, "BITS": bits, "GROUP": 16, "PARAMS": params}
        signature = {"p_x": f"*{dtype}", "p_scale": "*fp32", **strides, "groups": "i32"}
        signature |= {"p_codes": "*i16" if bits == 16 else "*u8"}
        signature |= {"p_params": f"*{params}" if kind == "int" else "*u8"}
        channels = {"PER_ROW": 8, "ELEMENTS": 16, "SATURATE": False, "BLOCK": 128, "WIDTH": 16}
        yield Variant(_by_channel, signature, {**constants, **channels}, options)
        if kind != "fp8":
            signature |= {"x_token": "i32", "p_valid": "*u8", "inner": "i32", "tokens": "i32"}
            signature |= dict.fromkeys(("valid_outer", "valid_inner", "valid_token"), "i32")
            tokens = {"CHANNELS": 128, "VALID": True, "BLOCK": 128, "LENGTH": 16}
            yield Variant(_by_token, signature, {**constants, **tokens}, options)
    for dtype, name in (("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32")):
        signature = {"p_x": f"*{dtype}", "p_scale": "*fp32", **strides, "groups": "i32"}
        signature |= {"p_codes": f"*{name}", "p_params": "*u8"}
        constants = {"KIND": "plain", "BITS": 32 if name == "fp32" else 16, "GROUP": 0, "PARAMS": name}
        rows = {"PER_ROW": 1, "ELEMENTS": 128, "SATURATE": name != "fp32", "BLOCK": 16, "WIDTH": 128}
        yield Variant(_by_channel, signature, {**constants, **rows}, options)
