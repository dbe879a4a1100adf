"""What stays of segments: the kernel chooses what its twin chooses, over stores as policies leave them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels import survivors as kernel
from minithink.kernels.survivors import NARROW, survivors
from minithink.kv.contract import Scope
from minithink.kv.reading import Reading
from minithink.kv.store import PagedStore
from minithink.ref import survivors as ref
from minithink.ref.kmeans import kmeans
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.kernels.stores import STORAGES, filled, rotated

# Those with one type of thought, so that any piece of a lane may be a segment.
NAMES = ("plain", "nvfp4", "ternary", "fp8", "int4", "int8-fp32", "int2-by-token", "nvfp4-by-token", "tq4", "tq3")


def cut(store: PagedStore, rows: list[int], seed: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Segments of any sizes in the lists of these rows: first and size [Lt, R, Ht, G], goal [R, G]; some keep all."""
    draw, segments = torch.Generator().manual_seed(seed), 4
    count = store.lists.count[:, rows].cpu()
    size = torch.randint(longest + 1, (*count.shape, segments), generator=draw).int()
    before = torch.randint(4, count.shape, generator=draw).int()[..., None]  # columns of no segment
    first = before + size.cumsum(-1, dtype=torch.int32) - size
    size = torch.minimum(size, (count[..., None] - first).clamp(min=0)).int()
    first = torch.where(size > 0, first, 0)
    goal = torch.randint(longest + 2, (len(rows), segments), generator=draw).int()
    goal[torch.rand(goal.shape, generator=draw) < 0.2] = 0
    return first.to(DEVICE), size.to(DEVICE), goal.to(DEVICE)


def coarse(store: PagedStore) -> None:
    """Plain keys, and those that wait, become small whole numbers: products are exact in whatever order."""
    store.ring.copy_(store.ring.nan_to_num(0.0).mul(2).round())
    if store.pages.layouts[store.slots.home[0]].plain:
        codes = store.pages.codes[store.slots.home[0]]
        codes.copy_(codes.nan_to_num(0.0).mul(2).round())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=max(1, settings().max_examples // 16))
@given(
    scope=st.sampled_from(["head", "layer"]),
    lengths=st.lists(st.sampled_from([0, 1, 19, 40]), min_size=1, max_size=3),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([64, 64, 96]),
    some=st.booleans(),
    longest=st.sampled_from([NARROW, 40]),
    block=st.sampled_from([16, 128]),
    programs=st.sampled_from([1, 3, 264]),
    seed=st.integers(0, 999),
)
def test_equals_its_twin(
    name: str,
    scope: Scope,
    lengths: list[int],
    kv_heads: int,
    dim: int,
    some: bool,
    longest: int,
    block: int,
    programs: int,
    seed: int,
) -> None:
    """But where two choices are within rounding of each other; plain keys are whole numbers, and ties are exact."""
    dim = 128 if rotated(STORAGES[name]) and dim == 96 else dim
    store = filled(
        STORAGES[name], scope, lengths, layers=2, kv_heads=kv_heads, dim=dim, steps=21, seed=seed, keep=0.9
    )
    coarse(store)
    rows = [len(lengths) - 1, 0][: len(lengths)] if some else list(range(len(lengths)))
    read = Reading(store, torch.tensor(rows, device=DEVICE) if some else None)
    first, size, goal = cut(store, rows, seed, longest)
    want = ref.survivors(read, first, size, goal, longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "PROGRAMS", (programs, programs))
        patch.setattr(kernel, "BLOCK", block)
        got = survivors(read, first, size, goal, longest)
    counts = torch.minimum(size, goal[:, None]).sum(-1)
    member = covered(first, size, want.shape[-1])
    assert_same("how many stay", (member & ~got).sum(-1), counts)
    assert not (got & ~member).any()
    if name == "plain":
        assert_same("those that go", got, want)
        return
    for t, n, h in (got != want).any(-1).nonzero().tolist():
        keys = read(t)[0][n].unflatten(0, (got.shape[2], -1))[h]
        assert_close_call(keys, first[t, n, h], size[t, n, h], goal[n], got[t, n, h])


def covered(first: Tensor, size: Tensor, width: int) -> Tensor:
    """Columns that belong to a segment: bool [Lt, R, Ht, S]."""
    column = torch.arange(width, device=first.device)
    return ((column >= first[..., None]) & (column < (first + size)[..., None])).any(-2)


def assert_close_call(keys: Tensor, first: Tensor, size: Tensor, goal: Tensor, got: Tensor) -> None:
    """Where the kernel chose otherwise, its choice is one that keys off by some 10⁻⁶ would have had. keys: [heads, S,
    D] of one lane."""
    x = keys.transpose(0, 1).flatten(1).float()
    for a, n, k in zip(first.tolist(), size.tolist(), goal.tolist(), strict=True):
        if n <= k or k == 0:
            continue
        members, kept = x[a : a + n], ~got[a : a + n]
        draw = torch.Generator().manual_seed(a)
        for _ in range(60):
            noise = 3e-6 * members.abs().max() * torch.randn(members.shape, generator=draw).to(members)
            valid = torch.ones(1, n, dtype=torch.bool, device=x.device)
            if torch.equal(kmeans((members + noise)[None], valid, torch.tensor([k], device=x.device))[0], kept):
                break
        else:
            raise AssertionError(f"of {n} tokens, {k} should stay: not {kept.nonzero().flatten().tolist()}")


def test_thoughts_of_several_formats() -> None:
    """Each in its own pages, one that begins in a page and ends in the ring, one that waits as a whole."""
    store = filled(STORAGES["nvfp4-by-token"], "layer", [17], layers=2, steps=21, keep=1.0, seed=4)
    assert store.waiting == [5]
    first = torch.tensor([0, 20, 33], device=DEVICE).expand(2, 1, 1, 3)
    size = torch.tensor([9, 13, 5], device=DEVICE).expand(2, 1, 1, 3)
    goal = torch.tensor([[4, 3, 2]], device=DEVICE)
    got = survivors(Reading(store), first, size, goal, NARROW)
    assert_same("those that go", got, ref.survivors(Reading(store), first, size, goal, NARROW))
    assert (~got[..., 33:]).sum(-1).flatten().tolist() == [2, 2]


def test_wide_segments_and_narrow_ones() -> None:
    """Each on its list, in one format and in several launches; the widest of all, and one that keeps all but one."""
    store = filled(STORAGES["nvfp4-by-token"], "layer", [17], layers=2, steps=100, keep=1.0, seed=4)
    first = torch.tensor([0, 9, 26], device=DEVICE).expand(2, 1, 1, 3)
    size = torch.tensor([9, 17, 90], device=DEVICE).expand(2, 1, 1, 3)
    goal = torch.tensor([[4, 16, 20]], device=DEVICE)
    got = survivors(Reading(store), first, size, goal, 128)
    assert_same("those that go", got, ref.survivors(Reading(store), first, size, goal, 128))
    assert got.sum(-1).flatten().tolist() == [76, 76]


def test_lanes_of_a_whole_sequence_are_refused() -> None:
    store = filled(STORAGES["plain"], "sequence", [9], layers=2)
    none = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="no keys in common"):
        survivors(Reading(store), none, none, none[0, 0], NARROW)
