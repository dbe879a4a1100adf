"""The matrix product of a few rows, which reads W at the speed of memory. Twin: `minithink/ref/linear.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.linear import linear
    >>> x = torch.randn(3, 64)  # [N, in], any float dtype; more than 16 rows go to torch
    >>> weight = torch.randn(64, 32)  # [in, out]; the transposed view of [out, in] will do
    >>> bias = torch.randn(32)  # [out], or [N, out], or None
    >>> out = linear(x, weight, bias)  # [N, out] in the dtype of x
    >>> torch.allclose(out, x @ weight + bias, atol=1e-4)
    True

Bound: memory. With N ≤ 16 rows there are 2·N operations for each weight of two bytes. So W must be read once, at full
speed, which needs 4 MB of loads in flight on an H200 (4.8 TB/s · 0.8 µs), 30 KB for each of 132 SMs.

Layout: a program owns a block of columns and goes down them in tiles of 16 KB. Four tiles are in shared memory or on
their way there (asynchronous copies; threads read 16 bytes along the dense axis of W). Blocks are made narrower until
there is a program for every SM, so most shapes need no split of the sum. With too few columns the sum is split into
`split` parts: float32 partial sums go to a scratch tensor, and a second kernel adds them in a fixed order. There are
no atomics, so equal inputs give equal bits.

One row is multiplied without tensor cores: each thread keeps a float32 sum for each of its places in the tile, and
sums are exchanged once, at the end. Tensor cores would need the row padded to 16, and the tile in another layout of
shared memory. They would save only arithmetic that costs no time here: 3 operations for each weight of two bytes,
while an H200 does 12 in the time of its read. Two to 16 rows use tensor cores, padded to 16. More than 16 rows go to
torch, whose library (cuBLAS) is fast there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant

FEW_ROWS = 16  # more are left to torch; tensor cores take 16 at least


class Blocks(NamedTuple):
    """How the work is divided among programs."""

    k: int  # rows of W in a tile
    n: int  # columns of W in a tile, those of a program
    split: int = 1  # parts of the sum
    warps: int = 8
    stages: int = 5  # one more than the tiles in shared memory; 1: no tiles there, loads go straight to registers


# Tuned on an H200 for one row of bfloat16, over the products of an 8 B Llama; `tune_candidates` lists what was tried.
TILE_BYTES = 16384  # of W
PROGRAMS = 128  # the block of columns is narrowed until there are this many: about one for each SM
WIDEST = {False: 128, True: 64}  # columns of a program, for W with dense rows and with dense columns
ONE_ROW = 32  # columns of a program for one row; twice that where there are MANY columns with dense rows
MANY = 16384  # columns
LONG = 8192  # rows of W from which tiles are twice as large
NARROWEST = 16  # 32 bytes, a sector
FEW_PROGRAMS = 64  # if there are fewer,
LONG_SUM = 4096  # sums that are longer are split
WARPS = 4  # tensor cores make 8 columns a warp, so 4 are enough for 32
STAGES = 5
WIDE_DOT_K = 32  # for float32, which tensor cores do not take unrounded: operands are in registers, whole


@triton.jit
def _few_rows(
    p_x,
    p_weight,
    p_bias,
    p_out,
    rows,
    inner,
    columns,
    span,
    stride_x_row,
    stride_x_k,
    stride_k,
    stride_n,
    stride_bias,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_part = tl.program_id(1)
    b_n = tl.arange(0, BLOCK_N)
    b_k = tl.arange(0, BLOCK_K)
    column = i_block * BLOCK_N + b_n
    m_n = column < columns
    i_row = tl.arange(0, ROWS)
    start = i_part * span
    end = tl.minimum(start + span, inner)
    # A vocabulary times a hidden size may exceed 2³¹; inside a tile offsets are small.
    p_weight += start.to(tl.int64) * stride_k + (i_block * BLOCK_N).to(tl.int64) * stride_n
    o_weight = b_k[:, None] * stride_k + b_n[None, :] * stride_n
    total = tl.zeros([BLOCK_K if ROWS == 1 else ROWS, BLOCK_N], tl.float32)
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        m_k = k + b_k < end
        weight = tl.load(p_weight + o_weight, m_k[:, None] & m_n[None, :], other=0)  # [BLOCK_K, BLOCK_N]
        if ROWS == 1:
            x = tl.load(p_x + (k + b_k) * stride_x_k, m_k, other=0)  # [BLOCK_K]
            total += x.to(tl.float32)[:, None] * weight.to(tl.float32)
        else:
            o_x = i_row[:, None] * stride_x_row + (k + b_k)[None, :] * stride_x_k
            x = tl.load(p_x + o_x, (i_row < rows)[:, None] & m_k[None, :], other=0)  # [ROWS, BLOCK_K]
            if WIDEN:
                x = x.to(tl.float32)
                weight = weight.to(tl.float32)
            total = tl.dot(x, weight, total, input_precision="ieee")
        p_weight += BLOCK_K * stride_k
    if ROWS == 1:
        total = tl.sum(total, axis=0)[None, :]
    m_out = (i_row < rows)[:, None] & m_n[None, :]
    if p_bias is not None:
        total += tl.load(p_bias + i_row[:, None] * stride_bias + column[None, :], m_out, other=0).to(tl.float32)
    # of partial sums as of a result: [split, rows, columns]
    tl.store(p_out + (i_part * rows + i_row)[:, None] * columns + column[None, :], total, m_out)


@triton.jit
def _add_parts(p_parts, p_bias, p_out, rows, columns, stride_bias, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for i_part in tl.static_range(SPLIT):
        total += tl.load(p_parts + (i_part * rows + i_row) * columns + column, m_in, other=0)
    if p_bias is not None:
        total += tl.load(p_bias + i_row * stride_bias + column, m_in, other=0).to(tl.float32)
    tl.store(p_out + i_row * columns + column, total, m_in)


BLOCK = 256  # columns of a program that adds parts


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · W + b: by these kernels for up to 16 rows, by torch (cuBLAS) for more. Sums are float32.

    Args:
        x: [N, in], any strides.
        weight: [in, out] in the dtype of `x`; any strides, so a transposed [out, in] is fine.
        bias: what to add: a bias [out], the residual stream [N, out], whose memory the result may take, or None.

    Returns:
        [N, out] in the dtype of `x`.
    """
    rows, inner = x.shape
    columns = weight.shape[1]
    if not 0 < rows <= FEW_ROWS or inner == 0 or columns == 0:
        return _by_library(x, weight, bias)
    return few_rows(x, weight, bias, blocks(rows, inner, columns, weight.stride(0) == 1, weight.element_size()))


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` by torch. To the residual stream the product is added in place, because torch would first copy it into
    a result of its own: two copies a layer, each a node of a CUDA graph."""
    if bias is None:
        return x @ weight
    if bias.dim() == 2 and bias.is_contiguous() and not torch.is_grad_enabled():
        return bias.addmm_(x, weight)
    return torch.addmm(bias, x, weight)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Blocks) -> Tensor:
    """`linear` for 1 to 16 rows, divided as `cut` says. A sweep over `tune_candidates` calls it."""
    rows, inner = x.shape
    columns = weight.shape[1]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if bias is not None and bias.stride(-1) != 1:
        bias = bias.contiguous()
    stride_bias = bias.stride(0) if bias is not None and bias.dim() == 2 else 0
    whole = cut.split == 1
    parts = out if whole else torch.empty(cut.split, rows, columns, dtype=torch.float32, device=x.device)
    span = triton.cdiv(triton.cdiv(inner, cut.split), cut.k) * cut.k  # of the sum, for a part
    _few_rows[triton.cdiv(columns, cut.n), cut.split](
        p_x=x,
        p_weight=weight,
        p_bias=bias if whole else None,
        p_out=parts,
        rows=rows,
        inner=inner,
        columns=columns,
        span=span,
        stride_x_row=x.stride(0),
        stride_x_k=x.stride(1),
        stride_k=weight.stride(0),
        stride_n=weight.stride(1),
        stride_bias=stride_bias,
        ROWS=1 if rows == 1 else FEW_ROWS,
        BLOCK_K=cut.k,
        BLOCK_N=cut.n,
        STAGES=cut.stages,
        WIDEN=INTERPRETED,
        num_warps=cut.warps,
    )
    if not whole:
        _add_parts[rows, triton.cdiv(columns, BLOCK)](
            p_parts=parts,
            p_bias=bias,
            p_out=out,
            rows=rows,
            columns=columns,
            stride_bias=stride_bias,
            SPLIT=cut.split,
            BLOCK=BLOCK,
            num_warps=2,
        )
    return out


def blocks(rows: int, inner: int, columns: int, dense_columns: bool, itemsize: int) -> Blocks:
    """How to divide a product among programs.

    Args:
        rows: 1 to 16.
        inner, columns: the shape of W.
        dense_columns: whether W's columns are dense (it is a transposed [out, in]) rather than its rows.
        itemsize: bytes of a weight.
    """
    if rows == 1:
        n = 2 * ONE_ROW if columns >= MANY and not dense_columns else ONE_ROW
        long = inner >= LONG and n == ONE_ROW and not dense_columns
        k = TILE_BYTES * (2 if long else 1) // (n * itemsize)
        return Blocks(k, n, 1, 8 if long else WARPS, STAGES if dense_columns else 3)
    n = WIDEST[dense_columns]
    while n > NARROWEST and triton.cdiv(columns, n) < PROGRAMS:
        n //= 2
    k = TILE_BYTES // (n * itemsize)
    if itemsize == 4:
        k = WIDE_DOT_K
    split = 1
    while triton.cdiv(columns, n) * split < FEW_PROGRAMS and inner // split > LONG_SUM:
        split *= 2
    return Blocks(k, n, split, WARPS, STAGES)


def tune_candidates(itemsize: int = 2) -> list[Blocks]:
    """Divisions that are worth timing with `few_rows` on a GPU, for any shape and either layout of W."""
    return [
        Blocks(tile // (n * itemsize), n, split, warps, stages)
        for tile, n, split, warps, stages in product(
            (8192, 16384, 32768), (16, 32, 64, 128), (1, 2, 4, 8), (4, 8), (1, 3, 4, 5)
        )
        if tile * stages <= 160 * 1024 and tile // (n * itemsize) >= 16
    ]


def variants() -> Iterator[Variant]:
    integers = ("rows", "inner", "columns", "span", "stride_x_row", "stride_bias")
    shapes = [
        (4096, 6144, False),
        (4096, 4096, False),
        (4096, 28672, False),
        (4096, 128256, True),
        (8192, 256, False),
    ]
    for dtype, itemsize in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
        for rows, (inner, columns, dense_columns), biased in product((1, FEW_ROWS), shapes, (False, True)):
            cut = blocks(rows, inner, columns, dense_columns, itemsize)
            signature = dict.fromkeys(("p_x", "p_weight", "p_bias", "p_out"), f"*{dtype}")
            signature |= dict.fromkeys(integers, "i32")
            # a stride of 1 is a constant, as it is when the kernel is launched
            signature["stride_n" if dense_columns else "stride_k"] = "i32"
            constants: dict[str, int | None] = {"stride_x_k": 1, "stride_k" if dense_columns else "stride_n": 1}
            constants |= {"ROWS": rows, "BLOCK_K": cut.k, "BLOCK_N": cut.n, "STAGES": cut.stages, "WIDEN": False}
            parts = dict(signature)
            if cut.split > 1:
                parts["p_out"] = "*fp32"
            if cut.split > 1 or not biased:
                del parts["p_bias"]
                constants |= {"p_bias": None}
            yield Variant(_few_rows, parts, constants, {"num_warps": cut.warps})
            if cut.split > 1:
                constants = {"SPLIT": cut.split, "BLOCK": BLOCK}
                if not biased:
                    constants["p_bias"] = None
                signature = {"p_parts": "*fp32", "p_out": f"*{dtype}"} | ({"p_bias": f"*{dtype}"} if biased else {})
                signature |= dict.fromkeys(("rows", "columns", "stride_bias"), "i32")
                yield Variant(_add_parts, signature, constants, {"num_warps": 2})
