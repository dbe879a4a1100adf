"""Append new tokens to their lists: a decode step lists its tokens before they have a slot."""

from __future__ import annotations

import torch
from torch import Tensor


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
    held = count[:, at]  # [Lt, N, Ht]
    column = torch.where(active[:, None], held, place.shape[-1] - 1)[..., None].long()
    for lists, value in ((place, -1 - waiting), (pos, lengths)):
        own = lists[:, at]
        own.scatter_(-1, column, value.to(torch.int32)[:, None, None].expand(column.shape))
        lists[:, at] = own
    pos[..., -1] = -1
    count[:, at] = held + active[:, None].to(torch.int32)
