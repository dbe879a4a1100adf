"""Keep the positions and scores of the tokens that stay, without gaps (H2O)."""

from __future__ import annotations

import torch
from torch import Tensor

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others


def carry(
    score: Tensor,
    pos: Tensor,
    stay: Tensor,
    known: tuple[Tensor, Tensor],
    at: Tensor,
    active: Tensor,
) -> None:
    """Keep the positions and scores of the tokens that stay, oldest first. `known` is changed in place.

    Args:
        score: float32 [L, N, H, S].
        pos: int32 [L, N, H, S], positions, ascending.
        stay: bool [L, N, H, S]; at most E tokens of each active lane.
        known: int32 and float32 [L, B, H, E]. Entries behind the last token get NOWHERE and 0.
        at: int64 [N], the rows, each once.
        active: bool [N]. In other rows nothing changes.
    """
    entries = known[0].shape[-1]
    rank = stay.cumsum(-1) - 1  # [L, N, H, S]
    rank = torch.where(stay, rank, entries)  # one more entry takes the tokens that go
    rank = rank.clamp(max=entries)
    shape = (*rank.shape[:3], entries + 1)
    rows = active[:, None, None]
    for x, of_columns, nothing in zip(known, (pos, score), (NOWHERE, 0), strict=True):
        new = torch.full(shape, nothing, dtype=x.dtype, device=x.device)
        new.scatter_(-1, rank, of_columns)
        x[:, at] = torch.where(rows, new[..., :-1], x[:, at])
