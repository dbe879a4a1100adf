"""Decide before an eviction which token moves to which slot. Twin: `minithink/ref/close_ranks.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.close_ranks import close_ranks
    >>> drop = torch.tensor([[[[False, True, False, False]]]])  # [Lt, B, Ht, S]
    >>> place = torch.tensor([[[[0, 1, 2, 3, 0]]]], dtype=torch.int32)  # [Lt, B, Ht, W + 1], slots
    >>> pos = torch.tensor([[[[5, 6, 7, 8, 0]]]], dtype=torch.int32)  # [Lt, B, Ht, W + 1], changed in place
    >>> count = torch.tensor([[[4]]], dtype=torch.int32)  # [Lt, B, Ht]
    >>> source = torch.zeros_like(place)  # changed in place
    >>> moves = torch.zeros(1, 1, 1, 2, dtype=torch.int32)  # [Lt, B, Ht, 2], changed in place
    >>> close_ranks(drop, place, pos, count, source, moves).tolist()  # the slots that become free
    [[[[False, False, False, True]]]]
    >>> source[..., 1:3].tolist(), moves.tolist()  # where the tokens for slots 1 and 2 come from
    ([[[[2, 3]]]], [[[[1, 3]]]])

Layout: a program per unit goes through its list once, BLOCK columns at a time. From the first dropped token on, it
writes the kept tokens of a block behind those kept before, in place. Then it flags the columns at the list's end.
Bound: memory. 2 bytes for each token up to the first dropped one (its flag, and the flag of the end), 18 behind it
(place read, its copy written, position read and written).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

BLOCK = 1024  # tokens of a list at a time


@triton.jit
def _close_ranks(p_drop, p_place, p_pos, p_count, p_source, p_moves, p_ends, seen, width, BLOCK: tl.constexpr):
    i_unit = tl.program_id(0).to(tl.int64)
    p_drop += i_unit * seen
    p_ends += i_unit * seen
    p_place += i_unit * width
    p_pos += i_unit * width
    p_source += i_unit * width
    end = tl.minimum(tl.load(p_count + i_unit), seen)
    column = tl.arange(0, BLOCK)

    start = tl.full((), 0, tl.int32)
    kept = tl.full((), 0, tl.int32)
    first = end
    while start < end:
        m_in = start + column < end
        m_drop = tl.load(p_drop + (start + column), m_in, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(m_in & m_drop, start + column, end)))
        keep = (m_in & ~m_drop).to(tl.int32)
        to = kept + tl.cumsum(keep, 0) - 1
        m_moves = (keep > 0) & (start + column > first)
        place = tl.load(p_place + (start + column), m_moves, other=0)
        pos = tl.load(p_pos + (start + column), m_moves, other=0)
        # Threads write where others read, so all of them read before any writes. Later blocks are not written to.
        tl.debug_barrier()
        tl.store(p_source + to, place, m_moves)
        tl.store(p_pos + to, pos, m_moves)
        kept += tl.sum(keep, 0)
        start += BLOCK
    tl.store(p_moves + 2 * i_unit, first)
    tl.store(p_moves + 2 * i_unit + 1, kept)

    start = tl.full((), 0, tl.int32)
    while start < seen:
        m_end = (start + column >= kept) & (start + column < end)
        tl.store(p_ends + (start + column), m_end.to(tl.uint8), start + column < seen)
        start += BLOCK


def close_ranks(drop: Tensor, place: Tensor, pos: Tensor, count: Tensor, source: Tensor, moves: Tensor) -> Tensor:
    """Before an eviction, assign the first slots of every list to the tokens that stay, in order.

    All tensors are contiguous, except that `drop` may have any strides. `pos`, `source` and `moves` are changed in
    place.

    Args:
        drop: bool [Lt, B, Ht, S], the tokens to evict, S at least the tokens of the longest list; anything behind the
            last token.
        place: int32 [Lt, B, Ht, W + 1], W at least S: the slot of every token.
        pos: int32 [Lt, B, Ht, W + 1]: column r becomes the position of the token that moves to place[r].
        count: int32 [Lt, B, Ht], tokens of each list.
        source: int32 [Lt, B, Ht, W + 1]: the slot from which the token for place[r] comes.
        moves: int32 [Lt, B, Ht, 2]: the tokens for place[r] move if moves[0] ≤ r < moves[1].

    Returns:
        bool [Lt, B, Ht, S]: the ends of the lists, which are to be evicted in place of `drop`.
    """
    drop = drop.contiguous()
    ends = torch.empty_like(drop)
    if units := count.numel():
        lists = drop.view(torch.uint8), place, pos, count, source, moves, ends.view(torch.uint8)
        _close_ranks[(units,)](*lists, drop.shape[-1], place.shape[-1], BLOCK)
    return ends


def variants() -> Iterator[Variant]:
    pointers = dict.fromkeys(("p_place", "p_pos", "p_count", "p_source", "p_moves"), "*i32")
    pointers |= {"p_drop": "*u8", "p_ends": "*u8", "seen": "i32", "width": "i32"}
    yield Variant(_close_ranks, pointers, {"BLOCK": BLOCK})
