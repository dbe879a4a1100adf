"""Requantize integers to fewer bits, from the codes alone. Twin: `minithink/ref/shrink.py`, byte for byte.

To use it alone, copy this file, `_common.py`, `_formats.py` and `_rotation.py`. With the GPU as torch's default
device:

    >>> from types import SimpleNamespace
    >>> import torch
    >>> from minithink.kernels.shrink import shrink
    >>> fields = {"group": 16, "by": "channel", "param_bytes": 4, "params": "fp16", "tensor_scaled": False}
    >>> int8 = SimpleNamespace(name="int8", bits=8, **fields)
    >>> int4 = SimpleNamespace(name="int4", bits=4, **fields)
    >>> codes = torch.tensor([[0, 17, 34, 255] * 4], dtype=torch.uint8)  # [N, D]
    >>> params = torch.tensor([[0.5, -3.0]], dtype=torch.float16).view(torch.uint8)  # [N, 4·D/16]: scale and minimum
    >>> fewer, params = shrink(int8, int4, codes, params)
    >>> [f"{byte:02x}" for byte in fewer[0].tolist()]  # uint8 [N, D/2], two codes a byte
    ['10', 'f2', '10', 'f2', '10', 'f2', '10', 'f2']
    >>> params.view(torch.float16).tolist()
    [[8.5, -3.0]]

Layout: one launch. The first programs take [BLOCK rows, codes of a row] of the codes, the others [BLOCK rows, scales
of a row] of the parameters, because a row of parameters may belong to one row of codes or to many. All halvings, 16
to 8 to 4 to 2 bits, are done in registers.

Bound: memory down to 4 bits; from 4 to 2 bits, ¾ of a byte a code, memory and arithmetic. 1½ times the source's bytes
are moved. Each code and halving takes about 5 instructions; a multiplication replaces the division by 2^c + 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2
from minithink.kernels._formats import (
    CODES,
    Format,
    constexprs,
    pack,
    params_dtype,
    round_to,
    saturate,
    two_levels,
    unpack,
    view_as,
)

TILE = 2048  # codes of a program


@triton.jit
def _shrink(
    p_codes,
    codes_outer,
    codes_inner,
    p_params,
    params_outer,
    params_inner,
    p_out,
    p_out_params,
    outer,
    rows,
    params_rows,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    TO: tl.constexpr,
    PARAMS: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARAMS_WIDTH: tl.constexpr,
):
    i_program = tl.program_id(0)
    programs = tl.cdiv(rows, BLOCK)  # of an outer index, which has so many rows
    if i_program < outer * programs:
        i_outer = (i_program // programs).to(tl.int64)
        i_row = i_program % programs * BLOCK + tl.arange(0, BLOCK)[:, None].to(tl.int64)
        SHARING: tl.constexpr = 8 // BITS if BITS < 8 else 1
        place = tl.arange(0, WIDTH // SHARING)[None, :]
        o_codes = i_outer * codes_outer + i_row * codes_inner + place
        stored = tl.load(p_codes + o_codes, (i_row < rows) & (place < DIM // SHARING), 0)
        code = unpack(stored.to(tl.int32), BITS)
        for i in tl.static_range(HALVINGS):
            # q' = ⌊(q + 2^(c−1)) / (2^c + 1)⌋, c half of the bits
            code = (code + (1 << ((BITS >> (i + 1)) - 1))) // ((1 << (BITS >> (i + 1))) + 1)
        TO_SHARING: tl.constexpr = 8 // TO if TO < 8 else 1
        place_to = tl.arange(0, WIDTH // TO_SHARING)[None, :]
        m_out = (i_row < rows) & (place_to < DIM // TO_SHARING)
        o_out = (i_outer * rows + i_row) * (DIM // TO_SHARING) + place_to
        tl.store(p_out + o_out, pack(code, TO), m_out)
    else:
        i_program -= outer * programs
        programs = tl.cdiv(params_rows, BLOCK)
        i_outer = (i_program // programs).to(tl.int64)
        i_row = i_program % programs * BLOCK + tl.arange(0, BLOCK)[:, None].to(tl.int64)
        i_group = tl.arange(0, PARAMS_WIDTH)[None, :]
        m_params = (i_row < params_rows) & (i_group < GROUPS)
        o_row = i_outer * params_outer + i_row * params_inner
        scale = tl.load(p_params + o_row + i_group * 2, m_params, 0.0)
        minimum = tl.load(p_params + o_row + i_group * 2 + 1, m_params, 0.0)
        for i in tl.static_range(HALVINGS):
            # scale' = scale·(2^c + 1)
            grown = scale.to(tl.float32) * ((1 << (BITS >> (i + 1))) + 1.0)
            scale = round_to(saturate(grown, PARAMS), PARAMS)
        o_params = (i_outer * params_rows + i_row) * (2 * GROUPS) + i_group * 2
        tl.store(p_out_params + o_params, scale, m_params)
        tl.store(p_out_params + o_params + 1, minimum, m_params)


def shrink(source: Format, target: Format, codes: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """Requantize to half, a quarter or an eighth of the bits; the formula is in `minithink/quant/int_asymmetric.py`.

    Args:
        source, target: asymmetric integers of `minithink.quant`, equal in `group`, `by` and `params`.
        codes: [..., source.code_bytes] uint8.
        params: [..., source.params_bytes] uint8; by token one row for every token, or each shared row once.

    Returns:
        codes: [..., target.code_bytes] uint8.
        params: like `params`.

    Raises:
        ValueError: the formats differ in more than the bits, or the target has more.
    """
    old = constexprs(source)
    new = constexprs(target)
    if (
        old["KIND"] != "int"
        or {**old, "BITS": 0} != {**new, "BITS": 0}
        or source.by != target.by
        or (target.bits > source.bits)
    ):
        raise ValueError(f"{source} cannot be shrunk to {target}: only integers can, to fewer bits and nothing else.")
    dim = codes.shape[-1] * 8 // source.bits
    out = codes.new_empty(*codes.shape[:-1], dim * target.bits // 8)
    out_params = torch.empty_like(params, memory_format=torch.contiguous_format)
    if out.numel() + out_params.numel() == 0:
        return out, out_params
    dtype = params_dtype(source)
    outer, rows, (codes,) = two_levels(codes.shape[:-1], view_as(codes, CODES[source.bits]))
    params_outer, params_rows, (params,) = two_levels(params.shape[:-1], view_as(params, dtype))
    groups = params.shape[-1] // 2
    width = power_of_2(dim)
    block = max(1, min(power_of_2(max(rows, params_rows)), TILE // width))
    programs = outer * triton.cdiv(rows, block) + params_outer * triton.cdiv(params_rows, block)
    _shrink[programs,](
        p_codes=codes,
        codes_outer=codes.stride(0),
        codes_inner=codes.stride(1),
        p_params=params,
        params_outer=params.stride(0),
        params_inner=params.stride(1),
        p_out=view_as(out, CODES[target.bits]),
        p_out_params=view_as(out_params, dtype),
        outer=outer,
        rows=rows,
        params_rows=params_rows,
        DIM=dim,
        GROUPS=groups,
        BITS=source.bits,
        TO=target.bits,
        PARAMS=old["PARAMS"],
        HALVINGS=(source.bits // target.bits).bit_length() - 1,
        BLOCK=block,
        WIDTH=width,
        PARAMS_WIDTH=power_of_2(groups),
        enable_fp_fusion=False,
    )
    return out, out_params


def variants() -> Iterator[Variant]:
    names = ("codes_outer", "codes_inner", "params_outer", "params_inner", "outer", "rows", "params_rows")
    numbers = dict.fromkeys(names, "i32")
    for params in ("fp16", "fp32"):
        for bits, to in ((16, 16), (16, 8), (16, 4), (16, 2), (8, 4), (8, 2), (4, 2))[4 * (params == "fp16") :]:
            signature = {"p_codes": "*i16" if bits == 16 else "*u8", "p_out": "*i16" if to == 16 else "*u8"}
            signature |= {"p_params": f"*{params}", "p_out_params": f"*{params}", **numbers}
            constants = {"DIM": 128, "GROUPS": 8, "BITS": bits, "TO": to, "PARAMS": params, "BLOCK": 16, "WIDTH": 128}
            constants |= {"HALVINGS": (bits // to).bit_length() - 1, "PARAMS_WIDTH": 8}
            yield Variant(_shrink, signature, constants, {"enable_fp_fusion": False})
