"""DynTS's importance predictor for a few rows, in three launches. Twin: `minithink/ref/predict.py`.

To use it alone, copy this file, `linear.py` and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.predict import predict
    >>> hidden = torch.randn(3, 64)  # [N, d], any float dtype; more than 64 rows go to torch
    >>> weights = [torch.randn(64, 128) / 8, torch.randn(128, 32) / 11]  # [d, 2d] and [2d, d/2],
    >>> weights.append(torch.randn(32, 1) / 6)  # [d/2, 1]; of one float dtype
    >>> score = predict(hidden, weights)  # float32 [N]
    >>> for weight in weights:
    ...     hidden = torch.nn.functional.softplus(hidden @ weight)
    >>> torch.allclose(score, hidden[:, 0], atol=1e-4)
    True

Layout: the first two layers are products of at most 64 rows with W, as in `linear.py`: a program owns a block of
columns and goes down W in tiles. It applies softplus to its sums before it writes them, so softplus needs no pass of
its own. The third layer has one column, and a program for each row. torch computes more than 64 rows.
Bound: memory. Each weight of two bytes is read once. At d = 4,096 these are 100 MB, 21 µs on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant
from minithink.kernels.linear import TILE_BYTES, Blocks, blocks

FEW_ROWS = 64  # more are left to torch
LEAST = 16  # rows of a tile: tensor cores take no fewer
BLOCK = 1024  # numbers of a row at a time, in the third layer


@triton.jit
def _softplus(x):
    """log(1 + eˣ) = max(x, 0) + log(1 + u) with u = e^−|x|. log(1 + u) = u·log(w)/(w − 1) with w = 1 + u, which is as
    exact as u where u is small."""
    u = tl.exp(-tl.abs(x))
    w = 1 + u
    return tl.maximum(x, 0) + tl.where(w == 1, u, tl.log(w) * (u / tl.where(w == 1, 1.0, w - 1)))


@triton.jit
def _layer(
    p_x,
    p_weight,
    p_out,
    rows,
    inner,
    columns,
    stride_row,
    stride_k,
    stride_n,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    i_row = tl.arange(0, ROWS)
    b_k = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row = i_row < rows
    m_n = column < columns
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        m_k = k + b_k < inner
        p_tile = p_weight + (k + b_k)[:, None] * stride_k + column[None, :] * stride_n
        weight = tl.load(p_tile, m_k[:, None] & m_n[None, :], other=0)
        x = tl.load(p_x + i_row[:, None] * stride_row + (k + b_k)[None, :], m_row[:, None] & m_k[None, :], other=0)
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    m_out = m_row[:, None] & m_n[None, :]
    tl.store(p_out + i_row[:, None] * columns + column[None, :], _softplus(total), m_out)


@triton.jit
def _score(p_x, p_weight, p_out, inner, stride_k, BLOCK: tl.constexpr):
    i_row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        m = start + column < inner
        x = tl.load(p_x + i_row * inner + start + column, m, other=0).to(tl.float32)
        total += x * tl.load(p_weight + (start + column) * stride_k, m, other=0).to(tl.float32)
    tl.store(p_out + i_row, _softplus(tl.sum(total)))


def predict(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """s = softplus(softplus(softplus(h·W1)·W2)·W3), as `minithink/ref/predict.py` describes it: by these kernels for
    up to 64 rows, by torch (cuBLAS) for more."""
    first, second, last = weights
    if not 0 < len(hidden) <= FEW_ROWS:
        return many_rows(hidden, weights)
    x = hidden.to(first.dtype).contiguous()  # as its twin rounds it
    for weight in (first, second):
        x = layer(x, weight)
    score = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _score[(len(x),)](
        p_x=x, p_weight=last, p_out=score, inner=x.shape[1], stride_k=last.stride(0), BLOCK=BLOCK, num_warps=4
    )
    return score


def many_rows(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The same by torch."""
    first, second, last = weights
    x = hidden.to(first.dtype)
    for weight in (first, second):
        x = F.softplus((x @ weight).float()).to(weight.dtype)
    return F.softplus(x.float() @ last.float())[:, 0]


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """softplus(x·W). x: [N, in], contiguous, 1 to 64 rows; weight: [in, out], any strides → [N, out] in its dtype."""
    rows, inner = x.shape
    columns = weight.shape[1]
    out = torch.empty(rows, columns, dtype=weight.dtype, device=x.device)
    cut = cut_of(rows, inner, columns, weight.stride(0) == 1, weight.element_size())
    _layer[(triton.cdiv(columns, cut.n),)](
        p_x=x,
        p_weight=weight,
        p_out=out,
        rows=rows,
        inner=inner,
        columns=columns,
        stride_row=x.stride(0),
        stride_k=weight.stride(0),
        stride_n=weight.stride(1),
        ROWS=rows_of(rows),
        BLOCK_K=cut.k,
        BLOCK_N=cut.n,
        STAGES=cut.stages,
        WIDEN=INTERPRETED,
        num_warps=cut.warps,
    )
    return out


def rows_of(rows: int) -> int:
    """Rows of a tile: a power of two."""
    return max(LEAST, triton.next_power_of_2(rows))


def cut_of(rows: int, inner: int, columns: int, dense_columns: bool, itemsize: int) -> Blocks:
    """How a layer is divided among programs: as `linear` divides it for 16 rows, except that no sum is split, and a
    tile of x takes no more memory than a tile of W."""
    cut = blocks(LEAST, inner, columns, dense_columns, itemsize)
    return cut._replace(split=1, k=min(cut.k, TILE_BYTES // (rows_of(rows) * itemsize)))


def variants() -> Iterator[Variant]:
    for dtype, itemsize in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
        for rows in (LEAST, 2 * LEAST, FEW_ROWS):
            for inner, columns in ((4096, 8192), (8192, 2048)):
                cut = cut_of(rows, inner, columns, False, itemsize)
                signature = dict.fromkeys(("p_x", "p_weight", "p_out"), f"*{dtype}")
                signature |= dict.fromkeys(("rows", "inner", "columns", "stride_row", "stride_k"), "i32")
                constants = {"stride_n": 1, "ROWS": rows, "BLOCK_K": cut.k, "BLOCK_N": cut.n, "STAGES": cut.stages}
                yield Variant(_layer, signature, {**constants, "WIDEN": False}, {"num_warps": cut.warps})
        signature = {"p_x": f"*{dtype}", "p_weight": f"*{dtype}", "p_out": "*fp32", "inner": "i32"}
        yield Variant(_score, signature, {"stride_k": 1, "BLOCK": BLOCK}, {"num_warps": 4})
