"""Scores that grow step by step: attention that each token of a lane has received so far (H2O)."""

from __future__ import annotations

import torch
from torch import Tensor

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others


def accumulate(
    mass: Tensor,
    pos: Tensor,
    held: Tensor,
    known: tuple[Tensor, Tensor],
    at: Tensor,
) -> Tensor:
    """Add a step's attention to the scores.

        S_i ← S_i + A_i      for every token i

    Tokens are found by their position, so other policies may have evicted some of them. A token that is not found is
    new: its score is this step's attention. Nothing is written; `carry` keeps the scores of the tokens that stay.

    Args:
        mass: float32 [L, N, H, S], attention A; anything behind the last token.
        pos: int32 [L, N, H, S], the tokens' positions, ascending; anything behind the last token.
        held: int32 [L, N, H], tokens of each lane.
        known: int32 and float32 [L, B, H, E], E entries of positions (ascending, then NOWHERE) and scores.
        at: int64 [N], the rows.

    Returns:
        float32 [L, N, H, S], the scores; 0 behind the last token.
    """
    positions, scores = known
    there = positions[:, at]  # [L, N, H, E]
    score = scores[:, at]
    entry = torch.searchsorted(there, pos.contiguous())  # [L, N, H, S]
    entry = entry.clamp(max=there.shape[-1] - 1)
    found = there.gather(-1, entry) == pos
    old = torch.where(found, score.gather(-1, entry), 0)
    column = torch.arange(pos.shape[-1], device=pos.device)
    listed = column < held[..., None]
    return torch.where(listed, old + mass, 0)
