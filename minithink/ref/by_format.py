"""Sort lists of tokens by format, so that attention reads the tokens of each format in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def by_format(
    place: Tensor, count: Tensor, rows: Tensor, page_format: Tensor, formats: Sequence[int], most: int, seen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the lists of some rows: the tokens of one format after the other, then those in the ring (the buffer),
    each oldest first.

    Args:
        place: int32 [Lt, B, Ht, W], page · most + slot of every token; negative for tokens in the ring; anything
            behind the last token.
        count: int32 [Lt, B, Ht], tokens of each list.
        rows: int64 [N], the rows whose lists are sorted.
        page_format: uint8 [pages], the index of each page's format.
        formats: the F indexes that tokens in pages may have, in the order wanted.
        most: slots that places count for a page.
        seen: S, at least the tokens of the longest list, at most W.

    Returns:
        place: int32 [Lt, N, Ht, S], sorted; anything behind the last token.
        column: int32 [Lt, N, Ht, S], the column of each of these tokens in its list; anything behind the last token.
        first: int32 [Lt, N, Ht, F + 2], where each format begins, then where the ring begins, then the number of
            tokens.
    """
    column = torch.arange(seen, dtype=torch.int32, device=place.device)
    listed = column < count[:, rows, :, None]  # [Lt, N, Ht, S]
    place = place[:, rows, :, :seen].masked_fill(~listed, -1)
    found = page_format[(place.clamp(min=0) // most).long()]
    kind = torch.full_like(place, len(formats))  # the ring
    for i, f in enumerate(formats):
        kind = torch.where((place >= 0) & (found == f), i, kind)
    kind = kind.masked_fill(~listed, len(formats) + 1)
    kinds = torch.arange(len(formats) + 2, device=place.device)
    first = (kind[..., None, :] < kinds[:, None]).sum(-1, dtype=torch.int32)
    order = kind.argsort(dim=-1, stable=True)
    return place.gather(-1, order), order.int(), first
