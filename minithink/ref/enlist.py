"""New tokens at the ends of their lists: a decode step lists its tokens before they have a slot."""

from __future__ import annotations

import torch
from torch import Tensor


def enlist(
    place: Tensor, pos: Tensor, count: Tensor, at: Tensor, active: Tensor, lengths: Tensor, waiting: Tensor
) -> None:
    """Put one token of every row that brings one at the end of the lists of all its units.

    Its place is −1 − w, as for all tokens that lie in no page yet; w is its index in the buffer. Changed in place:
    place, pos and count, which are contiguous. S: columns of the lists; the last column means nothing.

    Args:
        place: int32 [Lt, B, Ht, S].
        pos: int32 [Lt, B, Ht, S], original positions.
        count: int32 [Lt, B, Ht], tokens in each list, fewer than S − 1.
        at: int64 [N], rows, each once.
        active: bool [N], those that bring a token.
        lengths: int64 [N], its position.
        waiting: int64 [N], its index in the buffer; 0 where there is none.
    """
    held = count[:, at]  # [Lt, N, Ht]
    column = torch.where(active[:, None], held, place.shape[-1] - 1)[..., None].long()
    for lists, value in ((place, -1 - waiting), (pos, lengths)):
        own = lists[:, at]
        own.scatter_(-1, column, value.to(torch.int32)[:, None, None].expand(column.shape))
        lists[:, at] = own
    pos[..., -1] = -1
    count[:, at] = held + active[:, None].to(torch.int32)
