"""The best candidates of every lane, without sorting. Twin: `minithink/ref/keep_best.py`.

Layout: one program per lane, which reads its columns BLOCK at a time. Floats become unsigned integers of the same
order. A radix search finds the range of integers that holds the worst kept candidate, eight bits in each pass. It
stops as soon as all candidates of the range are kept: after two or three passes if scores differ, after all passes if
they tie. The last pass writes the candidates above the range, and the missing ones from the range, oldest first.
Bound: memory. S·(score + 2 bytes) are moved for each lane; later passes find the lane in the GPU's cache. Lanes that
keep all candidates or none never read their scores.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

BLOCK = 1024  # columns at a time
BITS = {torch.float32: 32, torch.float64: 64}


@triton.jit
def _ordered(p_score, column, m, BITS: tl.constexpr):
    """Scores as unsigned integers of the same order: equal floats become equal integers, NaN the largest."""
    score = tl.load(p_score + column, m, other=0.0)
    score = tl.where(score == 0, tl.zeros_like(score), score)  # −0 is equal to 0, its bits are not
    # Negative floats are ordered backwards: turn over all their bits, and only the sign bit of the others.
    if BITS == 32:
        bits = score.to(tl.int32, bitcast=True)
        bits = tl.where(score != score, 0x7FFFFFFF, bits)
        key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    else:
        bits = score.to(tl.int64, bitcast=True)
        bits = tl.where(score != score, 0x7FFFFFFFFFFFFFFF, bits)
        key = (bits ^ ((bits >> 63) | -0x8000000000000000)).to(tl.uint64, bitcast=True)
    return key


@triton.jit
def _keep_best(p_score, p_candidate, p_count, p_kept, width, BITS: tl.constexpr, BLOCK: tl.constexpr):
    i_lane = tl.program_id(0).to(tl.int64)
    p_score += i_lane * width
    p_candidate += i_lane * width
    p_kept += i_lane * width
    missing = tl.load(p_count + i_lane)
    column = tl.arange(0, BLOCK)

    inside = tl.zeros((), tl.int32)  # candidates in the range
    for start in range(0, width, BLOCK):
        candidate = tl.load(p_candidate + start + column, start + column < width, other=0)
        inside += tl.sum(candidate.to(tl.int32))
    if (missing <= 0) | (missing >= inside):
        for start in range(0, width, BLOCK):
            m_in = start + column < width
            candidate = tl.load(p_candidate + start + column, m_in, other=0)
            tl.store(p_kept + start + column, tl.where(missing > 0, candidate, 0), m_in)
        return

    # Kept candidates lie above the range [low, high], except `missing` of them, which lie in it.
    if BITS == 32:
        low, high = tl.full((), 0, tl.uint32), tl.full((), 0xFFFFFFFF, tl.uint32)
    else:
        low, high = tl.full((), 0, tl.uint64), tl.full((), 0xFFFFFFFFFFFFFFFF, tl.uint64)
    one = low + 1  # 1, typed as `low`
    digit = tl.arange(0, 256)
    shift = low + BITS  # of the digit searched last; BITS, typed as `low`, which is still 0
    while (shift > 0) & (inside > missing):
        shift -= 8
        count = tl.zeros((256,), tl.int32)  # candidates in the range, by digit
        for start in range(0, width, BLOCK):
            m_in = start + column < width
            candidate = tl.load(p_candidate + start + column, m_in, other=0) != 0
            key = _ordered(p_score + start, column, m_in, BITS)
            m_range = candidate & (key >= low) & (key <= high)
            count += tl.histogram(((key - low) >> shift).to(tl.int32) & 255, 256, mask=m_range)
        above = inside - tl.cumsum(count)  # candidates in the range with a larger digit
        # The worst kept candidate has the largest digit with at least `missing` candidates at this digit or above. It
        # equals the number of digits that have so many candidates above them.
        i_digit = tl.sum((above >= missing).to(tl.int32))
        missing -= tl.sum(tl.where(digit == i_digit, above, 0))
        inside = tl.sum(tl.where(digit == i_digit, count, 0))
        low += i_digit.to(low.dtype) << shift
        high = low + ((one << shift) - one)

    for start in range(0, width, BLOCK):
        m_in = start + column < width
        candidate = tl.load(p_candidate + start + column, m_in, other=0) != 0
        key = _ordered(p_score + start, column, m_in, BITS)
        m_range = (candidate & (key >= low) & (key <= high)).to(tl.int32)
        kept = (candidate & (key > high)) | ((m_range > 0) & (tl.cumsum(m_range) <= missing))
        missing -= tl.sum(m_range)  # below 0 once they are found
        tl.store(p_kept + start + column, kept.to(tl.uint8), m_in)


def keep_best(score: Tensor, candidate: Tensor, count: Tensor) -> Tensor:
    """The `count` best candidates of every lane; of equal scores the older token is kept.

    Args:
        score: [..., S] float32 or float64, columns oldest first; anything (also NaN) where there is no candidate.
        candidate: bool [..., S].
        count: integers [...]; if a lane has fewer candidates, all are kept.

    Returns:
        bool [..., S], the candidates that are kept.
    """
    shape = candidate.shape
    if score.dtype not in BITS:
        score = score.float()
    score, candidate = score.expand(shape).contiguous(), candidate.contiguous()
    count = count.to(torch.int32).expand(shape[:-1]).contiguous()
    kept = torch.empty_like(candidate)
    if kept.numel():
        args = score, candidate.view(torch.uint8), count, kept.view(torch.uint8), shape[-1]
        _keep_best[(count.numel(),)](*args, BITS[score.dtype], BLOCK)
    return kept


def variants() -> Iterator[Variant]:
    for dtype, bits in (("fp32", 32), ("fp64", 64)):
        pointers = {"p_score": f"*{dtype}", "p_candidate": "*u8", "p_count": "*i32", "p_kept": "*u8"}
        yield Variant(_keep_best, {**pointers, "width": "i32"}, {"BITS": bits, "BLOCK": BLOCK})
