"""Slots for tokens that have none: kernel and twin leave the tables as `BlockTable` does, operation by operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.allocate import allocate
from minithink.kv.contract import SCOPES, Scope, Shape
from minithink.kv.table import BlockTable
from minithink.ref import allocate as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE

OPERATIONS: dict[str, Callable[..., Tensor]] = {"kernel": allocate, "twin": ref.allocate}
COLUMNS = 40  # of the lists


class Lists:
    """A table, and lists of tokens whose places point into it."""

    def __init__(
        self, sizes: tuple[int, int, int], scope: Scope, pages: int, slots: tuple[int, ...], width: int
    ) -> None:
        layers, rows, heads = sizes
        self.shape = Shape(layers, rows, heads, 2 * heads, 16, 8, scope, DEVICE)
        self.table = BlockTable(self.shape, pages, slots, DEVICE, width)
        self.place = torch.zeros(*self.shape.tables, COLUMNS + 1, dtype=torch.int32, device=DEVICE)
        self.count = torch.zeros(self.shape.tables, dtype=torch.int32, device=DEVICE)
        self.overflow = torch.zeros((), dtype=torch.bool, device=DEVICE)

    def enlist(self, waits: Tensor) -> None:
        """Tokens at the ends of the lists, without slots: bool [Lt, B, Ht, size], in the order of their indices."""
        index = torch.arange(waits.shape[-1], device=DEVICE).expand(waits.shape)
        column = torch.where(waits, self.count[..., None] + waits.cumsum(-1) - 1, COLUMNS).long()
        self.place.scatter_(-1, column, (-1 - index).to(torch.int32))
        self.count += waits.sum(-1, dtype=torch.int32)

    def call(self, operation: Callable[..., Tensor], wishes: Wishes, size: int) -> Tensor:
        t = self.table
        slots = torch.tensor(t.per_page, dtype=torch.int32, device=DEVICE)
        return operation(
            t.live,
            t.taken,
            t.filled,
            t.thought,
            t.format,
            t.page,
            t.free_pages.stack,
            t.free_pages.top,
            self.place,
            self.count,
            wishes.at,
            wishes.active,
            wishes.thought,
            wishes.formats,
            slots,
            self.overflow,
            size,
            self.shape.sharing,
        )

    def drop(self, share: float, generator: torch.Generator) -> None:
        """Forget a share of the tokens, which all have slots."""
        held = torch.arange(COLUMNS + 1, device=DEVICE) < self.count[..., None]
        gone = held & (torch.rand(held.shape, generator=generator).to(DEVICE) < share)
        stride = self.table.stride
        self.table.release(
            torch.where(gone, self.place // stride, self.table.free_pages.count), self.place % stride, gone
        )
        keep = held & ~gone
        column = torch.where(keep, keep.cumsum(-1) - 1, COLUMNS)
        self.place.scatter_(-1, column, self.place.clone())
        self.count = keep.sum(-1, dtype=torch.int32)

    def listed(self) -> Tensor:
        """The places, 0 behind the ends."""
        return self.place.masked_fill(torch.arange(COLUMNS + 1, device=DEVICE) >= self.count[..., None], 0)


class Wishes:
    """Whose turn it is, and what they want."""

    def __init__(self, rows: int, generator: torch.Generator, share: float, formats: int, thoughts: int) -> None:
        n = int(torch.randint(1, rows + 1, (1,), generator=generator))
        at = torch.randperm(rows, generator=generator)[:n]
        active = torch.rand(n, generator=generator) < share
        thought = torch.randint(thoughts, (rows,), generator=generator, dtype=torch.uint8)
        of_thought = torch.randint(formats, (thoughts,), generator=generator)
        self.at, self.active, self.thought, self.formats = (x.to(DEVICE) for x in (at, active, thought, of_thought))

    def waits(self, shape: tuple[int, int, int], size: int, generator: torch.Generator) -> Tensor:
        """Tokens of the chosen rows: bool [Lt, B, Ht, size]; those that are not active have some too."""
        some = torch.rand(*shape, size, generator=generator).to(DEVICE) < (0.7 if size > 1 else 1.1)
        mine = torch.zeros(shape[1], dtype=torch.bool, device=DEVICE).index_fill_(0, self.at[self.active], True)
        return some & mine[:, None, None]


def by_table(lists: Lists, wishes: Wishes, size: int) -> Tensor:
    """What the operation must do, token by token: the first free slot of the first page with room, or the first slot
    of a new page."""
    t, places = lists.table, lists.place
    layers, _, heads = lists.shape.tables
    base = torch.zeros(layers, len(wishes.at), heads, size, dtype=torch.int64)
    for layer in range(layers):
        for n, row in enumerate(wishes.at.tolist()):
            thought = int(wishes.thought[row])
            f = int(wishes.formats[thought])
            lanes = lists.shape.sharing * t.per_page[f]
            base[layer, n] = t.free_pages.count * lanes
            for head in range(heads) if wishes.active[n] else ():
                unit = layer, row, head
                for column in range(int(lists.count[unit])):
                    if (index := -1 - int(places[(*unit, column)])) >= 0:
                        page, slot = take(t, unit, f, thought)
                        places[(*unit, column)] = page * t.stride + slot
                        base[layer, n, head, index] = page * lanes + slot
    return base.to(DEVICE)


def take(t: BlockTable, unit: tuple[int, int, int], f: int, thought: int) -> tuple[int, int]:
    """A slot for one token of a unit: page and slot."""
    pages = t.page[unit].tolist()
    mine = [p for p in pages if p != t.free_pages.count and (int(t.format[p]), int(t.thought[p])) == (f, thought)]
    page = next((p for p in mine if int(t.taken[p]) < t.per_page[f]), None)
    if page is None:
        page = int(t.free_pages.stack[t.free_pages.top - 1])
        t.free_pages.top -= 1
        t.page[unit][pages.index(t.free_pages.count)] = page
        t.live[page], t.taken[page], t.filled[page], t.format[page], t.thought[page] = False, 0, 0, f, thought
    slot = t.live[page].tolist().index(False)
    t.live[page, slot] = True
    t.taken[page] += 1
    t.filled[page] = max(int(t.filled[page]), slot + 1)
    return page, slot


def assert_tables_same(name: str, got: BlockTable, want: BlockTable) -> None:
    """All that they hold, but for what nobody reads: at the page that is none, and columns nobody has used."""
    width, none = min(got.page.shape[-1], want.page.shape[-1]), want.free_pages.count
    for table in (got, want):
        assert (table.page[..., width:] == none).all(), f"{name}: the tables have different widths"
    assert_same(f"{name} page", got.page[..., :width], want.page[..., :width])
    for attribute in ("live", "taken", "filled", "format", "thought"):
        assert_same(f"{name} {attribute}", getattr(got, attribute)[:none], getattr(want, attribute)[:none])
    assert_same(f"{name} stack", got.free_pages.stack[:none], want.free_pages.stack[:none])
    assert_same(f"{name} top", got.free_pages.top, want.free_pages.top)


def assert_same_lists(name: str, got: Lists, want: Lists) -> None:
    assert_tables_same(name, got.table, want.table)
    assert_same(f"{name} place", got.listed(), want.listed())


def assert_consistent(table: BlockTable) -> None:
    """Every page is in one table or on the stack, and what is known of it is right."""
    none, free = table.free_pages.count, table.free_pages.free
    held = table.page[table.page != none].tolist()
    assert sorted([*held, *table.free_pages.stack[:free].tolist()]) == list(range(none))
    assert_same("taken", table.taken[:none], table.live[:none].sum(-1, dtype=torch.int32))
    assert not table.live[table.free_pages.stack[:free].long()].any()


def small_blocks(patch: pytest.MonkeyPatch, block: int, units: int) -> None:
    patch.setattr("minithink.kernels.allocate.BLOCK", block)
    patch.setattr("minithink.kernels.allocate.UNITS", units)


@settings(max_examples=max(2, settings().max_examples // 3))
@given(
    sizes=st.sampled_from([(1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 1, 3)]),
    scope=st.sampled_from(SCOPES),
    slots=st.sampled_from([(4,), (1,), (8, 4), (2, 3, 1), (1, 2), (5, 2)]),
    formats=st.integers(1, 3),
    thoughts=st.integers(1, 3),
    blocks=st.sampled_from([(4, 1), (16, 4), (4, 8)]),
    steps=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 5, 8]), st.sampled_from([0.0, 0.0, 0.5, 1.0])), min_size=2, max_size=4
    ),
    seed=st.integers(0, 2**31),
)
def test_equals_the_block_table(
    sizes: tuple[int, int, int],
    scope: Scope,
    slots: tuple[int, ...],
    formats: int,
    thoughts: int,
    blocks: tuple[int, int],
    steps: list[tuple[int, float]],
    seed: int,
) -> None:
    """Pages with holes and without, tables with holes, rows that are not due, one token and several."""
    generator = torch.Generator().manual_seed(seed)
    every = {name: Lists(sizes, scope, 300, slots, 40) for name in ("want", *OPERATIONS)}
    want, formats = every["want"], min(formats, len(slots))
    for size, share in [(8, 0.5), *steps]:  # several pages with room, from the beginning
        wishes = Wishes(sizes[1], generator, 0.8, formats, thoughts)
        waits = wishes.waits(want.shape.tables, size, generator)
        for lists in every.values():
            lists.enlist(waits)
        expected = by_table(want, wishes, size)
        for name, operation in OPERATIONS.items():
            with pytest.MonkeyPatch.context() as patch:
                small_blocks(patch, *blocks)
                base = every[name].call(operation, wishes, size)
            assert_same(f"{name} base", base, expected)
            assert_same_lists(name, every[name], want)
            assert not every[name].overflow
        state = generator.get_state()
        for lists in every.values():
            generator.set_state(state)
            lists.drop(share, generator)
    for lists in every.values():
        assert_consistent(lists.table)


@settings(max_examples=max(2, settings().max_examples // 2))
@given(
    sizes=st.sampled_from([(1, 1, 1), (1, 3, 2), (2, 2, 2), (2, 5, 1)]),
    pages=st.integers(0, 12),
    width=st.integers(1, 9),
    slots=st.sampled_from([(1,), (2, 1), (3, 4)]),
    units=st.sampled_from([1, 4, 8]),
    sizes_of_steps=st.lists(st.sampled_from([1, 1, 3, 8]), min_size=2, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_no_room(
    sizes: tuple[int, int, int],
    pages: int,
    width: int,
    slots: tuple[int, ...],
    units: int,
    sizes_of_steps: list[int],
    seed: int,
) -> None:
    """Too few pages, or columns: the first in the order of the units get what there is, and the flag says it."""
    generator = torch.Generator().manual_seed(seed)
    every = {name: Lists(sizes, "head", pages, slots, width) for name in OPERATIONS}
    ours, twin = every["kernel"], every["twin"]
    for size in sizes_of_steps:
        wishes = Wishes(sizes[1], generator, 0.8, len(slots), 2)
        waits = wishes.waits(ours.shape.tables, size, generator)
        for lists in every.values():
            lists.enlist(waits)
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch, 4, units)
            base = {name: lists.call(OPERATIONS[name], wishes, size) for name, lists in every.items()}
        assert_same("base", base["kernel"], base["twin"])
        assert_same_lists("kernel", ours, twin)
        assert_consistent(ours.table)
        nowhere = ours.listed() == pages * ours.table.stride
        nowhere &= torch.arange(COLUMNS + 1, device=DEVICE) < ours.count[..., None]
        assert bool(ours.overflow) == bool(twin.overflow) == bool(nowhere.any())
        full = (ours.table.page != pages).all(-1)
        lacking = nowhere.any(-1)
        assert ours.table.free_pages.free == 0 or full[lacking].all(), "a page was left, and a column for it"
        if ours.overflow:  # sequences cannot go on
            return


@pytest.mark.parametrize("size", [1, 3])
def test_as_it_is_launched(size: int) -> None:
    """More columns than a block, more units than a program of the second pass, no room in the first columns."""
    rows = 4
    every = {name: Lists((2, rows, 2), "head", 3_000, (2, 1), 300) for name in ("want", *OPERATIONS)}
    for i in range(2):  # 130 full pages, then pages of another type
        for t in (lists.table for lists in every.values()):
            for unit in torch.ones(t.shape.tables).nonzero().tolist():
                for _ in range(260 if i == 0 else 3):
                    take(t, tuple(unit), 0, i)
    wishes = Wishes(rows, torch.Generator(), 1.0, 1, 2)
    wishes.at = torch.arange(rows, device=DEVICE)
    wishes.active = wishes.at % 3 < 2
    wishes.thought = torch.zeros(rows, dtype=torch.uint8, device=DEVICE)
    wishes.formats = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    waits = torch.zeros(2, rows, 2, size, dtype=torch.bool, device=DEVICE)
    waits[:, wishes.active] = True
    for _ in range(2):  # new pages; at size 1 the second token takes the slot that is left
        for lists in every.values():
            lists.enlist(waits)
        expected = by_table(every["want"], wishes, size)
        for name, operation in OPERATIONS.items():
            assert_same(f"{name} base", every[name].call(operation, wishes, size), expected)
            assert_same_lists(name, every[name], every["want"])
            assert not every[name].overflow
    assert (every["kernel"].table.page[:, 0, :, 132] != 3_000).all()


def test_what_others_hold_stays() -> None:
    """Rows that are not active keep tokens that wait, and their pages."""
    lists = Lists((1, 2, 1), "head", 9, (4,), 3)
    lists.enlist(torch.ones(1, 2, 1, 3, dtype=torch.bool, device=DEVICE))
    before = lists.place[:, 1].clone()
    wishes = Wishes(2, torch.Generator(), 1.0, 1, 1)
    wishes.at = torch.tensor([1, 0], device=DEVICE)
    wishes.active = torch.tensor([False, True], device=DEVICE)
    base = lists.call(allocate, wishes, 3)
    assert_same("the idle row's places", lists.place[:, 1], before)
    assert base[0, :, 0].tolist() == [[36, 36, 36], [0, 1, 2]]
    assert lists.table.free_pages.free == 8
