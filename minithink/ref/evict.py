"""Tokens leave their lists, their slots are free, and so are the pages that are empty then."""

from __future__ import annotations

import torch
from torch import Tensor


def evict(
    drop: Tensor, place: Tensor, pos: Tensor, count: Tensor, live: Tensor, taken: Tensor, page_format: Tensor,
    page: Tensor, stack: Tensor, top: Tensor, most: int,
) -> None:  # fmt: skip
    """Forget tokens, as `PagedStore.evict` does; rows of key scales are left to the caller.

    What is left of a list moves together, oldest first. Pages that are empty go back to the stack in the order in
    which they stand in the tables, unit by unit.

    All tensors but `drop` are changed in place. P: pages; page number P means none, and what the tensors hold at P
    belongs to nobody, as does the last column of the lists.

    Args:
        drop: bool [Lt, B, Ht, S], S at least the tokens of the longest list; anything behind the last token.
        place: int32 [Lt, B, Ht, W + 1], W at least S: page · most + slot of every token, or negative for those in a
            buffer, which hold no slot. Afterwards anything may stand behind the last token.
        pos: int32 [Lt, B, Ht, W + 1], the tokens' positions, −1 behind the last token.
        count: int32 [Lt, B, Ht], tokens of each list.
        live: bool [P + 1, most], the slots that hold a token.
        taken: int32 [P + 1], how many these are: at least one for every page in a table.
        page_format: uint8 [P + 1], becomes 255 for pages that are free.
        page: int32 [Lt, B, Ht, width], the tables.
        stack: int32 [P + 1], the free pages, the next one last.
        top: int64 [], how many these are.
        most: slots of a page in the format with the most.
    """
    none, seen, last = stack.numel() - 1, drop.shape[-1], place.shape[-1] - 1
    here, at = place[..., :seen].clone(), pos[..., :seen].clone()
    keep = (at >= 0) & ~drop

    column = torch.where(keep, keep.cumsum(-1) - 1, last)
    place.scatter_(-1, column, here)
    pos.fill_(-1).scatter_(-1, column, at)
    pos[..., last] = -1
    count.copy_(keep.sum(-1))

    free = (at >= 0) & drop & (here >= 0)
    number = torch.where(free, here // most, none).long()
    live[number, torch.where(free, here % most, 0).long()] = False
    taken.index_add_(0, number.flatten(), -free.flatten().to(torch.int32))

    empty = (page != none) & (taken[page.long()] == 0)
    rank = empty.flatten().cumsum(0).view(empty.shape) - 1
    stack[torch.where(empty, top + rank, none)] = torch.where(empty, page, none)
    top += empty.sum()
    page_format[torch.where(empty, page, none).long()] = 255
    page.masked_fill_(empty, none)
