"""Paged attention: the kernel equals its twin, over stores as policies leave them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.backend import REFERENCE
from minithink.kernels import _parts
from minithink.kernels import paged_attention as kernel
from minithink.kernels._layout import Cache
from minithink.kernels._parts import Program
from minithink.kernels.by_format import by_format
from minithink.kernels.paged_attention import paged_attention
from minithink.kv.contract import SCOPES, Scope, Storage
from minithink.kv.reading import Reading
from minithink.ref import paged_attention as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE, needs_graphs
from tests.kernels.stores import STORAGES, filled, rotated

GROUPS = (None, "sum", "mean", "max", "max_logit", "none")
# Relative to the largest value: float32 sums in another order; products of 16-bit numbers; the reference rounds
# dequantized numbers and probabilities to the model's type, the fast path does not.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE) if DEVICE.type == "cuda" else [torch.float32, torch.float16]
BACKEND = replace(REFERENCE, by_format=by_format)  # lists are sorted as in a step


# What the lanes are cut as. With the last, those of 17 tokens are long ones already, and what is left of prompts of
# 300 is cut as lanes of 10,000 are; parts are whole blocks.
CUTS: dict[str, dict[str, Any]] = {
    "few lanes": {"PARTS": ((0, 128, 128),), "MANY_LANES": 10**6},
    "many": {"PARTS": ((0, 512, 512),), "MANY_LANES": 0},
    "long": {"PARTS": ((0, 16, 16),), "SHORT": 16, "PROGRAMS": dict.fromkeys(_parts.PROGRAMS, Program(16, 1, 3))},
}


def cut_as(patch: pytest.MonkeyPatch, cut: str, swapped: bool | None = None) -> None:
    """Cut lanes in one of these ways, and lay out products in this way; None: as the format's program does."""
    for constant, value in CUTS[cut].items():
        patch.setattr(_parts, constant, value)
    if swapped is not None:
        both = {name: program._replace(swapped=swapped) for name, program in _parts.PROGRAMS.items()}
        patch.setattr(_parts, "PROGRAMS", both)


@pytest.mark.parametrize("name", sorted(STORAGES))
@settings(max_examples=max(1, settings().max_examples // 8))
@given(
    scope=st.sampled_from(SCOPES),
    lengths=st.lists(st.sampled_from([0, 1, 5, 17, 40, 300]), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 5)]),
    dim=st.sampled_from([64, 64, 96, 128]),
    group=st.sampled_from(GROUPS),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([1e-2, 1.0, 4.0]),
    some=st.booleans(),
    cut=st.sampled_from(sorted(CUTS)),
    swapped=st.sampled_from([None, False, True]),
    seed=st.integers(0, 999),
)
def test_equals_its_twin(
    name: str,
    scope: Scope,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    group: str | None,
    dtype: torch.dtype,
    spread: float,
    some: bool,
    cut: str,
    swapped: bool | None,
    seed: int,
) -> None:
    """Every format in any scope, empty lanes, slots used again, NaN in every slot that is free; lanes cut as many
    are, as few are, or as very long ones; query heads as rows of products, or as columns."""
    kv_heads, g = heads
    dim = 128 if rotated(STORAGES[name]) and dim == 96 else dim
    store = filled(
        STORAGES[name],
        scope,
        lengths,
        layers=2,
        kv_heads=kv_heads,
        group=g,
        dim=dim,
        dtype=dtype,
        steps=9,
        seed=seed,
        spread=spread,
    )
    rows = torch.tensor([len(lengths) - 1, 0][: len(lengths)], device=DEVICE) if some else None
    n = len(lengths) if rows is None else len(rows)
    q = torch.randn(n, kv_heads * g, dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    layer = seed % 2
    want, want_mass = ref.paged_attention(q, Reading(store, rows), layer, group)
    store.pages.backend = BACKEND
    with pytest.MonkeyPatch.context() as patch:
        cut_as(patch, cut, swapped)
        got, mass = paged_attention(q, Reading(store, rows), layer, group)
    # A logit's rounding is relative to the logit, and becomes a relative error of its probability.
    near = TOLERANCE[dtype] * max(1, 2 * spread)
    assert_close(f"out of {name}", got.float(), want.float(), atol=near * max(1e-3, float(want.abs().max())))
    assert (mass is None) == (group is None)
    if mass is not None and want_mass is not None:
        assert_close(f"mass of {name}", mass, want_mass, atol=4 * near * max(1e-3, float(want_mass.max())))


@pytest.mark.parametrize("merged", [None, (1, 2)])
@pytest.mark.parametrize("prompt", [12, 60, 200, 500, 1100])
def test_lanes_of_every_length_are_whole(
    prompt: int, merged: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the length of the parts: some tens of tokens, or some hundreds in parts eight times as long; merged at
    once, or one after the other."""
    cut_as(monkeypatch, "long")
    if merged:
        monkeypatch.setattr(_parts, "MERGED", merged)
    store = filled(STORAGES["plain"], "head", [prompt], steps=1, seed=2)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    want, _ = ref.paged_attention(q, Reading(store), 0)
    got, _ = paged_attention(q, Reading(store), 0)
    assert_close("out", got, want, atol=2e-6)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["thoughts", "thoughts-by-token", "thoughts-rotated"])
def test_formats_side_by_side_after_many_evictions(
    name: str, group: str | None, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every lane several formats and a ring, here and there without a token of one of them."""
    cut_as(monkeypatch, "few lanes", swapped)
    held = _several(name, group)
    assert ((held > 0).sum(-1) > 2).any()
    assert ((held == 0).any((0, 1, 2)) & (held > 0).any((0, 1, 2))).any()
    assert (held[..., -1] > 0).any()


@pytest.mark.parametrize("name", ["thoughts", "thoughts-by-token"])
def test_a_ring_of_one_token_counts(name: str) -> None:
    held = _several(name, None, steps=49)
    assert (held[..., -1] == 1).all()


def _several(name: str, group: str | None, steps: int = 47) -> Tensor:
    """Kernel and twin over several formats → int32 [Lt, N, 1, F + 1], tokens of each format and of the ring."""
    store = filled(STORAGES[name], "layer", [90, 3, 40], layers=2, steps=steps, keep=0.4, seed=5)
    store.pages.backend = BACKEND
    read = Reading(store)
    held = read.by_format[2].diff(dim=-1)
    assert held.shape[-1] == len(store.slots.used) + 1 > 2
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    for layer in range(2):
        want, want_mass = ref.paged_attention(q, read, layer, group)
        got, mass = paged_attention(q, read, layer, group)
        assert_close("out", got, want, atol=4e-6 * float(want.abs().max()))
        if mass is not None and want_mass is not None:
            assert_close("mass", mass, want_mass, atol=2e-5 * float(want_mass.max()))
    return held


@needs_graphs
@pytest.mark.parametrize("group", [None, "max"])
@pytest.mark.parametrize("name", ["thoughts", "thoughts-by-token", "apart"])
def test_a_graph_gives_what_single_launches_give(
    name: str, group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, replay after replay: its branches write apart, and the merge waits for all of them."""
    cut_as(monkeypatch, "many")
    store = filled(STORAGES[name], "layer", [90, 3, 40], layers=2, steps=47, keep=0.4, seed=5)
    store.pages.backend = BACKEND
    read = Reading(store)
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    want, want_mass = paged_attention(q, read, 1, group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, mass = paged_attention(q, read, 1, group)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert_same("out", got, want)
        if mass is not None and want_mass is not None:
            assert_same("mass", mass, want_mass)


@pytest.mark.parametrize(("name", "times"), [("plain", 0), ("nvfp4", 0), ("nvfp4-by-token", 1), ("apart", 1)])
def test_lists_are_sorted_once_for_all_layers(name: str, times: int) -> None:
    """And not at all where all tokens are stored alike."""
    calls = []

    def counting(**named: Any) -> Any:
        calls.append(named)
        return by_format(**named)

    store = filled(STORAGES[name], "head", [30], layers=2, steps=12, seed=1)
    store.pages.backend = replace(REFERENCE, by_format=counting)
    read = Reading(store)
    for layer in range(2):
        paged_attention(torch.zeros(1, 4, 64, device=DEVICE), read, layer)
    assert len(calls) == times


def test_launches_are_planned_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew for each reading: the store may have changed."""
    plans = []

    def counting(read: Reading, q: Tensor) -> Any:
        plans.append(read)
        return plan(read, q)

    plan = kernel._plan
    monkeypatch.setattr(kernel, "_plan", counting)
    store = filled(STORAGES["plain"], "head", [30], layers=2, steps=12, seed=1)
    readings = [Reading(store), Reading(store)]
    for read in readings:
        for layer in range(2):
            paged_attention(torch.zeros(1, 4, 64, device=DEVICE), read, layer)
    assert plans == readings


@pytest.mark.parametrize("cut", ["few lanes", "long"])
@pytest.mark.parametrize("name", ["plain", "nvfp4", "tq4", "thoughts"])
def test_a_sequence_does_not_notice_what_others_lose(name: str, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane of several parts gives the same bits when the others have lost nearly everything, the longest of them
    too, so that fewer parts are merged."""
    cut_as(monkeypatch, cut)
    store = filled(STORAGES[name], "head", [300, 700, 40], steps=4, seed=3)
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    before, _ = paged_attention(q, Reading(store), 0)
    drop = store.lists.positions() > 1
    drop[:, 0] = False
    seen = store.lists.columns_read
    store.evict(drop)
    assert store.lists.columns_read < seen / 2
    after, _ = paged_attention(q, Reading(store), 0)
    assert_same("row 0", after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_lanes_are_cut_by_what_the_store_may_hold_not_by_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 alone has parts of its own. A format that no token has yet decides, too: the sums of a sequence must not
    change when another sequence stores its first token in it."""
    monkeypatch.setattr(_parts, "PARTS", ((0, 128, 64),))
    sizes = {}
    for formats in (("fp8",), ("fp8/nvfp4",), ("nvfp4",), ("fp8", "nvfp4")):
        store = filled(Storage(formats), "head", [40], layers=1, kv_heads=1, group=1, dim=64, dtype=torch.float32)
        store.slots.used = {0}
        plan = kernel._plan(Reading(store), torch.zeros(1, 1, 64, device=DEVICE))
        sizes["+".join(formats)] = plan.constants.base
    assert sizes == {"fp8": 64, "fp8/nvfp4": 128, "nvfp4": 128, "fp8+nvfp4": 128}


@triton.jit
def _length_of(p_out, p_count, C: tl.constexpr):
    tl.store(p_out, _parts.part_length(tl.load(p_count), C))


@given(
    base=st.sampled_from([16, 128, 256, 768]),
    short=st.sampled_from([16, 1024]),
    even=st.sampled_from([16, 128]),
    most=st.integers(1, 50_000),
    share=st.floats(0, 1),
)
@example(128, 1024, 128, 300, 0.0)  # an empty lane: its parts have a length, which is divided by
def test_there_is_room_for_all_parts(base: int, short: int, even: int, most: int, share: float) -> None:
    """Of any lane that holds at most as many tokens as the longest may; and parts are whole blocks, equally long."""
    count, even = int(share * most), min(even, base)
    longest = base * next(
        times for long, times in ((short, 1), (4 * short, 2), (16 * short, 4), (count, 8)) if count <= long
    )
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    c = Cache(1, 1, 64, 1, 1, 1, 16, 0, "fp32", base, short, even)
    _length_of[(1,)](out, torch.tensor([count], dtype=torch.int32, device=DEVICE), c)
    split = int(out)
    assert split % even == 0
    assert 0 < split <= longest
    parts = -(-count // longest)
    assert -(-count // split) <= parts <= _parts.most_parts(most, base, short)
    assert split - even < max(1, count) / max(1, parts)  # no longer than it must be


@pytest.mark.parametrize("name", ["int4", "int2-by-token"])
def test_integers_beyond_half_precision_stay_finite(name: str) -> None:
    """The kernel decodes them in fp16 and saturates, whatever the model's type."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    store = filled(STORAGES[name], "head", [70, 33], dtype=dtype, steps=3, seed=1, spread=1e5)
    q = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    out, mass = paged_attention(q, Reading(store), 0, "mean")
    assert mass is not None
    assert out.isfinite().all()
    assert mass.isfinite().all()


@pytest.mark.parametrize("name", ["tq4", "tq3", "thoughts-rotated"])
def test_rotated_values_beyond_half_precision_saturate(name: str) -> None:
    """Levels times a scale are larger than the numbers that they stand for, which a float16 model can just hold."""
    store = filled(STORAGES[name], "head", [1, 12], dtype=torch.float16, steps=0, keep=1.0, seed=1, spread=1e7)
    out, _ = paged_attention(torch.zeros(2, 4, 64, device=DEVICE, dtype=torch.float16), Reading(store), 0)
    assert out.isfinite().all()
    assert out[0].abs().max() > 6e4  # a single token: its own value


@pytest.mark.parametrize("name", ["plain", "tq4"])
def test_nan_is_not_hidden(name: str) -> None:
    """Saturated or not: what is no number is told from its sequence's tokens."""
    store = filled(STORAGES[name], "head", [70, 33], dtype=torch.float16, steps=3, seed=1)
    q = torch.full((2, 4, 64), torch.nan, device=DEVICE, dtype=torch.float16)
    out, _ = paged_attention(q, Reading(store), 0)
    assert out.isnan().all()


def test_values_that_lag_are_refused() -> None:
    storage = Storage(("int2:group=32,by=token/int2:group=32",), buffer=32, tail="keep", lag=True)
    store = filled(storage, "sequence", [40], steps=3)
    with pytest.raises(ValueError, match="lag"):
        paged_attention(torch.zeros(1, 4, 64, device=DEVICE), Reading(store), 0)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("group", [group for group in GROUPS if group])
@pytest.mark.parametrize("name", ["plain", "thoughts-by-token"])
def test_the_mass_in_place_is_the_mass(name: str, group: str, swapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in the rows that are active; nothing else changes there, neither rows nor columns."""
    cut_as(monkeypatch, "few lanes", swapped)
    store = filled(STORAGES[name], "layer", [90, 3, 40, 0, 300], layers=2, steps=7, keep=0.6, seed=2)
    store.pages.backend = BACKEND
    rows, active = torch.tensor([4, 0, 2, 1], device=DEVICE), torch.tensor([True, True, False, True], device=DEVICE)
    q = torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    want, mass = paged_attention(q, Reading(store, rows), 1, group)
    assert mass is not None
    kept = torch.full((5, mass.shape[1], mass.shape[2] + 9), -1.0, device=DEVICE)
    expected = kept.clone()
    expected[rows[active], :, : mass.shape[2]] = mass[active]
    read = Reading(store, rows)
    read.into = kept, active
    got, none = paged_attention(q, read, 1, group)
    assert none is None
    assert_same("out", got, want)
    assert_same("kept", kept, expected)
