"""Tokens leave their lists, their slots and pages are free. Twin: `minithink/ref/evict.py`.

Layout: two launches, and a sum between them.

    _compact   one program per UNITS units. It looks for the first block of BLOCK columns from which something is
               dropped; from there on it reads a block of the list, then writes what is kept of it behind what was
               kept before, in place. Dropped tokens free their slots and are counted off their page; whoever is the
               last token of a page counts it as empty
    cumsum     the empty pages up to each unit's
    _give      one program per TABLES units: those with empty pages, which are few, look for them in their tables and
               put them on the stack

A list and the pages of a table belong to one unit, and a slot to one token: only a page's count is written to by
several tokens, in integers, so the results are the same in any order. The first program of _compact copies `top`,
from which all programs of _give count up while the first of them writes the new one.
Bound: S bytes of `drop` up to the first dropped token, 17 bytes for every token behind it (drop; place and pos, read
and written): memory. Units from which nothing is dropped read `drop` up to their last token and write nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

UNITS = 1  # lists of a program of _compact: more of them would wait for the longest
BLOCK = 1024  # tokens of a list at a time
TABLES = 4  # units of a program of _give
COLUMNS = 128  # columns of a table at a time


@triton.jit
def _compact(
    p_drop, p_place, p_pos, p_count, p_live, p_taken, p_top, p_emptied, p_before, units, seen, width,
    MOST: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(p_before, tl.load(p_top))
    i_unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    m_unit = i_unit < units
    p_drop += (i_unit * seen)[:, None]
    p_place += (i_unit * width)[:, None]
    p_pos += (i_unit * width)[:, None]
    end = tl.minimum(tl.load(p_count + i_unit, m_unit, other=0), seen)
    longest = tl.max(end)
    column = tl.arange(0, BLOCK)[None, :]

    start, dropped = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (start < longest) & (dropped == 0):
        m_in = start + column < end[:, None]
        dropped = tl.max(tl.load(p_drop + (start + column), m_in, other=0).to(tl.int32))
        start += BLOCK
    emptied = tl.full((UNITS,), 0, tl.int32)  # pages
    if dropped == 0:
        tl.store(p_emptied + i_unit, emptied, m_unit)
        return

    start -= BLOCK
    kept = tl.minimum(end, start)  # tokens, all those before the block
    while start < longest:
        m_in = start + column < end[:, None]
        m_drop = tl.load(p_drop + (start + column), m_in, other=0) != 0
        place = tl.load(p_place + (start + column), m_in, other=-1)
        pos = tl.load(p_pos + (start + column), m_in, other=-1)
        keep = (m_in & ~m_drop).to(tl.int32)
        to = kept[:, None] + tl.cumsum(keep, 1) - 1
        # Where one thread writes another reads: nobody writes before all have read. Later blocks are not written to.
        tl.debug_barrier()
        tl.store(p_place + to, place, keep > 0)
        tl.store(p_pos + to, pos, keep > 0)
        kept += tl.sum(keep, 1)

        m_free = m_drop & (place >= 0)  # others lie in a buffer
        tl.store(p_live + place, tl.full((UNITS, BLOCK), 0, tl.uint8), m_free)
        less = tl.full((UNITS, BLOCK), -1, tl.int32)
        living = tl.atomic_add(p_taken + place // MOST, less, m_free, sem="relaxed")  # before
        emptied += tl.sum((m_free & (living == 1)).to(tl.int32), 1)
        start += BLOCK

    tl.store(p_count + i_unit, kept, m_unit)
    tl.store(p_emptied + i_unit, emptied, m_unit)
    start = tl.min(tl.where(m_unit, kept, longest))
    while start < longest:
        m_behind = (start + column >= kept[:, None]) & (start + column < end[:, None])
        tl.store(p_pos + (start + column), tl.full((UNITS, BLOCK), -1, tl.int32), m_behind)
        start += BLOCK


@triton.jit
def _give(
    p_taken, p_format, p_page, p_stack, p_top, p_emptied, p_sum, p_before, units, none, width,
    TABLES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    before = tl.load(p_before)  # free pages
    if tl.program_id(0) == 0:
        tl.store(p_top, before + tl.load(p_sum + units - 1))
    i_unit = tl.program_id(0).to(tl.int64) * TABLES + tl.arange(0, TABLES)
    missing = tl.load(p_emptied + i_unit, i_unit < units, other=0)
    to = before + tl.load(p_sum + i_unit, i_unit < units, other=0) - missing  # where the next one goes
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


def evict(
    drop: Tensor, place: Tensor, pos: Tensor, count: Tensor, live: Tensor, taken: Tensor, page_format: Tensor,
    page: Tensor, stack: Tensor, top: Tensor, most: int,
) -> None:  # fmt: skip
    """Forget tokens, as `PagedStore.evict` does; rows of key scales are left to the caller.

    All tensors but `drop` are changed in place, and contiguous. P: pages; page number P means none.

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
    if not (units := count.numel()):
        return
    drop, none = drop.contiguous().view(torch.uint8), stack.numel() - 1
    emptied = torch.empty(units, dtype=torch.int32, device=drop.device)
    before = torch.empty_like(top)
    lists = drop, place, pos, count, live.view(torch.uint8), taken, top, emptied, before
    sizes = units, drop.shape[-1], place.shape[-1]
    # No more threads than tokens: each is counted off its page by one.
    warps = max(1, min(4, UNITS * BLOCK // 32))
    _compact[(triton.cdiv(units, UNITS),)](*lists, *sizes, most, UNITS, BLOCK, num_warps=warps)
    total = emptied.cumsum(0, dtype=torch.int32)
    pages = taken, page_format, page, stack, top, emptied, total, before
    _give[(triton.cdiv(units, TABLES),)](*pages, units, none, page.shape[-1], TABLES, COLUMNS)


def variants() -> Iterator[Variant]:
    shared = {"p_taken": "*i32", "p_top": "*i64", "p_emptied": "*i32", "p_before": "*i64"}
    shared.update(dict.fromkeys(("units", "width"), "i32"))
    lists = {"p_drop": "*u8", "p_place": "*i32", "p_pos": "*i32", "p_count": "*i32", "p_live": "*u8", "seen": "i32"}
    pages = {"p_format": "*u8", "p_page": "*i32", "p_stack": "*i32", "p_sum": "*i32", "none": "i32"}
    for most in (1, 8, 16, 64):
        yield Variant(_compact, {**shared, **lists}, {"MOST": most, "UNITS": UNITS, "BLOCK": BLOCK})
    yield Variant(_give, {**shared, **pages}, {"TABLES": TABLES, "COLUMNS": COLUMNS})
