"""Slots for a step's tokens: kernel and twin leave the tables as `BlockTable` does, operation by operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.allocate import allocate
from minithink.kv.contract import SCOPES, Scope, Shape
from minithink.kv.table import BlockTable
from minithink.ref import allocate as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE

OPERATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"kernel": allocate, "twin": ref.allocate}


def new_table(
    sizes: tuple[int, int, int], scope: Scope, pages: int, slots: tuple[int, ...], width: int
) -> BlockTable:
    layers, rows, heads = sizes
    table = BlockTable(Shape(layers, rows, heads, 2 * heads, 16, 8, scope, DEVICE), pages, slots, DEVICE)
    table.page = torch.full((*table.shape.tables, width), pages, dtype=torch.int32, device=DEVICE)
    return table


def call(
    operation: Callable[..., tuple[Tensor, Tensor]], table: BlockTable, fmt: Tensor, thought: Tensor, valid: Tensor,
    overflow: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slots = torch.tensor(table.slots, dtype=torch.int32, device=DEVICE)
    tensors = table.live, table.taken, table.filled, table.thought, table.format, table.page
    return operation(*tensors, table.pages.stack, table.pages.top, fmt, thought, valid, slots, overflow)


def by_table(table: BlockTable, fmt: Tensor, thought: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """What the operation must do, by BlockTable: all units at once if they want one format, else one by one."""
    page = torch.full(valid.shape, table.pages.count, device=DEVICE)
    slot = torch.zeros_like(page)
    units = [tuple(unit) for unit in valid.nonzero().tolist()]
    formats = {int(fmt[unit]) for unit in units}
    parts = [torch.zeros_like(valid).index_put_(tuple(torch.tensor(unit)), ~slot[0, 0, 0].bool()) for unit in units]
    for part in [valid.contiguous()] if len(formats) == 1 else parts:
        f = int(fmt[part][0])
        table.open(f, thought, table.missing(f, thought, part.long()), 1)
        got = table.take(f, thought, part[..., None])
        page, slot = torch.where(part, got[0][..., 0], page), torch.where(part, got[1][..., 0], slot)
    return page, slot


def assert_tables_same(name: str, got: BlockTable, want: BlockTable) -> None:
    """All that they hold, but for what nobody reads: the thought type of no page, and columns nobody has used."""
    width, none = min(got.page.shape[-1], want.page.shape[-1]), want.pages.count
    for table in (got, want):
        assert (table.page[..., width:] == none).all(), f"{name}: the tables have different widths"
    assert_same(f"{name} page", got.page[..., :width], want.page[..., :width])
    assert_same(f"{name} thought", got.thought[:none], want.thought[:none])
    for attribute in ("live", "taken", "filled", "format"):
        assert_same(f"{name} {attribute}", getattr(got, attribute), getattr(want, attribute))
    assert_same(f"{name} stack", got.pages.stack, want.pages.stack)
    assert_same(f"{name} top", got.pages.top, want.pages.top)


def living(table: BlockTable, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A share of the tokens: page, slot and which, [Lt, B, Ht, width · most], to be released."""
    page = table.page.long()[..., None].expand(*table.page.shape, table.most).flatten(-2)
    slot = torch.arange(table.most, device=DEVICE).repeat(table.page.shape[-1]).expand(page.shape)
    which = torch.rand(page.shape, generator=generator).to(DEVICE) < share
    return page, slot, which & table.live[page, slot]


def wishes(
    table: BlockTable, generator: torch.Generator, share: float, formats: int, thoughts: int, by_row: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """fmt, thought and valid of a step; `by_row`: one for all units of a sequence, as views."""
    shape = table.shape.tables
    drawn = (1, shape[1], 1) if by_row else shape
    fmt = torch.randint(formats, drawn, generator=generator, dtype=torch.uint8)
    thought = torch.randint(thoughts, drawn, generator=generator, dtype=torch.uint8)
    valid = torch.rand(drawn, generator=generator) < share
    return tuple(x.to(DEVICE).expand(shape) for x in (fmt, thought, valid))  # type: ignore[return-value]


def assert_consistent(table: BlockTable) -> None:
    """Every page is in one table or on the stack, and what is known of it is right."""
    none, free = table.pages.count, table.pages.free
    held = table.page[table.page != none].tolist()
    assert sorted([*held, *table.pages.stack[:free].tolist()]) == list(range(none))
    assert_same("taken", table.taken, table.live.sum(-1, dtype=torch.int32))
    assert not table.live[table.pages.stack[:free].long()].any()


@given(
    sizes=st.sampled_from([(1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 1, 3), (1, 0, 2)]),
    scope=st.sampled_from(SCOPES),
    slots=st.sampled_from([(4,), (1,), (8, 4), (2, 3, 1), (1, 2), (5, 2)]),
    formats=st.integers(1, 3),
    thoughts=st.integers(1, 3),
    by_row=st.booleans(),
    block=st.sampled_from([4, 16]),
    group=st.sampled_from([4, 16, 16]),
    steps=st.lists(st.sampled_from(["take", "take", "take", "release", "fill", "empty"]), min_size=3, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_equals_the_block_table(
    sizes: tuple[int, int, int], scope: Scope, slots: tuple[int, ...], formats: int, thoughts: int, by_row: bool,
    block: int, group: int, steps: list[str], seed: int,
) -> None:  # fmt: skip
    """Pages with holes and without, tables with holes, units that are not due; one format, and one for each unit."""
    generator = torch.Generator().manual_seed(seed)
    want = new_table(sizes, scope, 2000, slots, 170)
    tables = {name: new_table(sizes, scope, 2000, slots, 170) for name in OPERATIONS}
    overflow = {name: torch.zeros((), dtype=torch.bool, device=DEVICE) for name in OPERATIONS}
    formats = min(formats, len(slots))
    for i, step in enumerate(["fill", "release", *steps]):  # several pages with room, from the beginning
        everything = {"want": want, **tables}
        if step == "take":
            share = [0.0, 0.4, 0.8, 1.0, 1.0][i % 5]
            step_wishes = wishes(want, generator, share, formats, thoughts, by_row)
            expected = by_table(want, *step_wishes)
            for name, operation in OPERATIONS.items():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("minithink.kernels.allocate.BLOCK", block)
                    patch.setattr("minithink.kernels.allocate.TABLES", group)
                    patch.setattr("minithink.kernels.allocate.UNITS", group)
                    page, slot = call(operation, tables[name], *step_wishes, overflow[name])
                assert_same(f"{name} page number", page, expected[0])
                assert_same(f"{name} slot", slot, expected[1])
                assert_tables_same(name, tables[name], want)
                assert not overflow[name]
        elif step == "fill":  # several tokens of every unit
            f, thought, _ = wishes(want, generator, 1.0, formats, thoughts, True)
            count = torch.randint(20, want.shape.tables, generator=generator).to(DEVICE)
            for table in everything.values() if count.numel() else ():
                at = int(f.flatten()[0])
                table.open(at, thought, table.missing(at, thought, count), 20)
                table.take(at, thought, torch.arange(20, device=DEVICE) < count[..., None])
        else:
            gone = living(want, 0.5 if step == "release" else 1.0, generator)
            for table in everything.values():
                table.release(*gone)
    for table in tables.values():
        assert_consistent(table)


@given(
    sizes=st.sampled_from([(1, 1, 1), (1, 3, 2), (2, 2, 2), (2, 5, 1)]),
    pages=st.integers(0, 12),
    width=st.integers(1, 9),
    slots=st.sampled_from([(1,), (2, 1), (3, 4)]),
    group=st.sampled_from([4, 16, 16]),
    steps=st.integers(2, 5),
    seed=st.integers(0, 2**31),
)
def test_no_room(
    sizes: tuple[int, int, int], pages: int, width: int, slots: tuple[int, ...], group: int, steps: int, seed: int
) -> None:
    """Too few pages, or columns: the first in the order of the units get what there is, and the flag says it."""
    generator = torch.Generator().manual_seed(seed)
    tables = {name: new_table(sizes, "head", pages, slots, width) for name in OPERATIONS}
    overflow = {name: torch.zeros((), dtype=torch.bool, device=DEVICE) for name in OPERATIONS}
    ours, twin = tables["kernel"], tables["twin"]
    lacked = False
    for i in range(steps):
        if i % 4 == 3:
            gone = living(twin, 0.6, generator)
            for table in tables.values():
                table.release(*gone)
        step_wishes = wishes(twin, generator, 0.8, len(slots), 2, False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minithink.kernels.allocate.BLOCK", 4)
            patch.setattr("minithink.kernels.allocate.TABLES", group)
            patch.setattr("minithink.kernels.allocate.UNITS", group)
            got = {name: call(OPERATIONS[name], tables[name], *step_wishes, overflow[name]) for name in OPERATIONS}
        assert_same("page number", got["kernel"][0], got["twin"][0])
        assert_same("slot", got["kernel"][1], got["twin"][1])
        assert_tables_same("kernel", ours, twin)
        assert_consistent(ours)
        number, slot = got["kernel"]
        lacking = step_wishes[-1] & (number == pages)
        lacked |= bool(lacking.any())
        assert bool(overflow["kernel"]) == bool(overflow["twin"]) == lacked
        assert (slot[number == pages] == 0).all()
        assert ours.live[number[number != pages], slot[number != pages]].all()
        full = (ours.page != pages).all(-1)
        assert ours.pages.free == 0 or full[lacking].all(), "a page was left, and a column for it"


def test_as_it_is_launched() -> None:
    """More columns than a block, more units than a program of the second pass, no room in the first columns."""
    table, twin, want = (new_table((2, 35, 2), "head", 20_000, (2, 1), 300) for _ in range(3))
    for i in range(2):  # 130 full pages, then pages of another type
        for t in (table, twin, want):
            thought = torch.full(t.shape.tables, i, dtype=torch.uint8, device=DEVICE)
            count = torch.full(t.shape.tables, 260 if i == 0 else 3, device=DEVICE)
            t.open(0, thought, t.missing(0, thought, count), 130)
            t.take(0, thought, torch.ones(*t.shape.tables, 260 if i == 0 else 3, dtype=torch.bool, device=DEVICE))
    overflow = torch.zeros((), dtype=torch.bool, device=DEVICE)
    fmt = torch.zeros(table.shape.tables, dtype=torch.uint8, device=DEVICE)
    valid = (torch.arange(35, device=DEVICE) % 3 < 2)[None, :, None].expand(table.shape.tables)
    for _ in range(2):  # the type's last free slot, then new pages
        expected = by_table(want, fmt, thought, valid)
        for name, t in (("kernel", table), ("twin", twin)):
            page, slot = call(OPERATIONS[name], t, fmt, thought, valid, overflow)
            assert_same(f"{name} page number", page, expected[0])
            assert_same(f"{name} slot", slot, expected[1])
            assert_tables_same(name, t, want)
    assert not overflow
    assert (table.page[:, 0, :, 132] != 20_000).all()


def test_views_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence wants is given to all its units as a view."""
    table = new_table((2, 3, 2), "head", 20, (2, 4), 4)
    step_wishes = wishes(table, torch.Generator().manual_seed(0), 1.0, 2, 2, True)
    overflow = torch.zeros((), dtype=torch.bool, device=DEVICE)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    page, _ = call(allocate, table, *step_wishes, overflow)
    monkeypatch.undo()
    assert_same("page number", page, torch.arange(12, device=DEVICE).view(2, 3, 2))
    of_row = step_wishes[0][0, :, 0].repeat_interleave(2).repeat(2)
    assert_same("format", table.format[:12], of_row)
