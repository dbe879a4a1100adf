"""Which tokens move where when those that stay of a lane are gathered in its first slots."""

from __future__ import annotations

import torch
from torch import Tensor


def close_ranks(drop: Tensor, place: Tensor, pos: Tensor, count: Tensor, source: Tensor, moves: Tensor) -> Tensor:
    """Before an eviction: the tokens that stay take over the first slots of their list, in order.

    The token that is the r-th to stay shall lie where the r-th of the list lies now, place[r]: `gather` brings it
    there. So `place` stays as it is, and what the eviction frees are the last slots of the list.

    Args:
        drop: bool [Lt, B, Ht, S], the tokens that go, S at least the tokens of the longest list; anything behind the
            last token.
        place: int32 [Lt, B, Ht, W + 1], W at least S: the slot of every token.
        pos: int32 [Lt, B, Ht, W + 1], changed in place: the r-th is of the token that will lie at place[r]. Columns
            of slots that become free stay as they are.
        count: int32 [Lt, B, Ht], tokens of each list.
        source: int32 [Lt, B, Ht, W + 1], changed in place: where the token lies that moves to place[r]; anything but
            for the r that `moves` tells.
        moves: int32 [Lt, B, Ht, 2], changed in place: the r from the first number up to the second move, those before
            lie where they shall.

    Returns:
        bool [Lt, B, Ht, S]: the ends of the lists, which are to be evicted in place of `drop`; false behind the last
        token.
    """
    seen, last = drop.shape[-1], place.shape[-1] - 1
    column = torch.arange(seen, device=drop.device)
    listed = column < count[..., None]
    gone = listed & drop
    keep = listed & ~drop
    kept = keep.sum(-1, dtype=torch.int32)
    rank = torch.where(keep, keep.cumsum(-1) - 1, last)  # the last column means nothing
    source.scatter_(-1, rank, place[..., :seen])
    pos.scatter_(-1, rank, pos[..., :seen].clone())
    pos[..., last].fill_(-1)
    moves[..., 0] = torch.where(gone, column, count[..., None]).amin(-1)
    moves[..., 1] = kept
    return listed & (column >= kept[..., None])
