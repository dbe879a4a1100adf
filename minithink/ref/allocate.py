"""Slots for tokens that are listed and lie in no page yet: how a decode step finds room."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(
    live: Tensor, taken: Tensor, filled: Tensor, page_thought: Tensor, page_format: Tensor, page: Tensor,
    stack: Tensor, top: Tensor, place: Tensor, count: Tensor, at: Tensor, active: Tensor, thought: Tensor,
    formats: Tensor, slots: Tensor, overflow: Tensor, size: int, lanes: int,
) -> Tensor:  # fmt: skip
    """Give a slot to every token of some rows that has none: the last of its list, whose place is −1 − index.

    A unit's tokens take, in their order, the free slots of its pages that hold tokens of their format and thought
    type, in the order of its table: evicted slots are used again in place. For the tokens that are left it opens
    pages: the units draw from the stack in their order, and enter a page in the first column of their table that
    holds none.

    A token for which there is no page, or no column, lies in the page P from then on, which belongs to nobody, and
    `overflow` becomes true. P: pages; what the tensors hold at P means nothing.

    The tensors up to `place`, and `overflow`, are changed in place.

    Args:
        live: bool [P + 1, most], the slots that hold a token.
        taken: int32 [P + 1], how many these are.
        filled: int16 [P + 1], slots that were ever written.
        page_thought: uint8 [P + 1].
        page_format: uint8 [P + 1], 255 for pages that are free.
        page: int32 [Lt, B, Ht, width], the tables; P: no page.
        stack: int32 [P + 1], the free pages, the next one last.
        top: int64 [], how many these are.
        place: int32 [Lt, B, Ht, S], page · most + slot of every listed token; the last column belongs to nobody.
        count: int32 [Lt, B, Ht], tokens that each unit lists.
        at: int64 [N], rows, each once.
        active: bool [N]; the others stay as they are.
        thought: uint8 [B], the type of each row's tokens.
        formats: int64 [types], the format of each type.
        slots: int32 [formats], slots of a page in each.
        overflow: bool [], becomes true if a token found no room; never false.
        size: indices that there are.
        lanes: that share a page.

    Returns:
        By index the number of each token's slot among those of its format, in the first lane of its unit: page ·
        lanes · slots + slot, int64 [Lt, N, Ht, size]; of the page P where there is no token, or no room.
    """
    none, most = stack.numel() - 1, live.shape[1]
    kind = thought[at]  # [N]
    fmt = formats[kind.long()]
    per_page = slots[fmt].long()[:, None, None]  # [N, 1, 1]
    here = page[:, at].long()  # [Lt, N, Ht, width]

    column = count[:, at, :, None] - size + torch.arange(size, device=place.device)  # [Lt, N, Ht, size]
    listed = place[:, at]
    own = listed.gather(-1, column.clamp(min=0))
    waits = (column >= 0) & (own < 0) & active[:, None, None]
    rank = waits.cumsum(-1) - 1

    # the token of rank i takes the i-th free slot
    fits = (page_format[here] == fmt[:, None, None]) & (page_thought[here] == kind[:, None, None]) & (here != none)
    free = ~live[here] & (torch.arange(most, device=place.device) < per_page[..., None]) & fits[..., None]
    free = free.flatten(-2).cumsum(-1, dtype=torch.int32)  # [Lt, N, Ht, width · most], up to and with each slot
    room = free[..., -1:].long()
    found = waits & (rank < room)
    which = torch.searchsorted(free, rank.int() + 1).clamp(max=free.shape[-1] - 1)
    number = torch.where(found, here.gather(-1, which // most), none)
    slot = torch.where(found, which % most, 0)

    # those that are left fill pages that are drawn: drawn[0] is the next of the stack
    lacking = waits & ~found
    if lacking.device.type != "cpu" or bool(lacking.any()):  # on a CPU it costs less to ask than to open nothing
        unused = here == none
        wanted = -(-(waits.sum(-1, keepdim=True) - room).clamp(min=0) // per_page)
        asked = torch.minimum(wanted, unused.sum(-1, keepdim=True))  # [Lt, N, Ht, 1]
        rest = (rank - room).clamp(min=0)
        draw = asked.flatten().cumsum(0).view(asked.shape) - asked + rest // per_page
        opened = lacking & (rest // per_page < asked) & (draw < top)
        overflow |= (lacking & ~opened).any()
        number = torch.where(opened, stack[(top - 1 - draw).clamp(min=0)].long(), number)
        slot = torch.where(opened, rest % per_page, slot)
        top -= torch.minimum(asked.sum(), top)
        fresh = torch.where(opened, number, none)
        live[fresh] = False
        taken[fresh] = 0
        filled[fresh] = 0
        page_thought[fresh] = torch.where(opened, kind[:, None, None], 0)
        page_format[fresh] = torch.where(opened, fmt[:, None, None], 255).to(torch.uint8)
        entry = torch.searchsorted(unused.cumsum(-1), rest // per_page + 1)  # the first columns that hold no page
        table = torch.nn.functional.pad(page[:, at], (0, 1))  # a column for what is not opened
        table.scatter_(-1, torch.where(opened, entry, page.shape[-1]), fresh.to(torch.int32))
        page[:, at] = table[..., :-1]
        found = found | opened

    live[number, slot] = found
    taken.index_add_(0, number.flatten(), found.flatten().to(torch.int32))
    last = torch.where(found, slot + 1, 0).to(torch.int16)
    filled.scatter_reduce_(0, number.flatten(), last.flatten(), "amax")

    listed.scatter_(-1, torch.where(waits, column, place.shape[-1] - 1), (number * most + slot).to(torch.int32))
    place[:, at] = listed
    base = (none * lanes * per_page).expand(*waits.shape[:3], size + 1).clone()
    index = torch.where(waits, -1 - own, size).long()
    return base.scatter_(-1, index, number * (lanes * per_page) + slot)[..., :size]
