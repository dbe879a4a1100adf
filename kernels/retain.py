"""Algorithm 1 of Crystal-KV for all heads, in one launch: update the tokens' score CRF, and select those to evict.

Twin: `minithink/ref/retain.py`, which says what CRF, τ and entries are.

Layout: one program of one warp per lane (a head of a row and layer). It goes over the lane's tokens BLOCK at a time.
The mass of a token is the attention that it got. A token that goes is evicted:

    sums    add up the masses, and count the protected tokens
    hits    find v, the largest mass such that all masses ≥ v hold the share p of the sum. Masses are not negative, so
            as integers their bits have the same order. A bisection narrows the bits of v; after each pass both ends
            are masses of tokens. It ends when the ends are equal, after about 10 passes. Tokens of a mass above v are
            hit, and of those with mass v as many of the oldest as the share needs
    CRF     each token finds its entry. Usually the token of column s is in entry s, because the lane and its entries
            have lost the same tokens. If another policy has evicted too, a binary search finds the entries of the
            block. Afterwards CRF and τ of the token are in entry s; unchanged values are not written
    border  find where the tokens that go end, by estimates of log2 CRF in float32, which are cheap. If one token has
            to go, its estimate is close to the smallest. If several have to go, a bisection finds the estimate of the
            last one. Tokens close to this estimate are compared exactly: first by CRF, one class of equal CRF after
            the other, until enough tokens are found. In the last class τ decides, found by a bisection, too
    gone    mark the tokens that go. From the first block with such a token on, the other tokens close up

Only a lane's own program touches its entries. A lane may have more columns than entries. CRF and τ of the columns
beyond the last entry wait in `more`, until tokens before them are gone. A lane's entries start where those of the
row's earlier lanes end; each program adds up the budgets to find this place. Powers of λ come from two tables, as
factors and exponents of 2: λ^age is a product of two factors, and never too small for a float64.

Bound: arithmetic, by a count of compiled instructions before CRF became a float64 (not measured). If one token of
1,025 goes, a token takes about 400: 15 for the sums, 15 in each pass for the hits, 90 for CRF, 85 for the border, 45
to close up. 24 bytes are read for each token (mass and position; position, CRF and τ of its entry), 12 written for a
token that is hit, and 16 for each token behind the first that goes; together about 40. `drop` takes 1 byte for each
column, and is cleared before the launch. Later passes find the lane in the GPU's cache.

Rounding: masses are summed in float64, in another order than the twin's. Sums of dyadic masses are exact. Otherwise
the kernel and its twin may disagree on a hit if the sum before the token is within about 10⁻¹⁶·S of the share. CRF
and τ are the twin's, bit by bit, and so is the order of tokens: both are products and sums of the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

BLOCK = 64  # tokens at a time
WARPS = 1
NOWHERE = 2**31 - 1  # the position in an empty entry
LARGEST = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(float("inf"))


class Decay(Protocol):
    """The powers of λ, as `minithink/ref/lrfu.py` describes them."""

    lam: float
    factor: Tensor  # float64
    exponent: Tensor  # int32


@triton.jit
def entries_of(p_budget, i_n, i_own, n, layers, heads, slack, LANES: tl.constexpr):
    """The first entry of a lane in its row's list, and the number of its entries. i_own: layer · heads + head."""
    lane = tl.arange(0, LANES)
    m = lane < layers * heads
    room = tl.load(p_budget + (lane // heads * n + i_n) * heads + lane % heads, m, other=0) + slack
    return tl.sum(tl.where(lane < i_own, room, 0)), tl.sum(tl.where(lane == i_own, room, 0))


@triton.jit
def decayed(crf, last, t, m, p_factor, p_exponent, STEPS: tl.constexpr):
    """The CRF decayed to t, as value · 2^exponent: float64 and int32. Where m is false the value is 0."""
    age = tl.minimum(tl.maximum(t - last, 0), STEPS * STEPS - 1)
    near, far = age % STEPS, STEPS + age // STEPS
    factor = tl.load(p_factor + near, m, other=0.0) * tl.load(p_factor + far, m, other=0.0)
    exponent = tl.load(p_exponent + near, m, other=0) + tl.load(p_exponent + far, m, other=0)
    return crf * factor, exponent


@triton.jit
def scaled(value, exponent):
    """value · 2^exponent, float64. Powers below 2^−1022 or above 2^1023 are taken for these."""
    exponent = tl.minimum(tl.maximum(exponent, -1022), 1023)
    return value * ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def compared(crf, last, t, m, below, p_factor, p_exponent, STEPS: tl.constexpr):
    """The decayed CRF divided by 2^⌊below⌋. `below` is a little less than log2 of the CRFs that are compared, so they
    fit a float64 however small they are, and their order is exact."""
    value, exponent = decayed(crf, last, t, m, p_factor, p_exponent, STEPS)
    return scaled(value, exponent - tl.where(below > -INFINITY, tl.floor(below), 0.0).to(tl.int32))


@triton.jit
def estimate(crf, last, t, LAM: tl.constexpr, LOG_LAM: tl.constexpr):
    """A cheap estimate of log2 of the decayed CRF, in float32: 0 to 0.0861 less. A number's bits, read as an integer,
    give its logarithm at powers of 2, and a straight line between them."""
    age = tl.maximum(t - last, 0)
    bits = crf.to(tl.float32).to(tl.int32, bitcast=True)
    score = bits.to(tl.float32) * 2.0**-23 + (age.to(tl.float32) * LOG_LAM - 127)
    alive = crf > 0
    if LAM == 0:
        alive &= age == 0
    return tl.where(alive, score, -INFINITY)


@triton.jit
def ordered(x):
    """float32 as int32 of the same order. The same operation on the integer gives back the bits of the number."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def tokens(p_crf, p_last, p_more_crf, p_more_last, start, room, m, BLOCK: tl.constexpr):
    """CRF and τ of the columns from `start` on, read from their entries or from `more`."""
    column = start + tl.arange(0, BLOCK)
    crf, last = tl.load(p_crf + column, m & (column < room)), tl.load(p_last + column, m & (column < room))
    if start + BLOCK > room:
        m_more = m & (column >= room)
        crf = tl.where(m_more, tl.load(p_more_crf + column, m_more, other=0.0), crf)
        last = tl.where(m_more, tl.load(p_more_last + column, m_more, other=0), last)
    return crf, last


@triton.jit
def last_of(
    p_crf, p_last, p_more_crf, p_more_last, p_factor, p_exponent, fixed, held, room, t, goes, low, high, below, score,
    TAU: tl.constexpr, LAM: tl.constexpr, LOG_LAM: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `goes`-th smallest key of columns `fixed` to `held`, and how many keys are smaller. A token's key is its
    ordered estimate or, if TAU, its τ; then only tokens with this score count. Keys lie between low and high."""
    column, smaller = tl.arange(0, BLOCK), tl.zeros((), tl.int32)
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        count = tl.zeros((BLOCK,), tl.int32)
        at_most, more = tl.full((BLOCK,), -LARGEST - 1, tl.int32), tl.full((BLOCK,), LARGEST, tl.int32)
        for start in range(0, held, BLOCK):
            m = (start + column >= fixed) & (start + column < held)
            crf, tau = tokens(p_crf, p_last, p_more_crf, p_more_last, start, room, m, BLOCK)
            if TAU:
                m &= compared(crf, tau, t, m, below, p_factor, p_exponent, STEPS) == score
                key = tau
            else:
                key = ordered(estimate(crf, tau, t, LAM, LOG_LAM))
            m_less = m & (key <= middle)
            count += m_less.to(tl.int32)
            at_most = tl.maximum(at_most, tl.where(m_less, key, at_most))
            more = tl.minimum(more, tl.where(m & (key > middle), key, more))
        found = tl.sum(count)
        enough = found >= goes
        smaller = tl.where(enough, smaller, found)
        low = tl.where(enough, low, tl.min(more))
        high = tl.where(enough, tl.max(at_most), high)
    return low, smaller


@triton.jit
def border_of(
    p_crf, p_last, p_more_crf, p_more_last, p_factor, p_exponent, fixed, held, room, t, goes, low, high,
    LAM: tl.constexpr, LOG_LAM: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the `goes` > 0 tokens of columns `fixed` to `held` that go first, among estimates from low to high.

    Returns:
        below, above: a token goes if its estimate is below `below`, and stays if it is above `above`.
        score, last, missing: of the others, a token goes if its (score, τ) is less than (score, last), or is equal
            and it is one of the `missing` oldest of such tokens.
        first: no token before this column goes.
    """
    column = tl.arange(0, BLOCK)
    if goes > 1:
        low, _ = last_of(
            p_crf, p_last, p_more_crf, p_more_last, p_factor, p_exponent, fixed, held, room, t, goes, low, high, 0.0,
            0.0, False, LAM, LOG_LAM, STEPS, BLOCK,
        )  # fmt: skip
    edge = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    margin = tl.where(edge > -INFINITY, tl.abs(edge) * 2.0**-20 + 0.09, 0.0)  # of estimates, with their rounding
    below, above = edge - margin, edge + margin

    score = tl.full((), float("nan"), tl.float64)  # of the class: the tokens near the border with this score
    size, taken = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    oldest, newest = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    missing, first = goes, held
    while missing > size:
        taken += size  # the class goes as a whole, and the next one follows
        old_score = score
        score, size = tl.full((), INFINITY, tl.float64), tl.zeros((), tl.int32)
        sure, front = tl.zeros((BLOCK,), tl.int32), tl.full((BLOCK,), LARGEST, tl.int32)
        for start in range(0, held, BLOCK):
            m = (start + column >= fixed) & (start + column < held)
            crf, tau = tokens(p_crf, p_last, p_more_crf, p_more_last, start, room, m, BLOCK)
            about = estimate(crf, tau, t, LAM, LOG_LAM)
            m_near = m & (about >= below) & (about <= above)
            sure += (m & (about < below)).to(tl.int32)
            front = tl.minimum(front, tl.where(m & (about <= above), start + column, front))
            if tl.max(m_near.to(tl.int32)) > 0:
                exact = compared(crf, tau, t, m_near, below, p_factor, p_exponent, STEPS)
                m_left = m_near & ~(exact <= old_score)  # at first all, for nothing is less than NaN
                least = tl.min(tl.where(m_left, exact, INFINITY))
                m_left &= exact == least
                if least < score:
                    score, size = least, tl.zeros((), tl.int32)
                    oldest, newest = tl.full((), LARGEST, tl.int32), tl.zeros((), tl.int32)
                if least == score:
                    size += tl.sum(m_left.to(tl.int32))
                    oldest = tl.minimum(oldest, tl.min(tl.where(m_left, tau, LARGEST)))
                    newest = tl.maximum(newest, tl.max(tl.where(m_left, tau, 0)))
        missing = goes - tl.sum(sure) - taken
        first = tl.min(front)
    last, smaller = last_of(
        p_crf, p_last, p_more_crf, p_more_last, p_factor, p_exponent, fixed, held, room, t, missing, oldest, newest,
        below, score, True, LAM, LOG_LAM, STEPS, BLOCK,
    )  # fmt: skip
    return below, above, score, last, missing - smaller, first


@triton.jit
def gone_of(
    crf, tau, m, t, below, above, score, last, missing, p_factor, p_exponent,
    LAM: tl.constexpr, LOG_LAM: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The tokens of a block that go, int32, and how many tokens have the border's score and τ. m: free tokens."""
    about = estimate(crf, tau, t, LAM, LOG_LAM)
    m_near = m & (about >= below) & (about <= above)
    gone = (m & (about < below)).to(tl.int32)
    found = tl.zeros((), tl.int32)
    if tl.max(m_near.to(tl.int32)) > 0:
        exact = compared(crf, tau, t, m_near, below, p_factor, p_exponent, STEPS)
        equal = (m_near & (exact == score) & (tau == last)).to(tl.int32)
        before = m_near & ((exact < score) | ((exact == score) & (tau < last)))
        gone += (before | ((equal > 0) & (tl.cumsum(equal) <= missing))).to(tl.int32)
        found = tl.sum(equal)
    return gone, found


@triton.jit
def clear(p_pos, start, room, NOWHERE: tl.constexpr, BLOCK: tl.constexpr):
    """Empty the entries from `start` on, up to the first block without an entry in use: entries in use come first."""
    column = tl.arange(0, BLOCK)
    used = tl.full((), 1, tl.int32)
    while (start < room) & (used > 0):
        m = tl.load(p_pos + (start + column), start + column < room, other=NOWHERE) != NOWHERE
        tl.store(p_pos + (start + column), tl.full((BLOCK,), NOWHERE, tl.int32), m)
        used = tl.max(m.to(tl.int32))
        start += BLOCK


@triton.jit(do_not_specialize=["n"])
def _retain(
    p_mass, p_pos, p_held, p_known, p_crf, p_last, p_at, p_budget, p_keep, p_protected, p_prompt, p_t, p_tracked,
    p_counted, p_summed, p_factor, p_exponent, p_more_crf, p_more_last, p_drop, p_kept, p_fixed, p_total, p_score,
    n, layers, heads, width, entries, slack,
    mass_layer, mass_row, mass_head, pos_layer, pos_row, pos_head,
    P: tl.constexpr, BIRTH: tl.constexpr, LAM: tl.constexpr, LOG_LAM: tl.constexpr, STEPS: tl.constexpr,
    SCORED: tl.constexpr, NOWHERE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    i_n, i_layer, i_head = i // heads % n, i // (n * heads), i % heads
    summed = tl.load(p_summed + i_n) > 0
    if tl.load(p_tracked + i_n) == 0:
        tl.store(p_kept + i, 0)
        tl.store(p_fixed + i, 0)
        tl.store(p_total + i, tl.zeros((), tl.float64))
        return
    first, room = entries_of(p_budget, i_n, i_layer * heads + i_head, n, layers, heads, slack, LANES)
    entry = tl.load(p_at + i_n) * entries + first
    p_known += entry
    p_crf += entry
    p_last += entry
    p_mass += i_layer * mass_layer + i_n * mass_row + i_head * mass_head
    p_pos += i_layer * pos_layer + i_n * pos_row + i_head * pos_head
    p_more_crf += i * width
    p_more_last += i * width
    p_drop += i * width
    p_score += i * width
    held, t = tl.load(p_held + i), tl.load(p_t + i_n)
    prompt, protected = tl.load(p_prompt + i_n), tl.load(p_protected + i_n)
    column = tl.arange(0, BLOCK)

    # sums
    totals, top = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.int32)
    fixed = tl.zeros((BLOCK,), tl.int32)  # protected tokens
    for start in range(0, held, BLOCK):
        m_in = start + column < held
        mass = tl.load(p_mass + (start + column), m_in, other=0.0)
        totals += mass.to(tl.float64)
        top = tl.maximum(top, mass.to(tl.int32, bitcast=True))
        fixed += (tl.load(p_pos + (start + column), m_in, other=NOWHERE) < protected).to(tl.int32)
    fixed, total = tl.sum(fixed), tl.sum(totals)
    goes = held - tl.maximum(tl.load(p_keep + i), fixed)

    # hits
    share = tl.full((), P, tl.float64) * total
    high, more = tl.max(top), tl.zeros((), tl.float64)  # sum of the masses above `high`
    # v is at least this mass: all smaller masses add up to less than half of 1 − p, the share that need not be hit.
    low = (total * ((1 - P) / 2) / tl.maximum(held, 1)).to(tl.float32).to(tl.int32, bitcast=True)
    if (tl.load(p_counted + i) == 0) | (total == 0):
        low, high = tl.full((), LARGEST, tl.int32), tl.full((), LARGEST, tl.int32)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        sums = tl.zeros((BLOCK,), tl.float64)
        less, at_least = tl.zeros((BLOCK,), tl.int32), tl.full((BLOCK,), LARGEST, tl.int32)
        for start in range(0, held, BLOCK):
            mass = tl.load(p_mass + (start + column), start + column < held, other=0.0)
            bits = mass.to(tl.int32, bitcast=True)
            m_counts = bits >= middle
            sums += tl.where(m_counts, mass, 0.0).to(tl.float64)
            at_least = tl.minimum(at_least, tl.where(m_counts, bits, LARGEST))
            less = tl.maximum(less, tl.where(m_counts, 0, bits))
        reached = tl.sum(sums)
        enough = reached >= share
        low = tl.where(enough, tl.min(at_least), low)
        high = tl.where(enough, high, tl.max(less))
        more = tl.where(enough, more, reached)

    # CRF
    older = tl.zeros((), tl.int32)  # tokens of mass v seen before
    least, most = tl.full((BLOCK,), LARGEST, tl.int32), tl.full((BLOCK,), -LARGEST - 1, tl.int32)
    for start in range(0, held, BLOCK):
        own = start + column
        m_in, m_entry = own < held, own < tl.minimum(held, room)
        pos, mass = tl.load(p_pos + own, m_in, other=0), tl.load(p_mass + own, m_in, other=0.0)
        known, crf = tl.load(p_known + own, m_entry, other=NOWHERE), tl.load(p_crf + own, m_entry, other=0.0)
        last, at = tl.load(p_last + own, m_entry, other=0), own
        if tl.max(((known != pos) & (known != NOWHERE)).to(tl.int32)) > 0:
            at, end, left = tl.zeros_like(own) + start, tl.zeros_like(own) + room, room - start
            while left > 0:
                middle = (at + end) // 2
                m_less = (tl.load(p_known + middle, at < end, other=NOWHERE) < pos) & (at < end)
                at, end = tl.where(m_less, middle + 1, at), tl.where(m_less, end, middle)
                left //= 2
            m_at = m_in & (at < room)
            known, crf = tl.load(p_known + at, m_at, other=NOWHERE), tl.load(p_crf + at, m_at, other=0.0)
            last = tl.load(p_last + at, m_at, other=0)
        new = known != pos
        born = tl.maximum(pos - prompt + 1, 0)
        crf, last = tl.where(new, BIRTH, crf).to(tl.float64), tl.where(new, born, last)

        bits = mass.to(tl.int32, bitcast=True)
        hit, equal = bits > low, (bits == low).to(tl.int32)
        if tl.max(equal) > 0:
            before = more + (older + tl.cumsum(equal) - equal).to(tl.float64) * mass.to(tl.float64)
            hit |= (equal > 0) & (before < share)
            older += tl.sum(equal)
        if BIRTH == 1:
            hit &= born < t
        # CRF_i(t) = λ^(t − τ_i)·CRF_i(τ_i) + 1
        value, exponent = decayed(crf, last, t, hit, p_factor, p_exponent, STEPS)
        crf = tl.where(hit, scaled(value, exponent) + 1, crf)
        last = tl.where(hit, t, last)

        moved = (at != own) | new
        tl.debug_barrier()  # all threads have read the entries before one of them writes
        tl.store(p_known + own, pos, m_entry & moved)
        tl.store(p_crf + own, crf, m_entry & (moved | hit))
        tl.store(p_last + own, last, m_entry & (moved | hit))
        if start + BLOCK > room:
            tl.store(p_more_crf + own, crf, m_in & (own >= room))
            tl.store(p_more_last + own, last, m_in & (own >= room))
        if SCORED:
            value, exponent = decayed(crf, last, t, m_in, p_factor, p_exponent, STEPS)
            log_crf = tl.log2(tl.where(value > 0, value, 1.0)) + exponent
            tl.store(p_score + own, tl.where(value > 0, log_crf, -INFINITY), m_in)
        m_free = m_in & (own >= fixed)
        order = ordered(estimate(crf, last, t, LAM, LOG_LAM))
        least = tl.minimum(least, tl.where(m_free, order, LARGEST))
        most = tl.maximum(most, tl.where(m_free, order, -LARGEST - 1))

    # border
    below, above = tl.full((), -INFINITY, tl.float32), tl.full((), -INFINITY, tl.float32)
    score, last, missing = tl.full((), -INFINITY, tl.float64), tl.full((), -1, tl.int32), tl.zeros((), tl.int32)
    front = held
    if goes > 0:
        below, above, score, last, missing, front = border_of(
            p_crf, p_last, p_more_crf, p_more_last, p_factor, p_exponent, fixed, held, room, t, goes, tl.min(least),
            tl.max(most), LAM, LOG_LAM, STEPS, BLOCK,
        )  # fmt: skip

    # gone
    begin = tl.where(summed, 0, front // BLOCK * BLOCK)
    kept, total = begin, tl.zeros((), tl.float64)
    for start in range(begin, held, BLOCK):
        own = start + column
        m_in = own < held
        crf, tau = tokens(p_crf, p_last, p_more_crf, p_more_last, start, room, m_in, BLOCK)
        pos = tl.load(p_pos + own, m_in, other=0)
        m_free = m_in & (own >= fixed)
        gone, found = gone_of(
            crf, tau, m_free, t, below, above, score, last, missing, p_factor, p_exponent, LAM, LOG_LAM, STEPS
        )
        missing -= found
        tl.store(p_drop + own, gone.to(tl.uint8), gone > 0)
        stay = (m_in & (gone == 0)).to(tl.int32)
        to = kept + tl.cumsum(stay) - 1
        m_stay = (stay > 0) & (to < room)
        tl.debug_barrier()
        tl.store(p_known + to, pos, m_stay)
        tl.store(p_crf + to, crf, m_stay)
        tl.store(p_last + to, tau, m_stay)
        kept += tl.sum(stay)
        if summed:
            value, exponent = decayed(crf, tau, t, stay > 0, p_factor, p_exponent, STEPS)
            total += tl.sum(scaled(value, exponent))
    clear(p_known, kept, room, NOWHERE, BLOCK)
    tl.store(p_kept + i, kept)
    tl.store(p_fixed + i, fixed)
    tl.store(p_total + i, total)


def retain(
    mass: Tensor, pos: Tensor, held: Tensor, known: tuple[Tensor, Tensor, Tensor], at: Tensor, budget: Tensor,
    slack: int, keep: Tensor, protected: Tensor, prompt: Tensor, t: Tensor, tracked: Tensor, counted: Tensor,
    summed: Tensor, decay: Decay, p: float, birth: int, scored: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """One step of algorithm 1, as `minithink/ref/retain.py` describes it.

    The twin also clears CRF and τ of empty entries; the kernel clears their positions only.
    """
    (layers, n, heads), width, device = held.shape, pos.shape[-1], pos.device
    drop = torch.zeros(pos.shape, dtype=torch.bool, device=device)
    kept, fixed = (torch.empty(held.shape, dtype=torch.int32, device=device) for _ in range(2))
    total = torch.empty(held.shape, dtype=torch.float64, device=device)
    score = torch.empty(pos.shape if scored else 0, dtype=torch.float64, device=device)
    if kept.numel():
        mass, pos = (x if x.stride(-1) == 1 or width < 2 else x.contiguous() for x in (mass.float(), pos))
        more_crf = torch.empty(pos.shape, dtype=torch.float64, device=device)
        more_last = torch.empty(pos.shape, dtype=torch.int32, device=device)
        tracked, counted, summed = (x.contiguous().view(torch.uint8) for x in (tracked, counted, summed))
        _retain[(kept.numel(),)](
            mass, pos, held.contiguous(), *known, at, budget.contiguous(), keep.contiguous(), protected, prompt, t,
            tracked, counted, summed, decay.factor, decay.exponent, more_crf, more_last, drop.view(torch.uint8), kept,
            fixed, total, score, n, layers, heads, width, known[0].shape[1], slack, *mass.stride()[:3],
            *pos.stride()[:3], P=float(p), BIRTH=birth, SCORED=scored,
            **constants(decay.lam, len(decay.factor) // 2, layers * heads), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return drop, kept, fixed, total, score if scored else None


def constants(lam: float, steps: int, lanes: int) -> dict[str, float]:
    """Constants of the compiled kernels. λ is one of them, because an argument would be rounded to float32."""
    return {
        "LAM": float(lam),
        "LOG_LAM": math.log2(lam) if lam > 0 else 0.0,
        "STEPS": steps,
        "NOWHERE": NOWHERE,
        "LANES": power_of_2(lanes),
        "BLOCK": BLOCK,
    }


def variants() -> Iterator[Variant]:
    signature = {"p_mass": "*fp32"}
    signature |= dict.fromkeys(("p_tracked", "p_counted", "p_summed", "p_drop"), "*u8")
    signature |= dict.fromkeys(("p_crf", "p_more_crf", "p_factor", "p_total", "p_score"), "*fp64") | {"p_at": "*i64"}
    signature |= {name: "*i32" for name in _retain.arg_names if name.startswith("p_") and name not in signature}
    signature |= {name: "i32" for name in _retain.arg_names if name[0].islower() and name not in signature}
    for lam, birth, scored in ((0.6, 1, False), (0.0, 0, True), (1.0, 1, False)):
        values = {"P": 0.9, "BIRTH": birth, "SCORED": scored, **constants(lam, 1024, 256)}
        yield Variant(_retain, signature, values, {"num_warps": WARPS})
