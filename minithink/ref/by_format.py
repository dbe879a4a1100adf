"""Sort lists of tokens by format, so that attention reads the tokens of each format in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def by_format(
    place: Tensor,
    count: Tensor,
    rows: Tensor,
    page_format: Tensor,
    formats: Sequence[int],
    stride: int,
    seen: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the lists of some rows: the tokens of one format after the other, then those in the ring (the buffer),
    each oldest first.

    Args:
        place: int32 [Lt, B, Ht, W], page · stride + slot of every token; negative for tokens in the ring; anything
            behind the last token.
        count: int32 [Lt, B, Ht], tokens of each list.
        rows: int64 [N], the rows whose lists are sorted.
        page_format: uint8 [pages], the index of each page's format.
        formats: the F indexes that tokens in pages may have, in the order wanted.
        stride: slots that places count for a page.
        seen: S, at least the tokens of the longest list, at most W.

    Returns:
        place: int32 [Lt, N, Ht, S], sorted; anything behind the last token.
        column: int32 [Lt, N, Ht, S], the column of each of these tokens in its list; anything behind the last token.
        first: int32 [Lt, N, Ht, F + 2], where each format begins, then where the ring begins, then the number of
            tokens.
    """
    column = torch.arange(seen, dtype=torch.int32, device=place.device)
    held = count[:, rows, :, None]
    listed = column < held  # [Lt, N, Ht, S]
    place = place[:, rows, :, :seen]
    place = place.masked_fill(~listed, -1)
    in_page = place >= 0

    # kind: 0 to F − 1 for the formats in their order, F for the ring, F + 1 where there is no token.
    ring = len(formats)
    page = place.clamp(min=0) // stride
    found = page_format[page.long()]
    kind = torch.full_like(place, ring)
    for i, f in enumerate(formats):
        kind = torch.where(in_page & (found == f), i, kind)
    kind = kind.masked_fill(~listed, ring + 1)

    kinds = torch.arange(ring + 2, device=place.device)
    smaller = kind[..., None, :] < kinds[:, None]  # [Lt, N, Ht, F + 2, S]
    first = smaller.sum(-1, dtype=torch.int32)
    order = kind.argsort(dim=-1, stable=True)
    return place.gather(-1, order), order.int(), first
