"""Decide which token moves to which slot, so that the remaining tokens of a lane fill its first slots.

For comparison only: minithink's slots are used again in place, so no token needs to move (`kv/compaction.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def close_ranks(
    drop: Tensor,
    place: Tensor,
    pos: Tensor,
    count: Tensor,
    source: Tensor,
    moves: Tensor,
) -> Tensor:
    """Before an eviction, assign the first slots of every list to the tokens that stay, in order.

    The r-th token that stays moves to place[r], the slot of the list's r-th token now; `gather` copies it there. So
    `place` does not change, and the eviction frees the last slots of the list.

    Args:
        drop: bool [Lt, B, Ht, S], the tokens to evict, S at least the tokens of the longest list; anything behind the
            last token.
        place: int32 [Lt, B, Ht, W + 1], W at least S: the slot of every token.
        pos: int32 [Lt, B, Ht, W + 1], changed in place: column r becomes the position of the token that moves to
            place[r]. Columns of slots that become free stay as they are.
        count: int32 [Lt, B, Ht], tokens of each list.
        source: int32 [Lt, B, Ht, W + 1], changed in place: the slot from which the token for place[r] comes. Means
            nothing outside of the range that `moves` gives.
        moves: int32 [Lt, B, Ht, 2], changed in place: the tokens for place[r] move if moves[0] ≤ r < moves[1]; those
            of smaller r already lie there.

    Returns:
        bool [Lt, B, Ht, S]: the ends of the lists, which are to be evicted in place of `drop`; False behind the last
        token.
    """
    seen = drop.shape[-1]
    last = place.shape[-1] - 1
    column = torch.arange(seen, device=drop.device)
    held = count[..., None]
    listed = column < held
    gone = listed & drop
    keep = listed & ~drop
    kept = keep.sum(-1, dtype=torch.int32)

    rank = keep.cumsum(-1) - 1
    rank = torch.where(keep, rank, last)  # the last column means nothing
    source.scatter_(-1, rank, place[..., :seen])
    old_pos = pos[..., :seen].clone()
    pos.scatter_(-1, rank, old_pos)
    pos[..., last].fill_(-1)

    first_gone = torch.where(gone, column, held)
    moves[..., 0] = first_gone.amin(-1)
    moves[..., 1] = kept
    return listed & (column >= kept[..., None])
