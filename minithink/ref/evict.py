"""Eviction: tokens leave their lists; their slots, empty pages and unused rows of key scales become free."""

from __future__ import annotations

import torch
from torch import Tensor


def evict(
    drop: Tensor,
    at: Tensor,
    place: Tensor,
    pos: Tensor,
    count: Tensor,
    live: Tensor,
    taken: Tensor,
    page_format: Tensor,
    page: Tensor,
    stack: Tensor,
    top: Tensor,
    scale_row: Tensor,
    row_uses: Tensor,
    row_stack: Tensor,
    row_top: Tensor,
    most: int,
) -> None:
    """Evict tokens of the rows `at`: what `PagedStore.evict` does.

    The remaining entries of a list close up, oldest first. Empty pages go back to the stack, unit by unit, in the
    order of the tables. Unused rows of key scales go back to their stack in the order of their last tokens. Units
    come in the order of `drop`.

    All tensors but `drop` and `at` are changed in place. P: number of pages; page number P means none. Q: number of
    rows of key scales; a row number of Q or more means none. What the tensors hold at P, at Q and in the last column
    of the lists means nothing.

    Args:
        drop: bool [Lt, N, Ht, S], S at least the tokens of the longest list; anything behind the last token.
        at: int64 [N], the rows, each once.
        place: int32 [Lt, B, Ht, W + 1], W at least S: page · most + slot of every token; negative for tokens in a
            buffer, which hold no slot. Afterwards anything may stand behind the last token.
        pos: int32 [Lt, B, Ht, W + 1], the tokens' positions, −1 behind the last token.
        count: int32 [Lt, B, Ht], tokens of each list.
        live: bool [P + 1, most], the slots that hold a token.
        taken: int32 [P + 1], slots of each page that hold a token: at least one for every page in a table.
        page_format: uint8 [P + 1], becomes 255 for free pages.
        page: int32 [Lt, B, Ht, width], the tables.
        stack: int32 [P + 1], the free pages, the next one last.
        top: int64 [], free pages on the stack.
        scale_row: int32 [P + 1 or more, most], the row of key scales of every slot's token, which tokens of a unit
            share; becomes Q + 1 (none) for evicted tokens. [0, most] if no keys share scales.
        row_uses: int32 [Q + 1], tokens that use each row of key scales.
        row_stack: int32 [Q + 1], the free rows of key scales, the next one last.
        row_top: int64 [], free rows of key scales.
        most: slots of a page in the format with the most.
    """
    none = stack.numel() - 1
    seen = drop.shape[-1]
    last = place.shape[-1] - 1
    here = place[:, at, :, :seen]  # [Lt, N, Ht, S]
    where = pos[:, at, :, :seen]
    listed = where >= 0
    keep = listed & ~drop
    free = listed & drop & (here >= 0)
    number = torch.where(free, here // most, none).long()
    slot = torch.where(free, here % most, 0).long()

    # The lists close up.
    rank = keep.cumsum(-1) - 1
    column = torch.where(keep, rank, last)
    new_place = place[:, at]
    new_place.scatter_(-1, column, here)
    place[:, at] = new_place
    new_pos = torch.full_like(pos[:, at], -1)
    new_pos.scatter_(-1, column, where)
    new_pos[..., last] = -1
    pos[:, at] = new_pos
    count[:, at] = keep.sum(-1, dtype=count.dtype)

    # Slots become free, and pages without tokens.
    live[number, slot] = False
    freed = free.flatten().to(torch.int32)
    taken.index_add_(0, number.flatten(), -freed)
    tables = page[:, at]  # [Lt, N, Ht, width]
    empty = taken[tables.long()] == 0
    empty = (tables != none) & empty
    _push(stack, top, tables, empty)
    closed = torch.where(empty, tables, none)
    page_format[closed.long()] = 255
    page[:, at] = tables.masked_fill(empty, none)
    if scale_row.numel():
        release_rows(
            page=number,
            slot=slot,
            which=free,
            scale_row=scale_row,
            row_uses=row_uses,
            row_stack=row_stack,
            row_top=row_top,
        )


def release_rows(
    page: Tensor,
    slot: Tensor,
    which: Tensor,
    scale_row: Tensor,
    row_uses: Tensor,
    row_stack: Tensor,
    row_top: Tensor,
) -> None:
    """Take tokens off their rows of key scales, and free each row with its last token.

    A row is freed once, also if several of its tokens go together. The last six arguments are those of `evict`.

    Args:
        page, slot: int64, any shape: where tokens lie, in the order in which their rows go to the stack.
        which: bool, the tokens that go; the page of the other tokens is P (none).
    """
    none = row_stack.numel() - 1
    row = scale_row[page, slot].flatten()
    scaled = which.flatten() & (row < none)
    row = torch.where(scaled, row, none).long()
    real = row < none
    scale_row[page, slot] = torch.full((), none + 1, dtype=torch.int32, device=row.device)
    row_uses.index_add_(0, row, -real.to(torch.int32))

    # A row goes to the stack with the last of its tokens that go now.
    number = torch.arange(len(row), device=row.device)
    last = torch.empty(none + 1, dtype=torch.int64, device=row.device)
    last.scatter_reduce_(0, row, number, "amax", include_self=False)
    unused = row_uses[row] == 0
    gone = real & unused & (last[row] == number)
    _push(row_stack, row_top, row, gone)


def _push(stack: Tensor, top: Tensor, numbers: Tensor, which: Tensor) -> None:
    """Put the numbers for which `which` is true on a stack, in their order."""
    none = stack.numel() - 1
    rank = which.flatten().cumsum(0) - 1
    rank = rank.view(which.shape)
    entry = torch.where(which, top + rank, none)
    pushed = torch.where(which, numbers, none)
    stack[entry] = pushed.to(stack.dtype)
    top += which.sum()
