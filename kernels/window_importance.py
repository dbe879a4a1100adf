"""How much the newest queries attend to each key, smoothed. Twin: `minithink/ref/window_importance.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.window_importance import window_importance
    >>> q = torch.randn(1, 2, 4, 16)  # [B, Hq, W, D]: the 4 newest queries of two query heads that share a KV head
    >>> k = torch.randn(1, 1, 50, 16)  # [B, Hkv, S, D]
    >>> valid = torch.ones(1, 1, 50, dtype=torch.bool)  # [B, Hkv, S], or [B, 1, S]
    >>> out = window_importance(q, k, valid, kernel_size=1)  # float32 [B, Hkv, S]
    >>> logits = (q @ k.mT / 4).amax(1, keepdim=True)
    >>> torch.allclose(out, logits.softmax(-1).mean(2), atol=1e-5)
    True

Layout: three launches, each a program per lane and block of keys.

    _logits   A[w, j], the maximum over the group; for each row of the block the maximum and the sum of e^(A − max)
    _mean     combines the rows' maxima and sums of all blocks, then I[j], the mean over the window of the softmax
    _pool     pools each key with its neighbours

Between the first two launches the logits lie in memory: W float32 for each key, little beside the key itself.
Bound: memory, if q and k have the same 16-bit type. K is read once, S·D numbers for each lane, and 4·(2W + 3) bytes
are moved for each key; the 2·G·W·D operations for each key are few, on tensor cores. With other types and windows of
more than 16 queries, the limit is arithmetic. Blocks without a valid key are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2

BLOCK = 64  # keys of a program
POOL_BLOCK = 1024
QUERIES = 64  # of the window at a time, at most
LOWEST = tl.constexpr(-3.0e38)  # replaces −∞, because −∞ − (−∞) is NaN


@triton.jit
def _logits(
    p_q,
    p_k,
    p_valid,
    p_logits,
    p_max,
    p_sum,
    heads,
    window,
    width,
    scale,
    stride_q_b,
    stride_q_h,
    stride_q_w,
    stride_k_b,
    stride_k_h,
    stride_k_s,
    stride_v_b,
    stride_v_h,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FULL: tl.constexpr,
):
    i_lane = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    i_b = i_lane // heads
    i_h = i_lane % heads
    column = i_block * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, WIDE)
    valid = tl.load(p_valid + i_b * stride_v_b + i_h * stride_v_h + column, column < width, other=0) != 0
    row = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    m_row = row < window
    o_part = (i_lane * tl.num_programs(1) + i_block) * window + row
    if tl.max(valid.to(tl.int32)) == 0:
        tl.store(p_max + o_part, tl.full((BLOCK_W,), LOWEST, tl.float32), m_row)
        tl.store(p_sum + o_part, tl.zeros((BLOCK_W,), tl.float32), m_row)
        return

    p_k += i_b * stride_k_b + i_h * stride_k_h
    k = tl.load(
        p_k + column.to(tl.int64)[:, None] * stride_k_s + dim, valid[:, None] & (dim < D), other=0.0
    )  # [BLOCK, WIDE]
    if FULL:
        k = k.to(tl.float32)
    a = tl.full((BLOCK_W, BLOCK), LOWEST, tl.float32)
    for i_q in range(GROUP):
        p_rows = p_q + i_b * stride_q_b + (i_h * GROUP + i_q) * stride_q_h + row[:, None] * stride_q_w
        q = tl.load(p_rows + dim, m_row[:, None] & (dim < D), other=0.0)  # [BLOCK_W, WIDE]
        if FULL:
            q = q.to(tl.float32)
        a = tl.maximum(a, tl.dot(q, tl.trans(k), input_precision="ieee"))
    a = tl.where(valid[None, :], a * scale, LOWEST)
    top = tl.max(a, 1)
    tl.store(p_max + o_part, top, m_row)
    tl.store(p_sum + o_part, tl.sum(tl.exp(a - top[:, None]), 1), m_row)
    o_row = (i_lane * window + row) * width
    tl.store(p_logits + o_row[:, None] + column[None, :], a, m_row[:, None] & valid[None, :])


@triton.jit
def _mean(
    p_valid,
    p_logits,
    p_max,
    p_sum,
    p_mean,
    heads,
    window,
    width,
    stride_v_b,
    stride_v_h,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_lane = tl.program_id(0).to(tl.int64)
    blocks = tl.num_programs(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_valid += i_lane // heads * stride_v_b + i_lane % heads * stride_v_h
    valid = tl.load(p_valid + column, column < width, other=0) != 0
    if tl.max(valid.to(tl.int32)) == 0:
        return  # _pool reads results of valid keys only
    mean = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, window, BLOCK_W):
        row = start + tl.arange(0, BLOCK_W)
        m_row = row < window
        top = tl.full((BLOCK_W,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_W,), tl.float32)
        for start_block in range(0, blocks, 16):
            block = start_block + tl.arange(0, 16)
            m_part = (block < blocks)[:, None] & m_row[None, :]
            o_part = (i_lane * blocks + block)[:, None] * window + row[None, :]
            tops = tl.load(p_max + o_part, m_part, other=LOWEST)  # [16, BLOCK_W]
            sums = tl.load(p_sum + o_part, m_part, other=0.0)
            higher = tl.maximum(top, tl.max(tops, 0))
            total = total * tl.exp(top - higher) + tl.sum(sums * tl.exp(tops - higher[None, :]), 0)
            top = higher
        o_row = (i_lane * window + row) * width
        m_a = m_row[:, None] & valid[None, :]
        a = tl.load(p_logits + o_row[:, None] + column[None, :], m_a, other=LOWEST)
        total = tl.where(m_row, total, 1.0)
        mean += tl.sum(tl.where(m_a, tl.exp(a - top[:, None]) / total[:, None], 0.0), 0)
    tl.store(p_mean + i_lane * width + column, mean / window, valid)


@triton.jit
def _pool(
    p_valid,
    p_score,
    p_out,
    heads,
    width,
    side,
    stride_v_b,
    stride_v_h,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_valid += i_lane // heads * stride_v_b + i_lane % heads * stride_v_h
    p_score += i_lane * width
    valid = tl.load(p_valid + column, column < width, other=0) != 0
    pooled = tl.zeros((BLOCK,), tl.float32)  # importance is not negative
    if tl.max(valid.to(tl.int32)) > 0:
        for offset in range(-side, side + 1):
            near = column + offset
            m_near = tl.load(p_valid + near, (near >= 0) & (near < width), other=0) != 0
            score = tl.load(p_score + near, m_near, other=0.0)
            pooled = tl.maximum(pooled, score) if MAX else pooled + score
    if not MAX:
        pooled /= 2 * side + 1.0
    tl.store(p_out + i_lane * width + column, tl.where(valid, pooled, 0.0), column < width)


def window_importance(q: Tensor, k: Tensor, valid: Tensor, kernel_size: int = 7, pooling: str = "max") -> Tensor:
    """R-KV's importance: the newest queries' attention to each valid key, smoothed over neighbouring keys.

    Args:
        q: [B, Hq, W, D], rotated queries of the window.
        k: [B, Hkv, S, D], rotated keys, oldest first; anything (also NaN) where not valid.
        valid: bool [B, Hkv, S], or [B, 1, S] for all heads: the keys to score, neighbouring columns.
        kernel_size: odd number of keys that are pooled; 1 pools nothing.
        pooling: "max", or "avg": the sum divided by kernel_size, also at the ends, where there are fewer keys.

    Returns:
        float32 [B, Hkv, S]; 0 where not valid.
    """
    if kernel_size < 1 or kernel_size % 2 == 0 or pooling not in ("max", "avg"):
        raise ValueError(f"kernel_size {kernel_size} must be odd, and pooling {pooling!r} max or avg")
    b, heads, width, dim = k.shape
    window = q.shape[2]
    lanes = b * heads
    blocks = triton.cdiv(width, BLOCK)
    out = torch.empty(b, heads, width, dtype=torch.float32, device=k.device)
    if not out.numel():
        return out
    q, k, valid = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, valid))
    flags = valid.view(torch.uint8).expand(b, heads, width)
    logits = torch.empty(lanes, window, width, dtype=torch.float32, device=k.device)
    top, total = (torch.empty(lanes, blocks, window, dtype=torch.float32, device=k.device) for _ in range(2))
    mean = torch.empty_like(out)
    full = INTERPRETED or q.dtype != k.dtype or k.dtype == torch.float32
    # Tensor cores take at least 16 rows. In float32, more rows would not fit into the registers.
    rows = 16 if full else min(QUERIES, max(16, power_of_2(window)))
    shape = {"GROUP": q.shape[1] // heads, "D": dim, "WIDE": max(16, power_of_2(dim)), "BLOCK": BLOCK}
    shape |= {"BLOCK_W": rows, "FULL": full}
    _logits[lanes, blocks, triton.cdiv(window, rows)](
        p_q=q,
        p_k=k,
        p_valid=flags,
        p_logits=logits,
        p_max=top,
        p_sum=total,
        heads=heads,
        window=window,
        width=width,
        scale=dim**-0.5,
        stride_q_b=q.stride(0),
        stride_q_h=q.stride(1),
        stride_q_w=q.stride(2),
        stride_k_b=k.stride(0),
        stride_k_h=k.stride(1),
        stride_k_s=k.stride(2),
        stride_v_b=flags.stride(0),
        stride_v_h=flags.stride(1),
        **shape,
    )
    _mean[lanes, blocks](
        p_valid=flags,
        p_logits=logits,
        p_max=top,
        p_sum=total,
        p_mean=mean,
        heads=heads,
        window=window,
        width=width,
        stride_v_b=flags.stride(0),
        stride_v_h=flags.stride(1),
        BLOCK=BLOCK,
        BLOCK_W=16,
    )
    _pool[lanes, triton.cdiv(width, POOL_BLOCK)](
        p_valid=flags,
        p_score=mean,
        p_out=out,
        heads=heads,
        width=width,
        side=kernel_size // 2,
        stride_v_b=flags.stride(0),
        stride_v_h=flags.stride(1),
        MAX=pooling == "max",
        BLOCK=POOL_BLOCK,
    )
    return out


def variants() -> Iterator[Variant]:
    lanes = {"p_valid": "*u8", "heads": "i32", "width": "i32", "stride_v_b": "i32", "stride_v_h": "i32"}
    parts = {"p_logits": "*fp32", "p_max": "*fp32", "p_sum": "*fp32", "window": "i32"}
    strides = dict.fromkeys((f"stride_{x}" for x in ("q_b", "q_h", "q_w", "k_h", "k_s")), "i32")
    signature = {**lanes, **parts, **strides, "stride_k_b": "i64", "scale": "fp32"}
    few = ((64, 7, 16), (128, 4, 16))
    many = ((96, 1, 32), (128, 4, 64))
    types = {("fp32", "fp32"): few, ("fp16", "fp16"): few, ("bf16", "bf16"): few + many, ("fp32", "bf16"): few}
    for (q, k), sizes in types.items():
        for dim, group, rows in sizes:
            shape = {"GROUP": group, "D": dim, "WIDE": power_of_2(dim), "BLOCK": BLOCK, "BLOCK_W": rows}
            pointers = {"p_q": f"*{q}", "p_k": f"*{k}"}
            yield Variant(_logits, {**signature, **pointers}, {**shape, "FULL": q != k or k == "fp32"})
    yield Variant(_mean, {**lanes, **parts, "p_mean": "*fp32"}, {"BLOCK": BLOCK, "BLOCK_W": 16})
    for most in (True, False):
        signature = {**lanes, "p_score": "*fp32", "p_out": "*fp32", "side": "i32"}
        yield Variant(_pool, signature, {"MAX": most, "BLOCK": POOL_BLOCK})
