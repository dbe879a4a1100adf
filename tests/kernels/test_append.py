"""Append: the kernel rotates and writes what its twin does, bit for bit, into stores as policies leave them.

The twin works on the CPU wherever the kernel runs, on a store that was built in the same way: torch divides by a
Python number with one multiplication on a GPU, which is an ulp off now and then. Numbers and angles have 11 bits, so
that a rotation's products are exact: whether a product is rounded before the sum depends on torch's version, and the
interpreter knows no fused sum. Numbers of all bits are compared in `test_any_strides`, within a tolerance.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels import append as kernel
from minithink.kernels.append import append
from minithink.kv.contract import SCOPES, Scope, Storage
from minithink.kv.reading import Reading
from minithink.kv.store import PagedStore, Writer
from minithink.ref import append as ref
from tests.compare import assert_close
from tests.kernels import stores
from tests.kernels.device import DEVICE
from tests.kernels.formats import assert_bits
from tests.kv.run import append_one, flush, open_now

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Without a buffer tokens go into pages at once: several formats side by side, in one launch each.
STORAGES = stores.STORAGES | {
    "thoughts-at-once": Storage(("nvfp4", "ternary", "fp8"), block=8, also=("int4s",)),
    "plain-too": Storage(("int4:group=32", "plain", "int2s/ternary"), block=8),
    "numbers": Storage(("fp16/nvfp4", "bf16/fp32", "fp8/fp16")),
    "best-at-once": Storage(("nvfp4", "ternary_best"), block=8),
    "fp16-int8": Storage(("fp16/int8:group=32",)),
    "rotated-at-once": Storage(("tq4", "tq3/tq1", "nvfp4/tq2:scale=norm,params=fp32"), block=8),
}
# Groups as long as a row, of any even number of channels; parameters and wide codes behind an odd number of bytes.
ODD = {
    "int2-int16": Storage(("int2:group=128/int16:group=128",)),
    "ternary-int4": Storage(("ternary:group=128/int4:group=128", "int2:group=128/int8:group=128,params=fp32")),
    "fp8-fp16": Storage(("fp8/fp16", "nvfp4:group=128/bf16")),
    "int16-int2s": Storage(("int16:group=128/int2s:group=128",)),
}


def built(
    device: torch.device, storage: Storage, scope: Scope, lengths: list[int], seed: int, **how: Any
) -> PagedStore:
    """On a device, the same wherever; every row with tokens runs a thought type of its own, and no ring is full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "DEVICE", device)
        store = stores.filled(storage, scope, lengths, seed=seed, layers=2, steps=3, **how)
    kinds = torch.randint(len(storage.thoughts), (len(lengths),), generator=torch.Generator().manual_seed(seed))
    open_now(store, torch.ones(len(lengths), dtype=torch.bool, device=device), kinds.to(device, torch.uint8))
    if full := [row for row in range(len(lengths)) if 0 < storage.buffer == store.waiting[row]]:
        flush(store, full)
    return store


def pair(storage: Storage, scope: Scope, lengths: list[int], seed: int, **how: Any) -> tuple[PagedStore, PagedStore]:
    """The kernel's store, and the twin's with the same bytes: a GPU's divisions may have left others."""
    store, twin = (built(device, storage, scope, lengths, seed, **how) for device in (DEVICE, CPU))
    if DEVICE != CPU:
        pages = in_use(twin)
        for mine, own in ((store.pages.pool, twin.pages.pool), (store.pages.side, twin.pages.side)):
            own[:pages].copy_(mine[:pages])
        twin.ring.copy_(store.ring)
        twin.pages.scale.copy_(store.pages.scale)
    return store, twin


def in_use(store: PagedStore) -> int:
    """Pages up to the last one that holds tokens, and some more."""
    holds = (store.slots.table.format[:-1] != 255).nonzero()
    return min(store.pages.trash_page, 4 + int(holds.max()) if len(holds) else 4)


def assert_same_stores(name: str, got: PagedStore, want: PagedStore) -> None:
    """Every byte that can be read: of all pages but the trash page, and of the ring."""
    pages = in_use(want)
    assert_bits(f"pool of {name}", got.pages.pool[:pages], want.pages.pool[:pages])
    assert_bits(f"side of {name}", got.pages.side[:pages], want.pages.side[:pages])
    assert_bits(f"ring of {name}", got.ring, want.ring)
    assert not got.pages.pool[got.pages.zero_page].any()
    assert not got.pages.side[got.pages.zero_page].any()


def tokens(
    n: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, spread: float, generator: torch.Generator
) -> list[Tensor]:
    """q, k and v as parts of one projection's output, the cosines and the sines; on the CPU, of 11 bits."""
    kv_heads, g = heads
    whole = (spread * torch.randn(n, kv_heads * (g + 2), dim, generator=generator)).half().to(dtype)
    angle = 100 * torch.randn(n, 1, dim // 2, generator=generator)
    cos, sin = angle.cos().half().float(), angle.sin().half().float()
    q, k, v = whole.split((kv_heads * g, kv_heads, kv_heads), dim=1)
    return [q, k, v, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)]


def check(
    name: str, stores: tuple[PagedStore, PagedStore], writers: list[Writer], parts: list[Tensor], layer: int
) -> None:
    """The kernel and the twin, each into its store."""
    heads = [x.shape[1] for x in parts[:3]]
    whole, cos, sin = (x.to(DEVICE) for x in (torch.cat(parts[:3], dim=1), *parts[3:]))
    got = append(*whole.split(heads, dim=1), cos, sin, writers[0], layer)
    assert got.is_contiguous()
    assert_bits(f"q of {name}", got, ref.append(*parts, writers[1], layer))
    assert_same_stores(name, *stores)


@given(
    name=st.sampled_from(sorted(STORAGES)),
    scope=st.sampled_from(SCOPES),
    lengths=st.lists(st.sampled_from([0, 1, 5, 17, 40]), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 5), (3, 2), (1, 16)]),
    dim=st.sampled_from([32, 64, 96, 128]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([1e-2, 1.0, 30.0]),
    layer=st.integers(0, 1),
    seed=st.integers(0, 999),
)
def test_equals_its_twin(
    name: str,
    scope: Scope,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    spread: float,
    layer: int,
    seed: int,
) -> None:
    """Any formats and scopes, several at once, some of the rows in any order, slots used again."""
    dim = 128 if stores.rotated(STORAGES[name]) and dim == 96 else dim
    living = [row for row, length in enumerate(lengths) if length]
    assume(living)
    how = {"kv_heads": heads[0], "group": heads[1], "dim": dim, "dtype": dtype}
    both = pair(STORAGES[name], scope, lengths, seed, **how)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(living), generator=generator)[: 1 + seed % len(living)]
    rows = [living[i] for i in order.tolist()]
    writers = [append_one(s, rows, [s.lengths[row] for row in rows]) for s in both]
    check(name, both, writers, tokens(len(rows), heads, dim, dtype, spread, generator), layer)


@pytest.mark.parametrize("dim", [4, 12, 20, 36])
@pytest.mark.parametrize("name", sorted(ODD))
def test_odd_sizes(name: str, dim: int) -> None:
    """What lies behind an odd number of bytes, and tiles with holes; rows 0 and 2 have different thought types."""
    seed = sorted(ODD).index(name) + dim // 4
    dtype, scope = DTYPES[seed % 3], SCOPES[seed % 2]
    both = pair(ODD[name], scope, [5, 17, 1], 1, kv_heads=2, group=3, dim=dim, dtype=dtype)
    writers = [append_one(s, [2, 0], [4, 8]) for s in both]
    check(name, both, writers, tokens(2, (2, 3), dim, dtype, 1.0, torch.Generator().manual_seed(seed)), seed % 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("storage", ["plain", "int2-by-token"])
def test_any_strides(storage: str, dtype: torch.dtype) -> None:
    """Axes in another order, one angle for all tokens, numbers of all bits; into plain pages, and into the ring."""
    both = pair(STORAGES[storage], "head", [5, 7], 3, kv_heads=3, group=2, dim=64, dtype=dtype)
    writers = [append_one(s, [1, 0], [10, 8]) for s in both]
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 64, generator=generator).to(dtype) for heads in (6, 3, 3))
    angle = torch.randn(1, 1, 32, generator=generator).repeat(1, 1, 2)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(32)
    cos, sin = angle.cos().expand(2, -1, -1), (signs * angle.sin()).expand(2, -1, -1)
    by_head = [x.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    by_channel = v.to(DEVICE).mT.contiguous().mT
    got = append(*by_head, by_channel, cos.to(DEVICE), sin.to(DEVICE), writers[0], 1)
    want = ref.append(q, k, v, cos, sin, writers[1], 1)
    near = {"atol": 1e-6, "rtol": torch.finfo(dtype).eps}
    assert_close("q", got.float(), want.float(), **near)
    for name, a, b in zip(("k", "v"), *(Reading(s)(1) for s in both), strict=True):
        assert_close(name, a.float(), b.float(), **near)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_prompt_of_one_token(scope: Scope) -> None:
    """It waits in plain pages, whatever the format."""
    both = pair(STORAGES["ternary"], scope, [5, 0, 0], 1, kv_heads=2, group=2, dim=32, dtype=torch.bfloat16)
    writers = [s.append([2, 1], [1, 1], [0, 0]) for s in both]
    parts = tokens(2, (2, 2), 32, torch.bfloat16, 1.0, torch.Generator().manual_seed(2))
    for layer in range(2):
        check("a prompt", both, writers, parts, layer)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("storage", ["plain", "fp8", "ternary", "kivi", "fp16-int8", "rotated-at-once"])
def test_what_is_no_ordinary_number(storage: str, dtype: torch.dtype) -> None:
    """Infinite and denormal numbers and zeros of both signs, at position 0, where nothing turns."""
    both = pair(STORAGES[storage], "layer", [5], 1, kv_heads=1, group=1, dim=32, dtype=dtype)
    writers = [append_one(s, [0], [8]) for s in both]
    tiny = torch.finfo(dtype).smallest_normal / 4
    row = torch.tensor([0.0, -0.0, tiny, -tiny, 1.0, -1.0, 1e-3, torch.finfo(dtype).max]).to(dtype).repeat(4)
    v = row.view(1, 1, -1).clone()
    v[..., 3], v[..., 12] = torch.inf, -torch.inf
    cos, sin = torch.ones(1, 1, 32), torch.zeros(1, 1, 32)
    x = row.view(1, 1, -1)
    moved = [t.to(DEVICE) for t in (x, x, v, cos, sin)]
    assert_bits("q", append(*moved, writers[0], 0), ref.append(x, x, v, cos, sin, writers[1], 0))
    assert_same_stores(storage, *both)


def test_no_tokens() -> None:
    store = built(DEVICE, STORAGES["plain"], "head", [5], 0, kv_heads=1, group=2, dim=32)
    writer = append_one(store, [0], [8])
    nothing = [torch.zeros(0, n, 32, device=DEVICE) for n in (2, 1, 1, 1, 1)]
    assert append(*nothing, writer, 0).shape == (0, 2, 32)


def test_launches_are_prepared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew for each writer: other tokens have other slots."""
    prepared = []

    def counting(writer: Writer, group: int, dtype: torch.dtype) -> Any:
        prepared.append(writer)
        return launches(writer, group, dtype)

    launches = kernel._launches
    monkeypatch.setattr(kernel, "_launches", counting)
    both = pair(STORAGES["thoughts-at-once"], "head", [5, 17], 1, kv_heads=2, group=2, dim=32, dtype=torch.float16)
    generator = torch.Generator().manual_seed(1)
    steps = []
    for i in range(2):
        writers = [append_one(store, [0, 1], store.lengths) for store in both]
        steps.append(writers[0])
        for layer in range(2):
            parts = tokens(2, (2, 2), 32, torch.float16, 1.0, generator)
            check(f"layer {layer} in step {i}", both, writers, parts, layer)
    assert prepared == steps


def test_turboquant_takes_few_instructions_more_than_nvfp4() -> None:
    """It took 19 times as many with Triton 3.6, when each thread computed all codes of a row, and 1.98 with 3.8."""
    code = """
from minithink.bench.speed.compile import compiled
from minithink.kernels.append import variants
for kind in ("tq-unbiased", "nvfp4"):
    of_kind = [v for v in variants() if v.constexprs["K"].kind == v.constexprs["V"].kind == kind]
    [variant] = [v for v in of_kind if v.constexprs["C"].dim == 128]
    print(compiled(variant, 90).asm["ptx"].count(";"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    turboquant, nvfp4 = map(int, done.stdout.split())
    assert turboquant <= 1.8 * nvfp4
