"""Evictions: kernel and twin change the same bytes, and both leave what `assert_evicted` says in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.evict import evict
from minithink.kv.contract import SCOPES, Scope, Shape, Storage
from minithink.kv.requantize import Moves
from minithink.kv.store import PagedStore
from minithink.ref import evict as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.kernels.stores import STORAGES, filled
from tests.kernels.test_allocate import assert_consistent, assert_tables_same
from tests.kv.run import append_one, flush, open_now

NAMES = ["plain", "nvfp4", "ternary", "thoughts", "apart", "nvfp4-by-token", "ternary-by-token", "kivi", "mixed"]
# Beside those of other tests: some types have rows of key scales and some have none, groups end before buffers do.
MIXED = Storage(("ternary", "nvfp4:by=token/nvfp4", "fp8"), block=8, buffer=24, also=("int4s",))


def tensors(store: PagedStore) -> tuple[Tensor, ...]:
    """What the operation changes, in its order."""
    t, groups = store.slots.table, store.slots.free_groups
    lists = store.lists.place, store.lists.pos, store.lists.count
    pages = t.live, t.taken, t.format, t.page, t.free_pages.stack, t.free_pages.top
    return *lists, *pages, store.slots.group_of, store.slots.group_uses, groups.stack, groups.top


def assert_tensors_same(name: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """All but what stands in `place` behind the last token, and at the numbers that mean none."""
    held = want[1] >= 0
    assert_same(f"{name} place", got[0].masked_fill(~held, 0), want[0].masked_fill(~held, 0))
    tables = ("live", "taken", "format", "page", "stack", "top")
    names = ("pos", "count", *tables, "group_of", "uses", "group_stack", "groups")
    for what, x, y in zip(names, got[1:], want[1:], strict=True):
        none = what in ("live", "taken", "format", "stack", "uses", "group_stack")
        ends = slice(None, -1) if none else slice(None, len(want[3]) - 1) if what == "group_of" else slice(None)
        assert_same(f"{name} {what}", *((z[ends] if z.ndim else z) for z in (x, y)))


def named(state: tuple[Tensor, ...]) -> dict[str, Any]:
    """The tensors that the operation changes, as lists by name."""
    lists, tables = ("place", "pos", "count"), ("live", "taken", "format", "page", "stack", "top")
    names = (*lists, *tables, "group_of", "uses", "groups", "groups_top")
    return {name: x.tolist() for name, x in zip(names, state, strict=True)}


def assert_evicted(old: dict[str, Any], new: dict[str, Any], drop: Tensor, at: Tensor, stride: int) -> None:
    """What an eviction must do, token by token. old, new: lists, as of `named`.

    A list loses the dropped tokens and nothing else. Their slots are free. A page without a token leaves its table
    and is free; every other page stays in its column. A group of keys is free when its last token has gone.
    """
    none, free_before, free_after = len(old["stack"]) - 1, *(set(x["stack"][: x["top"]]) for x in (old, new))
    live = {(page, slot) for page, slots in enumerate(old["live"][:none]) for slot, x in enumerate(slots) if x}
    uses, emptied, chosen = list(old["uses"]), set[int](), at.tolist()
    layers, rows, heads = len(old["count"]), len(old["count"][0]), len(old["count"][0][0])
    for layer, row, head in product(range(layers), range(rows), range(heads)):
        n = old["count"][layer][row][head]
        tokens = list(zip(old["pos"][layer][row][head][:n], old["place"][layer][row][head][:n], strict=True))
        goes = drop[layer, chosen.index(row), head].tolist() if row in chosen else [False] * n
        for column, (_, place) in enumerate(tokens):
            if goes[column] and place >= 0:
                live.remove((place // stride, place % stride))
                if old["group_of"] and (scales := old["group_of"][place // stride][place % stride]) < len(uses) - 1:
                    uses[scales] -= 1
        kept = [token for column, token in enumerate(tokens) if not goes[column]]
        m, pos, place = len(kept), new["pos"][layer][row][head], new["place"][layer][row][head]
        assert (new["count"][layer][row][head], list(zip(pos[:m], place[:m], strict=True))) == (m, kept)
        assert set(pos[m:]) <= {-1}
        for was, now in zip(old["page"][layer][row][head], new["page"][layer][row][head], strict=True):
            held = was != none and any((was, slot) in live for slot in range(stride))
            assert now == (was if held else none)
            emptied |= {was} - {none} if not held else set()
    assert free_after == free_before | emptied
    assert new["top"] == len(free_after), "each once"
    for page in range(none):
        slots = [(page, slot) in live for slot in range(stride)]
        assert (new["live"][page], new["taken"][page]) == (slots, sum(slots))
        assert new["format"][page] == (255 if page in emptied else old["format"][page])
    assert new["uses"][:-1] == uses[:-1]
    gone = {i for i, (was, now) in enumerate(zip(old["uses"][:-1], uses[:-1], strict=True)) if was and not now}
    assert new["groups_top"] == old["groups_top"] + len(gone)
    assert set(new["groups"][: new["groups_top"]]) == set(old["groups"][: old["groups_top"]]) | gone


class KernelStore(PagedStore):
    """A store that evicts by the kernel."""

    def evict(self, drop: Tensor, at: Tensor | None = None) -> None:
        drop = (
            drop | (self.lists.positions() < 0)[:, slice(None) if at is None else at]
        )  # behind the last token: anything
        at = torch.arange(self.shape.rows, device=DEVICE) if at is None else at
        other, twins, others = (tuple(x.clone() for x in tensors(self)) for _ in range(3))
        before = drop.clone()
        assert evict(drop, at, *tensors(self), self.slots.table.stride) is None
        ref.evict(drop, at, *twins, self.slots.table.stride)
        assert_tensors_same("kernel and twin", tensors(self), twins)
        assert_evicted(named(others), named(twins), drop, at, self.slots.table.stride)
        evict(drop.flip(1), at.flip(0), *other, self.slots.table.stride)
        ref.evict(drop.flip(1), at.flip(0), *others, self.slots.table.stride)
        assert_tensors_same("the other way round, kernel and twin", other, others)
        assert_same("drop", drop, before)
        if self.lists.columns is None:
            self.lists.refresh()


def new_store(
    kind: type[PagedStore], name: str, sizes: tuple[int, int, int], scope: Scope, **options: int
) -> PagedStore:
    layers, rows, heads = sizes
    shape = Shape(layers, rows, heads, 2 * heads, 32, 8, scope, DEVICE)
    return kind(shape, {**STORAGES, "mixed": MIXED}[name], **{"pages": 600, "groups": 500, **options})  # type: ignore[arg-type]


def assert_stores_same(got: PagedStore, want: PagedStore) -> None:
    assert_tables_same("store", got.slots.table, want.slots.table)
    lists = [(s.lists.place.masked_fill(s.lists.pos < 0, 0), s.lists.pos, s.lists.count) for s in (got, want)]
    for what, x, y in zip(("place", "pos", "count"), *lists, strict=True):
        assert_same(what, x, y)
    assert_consistent(got.slots.table)
    ours, theirs = got.slots, want.slots
    pages, free = ours.table.free_pages.count, ours.free_groups
    assert_same("groups of slots", ours.group_of[:pages], theirs.group_of[:pages])
    assert_same("uses", ours.group_uses[:-1], theirs.group_uses[:-1])
    assert_same("groups on the stack", *(x.free_groups.stack[: x.free_groups.count] for x in (ours, theirs)))
    assert free.free == theirs.free_groups.free
    groups = [free.stack[: free.free], ours.group_uses[:-1].nonzero().flatten()]
    assert torch.cat(groups).sort().values.tolist() == list(range(free.count))
    living = ours.group_of[ours.table.live.nonzero(as_tuple=True)] if ours.group_of.numel() else ours.group_uses[:0]
    uses = living[living < free.count].long().bincount(minlength=free.count)
    assert_same("uses are living tokens", ours.group_uses[:-1].long(), uses)


def drops(kind: str, store: PagedStore, generator: torch.Generator, everywhere: Callable[[Tensor], Tensor]) -> Tensor:
    """bool [Lt, B, Ht, S]."""
    pos = store.lists.positions()
    chance = torch.rand(pos.shape, generator=generator).to(DEVICE)
    if kind == "few":  # one token or none of a unit
        return (chance < 0.5) & (chance == torch.where(pos >= 0, chance, 2).amin(-1, keepdim=True))
    if kind == "oldest":  # a whole stretch: pages become empty together
        return (pos >= 0) & (pos < 24) & everywhere(pos)
    if kind == "newest":
        return (pos >= 7) & everywhere(pos)
    share = {"none": 0.0, "some": 0.3, "most": 0.9, "all": 1.1}[kind]
    return (pos >= 0) & (chance < share) & everywhere(pos)


@settings(max_examples=max(2, settings().max_examples // 2))  # several evictions each
@given(
    name=st.sampled_from(NAMES),
    sizes=st.sampled_from([(1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 3, 1), (1, 1, 3)]),
    scope=st.sampled_from(SCOPES),
    blocks=st.sampled_from([32, 64]),
    steps=st.lists(
        st.sampled_from(["none", "few", "some", "most", "all", "oldest", "newest", "append", "append", "clear"]),
        min_size=3,
        max_size=7,
    ),
    fixed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_store(
    name: str,
    sizes: tuple[int, int, int],
    scope: Scope,
    blocks: int,
    steps: list[str],
    fixed: bool,
    seed: int,
) -> None:
    """Lists of several blocks and of none, tokens in a buffer, empty pages, rows that are done and start again."""
    generator = torch.Generator().manual_seed(seed)
    options = {"columns": 90} if fixed else {"width": 1 + seed % 20}
    want = new_store(PagedStore, name, sizes, scope, **options)
    got = new_store(KernelStore, name, sizes, scope, **options)
    lengths = [0] * sizes[1]
    some = torch.ones(1, dtype=torch.bool)

    def everywhere(pos: Tensor) -> Tensor:
        """But for some units, which keep everything."""
        return some.to(DEVICE).expand(pos.shape[:-1])[..., None]

    with pytest.MonkeyPatch.context() as patch:
        constants = {"BLOCKS": ((0, blocks),), "LOOK": 32, "TABLES": 2, "COLUMNS": 4, "SUMS": 2}
        for constant, value in constants.items():
            patch.setattr(f"minithink.kernels.evict.{constant}", value)
        for step in steps:
            some = torch.rand(want.shape.tables, generator=generator) < 0.8
            if step == "clear":
                row = int(torch.randint(sizes[1], (), generator=generator))
                lengths[row] = 0
                for store in (got, want):
                    store.clear(row)
            elif step != "append":
                drop, at = drops(step, want, generator, everywhere), None
                if seed % 2:  # of some rows, or of none
                    at = (torch.rand(sizes[1], generator=generator) < 0.7).nonzero().flatten().to(DEVICE)
                    drop = drop[:, at]
                for store in (got, want):
                    store.evict(drop, at)
            elif new := [row for row, length in enumerate(lengths) if not length]:
                counts = torch.randint(1, 50, (len(new),), generator=generator).tolist()
                for store in (got, want):
                    store.append(new, counts, [0] * len(new))
                    for row, count in zip(new, counts, strict=True):
                        Moves(store).settle(row, count)
                for row, count in zip(new, counts, strict=True):
                    lengths[row] = count
            else:
                kinds = torch.randint(len(want.storage.thoughts), (sizes[1],), generator=generator).to(DEVICE)
                rows = [row for row in range(sizes[1]) if torch.rand((), generator=generator) < 0.8] or [0]
                for store in (got, want):
                    open_now(store, torch.ones_like(kinds, dtype=torch.bool), kinds.to(torch.uint8))
                for _ in range(4):
                    for store in (got, want):
                        if full := [row for row in rows if 0 < store.storage.buffer == store.waiting[row]]:
                            flush(store, full)
                        append_one(store, rows, [lengths[row] for row in rows])
                    for row in rows:
                        lengths[row] += 1
            assert_stores_same(got, want)


@pytest.mark.parametrize("scope", SCOPES)
def test_as_it_is_launched(scope: Scope) -> None:
    """More tokens than a block, more pages than a block of a table: twice, with appended tokens between."""
    # plain tokens fill a page of this format each
    stores = [
        new_store(kind, "nvfp4", (1, 3, 2), scope, pages=6000, width=2600) for kind in (KernelStore, PagedStore)
    ]
    generator = torch.Generator().manual_seed(1)
    for store in stores:
        store.append([0, 2], [1500, 1027], [0, 0])
    for i in range(2):
        drop = torch.rand(stores[0].lists.positions().shape, generator=generator).to(DEVICE) < 0.3
        drop[..., 1020:1026] = False
        drop[:, 0, :, : 1030 * i] = False  # then nothing moves in the first block
        for store in stores:
            store.evict(drop)
        assert_stores_same(*stores)
        for store in stores:
            append_one(store, [0, 1], [1500 + i, i])
        assert_stores_same(*stores)
    drop = torch.ones_like(stores[0].lists.positions(), dtype=torch.bool)
    for store in stores:
        store.evict(drop)
    assert_stores_same(*stores)
    assert stores[0].slots.table.free_pages.free == 6000


def test_units_that_drop_nothing_are_left_alone() -> None:
    """Not a byte of theirs is written, nor behind their last token, whatever `drop` holds there."""
    store = new_store(PagedStore, "plain", (2, 2, 2), "head", width=12)
    store.append([0, 1], [5, 9], [0, 0])
    store.lists.place.masked_fill_(store.lists.pos < 0, 12345)
    before = [x.clone() for x in tensors(store)]
    drop = store.lists.positions() < 0  # no token
    at = torch.arange(2, device=DEVICE)
    evict(drop, at, *tensors(store), store.slots.table.stride)
    for x, y in zip(tensors(store), before, strict=True):
        assert_same("a tensor", x, y)
    drop[1, 1, 0, 3] = True
    evict(drop, at, *tensors(store), store.slots.table.stride)
    changed = (store.lists.pos != before[1]).any(-1)
    assert changed.nonzero().tolist() == [[1, 1, 0]]
    assert store.lists.count.flatten().tolist() == [5, 5, 9, 9, 5, 5, 8, 9]
    assert store.lists.pos[1, 1, 0].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, *[-1] * (store.lists.pos.shape[-1] - 8)]


@pytest.mark.parametrize("block", [32, 1024])
def test_rows_of_key_scales_go_with_their_last_tokens(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens at a time, until none is left, of rows in another order; groups that reach over two blocks."""
    monkeypatch.setattr("minithink.kernels.evict.BLOCKS", ((0, block),))
    store = filled(STORAGES["nvfp4-by-token"], "head", [40, 9, 61], layers=2, keep=0.9, seed=3)
    at, generator = torch.tensor([2, 0], device=DEVICE), torch.Generator().manual_seed(5)
    before = store.slots.free_groups.free
    for share in (0.3, 0.5, 0.5, 1.0):
        shape = store.lists.positions()[:, at].shape
        drop = (torch.rand(shape, generator=generator) < share).to(DEVICE)
        twins = tuple(x.clone() for x in tensors(store))
        evict(drop, at, *tensors(store), store.slots.table.stride)
        ref.evict(drop, at, *twins, store.slots.table.stride)
        assert_tensors_same(f"{share} of the tokens,", tensors(store), twins)
        uses = store.slots.group_of[store.slots.table.live[:-1].nonzero(as_tuple=True)]
        uses = uses[uses < store.slots.free_groups.count].long().bincount(minlength=store.slots.free_groups.count)
        assert_same("uses", store.slots.group_uses[:-1].long(), uses)
    assert store.lists.count[:, at].sum() == 0
    assert store.slots.free_groups.free > before
    free = store.slots.free_groups.stack[: store.slots.free_groups.free].tolist()
    assert sorted([*free, *uses.nonzero().flatten().tolist()]) == list(range(store.slots.free_groups.count))


def test_whole_blocks_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that lose no token, behind others that have lost some."""
    monkeypatch.setattr("minithink.kernels.evict.BLOCKS", ((0, 32),))
    store = filled(STORAGES["plain"], "head", [230, 215], layers=2, keep=1.0, seed=4)
    at = torch.arange(2, device=DEVICE)
    for columns in ([3], [0, 70], [31, 32], [199], [64, 100, 101]):
        drop = torch.zeros_like(store.lists.positions(), dtype=torch.bool)
        drop[:, :, :, columns] = True
        twins = tuple(x.clone() for x in tensors(store))
        evict(drop, at, *tensors(store), store.slots.table.stride)
        ref.evict(drop, at, *twins, store.slots.table.stride)
        assert_tensors_same(f"columns {columns},", tensors(store), twins)
