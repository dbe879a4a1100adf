"""Append new tokens to their lists: a decode step lists its tokens before they have a slot."""

from __future__ import annotations

import torch
from torch import Tensor


def enlist(
    place: Tensor,
    pos: Tensor,
    count: Tensor,
    at: Tensor,
    active: Tensor,
    lengths: Tensor,
    waiting: Tensor,
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
    held = count[:, at]  # [Lt, N, Ht]
    joins = active[:, None]
    nowhere = place.shape[-1] - 1
    column = torch.where(joins, held, nowhere)
    column = column[..., None].long()  # [Lt, N, Ht, 1]
    for lists, value in ((place, -1 - waiting), (pos, lengths)):
        own = lists[:, at]
        new = value.to(torch.int32)[:, None, None]
        own.scatter_(-1, column, new.expand(column.shape))
        lists[:, at] = own
    pos[..., -1] = -1
    count[:, at] = held + joins.to(torch.int32)
