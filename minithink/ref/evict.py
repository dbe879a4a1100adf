"""Eviction: tokens leave their lists; their slots, empty pages and unused groups of keys become free."""

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
    group_of: Tensor,
    group_uses: Tensor,
    group_stack: Tensor,
    group_top: Tensor,
    stride: int,
) -> None:
    """Evict tokens of the rows `at`: what `PagedStore.evict` does.

    The remaining entries of a list close up, oldest first. Empty pages go back to the stack, unit by unit, in the
    order of the tables. Unused groups of keys go back to their stack in the order of their last tokens. Units come in
    the order of `drop`.

    All tensors but `drop` and `at` are changed in place. P: number of pages; page number P means none. Q: number of
    groups of keys by token; a group number of Q or more means none. What the tensors hold at P, at Q and in the last
    column of the lists means nothing.

    Args:
        drop: bool [Lt, N, Ht, S], S at least the tokens of the longest list; anything behind the last token.
        at: int64 [N], the rows, each once.
        place: int32 [Lt, B, Ht, W + 1], W at least S: page · stride + slot of every token; negative for tokens in a
            buffer, which hold no slot. Afterwards anything may stand behind the last token.
        pos: int32 [Lt, B, Ht, W + 1], the tokens' positions, −1 behind the last token.
        count: int32 [Lt, B, Ht], tokens of each list.
        live: bool [P + 1, stride], the slots that hold a token.
        taken: int32 [P + 1], slots of each page that hold a token: at least one for every page in a table.
        page_format: uint8 [P + 1], becomes 255 for free pages.
        page: int32 [Lt, B, Ht, width], the tables.
        stack: int32 [P + 1], the free pages, the next one last.
        top: int64 [], free pages on the stack.
        group_of: int32 [P + 1 or more, stride], the group of every slot's token: tokens of a unit whose keys share a
            row of scales, which has the group's number; becomes Q + 1 (none) for evicted tokens. [0, stride] if no
            keys are by token.
        group_uses: int32 [Q + 1], tokens held of each group.
        group_stack: int32 [Q + 1], the free numbers of groups, the next one last.
        group_top: int64 [], free numbers of groups.
        stride: slots of a page in the format with the most, and what places count for a page of any format.
    """
    none = stack.numel() - 1
    seen = drop.shape[-1]
    last = place.shape[-1] - 1
    here = place[:, at, :, :seen]  # [Lt, N, Ht, S]
    where = pos[:, at, :, :seen]
    listed = where >= 0
    keep = listed & ~drop
    free = listed & drop & (here >= 0)
    number = torch.where(free, here // stride, none).long()
    slot = torch.where(free, here % stride, 0).long()

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
    if group_of.numel():
        release_groups(
            page=number,
            slot=slot,
            which=free,
            group_of=group_of,
            group_uses=group_uses,
            group_stack=group_stack,
            group_top=group_top,
        )


def release_groups(
    page: Tensor,
    slot: Tensor,
    which: Tensor,
    group_of: Tensor,
    group_uses: Tensor,
    group_stack: Tensor,
    group_top: Tensor,
) -> None:
    """Take tokens off their groups of keys, and free each group with its last token.

    A group is freed once, also if several of its tokens go together. The last four arguments are those of `evict`.

    Args:
        page, slot: int64, any shape: where tokens lie, in the order in which their groups go to the stack.
        which: bool, the tokens that go; the page of the other tokens is P (none).
    """
    none = group_stack.numel() - 1
    group = group_of[page, slot].flatten()
    grouped = which.flatten() & (group < none)
    group = torch.where(grouped, group, none).long()
    real = group < none
    group_of[page, slot] = torch.full((), none + 1, dtype=torch.int32, device=group.device)
    group_uses.index_add_(0, group, -real.to(torch.int32))

    # A group goes to the stack with the last of its tokens that go now.
    number = torch.arange(len(group), device=group.device)
    last = torch.empty(none + 1, dtype=torch.int64, device=group.device)
    last.scatter_reduce_(0, group, number, "amax", include_self=False)
    unused = group_uses[group] == 0
    gone = real & unused & (last[group] == number)
    _push(group_stack, group_top, group, gone)


def _push(stack: Tensor, top: Tensor, numbers: Tensor, which: Tensor) -> None:
    """Put the numbers for which `which` is true on a stack, in their order."""
    none = stack.numel() - 1
    rank = which.flatten().cumsum(0) - 1
    rank = rank.view(which.shape)
    entry = torch.where(which, top + rank, none)
    pushed = torch.where(which, numbers, none)
    stack[entry] = pushed.to(stack.dtype)
    top += which.sum()
