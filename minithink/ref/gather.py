"""Keys and values move together: what other implementations do after an eviction, and this one only to measure it."""

from __future__ import annotations

import torch
from torch import Tensor


def gather(source: Tensor, moves: Tensor, place: Tensor, pool: Tensor, most: int) -> None:
    """Copy the tokens that move from slot to slot, in all lanes of their units.

    Args:
        source: int32 [..., W], slots as page · most + slot.
        moves: int32 [..., 2]: the r from the first number up to the second move, from source[r] to place[r].
        place: int32 [..., W]; where a token comes from is no place of an earlier r (`close_ranks` sees to it).
        pool: uint8 [pages, lanes, bytes of a page], changed in place; a page has `most` slots of equal size, of a
            multiple of 4 bytes. Its lanes may be some of a larger pool's.
        most: slots of a page.
    """
    rank = torch.arange(place.shape[-1], device=place.device)
    moving = (rank >= moves[..., :1]) & (rank < moves[..., 1:])
    slots = pool.unflatten(-1, (most, -1))  # [pages, lanes, most, bytes]
    start, end = source[moving].long(), place[moving].long()
    slots[end // most, :, end % most] = slots[start // most, :, start % most]
