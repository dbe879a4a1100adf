"""The meter: what it says of a sequence is what the ledger says after each of its steps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import minithink.kv.manager as manager_module
import minithink.loop as loop_module
import minithink.stream as stream_module
from minithink.engine import Engine, load
from minithink.evaluate.meter import DeviceMeter, Held, LedgerMeter, meter
from minithink.kv.apart import Apart
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.sequence import Track
from minithink.stream import Stream
from tests.evaluate.run import QUESTIONS, STOPS
from tests.fixtures_checkpoint import write_checkpoint
from tests.test_loop import Launched

torch.set_num_threads(1)

POLICIES = [
    "full",
    "window:budget=20",
    "rkv:budget=20,buffer=4,alpha=3",
    "quant:fmt=int4,by=token,group=16",
    "kivi:group=16,residual=16",
    "pm_kvq:bits=4,max_len=40,window=8",
    "crystal_kv_lite:budget=20,protect_prompt=false",
    "window:budget=20+quant:fmt=int4,by=token,group=16",
    "window:budget=20+quant:fmt=fp8",
]


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return load(model, device="cpu")


@pytest.fixture
def graphed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose steps go through the loop of a GPU, launch by launch."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(manager_module, "NARROWEST", 16)
    monkeypatch.setattr(engine.loaded, "columns", "fit")
    monkeypatch.setattr(engine.loaded, "captures", True)
    return engine


def stream_of(engine: Engine, policy: str | None, **options: Any) -> Stream:
    options = {"max_new_tokens": 16, "batch_size": 2, "temperature": 0.9, "seed": 6, **options}
    return engine.stream(QUESTIONS[:5], policy=policy, fixed=True, **options)


def run(stream: Stream) -> tuple[list[Held], list[Held]]:
    """What the meter says of every sequence at its end, and what is counted from what the cache says in each step."""
    measure = meter(stream)
    cache = stream.cache
    seen: dict[int, list[tuple[float, int, list[int]]]] = defaultdict(list)

    def look(sequences: list[Track]) -> None:
        for s in sequences:
            own = cache.caches[s.number] if isinstance(cache, Apart) else cache
            if isinstance(own, FullCache):
                counts = [own.held(s.number)]
            else:
                counts = own.store.lists.count[:, own.row_of(s.number)].flatten().tolist()
            seen[s.number].append((sum(counts) / len(counts), own.account(s.number).held, counts))
        measure(sequences)

    stream.on_step = look
    got = {}
    for advanced in stream.advances():
        ended = [s for s in advanced if s.finish_reason]
        got.update(zip([s.number for s in ended], measure.take(ended), strict=True))
    want = {}
    for number, states in seen.items():
        tokens, sizes, counts = zip(*states, strict=True)
        evicting = sum(any(b <= a for a, b in zip(*two, strict=True)) for two in itertools.pairwise(counts))
        tokens, sizes = tokens[1:] or tokens, sizes[1:] or sizes
        mean = sum(tokens) / len(tokens), sum(sizes) / len(sizes)
        want[number] = Held(len(states) - 1, evicting, max(tokens), mean[0], max(sizes), mean[1])
    assert measure.take([]) == []
    with pytest.raises(KeyError):
        measure.take(stream.sequences[:1])
    return [got[s.number] for s in stream.sequences], [want[s.number] for s in stream.sequences]


def check(stream: Stream, evicts: bool) -> list[Held]:
    got, want = run(stream)
    for s, held, counted in zip(stream.sequences, got, want, strict=True):
        assert tuple(held) == pytest.approx(tuple(counted)), f"sequence {s.number}"
        assert held.steps == len(s.tokens) - 1
        assert type(held.steps) is type(held.evicting_steps) is type(held.bytes_peak) is int
    assert any(held.evicting_steps for held in got) == evicts
    assert len({held.steps for held in got}) > 1, "sequences of several lengths"
    return got


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_beside_a_loop(graphed: Engine, policy: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read one at a time, or two, and then steps are launched ahead."""
    monkeypatch.setattr(stream_module, "prompts_at_once", lambda rows: together)
    stream = stream_of(graphed, policy)
    stream.ahead = together > 1
    assert stream._together == together
    assert isinstance(stream.cache, KVManager)
    check(stream, "budget" in policy)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu(tmp_path: Path, policy: str, ahead: bool) -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 64, "intermediate_size": 64}
    model = write_checkpoint(tmp_path / "model", generation={"eos_token_id": STOPS}, shape=shape)
    stream = stream_of(load(model, device="cuda"), policy)
    stream.ahead = ahead
    assert isinstance(stream.cache, KVManager)
    for s in stream.sequences:  # of several lengths, wherever their draws would end them
        s.limit -= s.number
    check(stream, "budget" in policy)


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_with_caches_of_their_own(engine: Engine, policy: str | None) -> None:
    stream = stream_of(engine, policy)
    assert isinstance(stream.cache, Apart)
    got = check(stream, policy is not None and "budget" in policy)
    assert not stream.cache.caches, "every sequence left"
    for s, held in zip(stream.sequences, got, strict=True):
        if policy is None:
            last = len(s.prompt) + held.steps
            assert held.tokens_peak == last
            assert held.tokens_mean == len(s.prompt) + (held.steps + 1) / 2
            assert held.bytes_peak == last * engine.config.kv_bytes_per_token(4)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("policy", ["window:budget=20", "quant:fmt=fp8"])
def test_sequences_of_one_token(
    engine: Engine, graphed: Engine, policy: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no step of decoding: what they held is what was left of the prompt. And those of two tokens."""
    monkeypatch.setattr(stream_module, "prompts_at_once", lambda rows: together)
    for columns, n in (("fit", 1), (None, 1), ("fit", 2), (None, 2)):
        graphed.loaded.columns, graphed.loaded.captures = columns, columns is not None  # type: ignore[assignment]
        stream = stream_of(graphed, policy, max_new_tokens=n)
        assert isinstance(meter(stream), DeviceMeter if columns else LedgerMeter)
        for s, held, counted in zip(stream.sequences, *run(stream), strict=True):
            assert held == counted
            assert held.steps == len(s.tokens) - 1 < n
            seen = len(s.prompt) + held.steps
            assert held.tokens_peak == held.tokens_mean == (min(20, seen) if "window" in policy else seen)
            assert held.evicting_steps == (held.steps if "window" in policy and seen > 20 else 0)


def test_only_streams_of_a_fixed_shape(engine: Engine) -> None:
    with pytest.raises(ValueError, match="fixed=True"):
        meter(engine.stream("x", policy=None))
