"""Give slots to listed tokens that have none: how a decode step finds room for its new tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(
    live: Tensor,
    taken: Tensor,
    filled: Tensor,
    page_thought: Tensor,
    page_format: Tensor,
    page: Tensor,
    stack: Tensor,
    top: Tensor,
    place: Tensor,
    count: Tensor,
    at: Tensor,
    active: Tensor,
    thought: Tensor,
    formats: Tensor,
    slots: Tensor,
    overflow: Tensor,
    size: int,
    lanes: int,
) -> Tensor:
    """Give a slot to every token of the rows `at` that has none. These are the last tokens of the lists, with place
    −1 − index.

    The tokens of a unit first take free slots in the unit's own pages: pages of the tokens' format and thought type,
    in the order of the table. So slots of evicted tokens are used again in place. For the remaining tokens the unit
    opens pages. Units draw pages from the stack in their order. A drawn page is entered in the first column of the
    table that holds none.

    A token for which there is no page, or no column, lies in the trash page P from then on, and `overflow` becomes
    true. P is also the number of pages; what the tensors hold at P means nothing.

    The tensors up to `place`, and `overflow`, are changed in place.

    Args:
        live: bool [P + 1, stride], the slots that hold a token.
        taken: int32 [P + 1], slots of each page that hold a token.
        filled: int16 [P + 1], slots of each page that were ever written: the last one's number plus 1.
        page_thought: uint8 [P + 1], thought type of each page's tokens.
        page_format: uint8 [P + 1], format of each page, 255 for free pages.
        page: int32 [Lt, B, Ht, width], the tables; P: no page.
        stack: int32 [P + 1], the free pages, the next one last.
        top: int64 [], free pages on the stack.
        place: int32 [Lt, B, Ht, S], page · stride + slot of every listed token; the last column means nothing.
        count: int32 [Lt, B, Ht], tokens in each list.
        at: int64 [N], rows, each once.
        active: bool [N]; rows that are not active stay as they are.
        thought: uint8 [B], the type of each row's new tokens.
        formats: int64 [types], the format of each type.
        slots: int32 [formats], slots of a page in each format.
        overflow: bool [], becomes true if a token found no room; never becomes false.
        size: number of indices that tokens without a slot may have.
        lanes: lanes that share a page.

    Returns:
        int64 [Lt, N, Ht, size], for each index the slot of its token in the first lane of the unit, numbered within
        the format: page · lanes · slots + slot. A slot of page P if there is no such token, or no room for it.
    """
    none = stack.numel() - 1
    stride = live.shape[1]
    device = place.device
    kind = thought[at]  # [N]
    fmt = formats[kind.long()]  # [N]
    kind = kind[:, None, None]  # [N, 1, 1]
    per_page = slots[fmt].long()  # [N]
    per_page = per_page[:, None, None]
    fmt = fmt[:, None, None]
    here = page[:, at].long()  # [Lt, N, Ht, width]
    listed = place[:, at]  # [Lt, N, Ht, S]

    # The last `size` columns of each list, and the tokens there that wait for a slot.
    held = count[:, at, :, None]
    column = held - size + torch.arange(size, device=device)  # [Lt, N, Ht, size]
    own = listed.gather(-1, column.clamp(min=0))
    waits = (column >= 0) & (own < 0)
    waits = waits & active[:, None, None]
    rank = waits.cumsum(-1) - 1

    # The token of rank i takes the i-th free slot.
    fits = page_format[here] == fmt
    fits = fits & (page_thought[here] == kind)
    fits = fits & (here != none)  # [Lt, N, Ht, width]
    usable = torch.arange(stride, device=device) < per_page[..., None]
    free = ~live[here] & usable & fits[..., None]  # [Lt, N, Ht, width, stride]
    free = free.flatten(-2)
    free = free.cumsum(-1, dtype=torch.int32)  # [Lt, N, Ht, width · stride], up to and with each slot
    room = free[..., -1:].long()
    found = waits & (rank < room)
    which = torch.searchsorted(free, rank.int() + 1)  # [Lt, N, Ht, size]
    which = which.clamp(max=free.shape[-1] - 1)
    holder = here.gather(-1, which // stride)
    number = torch.where(found, holder, none)
    slot = torch.where(found, which % stride, 0)

    # The remaining tokens fill pages from the stack.
    lacking = waits & ~found
    if lacking.device.type != "cpu" or bool(lacking.any()):  # on a CPU the question is cheaper than opening nothing
        unused = here == none  # columns of the tables
        beyond = waits.sum(-1, keepdim=True) - room  # [Lt, N, Ht, 1]
        wanted = -(-beyond.clamp(min=0) // per_page)
        asked = torch.minimum(wanted, unused.sum(-1, keepdim=True))
        rest = (rank - room).clamp(min=0)
        nth = rest // per_page  # of the unit's new pages the one in which the token lies

        # draw: the rank of a token's page among those drawn, 0 the next.
        drawn = asked.flatten().cumsum(0)
        drawn = drawn.view(asked.shape)
        draw = drawn - asked + nth
        opened = lacking & (nth < asked) & (draw < top)
        overflow |= (lacking & ~opened).any()
        level = (top - 1 - draw).clamp(min=0)
        number = torch.where(opened, stack[level].long(), number)
        slot = torch.where(opened, rest % per_page, slot)
        top -= torch.minimum(asked.sum(), top)

        fresh = torch.where(opened, number, none)
        live[fresh] = False
        taken[fresh] = 0
        filled[fresh] = 0
        page_thought[fresh] = torch.where(opened, kind, 0)
        own_format = torch.where(opened, fmt, 255)
        page_format[fresh] = own_format.to(torch.uint8)

        entry = torch.searchsorted(unused.cumsum(-1), nth + 1)  # the first columns that hold no page
        entry = torch.where(opened, entry, page.shape[-1])
        table = page[:, at]
        table = torch.nn.functional.pad(table, (0, 1))  # one more column takes the writes that do not count
        table.scatter_(-1, entry, fresh.to(torch.int32))
        page[:, at] = table[..., :-1]
        found = found | opened

    live[number, slot] = found
    pages = number.flatten()
    taken.index_add_(0, pages, found.flatten().to(torch.int32))
    last = torch.where(found, slot + 1, 0)
    last = last.to(torch.int16)
    filled.scatter_reduce_(0, pages, last.flatten(), "amax")

    into = torch.where(waits, column, place.shape[-1] - 1)
    given = number * stride + slot
    listed.scatter_(-1, into, given.to(torch.int32))
    place[:, at] = listed

    # By index: first the trash for all, then the slots of the tokens that waited.
    in_page = lanes * per_page
    shape = (*waits.shape[:3], size + 1)  # the last index takes the writes that do not count
    trash = none * lanes * per_page
    out = trash.expand(shape).clone()
    index = torch.where(waits, -1 - own, size).long()
    out.scatter_(-1, index, number * in_page + slot)
    return out[..., :size]
