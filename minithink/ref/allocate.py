"""A slot for one new token of every unit: how a decode step finds room in the pages."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(
    live: Tensor, taken: Tensor, filled: Tensor, page_thought: Tensor, page_format: Tensor, page: Tensor,
    stack: Tensor, top: Tensor, fmt: Tensor, thought: Tensor, valid: Tensor, slots: Tensor, overflow: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take a slot for one token of every unit that is valid, and open a page where none has room.

    The first page of the unit, in the order of its table, that holds tokens of this format and thought type and has a
    free slot; in it the first free slot. Where there is none, a free page: the units draw from the stack in their
    order, and enter the page in the first column of their table that holds none. That is what `BlockTable.missing`,
    `open` and `take` do for one token, but in one go for units of different formats.

    A unit that needs a page and finds the stack empty or its table full gets nothing, and `overflow` becomes true.

    The tensors up to `top`, and `overflow`, are changed in place. P: pages; page number P means none, and what the
    tensors hold at P belongs to nobody.

    Args:
        live: bool [P + 1, most], the slots that hold a token.
        taken: int32 [P + 1], how many these are.
        filled: int16 [P + 1], slots that were ever written.
        page_thought: uint8 [P + 1].
        page_format: uint8 [P + 1], 255 for pages that are free.
        page: int32 [Lt, B, Ht, width], the tables.
        stack: int32 [P + 1], the free pages, the next one last.
        top: int64 [], how many these are.
        fmt: uint8 [Lt, B, Ht], index of the format wanted.
        thought: uint8 [Lt, B, Ht], the thought type of the token.
        valid: bool [Lt, B, Ht].
        slots: int32 [formats], slots of a page in each format.
        overflow: bool [], becomes true if a unit found no room; never false.

    Returns:
        page and slot, int64 [Lt, B, Ht]; P and 0 where not valid, and where there was no room.
    """
    none = stack.numel() - 1
    here = page.long()
    fits = (page_format[here] == fmt[..., None]) & (page_thought[here] == thought[..., None])
    room = (page != none) & fits & (taken[here] < slots[fmt.long()][..., None])  # [Lt, B, Ht, width]
    unused = page == none
    found = room.any(-1)

    # a new page for those that find none: rank 1 draws first
    want = valid & ~found & unused.any(-1)
    rank = want.flatten().cumsum(0).view(want.shape)
    opened = want & (rank <= top)
    new = torch.where(opened, stack[(top - rank).clamp(min=0)], none)
    top -= opened.sum()
    overflow |= (valid & ~found & ~opened).any()
    number = new.long()
    live[number] = False
    taken[number] = 0
    filled[number] = 0
    page_thought[number] = torch.where(opened, thought, 0)
    page_format[number] = torch.where(opened, fmt, 255)
    column = torch.where(found, room.to(torch.uint8).argmax(-1), unused.to(torch.uint8).argmax(-1))[..., None]
    page.scatter_(-1, column, torch.where(opened[..., None], new[..., None], page.gather(-1, column)))

    # A page with room has a free slot among those of its format: the first of all its slots is one of them.
    taking = valid & (found | opened)
    number = torch.where(taking, page.gather(-1, column)[..., 0].long(), none)
    slot = torch.where(taking, live[number].to(torch.uint8).argmin(-1), 0)
    live[number, slot] = taking
    taken.index_add_(0, number.flatten(), taking.flatten().to(torch.int32))
    last = torch.where(taking, slot + 1, 0).to(torch.int16)
    filled.scatter_reduce_(0, number.flatten(), last.flatten(), "amax")
    return number, slot
