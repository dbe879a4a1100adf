"""Algorithm 1 of Crystal-KV for all heads, in one launch: update the tokens' score CRF, and select those to evict.

Twin: `minithink/ref/retain.py`, which says what CRF, τ and entries are.

To use it alone, copy this file, `_common.py` and `_entries.py`. With the GPU as torch's default device:

    >>> from types import SimpleNamespace
    >>> import torch
    >>> from minithink.kernels.retain import retain
    >>> age = torch.arange(1024, dtype=torch.int32)  # λ = 1/2: λ^age and λ^(1024·age), as factors times powers of 2
    >>> factor = torch.ones(2048, dtype=torch.float64)
    >>> decay = SimpleNamespace(lam=0.5, factor=factor, exponent=-torch.cat((age, 1024 * age)))
    >>> one = torch.ones(1, dtype=torch.int32)  # [N]
    >>> head = torch.ones(1, 1, 1, dtype=torch.int32)  # [L, N, H]
    >>> position = torch.full((1, 4), 2**31 - 1, dtype=torch.int32)  # [B, E]; these three are changed in place
    >>> crf = torch.zeros(1, 4, dtype=torch.float64)  # [B, E]
    >>> last = torch.zeros(1, 4, dtype=torch.int32)  # [B, E]
    >>> drop, *_ = retain(
    ...     mass=torch.tensor([[[[0.6, 0.1, 0.3]]]]),  # float32 [L, N, H, S]
    ...     pos=torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32),  # [L, N, H, S]
    ...     held=3 * head,
    ...     known=(position, crf, last),
    ...     at=torch.tensor([0]),  # [N] int64, the rows
    ...     budget=2 * head,
    ...     slack=1,
    ...     keep=2 * head,
    ...     protected=0 * one,
    ...     prompt=2 * one,
    ...     t=one,
    ...     tracked=one.bool(),
    ...     counted=head.bool(),
    ...     summed=one.bool(),
    ...     decay=decay,
    ...     p=0.8,
    ...     birth=0,
    ...     scored=False,
    ... )
    >>> drop.tolist()  # tokens 0 and 2 are hit, because they hold the share p of the attention; token 1 goes
    [[[[False, True, False]]]]

Layout: one program of one warp per lane (a head of a row and layer). It goes over the lane's tokens BLOCK at a time.
The mass of a token is the attention that it got. A token that goes is evicted. The steps are functions, named as in
the twin where it has them:

    sums      Add up the masses, and count the protected tokens.
    hit_set   Find v, the largest mass such that all masses ≥ v hold the share p of the sum. Masses are not negative,
              so as integers their bits have the same order. A bisection narrows the bits of v; after each pass both
              ends are masses of tokens. It ends when the ends are equal, after about 10 passes. Tokens of a mass
              above v are hit, and of those with mass v as many of the oldest as the share needs.
    used      Update CRF and τ. Each token finds its entry. Usually the token of column s is in entry s, because the
              lane and its entries have lost the same tokens. If another policy has evicted too, a binary search finds
              the entries of the block. Afterwards CRF and τ of the token are in entry s; unchanged values are not
              written.
    worst     Find the border where the tokens that go end, by estimates of log2 CRF in float32, which are cheap. If
              one token has to go, its estimate is close to the smallest. If several have to go, a bisection finds the
              estimate of the last one. Tokens close to this estimate are compared exactly: first by CRF, one class of
              equal CRF after the other, until enough tokens are found. In the last class τ decides, found by a
              bisection, too.
    remember  Mark the tokens that go. From the first block with such a token on, the other tokens close up.

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
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2, with_dense_columns
from minithink.kernels._entries import NOWHERE, search

BLOCK = 64  # tokens at a time
WARPS = 1
LARGEST = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(float("inf"))


class Decay(Protocol):
    """The powers of λ, as `minithink/ref/lrfu.py` describes them."""

    lam: float
    factor: Tensor  # float64
    exponent: Tensor  # int32


class Powers(NamedTuple):
    """In a kernel: the powers of λ."""

    p_factor: Any
    p_exponent: Any
    LAM: Any
    LOG_LAM: Any  # log2 λ
    STEPS: Any  # powers in each of the two tables


class Lane(NamedTuple):
    """In a kernel: CRF and τ of a lane's tokens. Columns from `room` on stand in `more`."""

    p_crf: Any
    p_last: Any
    p_more_crf: Any
    p_more_last: Any
    room: Any  # entries
    held: Any  # tokens
    t: Any  # the time


class Border(NamedTuple):
    """In a kernel: which tokens go.

    A token goes if its estimate is less than `below`, and stays if it is more than `above`. Of the others, a token
    goes if its (score, τ) is less than (score, last), or is equal and it is one of the `missing` oldest of such
    tokens. No token before the column `first` goes.
    """

    below: Any
    above: Any
    score: Any
    last: Any
    missing: Any
    first: Any


@triton.jit
def entries_of(p_budget, i_n, i_own, n, layers, heads, slack, LANES: tl.constexpr):
    """The first entry of a lane in its row's list, and the number of its entries. i_own: layer · heads + head."""
    lane = tl.arange(0, LANES)
    m = lane < layers * heads
    room = tl.load(p_budget + (lane // heads * n + i_n) * heads + lane % heads, m, other=0) + slack
    return tl.sum(tl.where(lane < i_own, room, 0)), tl.sum(tl.where(lane == i_own, room, 0))


@triton.jit
def decayed(crf, last, t, m, powers):
    """The CRF decayed to t, as value · 2^exponent: float64 and int32. Where m is false the value is 0."""
    age = tl.minimum(tl.maximum(t - last, 0), powers.STEPS * powers.STEPS - 1)
    near = age % powers.STEPS
    far = powers.STEPS + age // powers.STEPS
    factor = tl.load(powers.p_factor + near, m, other=0.0) * tl.load(powers.p_factor + far, m, other=0.0)
    exponent = tl.load(powers.p_exponent + near, m, other=0) + tl.load(powers.p_exponent + far, m, other=0)
    return crf * factor, exponent


@triton.jit
def scaled(value, exponent):
    """value · 2^exponent, float64. Powers below 2^−1022 or above 2^1023 are taken for these."""
    exponent = tl.minimum(tl.maximum(exponent, -1022), 1023)
    return value * ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def compared(crf, last, t, m, below, powers):
    """The decayed CRF divided by 2^⌊below⌋. `below` is a little less than log2 of the CRFs that are compared, so they
    fit a float64 however small they are, and their order is exact."""
    value, exponent = decayed(crf, last, t, m, powers)
    return scaled(value, exponent - tl.where(below > -INFINITY, tl.floor(below), 0.0).to(tl.int32))


@triton.jit
def estimate(crf, last, t, powers):
    """A cheap estimate of log2 of the decayed CRF, in float32: 0 to 0.0861 less. A number's bits, read as an integer,
    give its logarithm at powers of 2, and a straight line between them."""
    age = tl.maximum(t - last, 0)
    bits = crf.to(tl.float32).to(tl.int32, bitcast=True)
    score = bits.to(tl.float32) * 2.0**-23 + (age.to(tl.float32) * powers.LOG_LAM - 127)
    alive = crf > 0
    if powers.LAM == 0:
        alive &= age == 0
    return tl.where(alive, score, -INFINITY)


@triton.jit
def ordered(x):
    """float32 as int32 of the same order. The same operation on the integer gives back the bits of the number."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def tokens(lane, start, m, BLOCK: tl.constexpr):
    """CRF and τ of the columns from `start` on, read from their entries or from `more`."""
    column = start + tl.arange(0, BLOCK)
    crf = tl.load(lane.p_crf + column, m & (column < lane.room))
    last = tl.load(lane.p_last + column, m & (column < lane.room))
    if start + BLOCK > lane.room:
        m_more = m & (column >= lane.room)
        crf = tl.where(m_more, tl.load(lane.p_more_crf + column, m_more, other=0.0), crf)
        last = tl.where(m_more, tl.load(lane.p_more_last + column, m_more, other=0), last)
    return crf, last


@triton.jit
def last_of(lane, fixed, goes, low, high, below, score, powers, TAU: tl.constexpr, BLOCK: tl.constexpr):
    """The `goes`-th smallest key of the free tokens, and how many keys are smaller.

    A token's key is its ordered estimate or, if TAU, its τ; then only tokens with this score count. Keys lie between
    low and high. The free tokens are those of the columns from `fixed` on.
    """
    column = tl.arange(0, BLOCK)
    smaller = tl.zeros((), tl.int32)
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        count = tl.zeros((BLOCK,), tl.int32)
        at_most = tl.full((BLOCK,), -LARGEST - 1, tl.int32)  # the largest key up to the middle
        more = tl.full((BLOCK,), LARGEST, tl.int32)  # the smallest key above it
        for start in range(0, lane.held, BLOCK):
            m = (start + column >= fixed) & (start + column < lane.held)
            crf, tau = tokens(lane, start, m, BLOCK)
            if TAU:
                m &= compared(crf, tau, lane.t, m, below, powers) == score
                key = tau
            else:
                key = ordered(estimate(crf, tau, lane.t, powers))
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
def no_border(first):
    """The border if no token goes."""
    return Border(
        below=tl.full((), -INFINITY, tl.float32),
        above=tl.full((), -INFINITY, tl.float32),
        score=tl.full((), -INFINITY, tl.float64),
        last=tl.full((), -1, tl.int32),
        missing=tl.zeros((), tl.int32),
        first=first,
    )


@triton.jit
def worst(lane, fixed, goes, low, high, powers, BLOCK: tl.constexpr):
    """The border of the `goes` > 0 free tokens that go first: those of the smallest CRF, then τ, then the oldest.

    The free tokens are those of the columns from `fixed` on. Their ordered estimates lie between low and high.
    """
    column = tl.arange(0, BLOCK)
    if goes > 1:
        low, _ = last_of(lane, fixed, goes, low, high, 0.0, 0.0, powers, TAU=False, BLOCK=BLOCK)
    edge = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    margin = tl.where(edge > -INFINITY, tl.abs(edge) * 2.0**-20 + 0.09, 0.0)  # of estimates, with their rounding
    below = edge - margin
    above = edge + margin

    # One class of tokens near the border, which have equal scores, goes after the other.
    score = tl.full((), float("nan"), tl.float64)
    size = tl.zeros((), tl.int32)
    taken = tl.zeros((), tl.int32)  # tokens of the classes before
    oldest = tl.zeros((), tl.int32)
    newest = tl.zeros((), tl.int32)
    missing = goes
    first = lane.held
    while missing > size:
        taken += size  # the class goes as a whole, and the next one follows
        old_score = score
        score = tl.full((), INFINITY, tl.float64)
        size = tl.zeros((), tl.int32)
        sure = tl.zeros((BLOCK,), tl.int32)
        front = tl.full((BLOCK,), LARGEST, tl.int32)
        for start in range(0, lane.held, BLOCK):
            m = (start + column >= fixed) & (start + column < lane.held)
            crf, tau = tokens(lane, start, m, BLOCK)
            about = estimate(crf, tau, lane.t, powers)
            m_near = m & (about >= below) & (about <= above)
            sure += (m & (about < below)).to(tl.int32)
            front = tl.minimum(front, tl.where(m & (about <= above), start + column, front))
            if tl.max(m_near.to(tl.int32)) > 0:
                exact = compared(crf, tau, lane.t, m_near, below, powers)
                m_left = m_near & ~(exact <= old_score)  # at first all, for nothing is less than NaN
                least = tl.min(tl.where(m_left, exact, INFINITY))
                m_left &= exact == least
                if least < score:
                    score = least
                    size = tl.zeros((), tl.int32)
                    oldest = tl.full((), LARGEST, tl.int32)
                    newest = tl.zeros((), tl.int32)
                if least == score:
                    size += tl.sum(m_left.to(tl.int32))
                    oldest = tl.minimum(oldest, tl.min(tl.where(m_left, tau, LARGEST)))
                    newest = tl.maximum(newest, tl.max(tl.where(m_left, tau, 0)))
        missing = goes - tl.sum(sure) - taken
        first = tl.min(front)
    last, smaller = last_of(lane, fixed, missing, oldest, newest, below, score, powers, TAU=True, BLOCK=BLOCK)
    return Border(below=below, above=above, score=score, last=last, missing=missing - smaller, first=first)


@triton.jit
def gone_of(crf, tau, m, t, border, missing, powers):
    """The tokens of a block that go, int32, and how many tokens have the border's score and τ.

    m: free tokens. missing: how many of the tokens with the border's score and τ go in this block and later ones.
    """
    about = estimate(crf, tau, t, powers)
    m_near = m & (about >= border.below) & (about <= border.above)
    gone = (m & (about < border.below)).to(tl.int32)
    found = tl.zeros((), tl.int32)
    if tl.max(m_near.to(tl.int32)) > 0:
        exact = compared(crf, tau, t, m_near, border.below, powers)
        equal = (m_near & (exact == border.score) & (tau == border.last)).to(tl.int32)
        before = m_near & ((exact < border.score) | ((exact == border.score) & (tau < border.last)))
        gone += (before | ((equal > 0) & (tl.cumsum(equal) <= missing))).to(tl.int32)
        found = tl.sum(equal)
    return gone, found


@triton.jit
def clear(p_pos, start, room, BLOCK: tl.constexpr):
    """Empty the entries from `start` on, up to the first block without an entry in use: entries in use come first."""
    column = tl.arange(0, BLOCK)
    used = tl.full((), 1, tl.int32)
    while (start < room) & (used > 0):
        m = tl.load(p_pos + (start + column), start + column < room, other=NOWHERE) != NOWHERE
        tl.store(p_pos + (start + column), tl.full((BLOCK,), NOWHERE, tl.int32), m)
        used = tl.max(m.to(tl.int32))
        start += BLOCK


@triton.jit
def sums(p_mass, p_pos, held, protected, BLOCK: tl.constexpr):
    """Of a lane's tokens: how many are protected, the sum of the masses, and the bits of the largest one."""
    column = tl.arange(0, BLOCK)
    totals = tl.zeros((BLOCK,), tl.float64)
    top = tl.zeros((BLOCK,), tl.int32)
    fixed = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, held, BLOCK):
        m_in = start + column < held
        mass = tl.load(p_mass + (start + column), m_in, other=0.0)
        totals += mass.to(tl.float64)
        top = tl.maximum(top, mass.to(tl.int32, bitcast=True))
        fixed += (tl.load(p_pos + (start + column), m_in, other=NOWHERE) < protected).to(tl.int32)
    return tl.sum(fixed), tl.sum(totals), tl.max(top)


@triton.jit
def hit_set(p_mass, held, total, top, counts, P: tl.constexpr, BLOCK: tl.constexpr):
    """Find v, the largest mass such that all masses ≥ v hold the share p of the sum.

    Returns:
        The bits of v, the sum of the masses above v, and the share as a mass. If hits do not count or all masses are
        0, all masses have smaller bits, so no token is hit.
    """
    column = tl.arange(0, BLOCK)
    share = tl.full((), P, tl.float64) * total
    high = top
    more = tl.zeros((), tl.float64)  # sum of the masses above `high`
    # v is at least this mass: all smaller masses add up to less than half of 1 − p, the share that need not be hit.
    low = (total * ((1 - P) / 2) / tl.maximum(held, 1)).to(tl.float32).to(tl.int32, bitcast=True)
    if (counts == 0) | (total == 0):
        low = tl.full((), LARGEST, tl.int32)
        high = tl.full((), LARGEST, tl.int32)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        reached = tl.zeros((BLOCK,), tl.float64)
        less = tl.zeros((BLOCK,), tl.int32)
        at_least = tl.full((BLOCK,), LARGEST, tl.int32)
        for start in range(0, held, BLOCK):
            mass = tl.load(p_mass + (start + column), start + column < held, other=0.0)
            bits = mass.to(tl.int32, bitcast=True)
            m_counts = bits >= middle
            reached += tl.where(m_counts, mass, 0.0).to(tl.float64)
            at_least = tl.minimum(at_least, tl.where(m_counts, bits, LARGEST))
            less = tl.maximum(less, tl.where(m_counts, 0, bits))
        above = tl.sum(reached)
        enough = above >= share
        low = tl.where(enough, tl.min(at_least), low)
        high = tl.where(enough, high, tl.max(less))
        more = tl.where(enough, more, above)
    return low, more, share


@triton.jit
def recall(p_known, lane, pos, start, own, m_in, m_entry):
    """The entries of a block of tokens → what they hold (position, CRF, τ), and their numbers."""
    at = own
    known = tl.load(p_known + own, m_entry, other=NOWHERE)
    crf = tl.load(lane.p_crf + own, m_entry, other=0.0)
    last = tl.load(lane.p_last + own, m_entry, other=0)
    if tl.max(((known != pos) & (known != NOWHERE)).to(tl.int32)) > 0:
        at = search(p_known, pos, start, lane.room)
        m_at = m_in & (at < lane.room)
        known = tl.load(p_known + at, m_at, other=NOWHERE)
        crf = tl.load(lane.p_crf + at, m_at, other=0.0)
        last = tl.load(lane.p_last + at, m_at, other=0)
    return known, crf, last, at


@triton.jit
def hits(mass, v, more, share, older):
    """The tokens of a block that are hit, and the tokens of mass v that this block and earlier ones hold.

    Of the tokens of mass v as many of the oldest are hit as the share needs. older: those of earlier blocks.
    """
    bits = mass.to(tl.int32, bitcast=True)
    hit = bits > v
    equal = (bits == v).to(tl.int32)
    if tl.max(equal) > 0:
        before = more + (older + tl.cumsum(equal) - equal).to(tl.float64) * mass.to(tl.float64)
        hit |= (equal > 0) & (before < share)
        older += tl.sum(equal)
    return hit, older


@triton.jit
def used(
    p_mass,
    p_pos,
    p_known,
    p_score,
    lane,
    fixed,
    prompt,
    v,
    more,
    share,
    powers,
    BIRTH: tl.constexpr,
    SCORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update CRF and τ of a lane's tokens, and write them to the entries of their columns.

    Returns:
        The smallest and the largest ordered estimate of the free tokens, those of the columns from `fixed` on.
    """
    column = tl.arange(0, BLOCK)
    held = lane.held
    room = lane.room
    older = tl.zeros((), tl.int32)  # tokens of mass v seen before
    least = tl.full((BLOCK,), LARGEST, tl.int32)
    most = tl.full((BLOCK,), -LARGEST - 1, tl.int32)
    for start in range(0, held, BLOCK):
        own = start + column
        m_in = own < held
        m_entry = own < tl.minimum(held, room)
        pos = tl.load(p_pos + own, m_in, other=0)
        mass = tl.load(p_mass + own, m_in, other=0.0)
        known, crf, last, at = recall(p_known, lane, pos, start, own, m_in, m_entry)
        new = known != pos
        born = tl.maximum(pos - prompt + 1, 0)
        crf = tl.where(new, BIRTH, crf).to(tl.float64)
        last = tl.where(new, born, last)

        hit, older = hits(mass, v, more, share, older)
        if BIRTH == 1:
            hit &= born < lane.t
        # CRF_i(t) = λ^(t − τ_i)·CRF_i(τ_i) + 1
        value, exponent = decayed(crf, last, lane.t, hit, powers)
        crf = tl.where(hit, scaled(value, exponent) + 1, crf)
        last = tl.where(hit, lane.t, last)

        moved = (at != own) | new
        tl.debug_barrier()  # all threads have read the entries before one of them writes
        tl.store(p_known + own, pos, m_entry & moved)
        tl.store(lane.p_crf + own, crf, m_entry & (moved | hit))
        tl.store(lane.p_last + own, last, m_entry & (moved | hit))
        if start + BLOCK > room:
            tl.store(lane.p_more_crf + own, crf, m_in & (own >= room))
            tl.store(lane.p_more_last + own, last, m_in & (own >= room))
        if SCORED:
            value, exponent = decayed(crf, last, lane.t, m_in, powers)
            log_crf = tl.log2(tl.where(value > 0, value, 1.0)) + exponent
            tl.store(p_score + own, tl.where(value > 0, log_crf, -INFINITY), m_in)
        m_free = m_in & (own >= fixed)
        order = ordered(estimate(crf, last, lane.t, powers))
        least = tl.minimum(least, tl.where(m_free, order, LARGEST))
        most = tl.maximum(most, tl.where(m_free, order, -LARGEST - 1))
    return tl.min(least), tl.max(most)


@triton.jit
def remember(p_pos, p_known, p_drop, lane, fixed, border, summed, powers, BLOCK: tl.constexpr):
    """Mark the tokens that go, and close up the entries of the others → how many stay, and if `summed` their ΣCRF."""
    column = tl.arange(0, BLOCK)
    missing = border.missing
    begin = tl.where(summed, 0, border.first // BLOCK * BLOCK)
    kept = begin
    total = tl.zeros((), tl.float64)
    for start in range(begin, lane.held, BLOCK):
        own = start + column
        m_in = own < lane.held
        crf, tau = tokens(lane, start, m_in, BLOCK)
        pos = tl.load(p_pos + own, m_in, other=0)
        m_free = m_in & (own >= fixed)
        gone, found = gone_of(crf, tau, m_free, lane.t, border, missing, powers)
        missing -= found
        tl.store(p_drop + own, gone.to(tl.uint8), gone > 0)
        stay = (m_in & (gone == 0)).to(tl.int32)
        to = kept + tl.cumsum(stay) - 1
        m_stay = (stay > 0) & (to < lane.room)
        tl.debug_barrier()  # all threads have read the block before one of them writes
        tl.store(p_known + to, pos, m_stay)
        tl.store(lane.p_crf + to, crf, m_stay)
        tl.store(lane.p_last + to, tau, m_stay)
        kept += tl.sum(stay)
        if summed:
            value, exponent = decayed(crf, tau, lane.t, stay > 0, powers)
            total += tl.sum(scaled(value, exponent))
    clear(p_known, kept, lane.room, BLOCK)
    return kept, total


@triton.jit(do_not_specialize=["n"])
def _retain(
    p_mass,
    p_pos,
    p_held,
    p_known,
    p_crf,
    p_last,
    p_at,
    p_budget,
    p_keep,
    p_protected,
    p_prompt,
    p_t,
    p_tracked,
    p_counted,
    p_summed,
    p_factor,
    p_exponent,
    p_more_crf,
    p_more_last,
    p_drop,
    p_kept,
    p_fixed,
    p_total,
    p_score,
    n,
    layers,
    heads,
    width,
    entries,
    slack,
    mass_layer,
    mass_row,
    mass_head,
    pos_layer,
    pos_row,
    pos_head,
    P: tl.constexpr,
    BIRTH: tl.constexpr,
    LAM: tl.constexpr,
    LOG_LAM: tl.constexpr,
    STEPS: tl.constexpr,
    SCORED: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_n = i // heads % n
    i_layer = i // (n * heads)
    i_head = i % heads
    summed = tl.load(p_summed + i_n) > 0
    if tl.load(p_tracked + i_n) == 0:
        tl.store(p_kept + i, 0)
        tl.store(p_fixed + i, 0)
        tl.store(p_total + i, tl.zeros((), tl.float64))
        return

    first, room = entries_of(p_budget, i_n, i_layer * heads + i_head, n, layers, heads, slack, LANES)
    entry = tl.load(p_at + i_n) * entries + first
    p_known += entry
    p_mass += i_layer * mass_layer + i_n * mass_row + i_head * mass_head
    p_pos += i_layer * pos_layer + i_n * pos_row + i_head * pos_head
    p_drop += i * width
    p_score += i * width
    powers = Powers(p_factor, p_exponent, LAM, LOG_LAM, STEPS)
    lane = Lane(
        p_crf=p_crf + entry,
        p_last=p_last + entry,
        p_more_crf=p_more_crf + i * width,
        p_more_last=p_more_last + i * width,
        room=room,
        held=tl.load(p_held + i),
        t=tl.load(p_t + i_n),
    )

    fixed, total, top = sums(p_mass, p_pos, lane.held, tl.load(p_protected + i_n), BLOCK)
    goes = lane.held - tl.maximum(tl.load(p_keep + i), fixed)

    # lines 3 to 9 of algorithm 1
    v, more, share = hit_set(p_mass, lane.held, total, top, tl.load(p_counted + i), P, BLOCK)
    least, most = used(
        p_mass=p_mass,
        p_pos=p_pos,
        p_known=p_known,
        p_score=p_score,
        lane=lane,
        fixed=fixed,
        prompt=tl.load(p_prompt + i_n),
        v=v,
        more=more,
        share=share,
        powers=powers,
        BIRTH=BIRTH,
        SCORED=SCORED,
        BLOCK=BLOCK,
    )

    # line 10
    border = no_border(lane.held)
    if goes > 0:
        border = worst(lane, fixed, goes, least, most, powers, BLOCK)

    # lines 11 to 13
    kept, total = remember(p_pos, p_known, p_drop, lane, fixed, border, summed, powers, BLOCK)
    tl.store(p_kept + i, kept)
    tl.store(p_fixed + i, fixed)
    tl.store(p_total + i, total)


def retain(
    mass: Tensor,
    pos: Tensor,
    held: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    at: Tensor,
    budget: Tensor,
    slack: int,
    keep: Tensor,
    protected: Tensor,
    prompt: Tensor,
    t: Tensor,
    tracked: Tensor,
    counted: Tensor,
    summed: Tensor,
    decay: Decay,
    p: float,
    birth: int,
    scored: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """One step of algorithm 1, as `minithink/ref/retain.py` describes it.

    The twin also clears CRF and τ of empty entries; the kernel clears their positions only.
    """
    layers, n, heads = held.shape
    device = pos.device
    drop = torch.zeros(pos.shape, dtype=torch.bool, device=device)
    kept = torch.empty(held.shape, dtype=torch.int32, device=device)
    fixed = torch.empty(held.shape, dtype=torch.int32, device=device)
    total = torch.empty(held.shape, dtype=torch.float64, device=device)
    score = torch.empty(pos.shape if scored else 0, dtype=torch.float64, device=device)
    if kept.numel():
        mass = with_dense_columns(mass.float())
        pos = with_dense_columns(pos)
        _retain[(kept.numel(),)](
            mass,
            pos,
            held.contiguous(),
            *known,
            at,
            budget.contiguous(),
            keep.contiguous(),
            protected,
            prompt,
            t,
            tracked.contiguous().view(torch.uint8),
            counted.contiguous().view(torch.uint8),
            summed.contiguous().view(torch.uint8),
            decay.factor,
            decay.exponent,
            torch.empty(pos.shape, dtype=torch.float64, device=device),  # more_crf
            torch.empty(pos.shape, dtype=torch.int32, device=device),  # more_last
            drop.view(torch.uint8),
            kept,
            fixed,
            total,
            score,
            n,
            layers,
            heads,
            pos.shape[-1],
            known[0].shape[1],
            slack,
            *mass.stride()[:3],
            *pos.stride()[:3],
            P=float(p),
            BIRTH=birth,
            SCORED=scored,
            **constants(decay.lam, len(decay.factor) // 2, layers * heads),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return drop, kept, fixed, total, score if scored else None


def constants(lam: float, steps: int, lanes: int) -> dict[str, float]:
    """Constants of the compiled kernels. λ is one of them, because an argument would be rounded to float32."""
    return {
        "LAM": float(lam),
        "LOG_LAM": math.log2(lam) if lam > 0 else 0.0,
        "STEPS": steps,
        "LANES": power_of_2(lanes),
        "BLOCK": BLOCK,
    }


def variants() -> Iterator[Variant]:
    signature = {"p_mass": "*fp32", "p_at": "*i64"}
    signature |= dict.fromkeys(("p_tracked", "p_counted", "p_summed", "p_drop"), "*u8")
    signature |= dict.fromkeys(("p_crf", "p_more_crf", "p_factor", "p_total", "p_score"), "*fp64")
    signature |= {name: "*i32" for name in _retain.arg_names if name.startswith("p_") and name not in signature}
    signature |= {name: "i32" for name in _retain.arg_names if name[0].islower() and name not in signature}
    for lam, birth, scored in ((0.6, 1, False), (0.0, 0, True), (1.0, 1, False)):
        values = {"P": 0.9, "BIRTH": birth, "SCORED": scored, **constants(lam, 1024, 256)}
        yield Variant(_retain, signature, values, {"num_warps": WARPS})
