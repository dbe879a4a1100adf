"""TriAttention's scores in pages: the kernel scores as its twin does, over stores as policies leave them.

To run it alone: pytest tests/kernels/test_tri_score.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels import tri_score as kernel
from minithink.kernels._common import INTERPRETED
from minithink.kernels.tri_score import tri_score
from minithink.kv.contract import Scope, Storage
from minithink.kv.reading import Reading
from minithink.kv.store import PagedStore
from minithink.quant.turboquant import LEVELS, SCALES
from minithink.ref import tri_score as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE
from tests.kernels.stores import STORAGES, filled, rotated


def inputs(store: PagedStore, rows: list[int], seed: int, share: float = 0.8) -> tuple[Tensor, Tensor, Tensor]:
    """ũ [N, Hq, D], e [Hq, D/2] and candidates [Lt, N, Ht, S]: so large a share of the tokens held."""
    draw = torch.Generator().manual_seed(seed)
    shape = store.shape
    query = torch.randn(len(rows), shape.query_heads, shape.head_dim, generator=draw)
    weight = torch.rand(shape.query_heads, shape.head_dim // 2, generator=draw)
    held = store.lists.positions()[:, rows] >= 0
    some = torch.rand(held.shape, generator=draw) < share
    return query.to(DEVICE), weight.to(DEVICE), held & some.to(DEVICE)


@pytest.mark.parametrize("name", STORAGES)
@settings(max_examples=max(1, settings().max_examples // 12))
@given(
    scope=st.sampled_from(["head", "layer", "sequence"]),
    lengths=st.lists(st.sampled_from([0, 1, 19, 40]), min_size=1, max_size=3),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 3]),
    dim=st.sampled_from([64, 64, 96]),
    some=st.booleans(),
    block_t=st.sampled_from([16, 64]),
    block=st.sampled_from([16, 512]),
    share=st.sampled_from([0.05, 0.8, 1.0]),
    seed=st.integers(0, 999),
)
def test_equals_its_twin(
    name: str,
    scope: Scope,
    lengths: list[int],
    kv_heads: int,
    group: int,
    dim: int,
    some: bool,
    block_t: int,
    block: int,
    share: float,
    seed: int,
) -> None:
    """In every layer, for all rows or some of them in another order. Freed slots hold NaN."""
    if rotated(STORAGES[name]):
        dim = 64
    store = filled(
        STORAGES[name],
        scope,
        lengths,
        layers=2,
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        steps=21,
        seed=seed,
        keep=0.9,
    )
    rows = [len(lengths) - 1, 0][: len(lengths)] if some else list(range(len(lengths)))
    read = Reading(store, torch.tensor(rows, device=DEVICE) if some else None)
    query, weight, candidates = inputs(store, rows, seed, share)
    for layer in range(2):
        own = candidates[min(layer, len(candidates) - 1)]
        want = ref.tri_score(read, layer, query, weight, own)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "BLOCK_T", block_t)
            patch.setattr(kernel, "BLOCK", block)
            got = tri_score(read, layer, query, weight, own)
        assert got.dtype == torch.float32
        assert_close("Z", got, want, atol=1e-3, rtol=1e-4)
        assert not got[~own.expand(got.shape)].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "nvfp4", "int2-by-token", "thoughts"])
def test_models_of_16_bits(name: str, dtype: torch.dtype) -> None:
    store = filled(STORAGES[name], "head", [40, 19], layers=2, steps=21, dtype=dtype)
    read = Reading(store)
    query, weight, candidates = inputs(store, [0, 1], 7)
    # Interpreted kernels do not round what they decode to bfloat16, as the twin does.
    atol = 0.02 if INTERPRETED and name != "plain" else 1e-3
    for layer in range(2):
        want = ref.tri_score(read, layer, query, weight, candidates[layer])
        assert_close("Z", tri_score(read, layer, query, weight, candidates[layer]), want, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("dim", [4, 10, 16, 32])
def test_heads_of_any_size(dim: int) -> None:
    """Fewer words than a block has, and halves that are no power of two."""
    store = filled(Storage(), "head", [9, 4], layers=1, dim=dim)
    query, weight, candidates = inputs(store, [0, 1], 3)
    read = Reading(store)
    want = ref.tri_score(read, 0, query, weight, candidates[0])
    assert_close("Z", tri_score(read, 0, query, weight, candidates[0]), want, atol=1e-4)


@settings(max_examples=max(1, settings().max_examples // 6))
@given(
    bits=st.sampled_from([*LEVELS]),
    scale=st.sampled_from(SCALES),
    params=st.sampled_from(["fp16", "fp32"]),
    dim=st.sampled_from([8, 16, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    buffer=st.sampled_from([0, 8]),
    group=st.sampled_from([1, 3]),
    block_t=st.sampled_from([4, 64]),
    seed=st.integers(0, 999),
)
def test_keys_that_are_stored_rotated(
    bits: int,
    scale: str,
    params: str,
    dim: int,
    dtype: torch.dtype,
    buffer: int,
    group: int,
    block_t: int,
    seed: int,
) -> None:
    """Every format of TurboQuant, alone and with tokens that wait, which are not rotated."""
    storage = Storage((f"tq{bits}:scale={scale},params={params}/fp8",), block=8, buffer=buffer)
    store = filled(storage, "head", [19, 5], layers=2, group=group, dim=dim, dtype=dtype, steps=11, seed=seed)
    query, weight, candidates = inputs(store, [0, 1], seed)
    read = Reading(store)
    for layer in range(2):
        want = ref.tri_score(read, layer, query, weight, candidates[layer])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "BLOCK_T", block_t)
            got = tri_score(read, layer, query, weight, candidates[layer])
        assert_close("Z", got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["thoughts", "tq4", "tq3", "thoughts-rotated"])
def test_a_dense_copy_is_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(STORAGES[name], "head", [19], layers=1)
    query, weight, candidates = inputs(store, [0], 3)
    read = Reading(store)
    want = tri_score(read, 0, query, weight, candidates[0])
    monkeypatch.setattr(Reading, "__call__", lambda *_: pytest.fail("the keys were read as a dense tensor"))
    assert_same("Z", tri_score(Reading(store), 0, query, weight, candidates[0]), want)


def test_what_other_rows_hold_changes_not_a_bit() -> None:
    """A row of the same width beside another one."""
    both = filled(STORAGES["thoughts"], "head", [40, 19], layers=1)
    query, weight, candidates = inputs(both, [0, 1], 3)
    read = Reading(both)
    whole = tri_score(read, 0, query, weight, candidates[0])
    fewer = candidates[0].clone()
    fewer[0] = False
    alone = tri_score(read, 0, query, weight, fewer)
    assert_same("Z", alone[1], whole[1])
    assert not alone[0].any()


def test_one_candidate_scores_0() -> None:
    store = filled(Storage(), "head", [9], layers=1)
    query, weight, candidates = inputs(store, [0], 3)
    one = torch.zeros_like(candidates[0])
    one[..., 2] = True
    assert not tri_score(Reading(store), 0, query, weight, one).any()
    assert not tri_score(Reading(store), 0, query, weight, torch.zeros_like(one)).any()


def test_no_rows() -> None:
    store = filled(Storage(), "head", [9], layers=1)
    query, weight, candidates = inputs(store, [0], 3)
    read = Reading(store, torch.zeros(0, dtype=torch.long, device=DEVICE))
    assert tri_score(read, 0, query[:0], weight, candidates[0][:0]).shape == (0, 2, candidates.shape[-1])
