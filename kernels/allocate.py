"""A slot for one new token of every unit. Twin: `minithink/ref/allocate.py`.

Layout: two launches, and a sum between them.

    _find    one program per TABLES units, which reads their tables BLOCK columns at a time until all have found a
             page with room, and takes the first free slot of each; units without one ask for a page, and remember the
             first column of their table that holds none
    cumsum   the ranks of those that ask, in the order of the units
    _open    one program per UNITS units: those that asked, which are few, draw their page and take its first slot

A page belongs to one unit, so no two programs write to the same page, and the results are the twin's in any order of
programs. The first program of _find copies `top`, from which all programs of _open count down while the first of them
writes the new one. Units that are not valid read nothing.
Bound: 4 bytes of a table's column, and 6 gathered from its page, for every column up to the page with room, and one
row of `live`: memory, some 0.8 KB for a table of 80 pages, 13 MB for 16384 of them. Such gathers move 32 bytes each
where they miss the cache; P pages of 6 bytes fit into it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

TABLES = 4  # units of a program of _find
BLOCK = 128  # columns of a table at a time
UNITS = 128  # units of a program of _open


@triton.jit
def _find(
    p_live, p_taken, p_filled, p_page_thought, p_page_format, p_page, p_top, p_fmt, p_thought, p_valid, p_slots,
    p_number, p_slot, p_column, p_asked, p_before, units, none, most, width, rows, heads,
    stride_f_l, stride_f_b, stride_f_h, stride_t_l, stride_t_b, stride_t_h, stride_v_l, stride_v_b, stride_v_h,
    SLOTS: tl.constexpr, TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(p_before, tl.load(p_top))
    i_unit = tl.program_id(0).to(tl.int64) * TABLES + tl.arange(0, TABLES)
    m_unit = i_unit < units
    i_layer, i_row, i_head = i_unit // (rows * heads), i_unit // heads % rows, i_unit % heads
    valid = tl.load(p_valid + i_layer * stride_v_l + i_row * stride_v_b + i_head * stride_v_h, m_unit, other=0) != 0
    fmt = tl.load(p_fmt + i_layer * stride_f_l + i_row * stride_f_b + i_head * stride_f_h, valid, other=0)
    thought = tl.load(p_thought + i_layer * stride_t_l + i_row * stride_t_b + i_head * stride_t_h, valid, other=0)
    per_page = tl.load(p_slots + fmt.to(tl.int32), valid, other=0)

    column = tl.arange(0, BLOCK)[None, :]
    start = tl.full((), 0, tl.int32)
    i_page = tl.full((TABLES,), 0, tl.int32) + none  # the page with room; `none` is more than any page
    i_unused = tl.full((TABLES,), 0, tl.int32) + width  # the first column without a page
    searching = tl.max(valid.to(tl.int32))
    while (start < width) & (searching > 0):
        m_in = (valid & (i_page == none))[:, None] & (start + column < width)
        here = tl.load(p_page + (i_unit * width)[:, None] + (start + column), m_in, other=none)
        m_page = here != none
        m_room = m_page & (tl.load(p_page_format + here, m_page, other=0) == fmt[:, None])
        m_room &= tl.load(p_page_thought + here, m_page, other=0) == thought[:, None]
        m_room &= tl.load(p_taken + here, m_page, other=0) < per_page[:, None]
        i_first = tl.min(tl.where(m_room, column, BLOCK), 1)
        i_page = tl.minimum(i_page, tl.min(tl.where(column == i_first[:, None], here, none), 1))
        i_unused = tl.minimum(i_unused, tl.min(tl.where(m_in & ~m_page, start + column, width), 1))
        searching = tl.max((valid & (i_page == none)).to(tl.int32))
        start += BLOCK

    m_found = i_page < none
    slot = tl.arange(0, SLOTS)[None, :]
    p_row = p_live + i_page.to(tl.int64) * most
    live = tl.load(p_row[:, None] + slot, m_found[:, None] & (slot < most), other=1)
    i_slot = tl.min(tl.where(live == 0, slot, SLOTS), 1)
    taken = tl.load(p_taken + i_page, m_found, other=0)
    filled = tl.load(p_filled + i_page, m_found, other=0)
    # Several threads may hold the same unit: nobody writes before all have read.
    tl.debug_barrier()
    tl.store(p_row + i_slot, tl.full((TABLES,), 1, tl.uint8), m_found)
    tl.store(p_taken + i_page, taken + 1, m_found)
    tl.store(p_filled + i_page, tl.maximum(filled.to(tl.int32), i_slot + 1).to(tl.int16), m_found)
    tl.store(p_number + i_unit, i_page.to(tl.int64), m_unit)
    tl.store(p_slot + i_unit, tl.where(m_found, i_slot, 0).to(tl.int64), m_unit)
    # −1: wants no page; `width`: its table is full, and it asks for none
    m_lacks = valid & (i_page == none)
    tl.store(p_column + i_unit, tl.where(m_lacks, i_unused, -1), m_unit)
    tl.store(p_asked + i_unit, (m_lacks & (i_unused < width)).to(tl.int32), m_unit)


@triton.jit
def _open(
    p_live, p_taken, p_filled, p_page_thought, p_page_format, p_page, p_stack, p_top, p_fmt, p_thought, p_overflow,
    p_number, p_column, p_rank, p_before, units, none, most, width, rows, heads,
    stride_f_l, stride_f_b, stride_f_h, stride_t_l, stride_t_b, stride_t_h,
    SLOTS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    before = tl.load(p_before)  # free pages
    if tl.program_id(0) == 0:
        tl.store(p_top, tl.maximum(before - tl.load(p_rank + units - 1), 0))
    i_unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    column = tl.load(p_column + i_unit, i_unit < units, other=-1)
    m_lacks = column >= 0
    if tl.max(m_lacks.to(tl.int32)) == 0:
        return
    rank = tl.load(p_rank + i_unit, m_lacks, other=0)  # 1 draws first
    m_draws = m_lacks & (column < width) & (rank <= before)
    if tl.max((m_lacks & ~m_draws).to(tl.int32)) > 0:
        tl.store(p_overflow, 1)
    number = tl.load(p_stack + (before - rank), m_draws, other=none)

    i_layer, i_row, i_head = i_unit // (rows * heads), i_unit // heads % rows, i_unit % heads
    fmt = tl.load(p_fmt + i_layer * stride_f_l + i_row * stride_f_b + i_head * stride_f_h, m_draws, other=0)
    thought = tl.load(p_thought + i_layer * stride_t_l + i_row * stride_t_b + i_head * stride_t_h, m_draws, other=0)
    tl.store(p_page_format + number, fmt, m_draws)
    tl.store(p_page_thought + number, thought, m_draws)
    slot = tl.arange(0, SLOTS)[None, :]
    live = tl.full((UNITS, SLOTS), 0, tl.uint8) + (slot == 0).to(tl.uint8)  # the token takes the first
    tl.store(p_live + number.to(tl.int64)[:, None] * most + slot, live, m_draws[:, None] & (slot < most))
    tl.store(p_taken + number, tl.full((UNITS,), 1, tl.int32), m_draws)
    tl.store(p_filled + number, tl.full((UNITS,), 1, tl.int16), m_draws)
    tl.store(p_page + i_unit * width + column, number, m_draws)
    tl.store(p_number + i_unit, number.to(tl.int64), m_draws)  # its slot is 0, as _find has left it


def allocate(
    live: Tensor, taken: Tensor, filled: Tensor, page_thought: Tensor, page_format: Tensor, page: Tensor,
    stack: Tensor, top: Tensor, fmt: Tensor, thought: Tensor, valid: Tensor, slots: Tensor, overflow: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take a slot for one token of every unit that is valid, and open a page where none has room.

    The tensors up to `top`, and `overflow`, are changed in place; all but fmt, thought and valid are contiguous.
    P: pages; page number P means none.

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
    none, most, units = stack.numel() - 1, live.shape[1], valid.numel()
    number, slot = torch.empty(2, *valid.shape, dtype=torch.int64, device=live.device).unbind()
    if not units:
        return number, slot
    column, asked = torch.empty(2, units, dtype=torch.int32, device=live.device).unbind()
    before = torch.empty_like(top)
    pages = live.view(torch.uint8), taken, filled, page_thought, page_format, page
    sizes = units, none, most, page.shape[-1], *valid.shape[1:]
    wanted, slot_block = (*fmt.stride(), *thought.stride()), power_of_2(most)
    _find[(triton.cdiv(units, TABLES),)](
        *pages, top, fmt, thought, valid.view(torch.uint8), slots, number, slot, column, asked, before,
        *sizes, *wanted, *valid.stride(), slot_block, TABLES, BLOCK,
    )  # fmt: skip
    rank = asked.cumsum(0, dtype=torch.int32)
    _open[(triton.cdiv(units, UNITS),)](
        *pages, stack, top, fmt, thought, overflow.view(torch.uint8), number, column, rank, before,
        *sizes, *wanted, slot_block, UNITS,
    )  # fmt: skip
    return number, slot


def variants() -> Iterator[Variant]:
    pages = {
        "p_live": "*u8", "p_taken": "*i32", "p_filled": "*i16", "p_page_thought": "*u8", "p_page_format": "*u8",
        "p_page": "*i32", "p_top": "*i64", "p_fmt": "*u8", "p_thought": "*u8", "p_number": "*i64", "p_column": "*i32",
        "p_before": "*i64",
    }  # fmt: skip
    sizes = [
        "units",
        "none",
        "most",
        "width",
        "rows",
        "heads",
        *(f"stride_{x}_{axis}" for x in "ft" for axis in "lbh"),
    ]
    shared = {**pages, **dict.fromkeys(sizes, "i32")}
    find = {"p_valid": "*u8", "p_slots": "*i32", "p_slot": "*i64", "p_asked": "*i32"}
    find.update({f"stride_v_{axis}": "i32" for axis in "lbh"})
    opened = {"p_stack": "*i32", "p_overflow": "*u8", "p_rank": "*i32"}
    for slots in (1, 8, 16, 64):
        yield Variant(_find, {**shared, **find}, {"SLOTS": slots, "TABLES": TABLES, "BLOCK": BLOCK})
        yield Variant(_open, {**shared, **opened}, {"SLOTS": slots, "UNITS": UNITS})
