"""A radix search: find the best scores of a range of columns without sorting.

Used by `keep_best.py`, `keep_shared.py` and `select.py`.

Floats become unsigned integers of the same order, the keys. The search finds the range of keys that holds the worst
kept candidate, eight bits in each pass. It stops as soon as all candidates of the range are kept: after two or three
passes if scores differ, after all passes if they tie.

A kernel says by a function of its own which columns are candidates, and what their scores are:

    load(lane, start, column, end, BITS) → the keys of the columns start + column, and which of them are candidates

`lane` is a tuple with whatever the function needs. Columns from `end` on are no candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BITS = {torch.float32: 32, torch.float64: 64}  # of a key


@triton.jit
def load_key(p_score, column, m, BITS: tl.constexpr):
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
def all_keys(BITS: tl.constexpr):
    """The smallest and the largest key."""
    if BITS == 32:
        low = tl.full((), 0, tl.uint32)
        high = tl.full((), 0xFFFFFFFF, tl.uint32)
    else:
        low = tl.full((), 0, tl.uint64)
        high = tl.full((), 0xFFFFFFFFFFFFFFFF, tl.uint64)
    return low, high


@triton.jit
def search(load: tl.constexpr, lane, begin, end, candidates, missing, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the border between the `missing` best candidates of the columns `begin` to `end`, and the others.

    candidates: their number in these columns.

    Returns:
        low, high, missing: candidates whose keys are above `high` are kept, and the `missing` oldest of those whose
            keys lie in [low, high].
    """
    low, high = all_keys(BITS)
    one = low + 1  # 1, typed as `low`
    shift = low + BITS  # of the digit searched last; BITS, typed as `low`, which is still 0
    column = tl.arange(0, BLOCK)
    digit = tl.arange(0, 256)
    inside = candidates  # candidates in the range [low, high]
    while (shift > 0) & (inside > missing) & (missing > 0):
        shift -= 8
        count = tl.zeros((256,), tl.int32)  # candidates in the range, by digit
        for start in range(begin, end, BLOCK):
            key, candidate = load(lane, start, column, end, BITS)
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
    return low, high, missing


@triton.jit
def best(key, candidate, low, high, missing):
    """Which candidates of a block are kept, and how many lie in the range [low, high]. Blocks go from old to new.

    `missing`, less those of earlier blocks that lie in the range, is below 0 once all kept candidates are found.
    """
    m_range = (candidate & (key >= low) & (key <= high)).to(tl.int32)
    kept = (candidate & (key > high)) | ((m_range > 0) & (tl.cumsum(m_range) <= missing))
    return kept, tl.sum(m_range)
