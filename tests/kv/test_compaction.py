"""Gather compaction: it changes no number, and afterwards every lane's tokens lie in its first slots, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.backend import REFERENCE
from minithink.errors import UsageError
from minithink.kv.contract import SCOPES, Scope, Shape, Storage
from minithink.kv.manager import KVManager
from minithink.kv.reading import Reading
from minithink.kv.store import PagedStore
from minithink.policies import parse
from minithink.policies.random import Random
from tests.compare import assert_same
from tests.kv.run import feed, kept, manager_for, text_of
from tests.kv.test_batches import feed_batch
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)
CONFIG = example_config(hidden_size=12, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=4, num_layers=3)
DECODER = random_decoder(CONFIG)
TOKENS, HOW = 90, ("gather", "overlapped")


def make(how: str, scope: Scope = "head", **options: Any) -> KVManager:
    """Random tokens go, 20 stay; pages of 4 tokens."""
    schedule = options.pop("schedule", "interval:3")
    policy = Random(20, scope=scope, schedule=schedule)
    policy.storage = Storage(block=4, compaction=how)  # type: ignore[arg-type]
    return manager_for(DECODER, policy, tokens=TOKENS, **{"poison": False, **options})


def run(manager: KVManager, seed: int) -> Iterator[tuple[dict[int, Tensor], set[int]]]:
    """Logits and the sequences there after each step: they come, pause, leave, and others take their rows."""
    generator, running, new = torch.Generator().manual_seed(seed), list[int](), 0

    def some(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for _ in range(30):
        if len(running) == 3 and not some(5):
            manager.leave(running.pop(some(3)))
        if (len(running) < 3 and not some(3)) or not running:
            prompt = 1 + some(40)
            manager.join(new, TOKENS, prompt)
            words = text_of(CONFIG, prompt, new)
            for chunk in (words[: prompt // 2], words[prompt // 2 :]):
                if chunk:
                    yield feed(DECODER, manager, {new: chunk}), {*running, new}
            running.append(new)
            new += 1
        batch = [seq for seq in running if some(4)] or running[:1]
        batch = [seq for seq in batch if manager.length(seq) < TOKENS]
        yield feed(DECODER, manager, {seq: [some(CONFIG.vocab_size)] for seq in batch}), set(running)


def assert_in_order(store: PagedStore, whole: bool) -> None:
    """Token i of every list lies in slot i of the unit's pages; with `whole` it has no page more than these fill."""
    t = store.slots.table
    for unit in torch.ones_like(store.lists.count).nonzero().tolist():
        n = int(store.lists.count[tuple(unit)])
        pages = [p for p in t.page[tuple(unit)].tolist() if p != t.free_pages.count]
        want = [pages[i // t.stride] * t.stride + i % t.stride for i in range(n)]
        assert store.lists.place[tuple(unit)][:n].tolist() == want, unit
        assert len(pages) >= -(-n // t.stride)
        assert not whole or len(pages) == -(-n // t.stride)
        assert t.live[pages].flatten().nonzero().flatten().tolist() == list(range(n))
        assert [int(t.taken[p]) for p in pages] == [
            min(t.stride, max(0, n - i * t.stride)) for i in range(len(pages))
        ]
    held = int((t.page != t.free_pages.count).sum())
    assert t.free_pages.free == t.free_pages.count - held


@given(
    how=st.sampled_from(HOW),
    scope=st.sampled_from(SCOPES),
    schedule=st.sampled_from(["every", "interval:3", "sawtooth:26/15"]),
    columns=st.sampled_from([None, 95]),
    poison=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=settings.default.max_examples * 3 // 10)
@torch.inference_mode()
def test_no_number_changes(
    how: str, scope: Scope, schedule: str, columns: int | None, poison: bool, seed: int
) -> None:
    """Bit for bit, step by step, as without it; what a lane holds lies together."""
    options = {"schedule": schedule, "columns": columns, "poison": poison}
    plain, moved = (make(name, scope, **options) for name in ("none", how))
    assert plain.store.compaction is None
    assert moved.store.compaction is not None
    moving = 0
    for (want, there), (got, _) in zip(run(plain, seed), run(moved, seed), strict=True):
        for seq, logits in want.items():
            assert_same(f"sequence {seq}", got[seq], logits)
        moving += int((moved.store.compaction.moves[..., 0] < moved.store.compaction.moves[..., 1]).any())
        for seq in there:
            assert kept(moved, seq) == kept(plain, seq)
        late = moved.store.compaction.late
        assert late == (how == "overlapped" and not poison)
        assert_in_order(moved.store, whole=not late)
    assert late or not moving
    moved.store.compaction.finish()
    assert_in_order(moved.store, whole=True)
    for layer in range(CONFIG.num_layers):
        for name, got_kv, want_kv in zip(
            ("keys", "values"), Reading(moved.store)(layer), Reading(plain.store)(layer), strict=True
        ):
            assert_same(f"{name} of layer {layer}", got_kv, want_kv)
    for seq in there:
        moved.leave(seq)
    assert moved.store.slots.table.free_pages.free == moved.store.slots.table.free_pages.count


def test_overlapped_moves_when_the_next_step_begins() -> None:
    """Layer by layer; pages that were freed stay with their lanes until sequences come or go."""
    layers: list[int] = []

    def gather(source: Tensor, moves: Tensor, *rest: Any) -> None:
        layers.append(moves.dim())
        if moves.dim() < 4:  # of a layer
            waits.append(bool((moves[..., 0] < moves[..., 1]).any()))
        REFERENCE.gather(source, moves, *rest)

    waits: list[bool] = []
    backend = replace(REFERENCE, gather=gather)
    manager = make("overlapped", backend=backend, schedule="sawtooth:30/10")
    compaction, pages = manager.store.compaction, manager.store.slots.table.free_pages
    assert compaction is not None
    for seq, n in ((0, 27), (1, 9)):
        manager.join(seq, TOKENS, n)
        feed(DECODER, manager, {seq: text_of(CONFIG, n, seq)})
    layers.clear()
    for _ in range(3):
        feed(DECODER, manager, {0: [1]})
    assert waits == [False] * 9
    free = pages.free
    assert bool((compaction.moves[:, 0, :, 0] < compaction.moves[:, 0, :, 1]).all())
    assert not (compaction.moves[:, 1, :, 0] < compaction.moves[:, 1, :, 1]).any()
    feed(DECODER, manager, {1: [1]})  # whoever runs
    assert waits[9:] == [True] * 3
    assert not compaction.moves.any()
    feed(DECODER, manager, {0: [1]})  # into a page that its lane has kept
    assert waits[12:] == [False] * 3
    assert layers == [3] * 15  # [B, Ht, 2]
    assert pages.free == free
    manager.join(2, TOKENS, 4)
    feed(DECODER, manager, {2: text_of(CONFIG, 4, 2)})
    units = CONFIG.num_layers * CONFIG.num_kv_heads
    assert pages.free == free + units * (8 - 3 - 1)  # 11 tokens of 30 are left, 4 are new


@pytest.mark.parametrize("how", HOW)
def test_steps_from_tensors_move_too(how: str) -> None:
    """Part by part, as the loop takes them."""
    plain, moved = (make(name, columns="fit", schedule="every") for name in ("none", how))
    for manager in (plain, moved):
        manager.join(0, TOKENS, 25)
        feed(DECODER, manager, {0: text_of(CONFIG, 25, 0)})
    for i in range(12):
        want, got = (feed_batch(DECODER, manager, {0: i})[0] for manager in (plain, moved))
        assert_same(f"step {i}", got, want)


@torch.inference_mode()
def test_lists_grow() -> None:
    """Of a store alone, which does not know how long they become."""
    shape = Shape(1, 1, 1, 1, 4, 4, "head", torch.device("cpu"))
    store = PagedStore(shape, Storage(block=4, compaction="gather"), pages=9, width=2)
    store.append([0], [9], [0])
    store.evict(torch.arange(9).view(1, 1, 1, 9) % 3 == 0)
    assert store.lists.pos[0, 0, 0, :7].tolist() == [1, 2, 4, 5, 7, 8, -1]
    assert_in_order(store, whole=True)


def test_gather_moves_at_once() -> None:
    manager = make("gather", schedule="sawtooth:30/10")
    assert manager.store.compaction is not None
    manager.join(0, TOKENS, 30)
    feed(DECODER, manager, {0: text_of(CONFIG, 30, 0)})
    assert not manager.store.compaction.moves.any()
    assert_in_order(manager.store, whole=True)
    assert manager.held(0) == 10


def test_only_plain_tokens_move() -> None:
    policy = parse("quant:fmt=int4")
    policy.storage = replace(policy.storage, compaction="gather")
    with pytest.raises(UsageError, match=r"'gather' moves tokens in the model's own number type only.*int4"):
        manager_for(random_decoder(example_config(head_dim=16)), policy)
    with pytest.raises(UsageError, match="store tokens in different ways"):
        parse("rkv:budget=64,compaction=gather+kivi")
    with pytest.raises(UsageError, match="cannot have compaction=late"):
        parse("rkv:budget=64,compaction=late")
    assert parse("rkv:budget=64,compaction=overlapped+window:budget=80").storage.compaction == "overlapped"
    assert parse("rkv:budget=64").storage == Storage()
