"""Move budgets to the KV heads that use theirs most (Crystal-KV §5.3, algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 2**34  # of B_total: targets are whole numbers of parts, so sums are exact in any order, and ties are ties


def reallocate(
    crf: Tensor,
    budget: Tensor,
    low: Tensor,
    high: Tensor,
    moves: Tensor,
    damping: float,
) -> Tensor:
    """New budgets of all KV heads of N rows. The sum of a row's budgets, B_total, stays as it is.

        η = ΣCRF / ΣB,  w = B^(1−a)·η^a           of a layer i among all, and of a head j among those of its layer
        x_ij = B_total · w_i/Σ_i w_i · w_ij/Σ_j w_ij
        B'_ij = clamp(c·x_ij, low_ij, high_ij)    with the one c for which Σ B' = B_total

    With damping a = 1 the weight w is η: that is algorithm 2 to the letter. If all layers, or all heads of a layer,
    have a CRF of 0, their shares stay. B' is rounded to whole tokens once: down, then up for the largest remainders,
    among equals for the lower layer, then for the lower head.

    Args:
        crf: float64 [L, N, H], ΣCRF over the tokens of each head, not negative.
        budget: int32 [L, N, H], B, at least 1.
        low, high: int32 [L, N, H], least and most tokens of each head; low ≤ high, and a row's sums are below 2^28.
        moves: bool [N]. Other rows keep their budgets, and so do rows whose bounds allow no budgets of sum B_total.
        damping: a in (0, 1].

    Returns:
        int32 [L, N, H].
    """
    layer = _shares(crf.sum(-1), budget.sum(-1), damping, dim=0)  # lines 1 and 2: [L, N]
    head = _shares(crf, budget, damping, dim=-1)  # lines 3 and 4: [L, N, H]
    parts = layer[..., None] * head * PARTS
    parts = parts.round().clamp(min=1)
    x = _of_rows(parts)
    old = _of_rows(budget)
    low = _of_rows(low)
    high = _of_rows(high)
    total = old.sum(-1, keepdim=True)  # [N, 1]
    least = low.sum(-1, keepdim=True)
    greatest = high.sum(-1, keepdim=True)

    def excess(bound: Tensor) -> Tensor:
        """For each head i: (Σ B' − B_total)·x_i if head i is just at its bound, c = bound_i/x_i. [N, L·H]."""
        own = x[..., None]
        each = bound[..., None] * x[:, None]  # [N, L·H of i, L·H]
        each = each.clamp(low[:, None] * own, high[:, None] * own)
        return each.sum(-1) - total * x

    at_low = excess(low) >= 0
    at_high = excess(high) <= 0
    free = ~(at_low | at_high)
    bound = torch.where(at_high, high, 0)
    new = torch.where(at_low, low, bound)
    # c = rest / Σ x of the free heads. So B' = rest·x / Σ x: divide without rounding.
    rest = total - new.sum(-1, keepdim=True)
    divisor = torch.where(free, x, 0).sum(-1, keepdim=True)
    divisor = divisor.clamp(min=1)
    new = torch.where(free, rest * x // divisor, new)
    remainder = torch.where(free, rest * x % divisor, -1)

    # The largest remainders are rounded up.
    order = remainder.sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(dim=-1)
    missing = total - new.sum(-1, keepdim=True)
    new += rank < missing

    feasible = (least <= total) & (total <= greatest)
    new = torch.where(moves[:, None] & feasible, new, old)
    layers, _, heads = budget.shape
    new = new.int().unflatten(1, (layers, heads))
    return new.transpose(0, 1).contiguous()


def _of_rows(x: Tensor) -> Tensor:
    """[L, N, H] → int64 [N, L·H]."""
    x = x.transpose(0, 1)
    return x.flatten(1).long()


def _shares(crf: Tensor, budget: Tensor, damping: float, dim: int) -> Tensor:
    """w/Σw along a dimension, float64; w = B^(1−a)·(CRF/B)^a = B^(1−2a)·CRF^a."""
    b = budget.double()
    weight = b ** (1 - 2 * damping) * crf**damping
    unused = (crf == 0).all(dim, keepdim=True)
    weight = torch.where(unused, b, weight)
    return weight / weight.sum(dim, keepdim=True)
