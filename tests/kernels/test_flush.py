"""Full buffers into pages: kernel and twin byte for byte, and both do what `assert_flushed` says in Python."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.backend import REFERENCE, Backend, triton_backend
from minithink.kv.batch import Batch
from minithink.kv.contract import SCOPES, Scope, Storage
from minithink.kv.reading import Reading
from minithink.kv.store import PagedStore
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.kernels.stores import STORAGES, filled, rotated
from tests.kernels.test_allocate import assert_consistent, assert_tables_same
from tests.kv.run import append_one

# The buffer is a multiple of the groups, or not; shorter than one; keys by channel; several formats; plain ones.
BUFFERED = {
    **{
        name: STORAGES[name]
        for name in ("nvfp4-by-token", "ternary-best", "kivi", "thoughts", "tq3", "thoughts-rotated")
    },
    "two groups": Storage(("nvfp4:by=token/fp8",), block=8, buffer=32),
    "a group and a half": Storage(("int4:group=16,by=token/int8:group=16",), block=8, buffer=24),
    "half a group": Storage(("ternary:by=token/nvfp4",), block=4, buffer=8),
    "wide": Storage(("int16:group=16,by=token,params=fp32/int16:group=16,params=fp32",), buffer=16),
    "floats": Storage(("fp16/bf16", "fp32"), buffer=4, block=4),
    "both": Storage(("nvfp4:by=token/nvfp4", "int2:group=16,by=token/ternary"), block=8, buffer=16),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def with_full_rings(
    storage: Storage, scope: Scope, rows: int, dtype: torch.dtype, dim: int, gone: float, seed: int
) -> PagedStore:
    """Some of the tokens in the rings are evicted; freed slots are NaN."""
    lengths = [5 + (seed + 3 * i) % 40 for i in range(rows)]
    store = filled(storage, scope, lengths, layers=2, dim=dim, dtype=dtype, steps=7, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    fed = [n + 7 for n in lengths]
    while waiting := [row for row in range(rows) if store.waiting[row] < storage.buffer]:
        writer = append_one(store, waiting, [fed[row] for row in waiting])
        for layer in range(2):
            x = torch.randn(2, len(waiting), 1, 2, dim, generator=generator).to(DEVICE, dtype)
            writer.write(layer, *x.unbind())
        for row in waiting:
            fed[row] += 1
    chance = torch.rand(store.lists.positions().shape, generator=generator).to(DEVICE)
    store.evict((store.lists.positions() >= 0) & (chance < gone))
    return store


def copied(store: PagedStore) -> PagedStore:
    """A store of its own; views of the pool are made anew."""
    out = copy.deepcopy(store)
    for name in ("codes", "sides"):
        out.pages.__dict__.pop(name, None)
    return out


def flushed(store: PagedStore, at: Tensor, active: Tensor, backend: Backend) -> PagedStore:
    """A copy, with some rows' rings in pages."""
    out = copied(store)
    out.pages.backend = backend
    out.asks = False
    out.flush_rings(Batch.of(DEVICE, row=at, active=active))
    out.flushed(at[active].tolist())
    return out


@pytest.mark.parametrize("name", sorted(BUFFERED))
@settings(max_examples=max(1, settings().max_examples // 20))
@given(
    scope=st.sampled_from(SCOPES),
    rows=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from([32, 96]),
    gone=st.sampled_from([0.0, 0.4, 0.9]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin_and_the_store(
    name: str, scope: Scope, rows: int, dtype: torch.dtype, dim: int, gone: float, seed: int
) -> None:
    """Some rows in any order, some of them idle."""
    storage = BUFFERED[name]
    dim = 64 if rotated(storage) and dim == 96 else dim
    store = with_full_rings(storage, scope, rows, dtype, dim, gone, seed)
    generator = torch.Generator().manual_seed(seed)
    at = torch.randperm(rows, generator=generator)[: 1 + seed % rows].to(DEVICE)
    active = (torch.rand(len(at), generator=generator) < 0.8).to(DEVICE)
    store.require_flush(at.tolist())  # tables grow; where the host does not ask, they are wide enough from the start
    twin, ours = (flushed(store, at, active, backend) for backend in (REFERENCE, triton_backend()))
    none = store.slots.table.free_pages.count
    assert_tables_same(name, ours.slots.table, twin.slots.table)
    held = twin.lists.pos >= 0
    assert_same("place", ours.lists.place.masked_fill(~held, 0), twin.lists.place.masked_fill(~held, 0))
    for what, x, y in zip(("pool", "side", "groups of tokens"), of_pages(ours), of_pages(twin), strict=True):
        assert_same(what, x[:none].contiguous(), y[:none].contiguous())
    groups = twin.slots.free_groups.count
    assert_same("parameters of groups", ours.pages.group_params[:groups], twin.pages.group_params[:groups])
    assert_same("ring", ours.ring.view(torch.uint8), twin.ring.view(torch.uint8))
    assert_same("pos", ours.lists.pos, twin.lists.pos)
    assert_same("count", ours.lists.count, twin.lists.count)
    assert_same(
        "uses",
        ours.slots.group_uses[: twin.slots.free_groups.count],
        twin.slots.group_uses[: twin.slots.free_groups.count],
    )
    assert not ours.slots.overflow
    assert not twin.slots.overflow

    for got in (twin, ours):
        assert_consistent(got.slots.table)
        assert_flushed(store, got, at[active].tolist())


def of_pages(store: PagedStore) -> tuple[Tensor, Tensor, Tensor]:
    """What has an entry for every page."""
    return store.pages.pool, store.pages.side, store.slots.group_of


def assert_flushed(before: PagedStore, after: PagedStore, rows: list[int]) -> None:
    """What a flush of these rows must do, token by token.

    Every list keeps its tokens in their order. A token of these rows that waited in the ring lies in a page of its
    row's thought type and format, in a slot of its own; its key and value are what the format makes of them. Keys by
    token are quantized together: those that are left of each stretch of `group` places of the ring. All other tokens
    stay where they are and as they are.
    """
    assert_same("pos", after.lists.pos, before.lists.pos)
    assert_same("count", after.lists.count, before.lists.count)
    assert after.waiting == [0 if row in rows else n for row, n in enumerate(before.waiting)]
    taken, stride, uses = list[int](), after.slots.table.stride, 0
    layers, _, heads = before.shape.tables
    for layer, row, head in product(range(2), range(before.shape.rows), range(2)):
        unit = min(layer, layers - 1), row, min(head, heads - 1)
        n, kind = int(before.lists.count[unit]), int(before.thought[row])
        f = before.storage.formats.index(before.storage.thoughts[kind])
        was, now = (s.lists.place[unit][:n].tolist() for s in (before, after))
        reads = [[x[row, head, :n] for x in Reading(s)(layer)] for s in (before, after)]
        waiting = {-1 - place: column for column, place in enumerate(was) if place < 0 and row in rows}
        for column in set(range(n)) - set(waiting.values()):
            assert now[column] == was[column]
            for got, want in zip(reads[1], reads[0], strict=True):
                assert_same(f"token {column} of lane {layer, row, head}", got[column], want[column])
        for column in waiting.values():
            page = now[column] // stride
            assert (int(after.slots.table.format[page]), int(after.slots.table.thought[page])) == (f, kind)
        for part, fmt in enumerate((before.pages.layouts[f].k, before.pages.layouts[f].v)):
            together = fmt.group if fmt.by == "token" else 1
            for start in range(0, before.storage.buffer, together):
                group = [i for i in range(start, start + together) if i in waiting]
                if group:
                    x = before.ring[layer, row, head, group, part]
                    scale = before.pages.scale[f, part, layer, row]
                    codes, params = fmt.quantize(x, scale)
                    want = fmt.dequantize(codes, params, scale, before.dtype)
                    assert_same(f"{'kv'[part]} of {group}", reads[1][part][[waiting[i] for i in group]], want)
                    uses += len(group) * (fmt.by == "token")
        if (layer, head) == (unit[0], unit[2]):  # the first lane of its unit
            taken += [place for place in now if place >= 0]
    assert len(set(taken)) == len(taken), "one token a slot"
    assert int(after.slots.table.live[:-1].sum()) == len(taken)
    lanes = before.shape.sharing
    assert int((after.slots.group_uses[:-1].sum() - before.slots.group_uses[:-1].sum()) * lanes) == uses


@pytest.mark.parametrize("scope", SCOPES)
def test_too_small_a_pool_is_noticed(scope: Scope) -> None:
    """No rows of scales, or no pages: the flag says it, and what the others hold stays."""
    store = with_full_rings(BUFFERED["nvfp4-by-token"], scope, 2, torch.float32, 32, 0.0, 3)
    at, active = torch.tensor([1], device=DEVICE), torch.tensor([True], device=DEVICE)
    for empty in (store.slots.free_groups, store.slots.table.free_pages):
        poor = copied(store)
        (poor.slots.free_groups if empty is store.slots.free_groups else poor.slots.table.free_pages).top.fill_(0)
        before = [x[:1].clone() for x in Reading(poor)(1)]
        for backend in (REFERENCE, triton_backend()):
            got = flushed(poor, at, active, backend)
            assert got.slots.overflow
            assert int(got.slots.free_groups.top) >= 0
            for x, y in zip(Reading(got)(1), before, strict=True):
                assert_same("row 0", x[:1], y)
