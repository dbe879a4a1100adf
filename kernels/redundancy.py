"""R-KV's redundancy without the S × S matrix of cosines in memory. Twin: `minithink/ref/redundancy.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.redundancy import redundancy
    >>> k = torch.zeros(1, 1, 4, 16)  # [B, Hkv, S, D]
    >>> k[0, 0, :3, 0] = 1  # three equal keys,
    >>> k[0, 0, 3, 1] = 1  # and another one
    >>> valid = torch.ones(1, 1, 4, dtype=torch.bool)  # [B, Hkv, S], or [B, 1, S]
    >>> redundancy(k, valid, threshold=0.5).cpu()  # float32 [B, Hkv, S]; of equal keys the newest is spared
    tensor([[[0.3342, 0.2603, 0.2027, 0.2027]]])

Layout: three launches, each with a program per lane and block of BLOCK keys, the last with a program per lane.

    _unit      1/(‖k‖ + 1e−8), and a block's share of Σ_i k̂_i
    _newest    per row i: j*_i, C_ij*, and the row's own column sum without sparing, k̂_i·Σ k̂ − k̂_i·k̂_i
    _softmax   per lane: column sums less what is spared, over the number of valid keys, and their softmax

What column j spares, Σ_{i: j*_i = j} C_ij*, is added up by the rows, each at its own time. They add integers, in
units of 1/ONE, because a sum of integers is the same in every order. _newest searches j* from the newest keys
backwards, and stops when every row of its block has found one. If keys resemble each other, as those of trained
models do, it computes only a small part of C. 16-bit keys are multiplied before the division by their norms: then
each product is exact on tensor cores, and the sums are in float32.
Bound: arithmetic for float32 keys and for lanes of dissimilar keys, else memory. At most S²·D multiply-adds, and at
least three reads of K, for each lane. Blocks without a valid key are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2

BLOCK = 64  # keys of a program, and at a time
SOFTMAX_BLOCK = 1024  # keys at a time
DEPTH = 32  # of float32 products: more of D at a time would not fit into the registers
WARPS = 8  # of _newest: with fewer the product does not fit into the registers
ONE = tl.constexpr(float(2**40))  # 1 in the units of what is spared; the sum over 2²² keys fits


@triton.jit
def _keys(p_k, row, m_row, dim, stride_k_s, D: tl.constexpr, FULL: tl.constexpr):
    """Rows of K, [rows, dims]; zeros where not valid, even if K is NaN there."""
    k = tl.load(p_k + row.to(tl.int64)[:, None] * stride_k_s + dim, m_row[:, None] & (dim < D), other=0.0)
    return k.to(tl.float32) if FULL else k


@triton.jit
def _unit(
    p_k,
    p_valid,
    p_scale,
    p_spared,
    p_partial,
    heads,
    width,
    stride_k_b,
    stride_k_h,
    stride_k_s,
    stride_v_b,
    stride_v_h,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_lane = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    row = i_block * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, WIDE)
    m_in = row < width
    valid = tl.load(p_valid + i_lane // heads * stride_v_b + i_lane % heads * stride_v_h + row, m_in, other=0) != 0
    p_partial += (i_lane * tl.num_programs(1) + i_block) * WIDE
    p_scale += i_lane * width
    tl.store(p_spared + i_lane * width + row, tl.zeros((BLOCK,), tl.int64), m_in)
    if tl.max(valid.to(tl.int32)) == 0:
        tl.store(p_scale + row, tl.zeros((BLOCK,), tl.float32), m_in)
        tl.store(p_partial + dim, tl.zeros((WIDE,), tl.float32))
        return
    p_k += i_lane // heads * stride_k_b + i_lane % heads * stride_k_h
    k = _keys(p_k, row, valid, dim, stride_k_s, D, True)
    scale = tl.where(valid, 1 / (tl.sqrt(tl.sum(k * k, 1)) + 1e-8), 0.0)
    tl.store(p_scale + row, scale, m_in)
    tl.store(p_partial + dim, tl.sum(k * scale[:, None], 0))


@triton.jit
def _newest(
    p_k,
    p_valid,
    p_scale,
    p_partial,
    p_spared,
    p_total,
    heads,
    width,
    threshold,
    stride_k_b,
    stride_k_h,
    stride_k_s,
    stride_v_b,
    stride_v_h,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    DEPTH: tl.constexpr,
):
    i_lane = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    row = i_block * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, WIDE)
    p_valid += i_lane // heads * stride_v_b + i_lane % heads * stride_v_h
    valid = tl.load(p_valid + row, row < width, other=0) != 0
    if tl.max(valid.to(tl.int32)) == 0:
        return  # _softmax reads results of valid rows only
    p_k += i_lane // heads * stride_k_b + i_lane % heads * stride_k_h
    p_scale += i_lane * width
    scale = tl.load(p_scale + row, valid, other=0.0)

    newest = tl.where(valid, -1, 0)  # j*, −1 while it is not found; invalid rows search none
    spared = tl.zeros((BLOCK,), tl.float32)  # C_ij*
    start = (width - 1) // BLOCK * BLOCK
    while (start >= 0) & (tl.min(newest) < 0):
        column = start + tl.arange(0, BLOCK)
        valid_j = tl.load(p_valid + column, column < width, other=0) != 0
        if tl.max(valid_j.to(tl.int32)) > 0:
            c = _cosines(
                p_k,
                p_scale,
                row,
                valid,
                scale,
                column,
                valid_j,
                stride_k_s,
                D,
                WIDE,
                BLOCK,
                BLOCK,
                FULL,
                DEPTH,
            )
            similar = tl.max(tl.where((c > threshold) & valid_j[None, :], column[None, :], -1), 1)
            here = tl.sum(tl.where(similar[:, None] == column[None, :], c, 0.0), 1)
            spared = tl.where(newest < 0, here, spared)
            newest = tl.where(newest < 0, similar, newest)
        start -= BLOCK

    k = _keys(p_k, row, valid, dim, stride_k_s, D, True)
    if tl.min(newest) < 0:  # a row that resembles no key spares C_i0
        m_first = dim < tl.where(tl.load(p_valid) != 0, D, 0)
        first = tl.load(p_k + dim, m_first, other=0.0).to(tl.float32) * tl.load(p_scale)
        c = tl.where(row == 0, 0.0, tl.sum(k * first[None, :], 1) * scale)
        spared = tl.where(newest < 0, c, spared)
        newest = tl.maximum(newest, 0)

    everything = _sum_of_units(p_partial + i_lane * tl.num_programs(1) * WIDE, WIDE)
    unit = k * scale[:, None]
    tl.store(p_total + i_lane * width + row, tl.sum(unit * (everything[None, :] - unit), 1), valid)
    _spare(p_spared + i_lane * width, newest, spared, valid)


@triton.jit
def _cosines(
    p_k,
    p_scale,
    row,
    m_row,
    scale,
    column,
    m_column,
    stride_k_s,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """C_ij of some rows and columns, 0 for i = j: float32 [ROWS, COLUMNS]. scale: 1/(‖k_i‖ + 1e−8) of the rows."""
    c = tl.zeros((ROWS, COLUMNS), tl.float32)
    for o_dim in range(0, WIDE, DEPTH):
        part = o_dim + tl.arange(0, DEPTH)
        k_i = _keys(p_k, row, m_row, part, stride_k_s, D, FULL)
        k_j = _keys(p_k, column, m_column, part, stride_k_s, D, FULL)
        c = tl.dot(k_i, tl.trans(k_j), c, input_precision="ieee")
    scale_j = tl.load(p_scale + column, m_column, other=0.0)
    c *= scale[:, None] * scale_j[None, :]
    return tl.where(row[:, None] == column[None, :], 0.0, c)


@triton.jit
def _sum_of_units(p_partial, WIDE: tl.constexpr):
    """Σ_i k̂_i over the keys of a lane, whose blocks `_unit` has summed: float32 [WIDE]."""
    dim = tl.arange(0, WIDE)
    everything = tl.zeros((WIDE,), tl.float32)
    for start_block in range(0, tl.num_programs(1), 16):
        block = start_block + tl.arange(0, 16)
        m_block = (block < tl.num_programs(1))[:, None]
        everything += tl.sum(tl.load(p_partial + block[:, None] * WIDE + dim, m_block, other=0.0), 0)
    return everything


@triton.jit
def _spare(p_spared, newest, c, m_row):
    """Add C_ij* of some rows of a lane to what the columns j* spare: int64, in units of 1/ONE."""
    tl.atomic_add(p_spared + newest, (c.to(tl.float64) * ONE).to(tl.int64), m_row)


@triton.jit
def _mean(p_total, p_spared, column, valid, count):
    """The means of some columns over `count` rows, float32; 0 where not valid."""
    spared = tl.load(p_spared + column, valid, other=0).to(tl.float64) / ONE
    return (tl.load(p_total + column, valid, other=0.0) - spared.to(tl.float32)) / count.to(tl.float32)


@triton.jit
def _softmax(p_valid, p_total, p_spared, p_out, heads, width, stride_v_b, stride_v_h, BLOCK: tl.constexpr):
    i_lane = tl.program_id(0).to(tl.int64)
    p_valid += i_lane // heads * stride_v_b + i_lane % heads * stride_v_h
    p_total += i_lane * width
    p_spared += i_lane * width
    p_out += i_lane * width
    count = tl.zeros((), tl.int32)  # valid keys
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        count += tl.sum((tl.load(p_valid + column, column < width, other=0) != 0).to(tl.int32))
    count = tl.maximum(count, 1)  # lanes without keys divide, too
    total = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = tl.load(p_valid + column, column < width, other=0) != 0
        # Means of cosines are at most 1, so the softmax needs no subtraction of the maximum.
        e = tl.exp(_mean(p_total, p_spared, column, valid, count))
        total += tl.sum(tl.where(valid, e, 0.0))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = tl.load(p_valid + column, column < width, other=0) != 0
        e = tl.where(valid, tl.exp(_mean(p_total, p_spared, column, valid, count)), 0.0)
        tl.store(p_out + column, e / tl.where(total > 0, total, 1.0), column < width)  # zeros in lanes without keys


def redundancy(k: Tensor, valid: Tensor, threshold: float = 0.5) -> Tensor:
    """R-KV's redundancy: softmax over the valid keys of how much each resembles the others, on average.

    If the cosine of two keys is so near the threshold that rounding decides, the result may differ from the twin's.

    Args:
        k: [B, Hkv, S, D], rotated keys, oldest first; anything (also NaN) where not valid.
        valid: bool [B, Hkv, S], or [B, 1, S] for all heads.
        threshold: cosine above which two keys resemble each other.

    Returns:
        float32 [B, Hkv, S]: sums to 1 over the valid keys, 0 elsewhere.
    """
    b, heads, width, dim = k.shape
    lanes = b * heads
    blocks = triton.cdiv(width, BLOCK)
    wide = max(16, power_of_2(dim))
    out = torch.empty(b, heads, width, dtype=torch.float32, device=k.device)
    if not out.numel():
        return out
    k = k if k.stride(3) == 1 else k.contiguous()
    valid = valid if valid.stride(-1) == 1 else valid.contiguous()
    flags = valid.view(torch.uint8).expand(b, heads, width)
    scale, total = (torch.empty_like(out) for _ in range(2))
    spared = torch.empty_like(out, dtype=torch.int64)
    partial = torch.empty(lanes, blocks, wide, dtype=torch.float32, device=k.device)
    shape = {"D": dim, "WIDE": wide, "BLOCK": BLOCK}
    full = INTERPRETED or k.dtype == torch.float32
    product = {"FULL": full, "DEPTH": min(wide, DEPTH) if full else wide}
    _unit[lanes, blocks](
        p_k=k,
        p_valid=flags,
        p_scale=scale,
        p_spared=spared,
        p_partial=partial,
        heads=heads,
        width=width,
        stride_k_b=k.stride(0),
        stride_k_h=k.stride(1),
        stride_k_s=k.stride(2),
        stride_v_b=flags.stride(0),
        stride_v_h=flags.stride(1),
        **shape,
        enable_fp_fusion=False,  # all threads that hold a sum hold the same bits: README.md, Conventions
    )
    _newest[lanes, blocks](
        p_k=k,
        p_valid=flags,
        p_scale=scale,
        p_partial=partial,
        p_spared=spared,
        p_total=total,
        heads=heads,
        width=width,
        threshold=float(threshold),
        stride_k_b=k.stride(0),
        stride_k_h=k.stride(1),
        stride_k_s=k.stride(2),
        stride_v_b=flags.stride(0),
        stride_v_h=flags.stride(1),
        **shape,
        **product,
        num_warps=WARPS,
        enable_fp_fusion=False,  # all threads that hold a sum hold the same bits: README.md, Conventions
    )
    _softmax[(lanes,)](
        p_valid=flags,
        p_total=total,
        p_spared=spared,
        p_out=out,
        heads=heads,
        width=width,
        stride_v_b=flags.stride(0),
        stride_v_h=flags.stride(1),
        BLOCK=SOFTMAX_BLOCK,
    )
    return out


def variants() -> Iterator[Variant]:
    size = {"heads": "i32", "width": "i32", "stride_v_b": "i32", "stride_v_h": "i32", "p_valid": "*u8"}
    sums = {"p_spared": "*i64", "p_total": "*fp32"}
    for dtype, dims in (("fp32", (64, 128)), ("fp16", (64, 128)), ("bf16", (64, 96, 128))):
        for dim in dims:
            shape = {"D": dim, "WIDE": power_of_2(dim), "BLOCK": BLOCK}
            strides = {"stride_k_b": "i64", "stride_k_h": "i32", "stride_k_s": "i32"}
            keys = {"p_k": f"*{dtype}", "p_scale": "*fp32", "p_partial": "*fp32", **size, **strides}
            options = {"enable_fp_fusion": False}
            yield Variant(_unit, {**keys, "p_spared": "*i64"}, shape, options)
            full = dtype == "fp32"
            product = {"FULL": full, "DEPTH": DEPTH if full else power_of_2(dim)}
            options = {"num_warps": WARPS, "enable_fp_fusion": False}
            yield Variant(_newest, {**keys, **sums, "threshold": "fp32"}, {**shape, **product}, options)
    yield Variant(_softmax, {**size, **sums, "p_out": "*fp32"}, {"BLOCK": SOFTMAX_BLOCK})
