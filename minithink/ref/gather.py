"""Move keys and values together after an eviction, as other implementations do. For comparison only."""

from __future__ import annotations

import torch
from torch import Tensor


def gather(
    source: Tensor,
    moves: Tensor,
    place: Tensor,
    pool: Tensor,
    stride: int,
) -> None:
    """Copy tokens from slot to slot, in all lanes of their units.

    Args:
        source: int32 [..., W], slots as page · stride + slot.
        moves: int32 [..., 2]: for moves[0] ≤ r < moves[1] a token moves from source[r] to place[r].
        place: int32 [..., W], slots. No place[r] is the source of a later r (`close_ranks` ensures this).
        pool: uint8 [pages, lanes, bytes of a page], changed in place. A page has `stride` slots of equal size, a
            multiple of 4 bytes. The lanes may be a part of a larger pool's lanes.
        stride: slots of a page.
    """
    first = moves[..., :1]
    end = moves[..., 1:]
    rank = torch.arange(place.shape[-1], device=place.device)
    moving = (rank >= first) & (rank < end)
    slots = pool.unflatten(-1, (stride, -1))  # [pages, lanes, stride, bytes]
    old = source[moving].long()
    new = place[moving].long()
    moved = slots[old // stride, :, old % stride]
    slots[new // stride, :, new % stride] = moved
