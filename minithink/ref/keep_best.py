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
    order = score.masked_fill(~candidate, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    # Candidates of score −∞ may stand behind columns that are no candidates: move the latter behind all candidates.
    order = order.gather(-1, (~candidate.gather(-1, order)).to(torch.uint8).sort(dim=-1, stable=True).indices)
    ranks = torch.arange(score.shape[-1], device=score.device)
    kept = torch.zeros_like(candidate).scatter(-1, order, ranks < count[..., None])
    return kept & candidate
