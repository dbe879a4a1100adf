"""Numbers from a format of the cache: codes, scales and minima read once, numbers written once. Twin:
`minithink/ref/dequantize.py`, bit for bit.

To use it alone, copy this file, `_common.py`, `_formats.py` and `_rotation.py`. With the GPU as torch's default
device:

    >>> from types import SimpleNamespace
    >>> import torch
    >>> from minithink.kernels.dequantize import dequantize
    >>> nvfp4 = SimpleNamespace(name="nvfp4", bits=4, group=16, by="channel", param_bytes=1, tensor_scaled=True)
    >>> codes = torch.tensor([[0x10, 0x32, 0x54, 0x76] * 2], dtype=torch.uint8)  # [N, D/2], two codes a byte
    >>> scales = torch.tensor([[2.0]]).to(torch.float8_e4m3fn).view(torch.uint8)  # [N, D/16]
    >>> dequantize(nvfp4, codes, scales, torch.ones(1), torch.float32)[:, :8].tolist()  # [N, D]
    [[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]]

Layout: a tile is [BLOCK groups, elements of a group]. In fp8, in the plain formats and in formats by token, a row
counts as one group. By token every channel has its own parameters, which are loaded as a tile. The tokens of a group
share these rows, so all but the first read come from the GPU's cache. Codes are unpacked in registers, along the last
axis.

Bound: memory (2.7 to 3.4 TB/s on an H200). From 4 bits in groups of 16 to bf16, 2 + 9/16 bytes are moved for each
element, with about 6 instructions. If the numbers are read only once, it is better to decode inside the kernel that
reads them, as attention does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2
from minithink.kernels._formats import (
    DTYPES,
    Format,
    code_dtype,
    constexprs,
    decode_scaled,
    group_step,
    load_bytes,
    params_dtype,
    round_to,
    saturate,
    sharing,
    to_fp32,
    two_levels,
    unpack,
    view_as,
)
from minithink.kernels._rotation import decode_level, is_rotated, rotate_back

TILE = 2048  # elements of a program
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@triton.jit
def _dequantize(
    p_codes,
    codes_outer,
    codes_inner,
    p_params,
    params_outer,
    params_inner,
    p_scale,
    scale_outer,
    scale_inner,
    p_out,
    groups,
    PER_ROW: tl.constexpr,
    ELEMENTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PARAMS: tl.constexpr,
    SATURATE: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    programs = tl.cdiv(groups, BLOCK)  # of an outer index, which has so many groups
    i_outer = (tl.program_id(0) // programs).to(tl.int64)
    i_group = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)[:, None]
    m_group = i_group < groups
    i_inner = (i_group // PER_ROW).to(tl.int64)
    # Codes below 8 bits share bytes: a group has fewer of these than elements.
    SHARING: tl.constexpr = sharing(BITS)
    place = tl.arange(0, WIDTH // SHARING)[None, :]
    m_codes = m_group & (place < ELEMENTS // SHARING)
    p_row_codes = p_codes + i_outer * codes_outer + i_inner * codes_inner
    if BITS == 3:
        stored = load_bytes(p_row_codes + place * 3, m_codes, 3)
    else:
        stored = tl.load(p_row_codes + i_group % PER_ROW * (ELEMENTS // SHARING) + place, m_codes, 0)
    column = tl.arange(0, WIDTH)[None, :]
    m_out = m_group & (column < ELEMENTS)
    if KIND == "plain":
        x = to_fp32(stored)
    else:
        tensor_scale = 1.0
        if KIND == "fp8" or KIND == "nvfp4":
            tensor_scale = tl.load(p_scale + i_outer * scale_outer + i_inner * scale_inner, m_group, 1.0)
        p_row = p_params + i_outer * params_outer + i_inner * params_inner
        minimum = 0.0
        if KIND == "fp8":
            scale = tensor_scale
        elif is_rotated(KIND):
            scale = tl.load(p_row, m_group, 0.0).to(tl.float32)
        elif KIND == "int" and BY_TOKEN:
            # scale and minimum lie together: whole pieces of a row are loaded, and then parted
            i_param = tl.arange(0, 2 * WIDTH)[None, :]
            both = tl.load(p_row + i_param, m_group & (i_param < 2 * ELEMENTS), 0.0).to(tl.float32)
            scale, minimum = tl.split(tl.reshape(both, (BLOCK, WIDTH, 2)))
        elif KIND == "int":
            scale = tl.load(p_row + i_group % PER_ROW * 2, m_group, 0.0).to(tl.float32)
            minimum = tl.load(p_row + i_group % PER_ROW * 2 + 1, m_group, 0.0).to(tl.float32)
        elif BY_TOKEN:
            scale = group_step(tl.load(p_row + column, m_out, 0), tensor_scale, KIND)
        else:
            scale = group_step(tl.load(p_row + i_group % PER_ROW, m_group, 0), tensor_scale, KIND)
        code = unpack(stored.to(tl.int32), BITS)
        if is_rotated(KIND):
            x = scale * rotate_back(decode_level(code, BITS))
        else:
            x = decode_scaled(code, scale, minimum, KIND, BITS, PARAMS)
    if SATURATE:
        x = saturate(x, OUT)
    tl.store(p_out + (i_outer * groups + i_group) * ELEMENTS + column, round_to(x, OUT), m_out)


def dequantize(fmt: Format, codes: Tensor, params: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode, in float32; numbers that `dtype` cannot hold saturate.

    Args:
        fmt: a format of `minithink.quant`.
        codes: [..., code_bytes] uint8.
        params: [..., params_bytes] uint8; also by token one row for every token, which may be expanded.
        tensor_scale: float32 that broadcasts to [...].
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        [..., D].
    """
    lead = codes.shape[:-1]
    dim = codes.shape[-1] * 8 // fmt.bits
    by_token = fmt.group > 0 and fmt.by == "token"
    constants = constexprs(fmt)
    if constants["KIND"] == "plain" and code_dtype(fmt) == dtype:
        return view_as(codes, dtype)
    per_row = 1 if by_token or not fmt.param_bytes else params.shape[-1] // fmt.param_bytes  # groups of a row
    out = codes.new_empty(*lead, dim, dtype=dtype)
    if out.numel() == 0:
        return out
    codes = view_as(codes, code_dtype(fmt))
    # Tensors that are not read get any address.
    nothing = codes[(0,) * codes.ndim]
    params = view_as(params, params_dtype(fmt)) if fmt.param_bytes else nothing.expand(*lead, 1)
    scale = (tensor_scale if fmt.tensor_scaled else nothing).expand(lead)
    outer, inner, (codes, params, scale) = two_levels(lead, codes, params, scale)
    elements = dim // per_row
    groups = inner * per_row
    width = power_of_2(elements)
    block = max(1, min(power_of_2(groups), TILE // width))
    saturates = not codes.dtype.is_floating_point or torch.finfo(dtype).max <= torch.finfo(codes.dtype).max
    _dequantize[outer * triton.cdiv(groups, block),](
        p_codes=codes,
        codes_outer=codes.stride(0),
        codes_inner=codes.stride(1),
        p_params=params,
        params_outer=params.stride(0),
        params_inner=params.stride(1),
        p_scale=scale,
        scale_outer=scale.stride(0),
        scale_inner=scale.stride(1),
        p_out=out,
        groups=groups,
        PER_ROW=per_row,
        ELEMENTS=elements,
        BY_TOKEN=by_token,
        **constants,
        SATURATE=saturates,
        OUT=NAMES[dtype],
        BLOCK=block,
        WIDTH=width,
        enable_fp_fusion=False,
    )
    return out


def variants() -> Iterator[Variant]:
    kinds = [
        ("fp8", 8, ""),
        ("nvfp4", 4, ""),
        ("ternary", 2, ""),
        ("int4s", 4, ""),
        ("int2s", 2, ""),
        ("int", 16, "fp32"),
    ]
    kinds += [("int", bits, params) for bits in (2, 4, 8) for params in ("fp16", "fp32")]
    kinds += [("tq-unbiased", bits, "fp32" if bits == 2 else "fp16") for bits in (1, 2, 3, 4)]
    kinds += [("plain", 8 * dtype.itemsize, name) for name, dtype in DTYPES.items()]
    names = ("codes_outer", "codes_inner", "params_outer", "params_inner", "scale_outer", "scale_inner", "groups")
    for i, (kind, bits, params) in enumerate(kinds):
        dtype = ("fp32", "fp16", "bf16")[i % 3]  # which number is written changes one instruction
        loaded = params if kind == "plain" else "i16" if bits == 16 else "u8"
        signature = {"p_codes": f"*{loaded}", "p_params": f"*{params or 'u8'}", "p_scale": "*fp32"}
        signature |= {"p_out": f"*{dtype}", **dict.fromkeys(names, "i32")}
        constants = {"KIND": kind, "BITS": bits, "GROUP": 16, "PARAMS": params, "SATURATE": True, "OUT": dtype}
        by_channel = {"PER_ROW": 8, "ELEMENTS": 16, "BY_TOKEN": False, "BLOCK": 128, "WIDTH": 16}
        by_token = {"PER_ROW": 1, "ELEMENTS": 128, "BY_TOKEN": True, "BLOCK": 16, "WIDTH": 128}
        by_row = {**by_token, "BY_TOKEN": False}
        shapes = (by_channel,) if kind in ("fp8", "plain") else (by_channel, by_token)
        if kind.startswith("tq"):
            shapes = (by_row,)
        for shape in shapes:
            yield Variant(_dequantize, signature, {**constants, **shape}, {"enable_fp_fusion": False})
