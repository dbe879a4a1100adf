"""Move budgets to the KV heads that use theirs most (Crystal-KV's algorithm 2). Twin: `minithink/ref/reallocate.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.reallocate import reallocate
    >>> crf = torch.tensor([[[3.0, 1.0]]], dtype=torch.float64)  # [L, N, H], what the tokens of each head are worth
    >>> budget = torch.tensor([[[4, 4]]], dtype=torch.int32)  # [L, N, H]
    >>> low = torch.ones_like(budget)
    >>> high = torch.full_like(budget, 8)
    >>> moves = torch.tensor([True])  # [N]
    >>> reallocate(crf, budget, low, high, moves, damping=1.0).tolist()
    [[[6, 2]]]

Layout: one launch, a program per row, which holds all heads of all layers in registers. Rows whose budgets do not
move are copied.
Finding c: take the c that is right if no head is at a bound, and clamp the budgets that it gives. If they add up to
more than B_total, c is too large, and the heads at their lower bounds stay there. If they add up to less, c is too
small, and the heads at their upper bounds stay there. Leave these heads out and repeat. A round fixes at least one
head, and few rounds are needed. The twin tries every bound instead.
Rounding: the largest remainders are found bit by bit, without sorting. Targets are whole numbers of parts of B_total
(2^−34 each), and all later arithmetic is exact. So a budget differs from the twin's only if the last bit of a power
changes a target, and this target decides between two remainders.
Bound: the launch. 20 bytes are read and 4 written for each head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

PARTS = 2**34  # of B_total
WARPS = 4


@triton.jit
def _shares(crf, budget, A: tl.constexpr, AXIS: tl.constexpr):
    """w/Σw along an axis; w = B^(1−2a)·CRF^a. 0 where all budgets are 0, which is padding."""
    exponent = tl.full((), 1 - 2 * A, tl.float64) * tl.log2(tl.maximum(budget, 1).to(tl.float64))
    exponent += tl.full((), A, tl.float64) * tl.log2(tl.where(crf > 0, crf, 1.0))
    weight = tl.where(crf > 0, tl.exp2(exponent), 0.0)
    none = tl.sum(crf, AXIS, keep_dims=True) == 0
    weight = tl.where(none, budget.to(tl.float64), weight)
    total = tl.sum(weight, AXIS, keep_dims=True)
    return weight / tl.where(total > 0, total, 1.0)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _targets(crf, budget, m, A: tl.constexpr, PARTS: tl.constexpr):
    """x of every head, in whole parts of B_total: int64 [LAYERS, HEADS], at least 1 where m."""
    of_layer = _shares(tl.sum(crf, 1, keep_dims=True), tl.sum(budget, 1, keep_dims=True), A, 0)  # [LAYERS, 1]
    of_head = _shares(crf, budget, A, 1)
    x = (of_layer * of_head * PARTS + 0.5).to(tl.int64)  # not negative: this rounds
    return tl.where(m, tl.maximum(x, 1), 0)


@triton.jit
def _at_bounds(x, low, high, m, total):
    """The budgets of the heads that stay at a bound, 0 for the others, and int32 which heads are not at a bound."""
    new = tl.zeros_like(x)
    free = m.to(tl.int32)
    fixed = tl.full((), 1, tl.int32)  # heads that the last round found at a bound
    while fixed > 0:
        # c = rest / divisor. Compare c·x with the bounds without dividing.
        rest = total - _sum(new)
        divisor = _sum(tl.where(free > 0, x, 0))
        least = low * divisor
        want = rest * x
        most = high * divisor
        excess = _sum(tl.where(free > 0, tl.minimum(tl.maximum(want, least), most), 0)) - rest * divisor
        m_low = (free > 0) & (want <= tl.where(excess >= 0, least, -1))
        m_high = (free > 0) & (want >= tl.where(excess <= 0, most, 0x7FFFFFFFFFFFFFFF))
        new = tl.where(m_low, low, tl.where(m_high, high, new))
        fixed = _sum((m_low | m_high).to(tl.int32))
        free = tl.where(m_low | m_high, 0, free)
    return new, free


@triton.jit
def _rounded(x, new, free, total, number, last, BITS: tl.constexpr):
    """c·x for the free heads, as whole tokens: rounded down, then up for the largest remainders.

    number: of each head, int32, at most `last`. new: the budgets of the other heads.
    """
    rest = total - _sum(new)
    divisor = tl.maximum(_sum(tl.where(free > 0, x, 0)), 1)
    whole = rest * x // divisor
    new = tl.where(free > 0, whole, new)
    # No two heads have equal keys: the key is the remainder, and then the distance from the last head.
    key = tl.where(free > 0, (rest * x - whole * divisor) * (last + 1) + last - number, -1)
    missing = total - _sum(new)
    border = tl.zeros_like(missing)  # the smallest key that still gets a token
    for i_bit in range(BITS):
        higher = border + (tl.full((), 1, tl.int64) << (BITS - 1 - i_bit))
        border = tl.where(_sum((key >= higher).to(tl.int64)) >= missing, higher, border)
    return new + (key >= tl.where(missing > 0, border, 0x7FFFFFFFFFFFFFFF)).to(tl.int64)


@triton.jit(do_not_specialize=["n"])
def _reallocate(
    p_crf,
    p_budget,
    p_low,
    p_high,
    p_moves,
    p_new,
    n,
    layers,
    heads,
    A: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
):
    i_n = tl.program_id(0)
    layer = tl.arange(0, LAYERS)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    m = (layer < layers) & (head < heads)
    at = (layer.to(tl.int64) * n + i_n) * heads + head
    budget = tl.load(p_budget + at, m, other=0).to(tl.int64)
    low = tl.load(p_low + at, m, other=0).to(tl.int64)
    high = tl.load(p_high + at, m, other=0).to(tl.int64)
    total = _sum(budget)
    if (tl.load(p_moves + i_n) == 0) | (_sum(low) > total) | (_sum(high) < total):
        tl.store(p_new + at, budget.to(tl.int32), m)
        return

    crf = tl.load(p_crf + at, m, other=0.0)
    x = _targets(crf, budget, m, A, PARTS)
    new, free = _at_bounds(x, low, high, m, total)
    new = _rounded(x, new, free, total, layer * HEADS + head, LAYERS * HEADS - 1, BITS)
    tl.store(p_new + at, new.to(tl.int32), m)


def reallocate(crf: Tensor, budget: Tensor, low: Tensor, high: Tensor, moves: Tensor, damping: float) -> Tensor:
    """New budgets of all KV heads of N rows. The sum of a row's budgets, B_total, stays as it is.

    Args:
        crf: float64 [L, N, H], ΣCRF over the tokens of each head, not negative.
        budget: int32 [L, N, H], B, at least 1.
        low, high: int32 [L, N, H], least and most tokens of each head; low ≤ high, and a row's sums are below 2^28.
        moves: bool [N]. Other rows keep their budgets, and so do rows whose bounds allow no budgets of sum B_total.
        damping: a in (0, 1].

    Returns:
        int32 [L, N, H].
    """
    layers, n, heads = budget.shape
    new = torch.empty_like(budget, memory_format=torch.contiguous_format)
    if new.numel():
        _reallocate[(n,)](
            crf.contiguous(),
            budget.contiguous(),
            low.contiguous(),
            high.contiguous(),
            moves.view(torch.uint8).contiguous(),
            new,
            n,
            layers,
            heads,
            A=float(damping),
            **_sizes(layers, heads),
            num_warps=WARPS,
        )
    return new


def _sizes(layers: int, heads: int) -> dict[str, int]:
    rows = power_of_2(layers)
    columns = power_of_2(heads)
    # A remainder is below the sum of all targets, 2^34 and at most one more for each head.
    return {"PARTS": PARTS, "BITS": 35 + (rows * columns).bit_length(), "LAYERS": rows, "HEADS": columns}


def variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("p_budget", "p_low", "p_high", "p_new"), "*i32")
    signature |= {"p_crf": "*fp64", "p_moves": "*u8"}
    signature |= dict.fromkeys(("n", "layers", "heads"), "i32")
    for damping, layers, heads in ((0.5, 8, 4), (1.0, 64, 8)):
        yield Variant(_reallocate, signature, {"A": damping, **_sizes(layers, heads)}, {"num_warps": WARPS})
