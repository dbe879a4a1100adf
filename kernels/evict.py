"""Eviction: tokens leave their lists; slots, pages and groups of keys become free. Twin: `minithink/ref/evict.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.evict import evict
    >>> drop = torch.tensor([[[[False, True, False, False, True]]]])  # [Lt, N, Ht, S]
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> place = torch.tensor([[[[0, 1, 2, 3, 4, 0]]]], dtype=torch.int32)  # [Lt, B, Ht, W + 1]: in pages 0, 1
    >>> pos = torch.tensor([[[[0, 1, 2, 3, 4, -1]]]], dtype=torch.int32)  # [Lt, B, Ht, W + 1]
    >>> count = torch.tensor([[[5]]], dtype=torch.int32)  # [Lt, B, Ht]
    >>> live = torch.tensor([[True] * 4, [True] + [False] * 3, [False] * 4])  # [P + 1, stride]
    >>> taken = torch.tensor([4, 1, 0], dtype=torch.int32)  # [P + 1]
    >>> page_format = torch.tensor([0, 0, 255], dtype=torch.uint8)  # [P + 1]
    >>> page = torch.tensor([[[[0, 1]]]], dtype=torch.int32)  # [Lt, B, Ht, width]
    >>> stack = torch.zeros(3, dtype=torch.int32)  # [P + 1], the free pages; at first there are none
    >>> top = torch.tensor(0)  # int64
    >>> group_of = torch.zeros(0, 4, dtype=torch.int32)  # no keys are by token
    >>> groups = (group_of, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.tensor(0))
    >>> evict(drop, at, place, pos, count, live, taken, page_format, page, stack, top, *groups, stride=4)
    >>> place[..., :3].tolist(), taken.tolist()
    ([[[[0, 2, 3]]]], [3, 0, 0])
    >>> stack[:top].tolist()  # page 1 is free
    [1]

Layout: two launches, over the units of the rows `at`.

    _compact   one program per unit. It finds the first column with a dropped token. From its block on it reads BLOCK
               columns of the list, then writes the kept tokens behind those kept before, in place. Dropped tokens
               free their slots, and are counted off their page and their group of keys; the last token of a page
               counts the page as empty. Most blocks lose no token: they only move
    _give      one program per TABLES units. Most end at once. The few whose units have empty pages add up what all
               units before these have freed, find the pages in their tables and put them on the stack; _compact has
               noted the groups of keys. The last one writes the new tops

A list, the pages of a table and the groups of its keys belong to one unit, and a slot to one token. Tokens share only
the counts of a page and of a group, which are integers, so the results are the same in any order. If several tokens
together end the last use of a group, one of them must note it: they write their columns to the group's count, which
is then theirs alone, and the token with the largest column notes the group. The first program of _compact copies the
tops of both stacks, from which all programs of _give count up while the last of them writes the new ones.
Bound: memory. 1 byte of `drop` for each token up to the first dropped one, 17 bytes for every token behind it (drop;
place and pos, read and written), 33 for a dropped token whose key is in a group. Units without a dropped token read
`drop` up to their last token, and write only zeros for _give. Other rows of the batch and other groups are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, unit_of

BLOCKS = (2048, 256), (0, 1024)  # (at least so many units, tokens of a list at a time)
THREADS = 256  # tokens of a block for each warp
LOOK = 1024  # columns of `drop` at a time, in search of the first one
TABLES = 4  # units of a program of _give
COLUMNS = 128  # columns of a table at a time
SUMS = 4096  # units whose counts are added up at a time


@triton.jit(do_not_specialize=["n", "rows", "units"])
def _compact(
    p_drop,
    p_at,
    p_place,
    p_pos,
    p_count,
    p_live,
    p_taken,
    p_top,
    p_group_of,
    p_group_uses,
    p_group_top,
    p_freed,
    p_gone,
    p_before,
    units,
    n,
    rows,
    heads,
    seen,
    width,
    group_none,
    STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
):
    """p_freed: pages of each unit, then its groups of keys; p_gone: numbers of these groups, [units, seen]; GROUPS:
    there are some."""
    i = tl.program_id(0).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.store(p_before, tl.load(p_top))
        tl.store(p_before + 1, tl.load(p_group_top))
    _, i_unit = unit_of(i, n, rows, heads, p_at)
    p_drop += i * seen
    p_gone += i * seen
    p_place += i_unit * width
    p_pos += i_unit * width
    end = tl.minimum(tl.load(p_count + i_unit), seen)
    column = tl.arange(0, BLOCK)

    start = tl.full((), 0, tl.int32)
    first = end  # the first column with a dropped token
    look = tl.arange(0, LOOK)
    while (start < end) & (first == end):
        dropped = tl.load(p_drop + (start + look), start + look < end, other=0) != 0
        first = tl.min(tl.where(dropped, start + look, end))
        start += LOOK
    emptied = tl.full((), 0, tl.int32)
    gone = tl.full((), 0, tl.int32)
    if first == end:
        tl.store(p_freed + i, emptied)
        tl.store(p_freed + units + i, gone)
        return

    start = first // BLOCK * BLOCK
    kept = start  # tokens, all those before the block
    while start < end:
        m_in = start + column < end
        m_drop = tl.load(p_drop + (start + column), m_in, other=0) != 0
        place = tl.load(p_place + (start + column), m_in, other=-1)
        pos = tl.load(p_pos + (start + column), m_in, other=-1)
        keep = (m_in & ~m_drop).to(tl.int32)
        stay = tl.sum(keep)
        # Threads write where others read, so all of them read before any writes. Later blocks are not written to.
        tl.debug_barrier()
        if stay == tl.minimum(end - start, BLOCK):
            tl.store(p_place + (kept + column), place, m_in)
            tl.store(p_pos + (kept + column), pos, m_in)
        else:
            to = kept + tl.cumsum(keep, 0) - 1
            tl.store(p_place + to, place, keep > 0)
            tl.store(p_pos + to, pos, keep > 0)

            m_free = m_drop & (place >= 0)  # others lie in a buffer
            tl.store(p_live + place, tl.full((BLOCK,), 0, tl.uint8), m_free)
            less = tl.full((BLOCK,), -1, tl.int32)
            living = tl.atomic_add(p_taken + place // STRIDE, less, m_free, sem="relaxed")  # before
            emptied += tl.sum((m_free & (living == 1)).to(tl.int32))
            if GROUPS:
                group = tl.load(p_group_of + place, m_free, other=group_none)
                m_group = m_free & (group < group_none)
                tl.store(p_group_of + place, tl.zeros((BLOCK,), tl.int32) + (group_none + 1), m_free)
                tl.atomic_add(p_group_uses + group, less, m_group, sem="relaxed")
                tl.debug_barrier()  # all are counted
                left = tl.atomic_add(p_group_uses + group, tl.zeros((BLOCK,), tl.int32), m_group, sem="relaxed")
                m_group = m_group & (left == 0)
                tl.debug_barrier()
                tl.atomic_max(p_group_uses + group, column + 1, m_group, sem="relaxed")
                tl.debug_barrier()
                last = tl.atomic_add(p_group_uses + group, tl.zeros((BLOCK,), tl.int32), m_group, sem="relaxed")
                m_group = m_group & (last == column + 1)
                tl.debug_barrier()
                tl.store(p_group_uses + group, tl.zeros((BLOCK,), tl.int32), m_group)
                tl.store(p_gone + (gone + tl.cumsum(m_group.to(tl.int32), 0) - 1), group, m_group)
                gone += tl.sum(m_group.to(tl.int32))
        kept += stay
        start += BLOCK

    tl.store(p_count + i_unit, kept)
    tl.store(p_freed + i, emptied)
    tl.store(p_freed + units + i, gone)
    start = kept
    while start < end:
        tl.store(p_pos + (start + column), tl.full((BLOCK,), -1, tl.int32), start + column < end)
        start += BLOCK


@triton.jit(do_not_specialize=["none", "n", "rows", "units"])
def _give(
    p_at,
    p_taken,
    p_format,
    p_page,
    p_stack,
    p_top,
    p_group_stack,
    p_group_top,
    p_freed,
    p_gone,
    p_before,
    units,
    n,
    rows,
    heads,
    none,
    width,
    seen,
    GROUPS: tl.constexpr,
    TABLES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
):
    first = tl.program_id(0) * TABLES
    i = first + tl.arange(0, TABLES)
    m = i < units
    freed = tl.load(p_freed + i, m, other=0)
    something = tl.max(freed)
    if GROUPS:
        something += tl.max(tl.load(p_freed + units + i, m, other=0))
    if tl.where(first + TABLES < units, something, 1) == 0:  # the last program has the new tops to write
        return
    # What lies on the stacks before the pages and groups that the units before these have freed.
    pages = tl.load(p_before)
    gone = tl.load(p_before + 1)
    start = tl.full((), 0, tl.int32)
    while start < first:
        before = start + tl.arange(0, SUMS)
        pages += tl.sum(tl.load(p_freed + before, before < first, other=0))
        if GROUPS:
            gone += tl.sum(tl.load(p_freed + units + before, before < first, other=0))
        start += SUMS

    missing = freed
    to = pages + tl.cumsum(freed, 0) - freed  # where the next one goes
    row = tl.load(p_at + i // heads % n, m, other=0)
    i_unit = (i // (n * heads) * rows + row) * heads + i % heads
    p_page += (i_unit * width)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    start = tl.full((), 0, tl.int32)
    while (start < width) & (tl.max(missing) > 0):
        m_in = (missing > 0)[:, None] & (start + column < width)
        here = tl.load(p_page + (start + column), m_in, other=none)
        m_page = here != none
        empty = (m_page & (tl.load(p_taken + here, m_page, other=1) == 0)).to(tl.int32)
        tl.store(p_stack + (to[:, None] + tl.cumsum(empty, 1) - 1), here, empty > 0)
        tl.store(p_format + here, tl.full((TABLES, COLUMNS), 255, tl.uint8), empty > 0)
        tl.store(p_page + (start + column), tl.full((TABLES, COLUMNS), 0, tl.int32) + none, empty > 0)
        found = tl.sum(empty, 1)
        to += found
        missing -= found
        start += COLUMNS

    if GROUPS:
        more = tl.load(p_freed + units + i, m, other=0)
        to = gone + tl.cumsum(more, 0) - more
        start = tl.full((), 0, tl.int32)
        longest = tl.max(more)
        while start < longest:
            m_left = start + column < more[:, None]
            number = tl.load(p_gone + i.to(tl.int64)[:, None] * seen + (start + column), m_left, other=0)
            tl.store(p_group_stack + (to[:, None] + start + column), number, m_left)
            start += COLUMNS
        gone += tl.sum(more)
    if first + TABLES >= units:
        tl.store(p_top, pages + tl.sum(freed))
        if GROUPS:
            tl.store(p_group_top, gone)


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

    All tensors but `drop` and `at` are changed in place, and contiguous. P: number of pages; page number P means
    none. Q: number of groups of keys by token; a group number of Q or more means none.

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
    n = len(at)
    lt, rows, heads = count.shape
    if not (units := lt * n * heads):
        return
    drop = drop.contiguous().view(torch.uint8)
    at = at.contiguous()
    device = drop.device
    grouped = group_of.numel() > 0
    seen = drop.shape[-1]
    freed = torch.empty(2 * units, dtype=torch.int32, device=device)
    gone = torch.empty(units * seen if grouped else 0, dtype=torch.int32, device=device)
    before = torch.empty(2, dtype=torch.int64, device=device)
    block = next(size for least, size in BLOCKS if units >= least)
    _compact[(units,)](
        p_drop=drop,
        p_at=at,
        p_place=place,
        p_pos=pos,
        p_count=count,
        p_live=live.view(torch.uint8),
        p_taken=taken,
        p_top=top,
        p_group_of=group_of,
        p_group_uses=group_uses,
        p_group_top=group_top,
        p_freed=freed,
        p_gone=gone,
        p_before=before,
        units=units,
        n=n,
        rows=rows,
        heads=heads,
        seen=seen,
        width=place.shape[-1],
        group_none=group_stack.numel() - 1,
        STRIDE=stride,
        GROUPS=grouped,
        BLOCK=block,
        LOOK=LOOK,
        num_warps=warps_for(block),
    )
    _give[(triton.cdiv(units, TABLES),)](
        p_at=at,
        p_taken=taken,
        p_format=page_format,
        p_page=page,
        p_stack=stack,
        p_top=top,
        p_group_stack=group_stack,
        p_group_top=group_top,
        p_freed=freed,
        p_gone=gone,
        p_before=before,
        units=units,
        n=n,
        rows=rows,
        heads=heads,
        none=stack.numel() - 1,
        width=page.shape[-1],
        seen=seen,
        GROUPS=grouped,
        TABLES=TABLES,
        COLUMNS=COLUMNS,
        SUMS=SUMS,
    )


def warps_for(block: int) -> int:
    """Warps of a program of _compact. It has no more threads than tokens: each is counted off its page by one."""
    return max(1, block // THREADS)


def variants() -> Iterator[Variant]:
    shared = dict.fromkeys(("units", "n", "rows", "heads", "seen", "width"), "i32")
    shared |= {"p_at": "*i64", "p_taken": "*i32", "p_top": "*i64", "p_group_top": "*i64", "p_freed": "*i32"}
    shared |= {"p_gone": "*i32", "p_before": "*i64"}
    lists = {"p_drop": "*u8", "p_place": "*i32", "p_pos": "*i32", "p_count": "*i32", "p_live": "*u8"}
    lists |= {"p_group_of": "*i32", "p_group_uses": "*i32", "group_none": "i32"}
    pages = {"p_format": "*u8", "p_page": "*i32", "p_stack": "*i32", "p_group_stack": "*i32", "none": "i32"}
    for stride, grouped in ((1, False), (8, True), (16, False), (64, True)):
        for _, block in BLOCKS:
            constexprs = {"STRIDE": stride, "GROUPS": grouped, "BLOCK": block, "LOOK": LOOK}
            yield Variant(_compact, {**shared, **lists}, constexprs, {"num_warps": warps_for(block)})
    for grouped in (False, True):
        constexprs = {"GROUPS": grouped, "TABLES": TABLES, "COLUMNS": COLUMNS, "SUMS": SUMS}
        yield Variant(_give, {**shared, **pages}, constexprs)
