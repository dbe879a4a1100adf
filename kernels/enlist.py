"""Append new tokens to their lists. Twin: `minithink/ref/enlist.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.enlist import enlist
    >>> place = torch.tensor([[[[4, 5, 0, 0]]]], dtype=torch.int32)  # [Lt, B, Ht, S], changed in place
    >>> pos = torch.tensor([[[[0, 1, 0, 0]]]], dtype=torch.int32)  # [Lt, B, Ht, S], changed in place
    >>> count = torch.tensor([[[2]]], dtype=torch.int32)  # [Lt, B, Ht], changed in place
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> active = torch.tensor([True])  # [N]
    >>> lengths = torch.tensor([7])  # [N] int64, the new token's position
    >>> waiting = torch.tensor([0])  # [N] int64, its index in the buffer
    >>> enlist(place, pos, count, at, active, lengths, waiting)
    >>> place[..., :3].tolist(), pos[..., :3].tolist()
    ([[[[4, 5, -1]]]], [[[[0, 1, 7]]]])

Layout: a program takes UNITS units. For each it reads the count and writes place and position behind the list's end.
Bound: the launch. 8 bytes are read and 12 written for each unit, in sectors of 32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

UNITS = 128  # of a program


@triton.jit(do_not_specialize=["n", "rows", "units"])
def _enlist(
    p_place, p_pos, p_count, p_at, p_active, p_lengths, p_waiting, units, n, rows, heads, width, UNITS: tl.constexpr
):
    i = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    m = i < units
    i_n = i // heads % n
    m = m & (tl.load(p_active + i_n, m, other=0) != 0)
    row = tl.load(p_at + i_n, m, other=0)
    i_unit = (i // (n * heads) * rows + row) * heads + i % heads  # of all rows; int64
    count = tl.load(p_count + i_unit, m, other=0)
    o_end = i_unit * width + count
    tl.store(p_place + o_end, (-1 - tl.load(p_waiting + i_n, m, other=0)).to(tl.int32), m)
    tl.store(p_pos + o_end, tl.load(p_lengths + i_n, m, other=0).to(tl.int32), m)
    tl.store(p_count + i_unit, count + 1, m)


def enlist(
    place: Tensor, pos: Tensor, count: Tensor, at: Tensor, active: Tensor, lengths: Tensor, waiting: Tensor
) -> None:
    """Append one new token of every active row to the lists of all its units.

    The token's place is −1 − w, as of all tokens that lie in no page yet; w is its index in the buffer. Changed in
    place: place, pos and count, which are contiguous. S: columns of the lists; the last column means nothing.

    Args:
        place: int32 [Lt, B, Ht, S].
        pos: int32 [Lt, B, Ht, S], original positions.
        count: int32 [Lt, B, Ht], tokens in each list, fewer than S − 1.
        at: int64 [N], rows, each once.
        active: bool [N], rows that have a new token.
        lengths: int64 [N], the new token's position.
        waiting: int64 [N], the new token's index in the buffer; 0 without a buffer.
    """
    layers, rows, heads = count.shape
    units = layers * len(at) * heads
    n = len(at)
    if not units:
        return
    at, active, lengths, waiting = (x.contiguous() for x in (at, active, lengths, waiting))
    _enlist[(triton.cdiv(units, UNITS),)](
        p_place=place,
        p_pos=pos,
        p_count=count,
        p_at=at,
        p_active=active.view(torch.uint8),
        p_lengths=lengths,
        p_waiting=waiting,
        units=units,
        n=n,
        rows=rows,
        heads=heads,
        width=place.shape[-1],
        UNITS=UNITS,
    )


def variants() -> Iterator[Variant]:
    pointers = dict.fromkeys(("p_place", "p_pos", "p_count"), "*i32") | {"p_active": "*u8"}
    pointers |= dict.fromkeys(("p_at", "p_lengths", "p_waiting"), "*i64")
    yield Variant(
        _enlist, pointers | dict.fromkeys(("units", "n", "rows", "heads", "width"), "i32"), {"UNITS": UNITS}
    )
