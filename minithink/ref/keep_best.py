"""Select the best candidates of every lane: how policies choose the tokens that stay."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_best(score: Tensor, candidate: Tensor, count: Tensor) -> Tensor:
    """The `count` best candidates of every lane; of equal scores the older token is kept.

    Args:
        score: [..., S] float, columns oldest first; anything (also NaN) where there is no candidate.
        candidate: bool [..., S].
        count: integers [...]; if a lane has fewer candidates, all are kept.

    Returns:
        bool [..., S], the candidates that are kept.
    """
    score = score.masked_fill(~candidate, -torch.inf)
    order = score.sort(dim=-1, descending=True, stable=True).indices
    # Candidates of score −∞ may stand behind columns that are no candidates: move the latter behind all candidates.
    other = ~candidate.gather(-1, order)
    candidates_first = other.to(torch.uint8).sort(dim=-1, stable=True).indices
    order = order.gather(-1, candidates_first)
    rank = torch.arange(score.shape[-1], device=score.device)
    best = rank < count[..., None]
    kept = torch.zeros_like(candidate)
    kept = kept.scatter(-1, order, best)
    return kept & candidate
