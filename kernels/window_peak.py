"""The most that a query of the window attends to each key. Twin: `minithink/ref/window_peak.py`.

To use it alone, copy this file, `window_importance.py` and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.window_peak import window_peak
    >>> q = torch.randn(1, 2, 4, 16)  # [B, Hq, W, D]: the 4 newest queries of two query heads that share a KV head
    >>> k = torch.randn(1, 1, 50, 16)  # [B, Hkv, S, D]
    >>> valid = torch.ones(1, 1, 50, dtype=torch.bool)  # [B, Hkv, S], or [B, 1, S]
    >>> out = window_peak(q, k, valid)  # float32 [B, Hkv, S]
    >>> torch.allclose(out, (q @ k.mT / 4).softmax(-1).amax((1, 2))[:, None], atol=1e-5)
    True

Layout: two launches, each a program per lane and block of keys.

    _logits   of `window_importance.py`, without a group: each query of each query head is a row of its own. It writes
              the rows' logits, and for each block the rows' maxima and sums of e^(logit − maximum)
    _peak     combines the maxima and sums of all blocks; the softmax of each row, then the maximum over the group,
              then the maximum or the sum over the queries

Between the launches the logits lie in memory: 4·G·W bytes for each key.
Bound: memory, if q and k have the same 16-bit type. K is read once, S·D numbers for each lane, and 8·G·W + 6 bytes
are moved for each key. With more than 64 rows (G·W), or 16 rows of other types, several programs of `_logits` read
each block of K. Blocks without a valid key are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2
from minithink.kernels.window_importance import LOWEST, _logits

BLOCK = 64  # keys of a program of _logits
PEAK_BLOCK = 256  # keys of a program of _peak
ROWS = 64  # of _logits at a time, at most
QUERIES = 16  # of _peak at a time, at most
PARTS = tl.constexpr(32)  # blocks of _logits that are combined at a time


@triton.jit
def _peak(
    p_valid,
    p_logits,
    p_max,
    p_sum,
    p_out,
    heads,
    group,
    queries,
    blocks,
    width,
    stride_v_b,
    stride_v_h,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_valid += i_lane // heads * stride_v_b + i_lane % heads * stride_v_h
    valid = tl.load(p_valid + column, column < width, other=0) != 0
    score = tl.zeros((BLOCK,), tl.float32)  # probabilities are not negative
    if tl.max(valid.to(tl.int32)) > 0:
        rows = group * queries
        for start in range(0, queries, BLOCK_W):
            query = start + tl.arange(0, BLOCK_W)
            m_row = query < queries
            most = tl.zeros((BLOCK_W, BLOCK), tl.float32)  # over the group
            for i_q in range(group):
                row = i_q * queries + query
                top = tl.full((BLOCK_W,), LOWEST, tl.float32)
                total = tl.zeros((BLOCK_W,), tl.float32)
                for start_block in range(0, blocks, PARTS):
                    block = start_block + tl.arange(0, PARTS)
                    m_part = (block < blocks)[:, None] & m_row[None, :]
                    o_part = (i_lane * blocks + block)[:, None] * rows + row[None, :]
                    tops = tl.load(p_max + o_part, m_part, other=LOWEST)  # [PARTS, BLOCK_W]
                    sums = tl.load(p_sum + o_part, m_part, other=0.0)
                    higher = tl.maximum(top, tl.max(tops, 0))
                    total = total * tl.exp(top - higher) + tl.sum(sums * tl.exp(tops - higher[None, :]), 0)
                    top = higher
                o_row = (i_lane * rows + row) * width
                m_a = m_row[:, None] & valid[None, :]
                a = tl.load(p_logits + o_row[:, None] + column[None, :], m_a, other=LOWEST)
                total = tl.where(m_row, total, 1.0)
                most = tl.maximum(most, tl.where(m_a, tl.exp(a - top[:, None]) / total[:, None], 0.0))
            score = tl.maximum(score, tl.max(most, 0)) if MAX else score + tl.sum(most, 0)
    tl.store(p_out + i_lane * width + column, score, column < width)


def window_peak(q: Tensor, k: Tensor, valid: Tensor, fuse: str = "max") -> Tensor:
    """MorphKV's score: the most that a query of the window attends to each valid key.

    Args:
        q: [B, Hq, W, D], rotated queries of the window.
        k: [B, Hkv, S, D], rotated keys; anything (also NaN) where not valid.
        valid: bool [B, Hkv, S], or [B, 1, S] for all heads: the keys to score.
        fuse: "max" or "sum": how the scores of the queries, each the maximum over the group, become one.

    Returns:
        float32 [B, Hkv, S]; 0 where not valid.
    """
    if fuse not in ("max", "sum"):
        raise ValueError(f"fuse {fuse!r} must be max or sum")
    b, heads, width, dim = k.shape
    group = q.shape[1] // heads
    queries = q.shape[2]
    lanes = b * heads
    blocks = triton.cdiv(width, BLOCK)
    rows = group * queries
    out = torch.empty(b, heads, width, dtype=torch.float32, device=k.device)
    if not out.numel():
        return out
    q = q.unflatten(1, (heads, group)).flatten(2, 3)  # [B, Hkv, rows, D], a copy if it must be
    q, k, valid = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, valid))
    flags = valid.view(torch.uint8).expand(b, heads, width)
    logits = torch.empty(lanes, rows, width, dtype=torch.float32, device=k.device)
    top, total = (torch.empty(lanes, blocks, rows, dtype=torch.float32, device=k.device) for _ in range(2))
    full = INTERPRETED or q.dtype != k.dtype or k.dtype == torch.float32
    # Tensor cores take at least 16 rows. In float32, more rows would not fit into the registers.
    size = 16 if full else min(ROWS, max(16, power_of_2(rows)))
    shape = {"GROUP": 1, "D": dim, "WIDE": max(16, power_of_2(dim)), "BLOCK": BLOCK, "BLOCK_W": size, "FULL": full}
    _logits[lanes, blocks, triton.cdiv(rows, size)](
        p_q=q,
        p_k=k,
        p_valid=flags,
        p_logits=logits,
        p_max=top,
        p_sum=total,
        heads=heads,
        window=rows,
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
    if fuse == "max":  # over all rows, in whatever order
        group = 1
        queries = rows
    _peak[lanes, triton.cdiv(width, PEAK_BLOCK)](
        p_valid=flags,
        p_logits=logits,
        p_max=top,
        p_sum=total,
        p_out=out,
        heads=heads,
        group=group,
        queries=queries,
        blocks=blocks,
        width=width,
        stride_v_b=flags.stride(0),
        stride_v_h=flags.stride(1),
        MAX=fuse == "max",
        BLOCK=PEAK_BLOCK,
        BLOCK_W=min(QUERIES, max(2, power_of_2(queries))),
    )
    return out


def variants() -> Iterator[Variant]:
    lanes = {"p_valid": "*u8", "heads": "i32", "width": "i32", "stride_v_b": "i32", "stride_v_h": "i32"}
    parts = {"p_logits": "*fp32", "p_max": "*fp32", "p_sum": "*fp32"}
    strides = dict.fromkeys((f"stride_{x}" for x in ("q_b", "q_h", "q_w", "k_h", "k_s")), "i32")
    signature = {**lanes, **parts, **strides, "window": "i32", "stride_k_b": "i64", "scale": "fp32"}
    few = ((64, 16), (128, 16))
    many = ((96, 32), (128, 64))
    types = {("fp32", "fp32"): few, ("fp16", "fp16"): few, ("bf16", "bf16"): few + many, ("fp32", "bf16"): few}
    for (q, k), sizes in types.items():
        for dim, rows in sizes:
            shape = {"GROUP": 1, "D": dim, "WIDE": power_of_2(dim), "BLOCK": BLOCK, "BLOCK_W": rows}
            pointers = {"p_q": f"*{q}", "p_k": f"*{k}"}
            yield Variant(_logits, {**signature, **pointers}, {**shape, "FULL": q != k or k == "fp32"})
    signature = {**lanes, **parts, "p_out": "*fp32", "queries": "i32", "blocks": "i32"}
    for rows in (2, 4, 8, 16):
        shape = {"BLOCK": PEAK_BLOCK, "BLOCK_W": rows}
        yield Variant(_peak, signature, {"MAX": True, "group": 1, **shape})  # Triton makes a constant of a 1
        yield Variant(_peak, {**signature, "group": "i32"}, {"MAX": False, **shape})
