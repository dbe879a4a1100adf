"""Select the tokens of the selection window that go (DynTS §4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.ref.keep_best import keep_best


def select(
    score: Tensor,
    pos: Tensor,
    held: Tensor,
    at: Tensor,
    first: Tensor,
    local: Tensor,
    keep: Tensor,
    due: Tensor,
) -> Tensor:
    """Keep the best tokens of the selection window in every lane that is due; its other tokens go.

    The selection window lies between the question, the tokens at positions below `first`, and the last `local`
    tokens. Of equal scores the older token stays.

    Args:
        score: float32 [B, T], by row and position.
        pos: int32 [Lt, N, Ht, S], positions of the tokens held, ascending; anything behind the last token.
        held: int32 [Lt, N, Ht], tokens of each lane.
        at: int64 [N], the rows, each once.
        first: int32 [N], the first position behind the question.
        local: int32 [Lt, N, Ht], W_l.
        keep: int32 [Lt, N, Ht], k; if the window has fewer tokens, all of them stay.
        due: bool [Lt, N, Ht]; a lane that is not due loses nothing.

    Returns:
        bool [Lt, N, Ht, S], the tokens that go.
    """
    column = torch.arange(pos.shape[-1], device=pos.device)
    end = held - local  # [Lt, N, Ht]
    window = column < end[..., None]
    window = window & (pos >= first[:, None, None])
    of_row = score[at][None, :, None]
    of_row = of_row.expand(*pos.shape[:3], -1)  # [Lt, N, Ht, T]
    position = pos.clamp(0, score.shape[1] - 1)
    own = of_row.gather(-1, position.long())  # [Lt, N, Ht, S]
    best = keep_best(own, window, keep.clamp(min=0))
    return window & ~best & due[..., None]
