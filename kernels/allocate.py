"""Give slots to listed tokens that have none. Twin: `minithink/ref/allocate.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.allocate import allocate
    >>> live = torch.zeros(3, 4, dtype=torch.bool)  # [P + 1, stride]: two pages of 4 slots, and the trash page
    >>> taken = torch.zeros(3, dtype=torch.int32)  # [P + 1]
    >>> filled = torch.zeros(3, dtype=torch.int16)  # [P + 1]
    >>> page_thought = torch.zeros(3, dtype=torch.uint8)  # [P + 1]
    >>> page_format = torch.full((3,), 255, dtype=torch.uint8)  # [P + 1]
    >>> page = torch.full((1, 1, 1, 2), 2, dtype=torch.int32)  # [Lt, B, Ht, width]: the table is empty
    >>> stack = torch.tensor([0, 1, 0], dtype=torch.int32)  # [P + 1]
    >>> top = torch.tensor(2)  # int64: pages 0 and 1 are free
    >>> place = torch.tensor([[[[-1, -2, 0]]]], dtype=torch.int32)  # [Lt, B, Ht, S]: two tokens wait
    >>> count = torch.tensor([[[2]]], dtype=torch.int32)  # [Lt, B, Ht]
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> active = torch.tensor([True])  # [N]
    >>> thought = torch.tensor([0], dtype=torch.uint8)  # [B], the type of each row's new tokens
    >>> formats = torch.tensor([0])  # [types] int64, the format of each type
    >>> slots = torch.tensor([4], dtype=torch.int32)  # [formats], slots of a page
    >>> overflow = torch.tensor(False)
    >>> state = (live, taken, filled, page_thought, page_format, page, stack, top, place)  # changed in place
    >>> base = allocate(*state, count, at, active, thought, formats, slots, overflow, size=2, lanes=1)
    >>> base.tolist()  # int64 [Lt, N, Ht, size], the tokens' slots
    [[[[4, 5]]]]
    >>> place[..., :2].tolist(), page.tolist()  # both lie in page 1
    ([[[[4, 5]]]], [[[[1, 2]]]])

Layout: two launches, and a sum between them.

    _find    one program per unit reads its table BLOCK columns at a time and fills pages that have room, one after
             the other, until all tokens of the unit have slots; for remaining tokens the unit requests pages
    cumsum   sums the requested pages over the units, in their order
    _open    one program per UNITS units: the few units with requests draw their pages and fill them, one after the
             other

A page belongs to one unit, so no two programs write to the same page, and the results are the twin's in any order of
programs. The first program of _find copies `top`. All programs of _open count down from the copy, while the first of
them writes the new `top`. Rows that are not active read nothing.
Bound: memory. For every column up to the last page that is needed, 4 bytes of the table, 6 gathered from its page,
and a row of `live`: 0.8 KB for a table of 80 pages, 13 MB for 16384 tables. A gather that misses the cache moves 32
bytes, but P pages of 6 bytes fit into the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2, unit_of

BLOCK = 128  # columns of a table at a time
UNITS = 8  # units of a program of _open


@triton.jit
def _waiting(p_list, count, size, SIZE: tl.constexpr):
    """The last `size` tokens of a list: their columns, which of them wait, their indices, their ranks among those."""
    column = count - size + tl.arange(0, SIZE)
    own = tl.load(p_list + column, (column >= 0) & (column < count), other=0)
    waits = own < 0
    return column, waits, -1 - own, tl.cumsum(waits.to(tl.int32), 0) - 1


@triton.jit
def _with_room(p_taken, p_page_thought, p_page_format, here, none, thought, fmt, per_page):
    """Which pages of a block of a table have the format, the thought type and room."""
    m_page = here != none
    m_room = m_page & (tl.load(p_page_format + here, m_page, other=255) == fmt)
    m_room &= tl.load(p_page_thought + here, m_page, other=0) == thought
    m_room &= tl.load(p_taken + here, m_page, other=0) < per_page
    return m_room


@triton.jit(do_not_specialize=["none", "n", "rows"])
def _find(
    p_live,
    p_taken,
    p_filled,
    p_page_thought,
    p_page_format,
    p_page,
    p_top,
    p_place,
    p_count,
    p_at,
    p_active,
    p_thought,
    p_formats,
    p_slots,
    p_base,
    p_left,
    p_asked,
    p_before,
    none,
    stride,
    width,
    columns,
    n,
    rows,
    heads,
    size,
    lanes,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    i = tl.program_id(0)
    if i == 0:
        tl.store(p_before, tl.load(p_top))
    row, i_unit = unit_of(i, n, rows, heads, p_at)
    active = tl.load(p_active + i // heads % n) != 0
    thought = tl.load(p_thought + row)
    fmt = tl.load(p_formats + thought).to(tl.int32)
    per_page = tl.load(p_slots + fmt)
    p_list = p_place + i_unit * columns
    count = tl.where(active, tl.load(p_count + i_unit), 0)  # the list of a row that is not active counts as empty
    column, waits, index, rank = _waiting(p_list, count, size, SIZE)
    total = tl.sum(waits.to(tl.int32))
    p_base += i.to(tl.int64) * size
    all_of_a_page = per_page.to(tl.int64) * lanes  # slots
    o_index = tl.arange(0, SIZE)
    tl.store(p_base + o_index, tl.full((SIZE,), 0, tl.int64) + none * all_of_a_page, o_index < size)
    tl.debug_barrier()  # before other threads write what is found

    slot = tl.arange(0, SLOTS)
    table_column = tl.arange(0, BLOCK)
    got = total * 0  # tokens that have a slot by now
    unused = total * 0  # columns of the table without a page
    start = total * 0
    while (start < width) & (got < total):
        here = tl.load(p_page + i_unit * width + start + table_column, start + table_column < width, other=none)
        m_room = _with_room(p_taken, p_page_thought, p_page_format, here, none, thought, fmt, per_page)
        unused += tl.sum(((start + table_column < width) & (here == none)).to(tl.int32))
        first = tl.min(tl.where(m_room, table_column, BLOCK))
        while (first < BLOCK) & (got < total):
            number = tl.min(tl.where(table_column == first, here, none)).to(tl.int64)
            p_row = p_live + number * stride + slot
            free = (tl.load(p_row, slot < per_page, other=1) == 0) & (slot < per_page)
            turn = got + tl.cumsum(free.to(tl.int32), 0) - 1  # the rank of the token that takes it
            takes = free & (turn < total)
            mine = takes[None, :] & (turn[None, :] == rank[:, None]) & waits[:, None]  # [SIZE, SLOTS]
            found = tl.sum(mine.to(tl.int32), 1) > 0
            own = tl.sum(tl.where(mine, slot[None, :], 0), 1)
            tl.store(p_list + column, (number * stride + own).to(tl.int32), found)
            tl.store(p_base + index, number * all_of_a_page + own, found)
            used = tl.sum(takes.to(tl.int32))
            taken = tl.load(p_taken + number)
            filled = tl.load(p_filled + number).to(tl.int32)
            last = tl.max(tl.where(takes, slot + 1, 0))
            # Several threads may hold the same number: all of them read before any writes.
            tl.debug_barrier()
            tl.store(p_row, tl.full((SLOTS,), 1, tl.uint8), takes)
            tl.store(p_taken + number, taken + used)
            tl.store(p_filled + number, tl.maximum(filled, last).to(tl.int16))
            got += used
            first = tl.min(tl.where(m_room & (table_column > first), table_column, BLOCK))
        start += BLOCK
    # Tokens without a slot: as many pages as they need, and as the table has columns for.
    tl.store(p_left + i, total - got)
    tl.store(p_asked + i, tl.minimum(tl.cdiv(total - got, per_page), unused))


@triton.jit
def _free_column(p_table, start, width, none, BLOCK: tl.constexpr):
    """The first column without a page, `width` if there is none, and the start of its block. No column before the
    block at `start` is free."""
    table_column = tl.arange(0, BLOCK)
    free = width + start * 0
    while free == width:
        m_column = start + table_column < width
        here = tl.load(p_table + start + table_column, m_column, other=0)
        free = tl.min(tl.where(m_column & (here == none), start + table_column, width))
        start = tl.where(free == width, start + BLOCK, start)
    return free, start


@triton.jit(do_not_specialize=["none", "n", "rows", "units"])
def _open(
    p_live,
    p_taken,
    p_filled,
    p_page_thought,
    p_page_format,
    p_page,
    p_stack,
    p_top,
    p_place,
    p_count,
    p_at,
    p_active,
    p_thought,
    p_formats,
    p_slots,
    p_overflow,
    p_base,
    p_left,
    p_asked,
    p_rank,
    p_before,
    none,
    stride,
    width,
    columns,
    n,
    rows,
    heads,
    size,
    lanes,
    units,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    UNITS: tl.constexpr,
):
    before = tl.load(p_before)  # free pages
    if tl.program_id(0) == 0:
        tl.store(p_top, tl.maximum(before - tl.load(p_rank + units - 1), 0))
    i_first = tl.program_id(0) * UNITS
    i_own = i_first + tl.arange(0, UNITS)
    left = tl.load(p_left + i_own, i_own < units, other=0)
    if tl.max(left) == 0:
        return
    slot = tl.arange(0, SLOTS)
    for offset in range(UNITS):
        i = i_first + offset
        total = tl.max(tl.where(i_own == i, left, 0))
        if total > 0:
            row, i_unit = unit_of(i, n, rows, heads, p_at)
            thought = tl.load(p_thought + row)
            fmt = tl.load(p_formats + thought).to(tl.int32)
            per_page = tl.load(p_slots + fmt)
            p_list = p_place + i_unit * columns
            p_table = p_page + i_unit * width
            # Those that have slots by now wait no longer.
            column, waits, index, rank = _waiting(p_list, tl.load(p_count + i_unit), size, SIZE)
            asked = tl.load(p_asked + i)
            drawn = tl.load(p_rank + i) - asked  # by the units before
            start = asked * 0
            for j in range(tl.cdiv(total, per_page)):
                own = rank - j * per_page
                m_own = waits & (own >= 0) & (own < per_page)
                if (j < asked) & (drawn + j < before):
                    number = tl.load(p_stack + (before - 1 - drawn - j)).to(tl.int64)
                    free, start = _free_column(p_table, start, width, none, BLOCK)
                    tl.debug_barrier()  # all threads have read the table
                    tl.store(p_table + free, number.to(tl.int32))
                    tl.debug_barrier()  # and see what is written, when they read it again
                    held = tl.minimum(total - j * per_page, per_page)
                    tl.store(p_page_format + number, fmt.to(tl.uint8))
                    tl.store(p_page_thought + number, thought)
                    tl.store(p_live + number * stride + slot, (slot < held).to(tl.uint8), slot < stride)
                    tl.store(p_taken + number, held)
                    tl.store(p_filled + number, held.to(tl.int16))
                    o_slot = number * lanes * per_page + own
                    tl.store(p_base + i.to(tl.int64) * size + index, o_slot, m_own)
                    tl.store(p_list + column, (number * stride + own).to(tl.int32), m_own)
                else:
                    tl.store(p_overflow, tl.full((), 1, tl.uint8))
                    tl.store(p_list + column, tl.full((SIZE,), 0, tl.int32) + none * stride, m_own)


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
    """Give a slot to every token of the rows `at` that has none: the last tokens of the lists, with place −1 − index.

    The tensors up to `place`, and `overflow`, are changed in place. They and `count` are contiguous. P: number of
    pages; what the tensors hold at P means nothing.

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
    layers, rows, heads = count.shape
    n = len(at)
    units = layers * n * heads
    base = torch.empty(layers, n, heads, size, dtype=torch.int64, device=live.device)
    if not units:
        return base
    left = torch.empty(units, dtype=torch.int32, device=live.device)
    asked = torch.empty(units, dtype=torch.int32, device=live.device)
    blocks = {"SLOTS": power_of_2(live.shape[1]), "BLOCK": BLOCK, "SIZE": power_of_2(size)}
    warps = warps_for(blocks["SLOTS"], blocks["SIZE"])
    shared = {
        "p_live": live.view(torch.uint8),
        "p_taken": taken,
        "p_filled": filled,
        "p_page_thought": page_thought,
        "p_page_format": page_format,
        "p_page": page,
        "p_top": top,
        "p_place": place,
        "p_count": count,
        "p_at": at.contiguous(),
        "p_active": active.contiguous().view(torch.uint8),
        "p_thought": thought,
        "p_formats": formats,
        "p_slots": slots,
        "p_base": base,
        "p_left": left,
        "p_asked": asked,
        "p_before": torch.empty_like(top),
        "none": stack.numel() - 1,
        "stride": live.shape[1],
        "width": page.shape[-1],
        "columns": place.shape[-1],
        "n": n,
        "rows": rows,
        "heads": heads,
        "size": size,
        "lanes": lanes,
        **blocks,
    }
    _find[(units,)](**shared, num_warps=warps)
    _open[(triton.cdiv(units, UNITS),)](
        **shared,
        p_stack=stack,
        p_overflow=overflow.view(torch.uint8),
        p_rank=asked.cumsum(0, dtype=torch.int32),
        units=units,
        UNITS=UNITS,
        num_warps=warps,
    )
    return base


def warps_for(slots: int, size: int) -> int:
    """Warps of a program: one, unless many slots are compared with many tokens."""
    return max(1, min(4, slots * size // 512))


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("p_live", "p_page_thought", "p_page_format", "p_active", "p_thought", "p_overflow"), "*u8")
    types |= dict.fromkeys(("p_top", "p_at", "p_formats", "p_base", "p_before"), "*i64")
    types["p_filled"] = "*i16"
    for slots, size in ((1, 1), (16, 1), (16, 16), (64, 128)):
        blocks = {"SLOTS": slots, "BLOCK": BLOCK, "SIZE": size}
        options = {"num_warps": warps_for(slots, size)}
        for kernel, constexprs in ((_find, blocks), (_open, blocks | {"UNITS": UNITS})):
            names = [name for name in kernel.arg_names if name not in constexprs]
            signature = {name: types.get(name, "*i32" if name.startswith("p_") else "i32") for name in names}
            yield Variant(kernel, signature, constexprs, options)
