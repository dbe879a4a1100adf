"""Move budgets to the KV heads that use theirs most (Crystal-KV §5.3, algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 2**34  # of B_total: targets are whole numbers of parts, so sums are exact in any order, and ties are ties


def reallocate(crf: Tensor, budget: Tensor, low: Tensor, high: Tensor, moves: Tensor, damping: float) -> Tensor:
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
    parts = (layer[..., None] * head * PARTS).round().clamp(min=1)
    x = _of_rows(parts)
    old = _of_rows(budget)
    low = _of_rows(low)
    high = _of_rows(high)
    total = old.sum(-1, keepdim=True)

    def excess(bound: Tensor) -> Tensor:
        """For each head i: (Σ B' − B_total)·x_i if head i is just at its bound, c = bound_i/x_i. [N, L·H]."""
        own = x[..., None]
        each = (bound[..., None] * x[:, None]).clamp(low[:, None] * own, high[:, None] * own)
        return each.sum(-1) - total * x

    at_low = excess(low) >= 0
    at_high = excess(high) <= 0
    free = ~(at_low | at_high)
    new = torch.where(at_low, low, torch.where(at_high, high, 0))
    # c = rest / Σ x of the free heads. So B' = rest·x / Σ x: divide without rounding.
    rest = total - new.sum(-1, keepdim=True)
    divisor = torch.where(free, x, 0).sum(-1, keepdim=True).clamp(min=1)
    new = torch.where(free, rest * x // divisor, new)
    remainder = torch.where(free, rest * x % divisor, -1)
    rank = remainder.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    new += rank < total - new.sum(-1, keepdim=True)

    scarce = moves[:, None] & (low.sum(-1, keepdim=True) <= total) & (total <= high.sum(-1, keepdim=True))
    new = torch.where(scarce, new, old).int()
    return new.unflatten(1, budget.shape[::2]).transpose(0, 1).contiguous()


def _of_rows(x: Tensor) -> Tensor:
    """[L, N, H] → int64 [N, L·H]."""
    return x.transpose(0, 1).flatten(1).long()


def _shares(crf: Tensor, budget: Tensor, damping: float, dim: int) -> Tensor:
    """w/Σw along a dimension, float64; w = B^(1−a)·(CRF/B)^a = B^(1−2a)·CRF^a."""
    weight = budget.double() ** (1 - 2 * damping) * crf**damping
    weight = torch.where((crf == 0).all(dim, keepdim=True), budget.double(), weight)
    return weight / weight.sum(dim, keepdim=True)
