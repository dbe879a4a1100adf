"""The best candidates of lanes that share a number of places. Twin: `minithink/ref/keep_shared.py`.

Layout: one program per group of lanes. The lanes of a group lie one behind the other. So a lane is a range of
columns, and the group is a longer range. The radix search of `keep_best.py` runs in each lane, for the candidates
that the lane keeps for certain. Then it runs once in the whole group, among the candidates that are not kept yet. The
last search reads what the searches of the lanes have written, so a barrier comes before it.
Bound: latency. Each search reads the scores of its range once for each digit and once at the end; after the first
time they are in the GPU's cache. A row is due once in some hundred steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels.keep_best import BITS, _ordered

BLOCK = 1024  # columns at a time
WARPS = 8


@triton.jit
def _open(p_candidate, p_kept, column, end, FIRST: tl.constexpr):
    """Candidates that are not kept yet. FIRST: no candidate is kept yet."""
    m = column < end
    candidate = tl.load(p_candidate + column, m, other=0) != 0
    if not FIRST:
        candidate = candidate & (tl.load(p_kept + column, m, other=1) == 0)
    return candidate


@triton.jit
def _search(
    p_score, p_candidate, p_kept, begin, end, missing, BITS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr
):
    """Keep the `missing` best open candidates of a range of columns → how many are kept. FIRST: all columns are
    written; else those that are kept now."""
    column = tl.arange(0, BLOCK)
    inside = tl.zeros((), tl.int32)  # open candidates in the range of scores
    for start in range(begin, end, BLOCK):
        inside += tl.sum(_open(p_candidate, p_kept, start + column, end, FIRST).to(tl.int32))
    missing = tl.minimum(tl.maximum(missing, 0), inside)
    found = missing

    # Kept candidates lie above the range [low, high], except `missing` of them, which lie in it.
    if BITS == 32:
        low, high = tl.full((), 0, tl.uint32), tl.full((), 0xFFFFFFFF, tl.uint32)
    else:
        low, high = tl.full((), 0, tl.uint64), tl.full((), 0xFFFFFFFFFFFFFFFF, tl.uint64)
    one = low + 1  # 1, typed as `low`
    digit = tl.arange(0, 256)
    shift = low + BITS  # of the digit searched last
    while (shift > 0) & (inside > missing) & (missing > 0):
        shift -= 8
        count = tl.zeros((256,), tl.int32)  # open candidates in the range, by digit
        for start in range(begin, end, BLOCK):
            candidate = _open(p_candidate, p_kept, start + column, end, FIRST)
            key = _ordered(p_score + start, column, start + column < end, BITS)
            m_range = candidate & (key >= low) & (key <= high)
            count += tl.histogram(((key - low) >> shift).to(tl.int32) & 255, 256, mask=m_range)
        above = inside - tl.cumsum(count)  # candidates in the range with a larger digit
        i_digit = tl.sum((above >= missing).to(tl.int32))  # of the worst candidate that is kept
        missing -= tl.sum(tl.where(digit == i_digit, above, 0))
        inside = tl.sum(tl.where(digit == i_digit, count, 0))
        low += i_digit.to(low.dtype) << shift
        high = low + ((one << shift) - one)

    if FIRST or found > 0:
        for start in range(begin, end, BLOCK):
            m_in = start + column < end
            candidate = _open(p_candidate, p_kept, start + column, end, FIRST)
            key = _ordered(p_score + start, column, m_in, BITS)
            m_range = (candidate & (key >= low) & (key <= high)).to(tl.int32)
            kept = (candidate & (key > high)) | ((m_range > 0) & (tl.cumsum(m_range) <= missing))
            missing -= tl.sum(m_range)  # below 0 once they are found
            tl.store(p_kept + start + column, kept.to(tl.uint8), m_in if FIRST else kept)
    return found


@triton.jit
def _keep_shared(
    p_score, p_candidate, p_count, p_floor, p_kept, heads, width, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    p_score += i * heads * width
    p_candidate += i * heads * width
    p_kept += i * heads * width
    missing = tl.load(p_count + i)
    for i_head in range(heads):
        floor = tl.load(p_floor + i * heads + i_head)
        begin = i_head * width
        missing -= _search(p_score, p_candidate, p_kept, begin, begin + width, floor, BITS, BLOCK, True)
    tl.debug_barrier()  # threads read what other threads have written
    _search(p_score, p_candidate, p_kept, 0, heads * width, missing, BITS, BLOCK, False)


def keep_shared(score: Tensor, candidate: Tensor, count: Tensor, floor: Tensor) -> Tensor:
    """The best candidates of H lanes together, and of each lane at least its `floor` best, as
    `minithink/ref/keep_shared.py` describes it."""
    *_, heads, width = shape = candidate.shape
    if score.dtype not in BITS:
        score = score.float()
    score, candidate = score.expand(shape).contiguous(), candidate.contiguous()
    count = count.to(torch.int32).expand(shape[:-2]).contiguous()
    floor = floor.to(torch.int32).expand(shape[:-1]).contiguous()
    kept = torch.empty_like(candidate)
    if kept.numel():
        args = score, candidate.view(torch.uint8), count, floor, kept.view(torch.uint8), heads, width
        _keep_shared[(count.numel(),)](*args, BITS[score.dtype], BLOCK, num_warps=WARPS)
    return kept


def variants() -> Iterator[Variant]:
    for dtype, bits in (("fp32", 32), ("fp64", 64)):
        signature = {"p_score": f"*{dtype}", "p_candidate": "*u8", "p_kept": "*u8"}
        signature |= dict.fromkeys(("p_count", "p_floor"), "*i32") | dict.fromkeys(("heads", "width"), "i32")
        yield Variant(_keep_shared, signature, {"BITS": bits, "BLOCK": BLOCK}, {"num_warps": WARPS})
