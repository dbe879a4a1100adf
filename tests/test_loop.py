"""The decode loop of CUDA graphs: it generates what the reference generates, and says when the pool is too small."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import minithink.kv.manager as manager_module
import minithink.loop as loop_module
from minithink.backend import REFERENCE, TORCH, Backend, triton_backend
from minithink.engine import Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.kv.batch import ACTIVE, FIELDS, Batch
from minithink.kv.contract import Demand, Policy, See, Step, Storage
from minithink.kv.manager import KVManager
from minithink.kv.view import View
from minithink.loop import SIZES, DecodeLoop
from minithink.model import Decoder, Rope
from minithink.policies import parse, vase
from minithink.policies.snapkv import SnapKV
from minithink.policies.vase import spread
from minithink.sampling import SamplingParams
from minithink.stream import Stream
from minithink.tasks import load_problems
from tests.compare import assert_close, margins
from tests.kv.run import Full, feed, kept, manager_for, state_of, text_of
from tests.kv.test_batches import (
    ONE_BY_ONE,
    assert_same_content,
    assert_same_state,
    content,
    formats,
    observed,
    with_backend,
)
from tests.kv.test_decisions import TEXTS, AsksNothing
from tests.policies.test_laws import TEXTS as SMALL
from tests.policies.test_laws import decoder_of
from tests.strategies import example_config, random_decoder

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

POLICIES = (
    None,  # a full cache: in pages for the kernels, in one buffer a sequence for the reference
    "window:budget=96",
    "streaming_llm:budget=80,sink=4",
    "streaming_llm:budget=80,sink=4,rerotate=true",
    "random:budget=100",
    "random_attention:budget=112,buffer=16",
    "sepllm:budget=112",
    "rkv:budget=96,buffer=16",
    "ada_snapkv:budget=96,buffer=16",
    "pyramidkv:budget=96,buffer=16",
    "crystal_kv_lite:budget=112",
    "crystal_kv:budget=128,realloc_every=32",
)
# A key that differs from the reference's in its last bit may round to the next code, which is no small difference: no
# law says that the reference draws the same tokens. The same kernels one by one do.
ROUNDING = (
    "quant:fmt=fp8",
    "quant:fmt=int4,by=token",
    "quant:fmt=tq4",
    "quant:fmt=tq3,v_fmt=tq1,scale=mse",
    "kivi:bits=4",
    "kivi:bits=4,flush=official",
    "rkv:budget=96,buffer=16+quant:fmt=fp8",
    "rkv:budget=96,buffer=16+quant:fmt=tq4,v_fmt=tq2",
    "thinkv:budget=160,tau=32,retention=16/8/4",
    "thinkv:budget=160,tau=32,retention=16/8/4,four=tq4,two=tq2",
    "tbq:tau=32",
    "pm_kvq:bits=4,max_len=300,sink=4,window=32",
)
# Every policy, in many settings
EVERY = [*SMALL, *(text for text in TEXTS if text not in SMALL), "kivi:bits=4,group=16,residual=16,flush=official"]
# ThinKV with small segments, whose types differ
SEGMENTS = "tau=8,retention=4/2,block=2,layers=0/1,thresholds=0.21/0.31"
PM_KVQ = "pm_kvq:bits=4,max_len=24,sink=2,window=6,group=16,block=2"
# In the first layer equal tokens have equal values, whatever their positions. VaSE keeps the largest, and which of
# these equals it keeps is decided by the last bit of a product: see `test_vase_parts_from_the_reference_at_ties`.
TIES = ("vase:budget=96,buffer=16",)
DRAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.6, "seed": 3}}
AT_ONCE = 3
SINKS, LARGE = 4, 24  # n_sink of VaSE, and a quarter of its budget in TIES
LONGEST = 380  # new tokens: some of the questions below are answered in fewer


@cache
def engine(backend: str) -> Engine:
    return load("tiny", device="cuda", dtype="float32", backend=backend)


def questions() -> list[str]:
    """Short problems of various lengths, more than run at once."""
    shortest = sorted(load_problems("test"), key=lambda p: p.thinking_tokens)
    return [p.question for p in shortest[: 2 * AT_ONCE + 1]]


def ran(backend: str, policy: str | None, **options: Any) -> Stream:
    """A stream, run to its end."""
    stream = engine(backend).stream(questions(), policy=policy, max_new_tokens=LONGEST, batch_size=AT_ONCE, **options)
    for _ in stream.steps():
        pass
    return stream


@needs_cuda
@pytest.mark.parametrize("draw", sorted(DRAWS))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_loop_generates_what_the_reference_does(policy: str | None, draw: str) -> None:
    """Sequences end at different times, and others take their rows; few graphs are captured for all steps."""
    want, got = ran("reference", policy, **DRAWS[draw]), ran("triton", policy, **DRAWS[draw])
    assert want._loop is None or not want._loop.captures
    for i, (a, b) in enumerate(zip(got.results, want.results, strict=True)):
        same = next((k for k, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
        assert a.token_ids == b.token_ids, f"{policy}, sequence {i}: {same} tokens are the same"
        assert (a.finish_reason, a.kv_tokens) == (b.finish_reason, b.kv_tokens)
    lengths = {r.generated_tokens for r in want.results}
    assert policy is not None or len(lengths) > 2, "the sequences should end at different times"
    loop = got._loop
    assert loop is not None
    sizes, _, widths, formats, *_ = zip(*loop.steps, strict=True)
    # fewer rows, where sequences end and none waits; a width that follows the lanes; formats that come and go
    assert set(sizes) <= {1, 2, AT_ONCE}
    assert all(w == loop.cache.width or w & (w - 1) == 0 for w in widths)
    assert len(set(formats)) <= 2
    assert len({key._replace(whole=False) for key in loop.steps}) <= 3 * 2 * 2
    assert max(lengths) > 4 * len(loop.steps)
    decides = policy is not None
    assert loop.cache.captures_decisions == decides
    assert bool(loop.decisions) == decides
    assert {n for n, *_ in loop.decisions} <= {1, 2, AT_ONCE}
    assert {key[2:4] for key in loop.decisions} <= {key[2:4] for key in loop.steps}


@needs_cuda
@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "rkv:budget=96,buffer=16",
        "crystal_kv:budget=128,realloc_every=32",
        "dynts:budget=160",
        *TIES,
        *ROUNDING,
    ],
)
def test_a_graph_is_its_steps(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels one by one, on tensors of the same shapes."""
    captured = ran("triton", policy, temperature=0)
    assert captured._loop is not None
    monkeypatch.setattr(loop_module, "capturer", lambda cache: None)
    launched = ran("triton", policy, temperature=0)
    assert launched._loop is not None
    assert not launched._loop.steps
    assert_same_results(captured, launched)


@needs_cuda
@pytest.mark.parametrize(
    "policy",
    [
        "window:budget=96",
        "streaming_llm:budget=80,sink=4,rerotate=true",
        "random:budget=100,protect_prompt=true",
        "rkv:budget=96,buffer=16",
        "rkv:budget=96,buffer=4,global_clock=true,exempt_answer=true",
        "rkv:budget=96,buffer=16+quant:fmt=nvfp4,buffer=32",
        "rkv:budget=110,buffer=20+window:budget=120,schedule=interval:50",
        "snapkv:cap=60,window=8+rkv:budget=110,buffer=20",
        "rkv:budget=96,buffer=16,compaction=gather",
        "rkv:budget=96,buffer=0,compaction=overlapped",
        *TIES,
        "thinkv:budget=160,tau=32,retention=16/8/4",
        "thinkv:budget=160,tau=32,retention=16/8/4,key_axis=token,precision=R8E4T0,sparsity_rows=4",
        "tbe:budget=160,tau=32,retention=16/8/4",
        "tbq:tau=32",
        "thinkv:budget=160,tau=32,retention=16/8/4,thoughts=keyword",
        "sepllm:budget=112,fill=true",
        "sepllm:budget=112+quant:fmt=nvfp4,buffer=32",
        "pm_kvq:bits=4,max_len=300,sink=4,window=32",
        "needs_oracle:budget=160",
    ],
)
def test_captured_decisions_are_decisions(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that are due, by replay, and for all rows in every step, kernel by kernel. Some policies need the host
    in `decide`, and only the question whether they are due is captured."""
    captured = ran("triton", policy, temperature=0)
    assert captured._loop is not None
    assert captured._loop.cache.tells_due
    assert bool(captured._loop.decisions) == (not policy.startswith(("pm_kvq", "needs_oracle")))
    monkeypatch.setattr(KVManager, "tells_due", property(lambda _: False))
    launched = ran("triton", policy, temperature=0)
    assert launched._loop is not None
    assert not launched._loop.decisions
    assert_same_results(captured, launched)


Lane = tuple[int, int, int, int]  # sequence, clock, layer, KV head


def vase_ranges(backend: str, monkeypatch: pytest.MonkeyPatch) -> dict[Lane, dict[int, float]]:
    """The range m of each candidate by its position, for each lane and round of VaSE, kernel by kernel."""
    found: dict[Lane, dict[int, float]] = {}
    newest = list[Tensor]()

    def kept_spread(v: Tensor) -> Tensor:
        newest.append(spread(v))
        return newest[-1]

    def note(view: View, score: Tensor, candidate: Tensor | None) -> None:
        assert candidate is not None
        due, _ = view.policy.due(view)
        candidate = (candidate & due[..., None]).cpu()
        position = view.pos().cpu()
        size = torch.stack(newest[-view.shape.layers :]).cpu()
        clocks = view.clock.tolist()
        numbers = view.batch.sequence.tolist()
        for layer, row, head, column in candidate.nonzero().tolist():
            lane = (numbers[row], clocks[row], layer, head)
            where = (layer, row, head, column)
            found.setdefault(lane, {})[int(position[where])] = float(size[where])

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "capturer", lambda cache: None)
        patch.setattr(vase, "spread", kept_spread)
        patch.setattr(View, "note", note)
        ran(backend, *TIES, temperature=0, cache="paged")  # `note` is the View's
    return found


@needs_cuda
def test_vase_parts_from_the_reference_at_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a lane first holds other tokens, the round before had a tie at the end of L, in the first layer."""
    want = vase_ranges("reference", monkeypatch)
    got = vase_ranges("triton", monkeypatch)
    assert want.keys() & got.keys()
    parted = 0
    for number in {lane[0] for lane in want}:
        lanes = sorted(lane for lane in want.keys() & got.keys() if lane[0] == number)
        apart = [lane for lane in lanes if want[lane].keys() != got[lane].keys()]
        if not apart:
            continue
        clock = apart[0][1]
        for lane in (lane for lane in apart if lane[1] == clock):
            before = max(x for x in lanes if x[2:] == lane[2:] and x[1] < clock)
            large = sorted((m for position, m in want[before].items() if position >= SINKS), reverse=True)
            last, first_left_out = large[LARGE - SINKS - 1 : LARGE - SINKS + 1]
            assert lane[2] == 0, f"{lane}: values of a later layer are no ties"
            assert last - first_left_out <= 1e-6 * last, f"{lane}: {last} and {first_left_out} are no tie"
            parted += 1
    assert parted, "no text has a tie: the loop could be held to the reference"


@needs_cuda
@pytest.mark.parametrize("buffer", [0, 16])
@pytest.mark.parametrize("how", ["gather", "overlapped"])
def test_compaction_changes_no_token(how: str, buffer: int) -> None:
    """Keys and values that move before the next step, or beside it on a stream of their own."""
    plain, moved = (
        ran("triton", f"rkv:budget=96,buffer={buffer},compaction={name}", temperature=0) for name in ("none", how)
    )
    assert moved._loop is not None
    assert moved._loop.decisions
    assert_same_results(moved, plain)


def assert_same_results(got: Stream, want: Stream) -> None:
    assert [r.token_ids for r in got.results] == [r.token_ids for r in want.results]
    assert [r.kv_tokens for r in got.results] == [r.kv_tokens for r in want.results]


# -- a loop by itself


def on_gpu(backend: Backend) -> Decoder:
    config = example_config(num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=64, intermediate_size=64)
    decoder = Decoder(config, backend).requires_grad_(False)
    decoder.load_state_dict(random_decoder(config, 1).state_dict())
    return decoder.to("cuda")


def cache_for(decoder: Decoder, policy: Any, rows: int, tokens: int, **options: Any) -> KVManager:
    return KVManager(
        decoder.config,
        Rope(decoder.config, "cuda"),
        policy,
        rows=rows,
        tokens=tokens,
        device="cuda",
        backend=decoder.backend,
        columns="fit",
        **options,
    )


@torch.inference_mode()
def step(decoder: Decoder, manager: KVManager, chunks: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    """A step that is not captured → logits [V] of each sequence's last token, on the CPU."""
    counts = [len(chunk) for chunk in chunks.values()]
    tokens = [token for chunk in chunks.values() for token in chunk]
    manager.begin_step(list(chunks), counts, tokens)
    hidden = decoder(torch.tensor(tokens, device="cuda"), manager)
    manager.end_step()
    return {s: x[-1].cpu() for s, x in zip(chunks, decoder.logits(hidden).split(counts), strict=True)}


@needs_cuda
@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "window:budget=20",
        "rkv:budget=24,buffer=8,alpha=4",
        "quant:fmt=nvfp4",
        "quant:fmt=int4,by=token",
        "quant:fmt=fp8",
        "window:budget=20+quant:fmt=nvfp4,buffer=4",
    ],
)
def test_some_of_the_sequences_in_any_order(policy: str) -> None:
    """Those that pause stay as they are, and so do the tokens in their buffers; rows are used again."""
    twin, ours = on_gpu(REFERENCE), on_gpu(triton_backend())
    want, got = (cache_for(d, parse(policy), rows=5, tokens=400) for d in (twin, ours))
    loop = DecodeLoop(ours, got, SamplingParams(temperature=0))
    last: dict[int, int] = {}

    def join(seq: int, n: int) -> None:
        for manager, decoder in ((want, twin), (got, ours)):
            manager.join(seq, 400, n)
            chosen = step(decoder, manager, {seq: text_of(decoder.config, n, seq)})[seq]
            last[seq] = int(chosen.argmax())

    def talk(seqs: Sequence[int]) -> None:
        fed = {seq: last[seq] for seq in seqs}
        logits = step(twin, want, {seq: [token] for seq, token in fed.items()})
        drawn = loop.step(list(fed), list(fed.values()))
        for seq, token in zip(fed, drawn, strict=True):
            sure = float(margins(logits[seq][None])[0]) > 1e-2  # a rounded code may be another
            assert not sure or token == int(logits[seq].argmax()), f"sequence {seq} at {want.length(seq)}"
            last[seq] = int(logits[seq].argmax())
            assert state_of(got, seq) == state_of(want, seq)
            assert got.held(seq) == want.held(seq)

    for seq, n in enumerate((30, 7, 19, 1)):
        join(seq, n)
    for i in range(40):
        talk([(0, 1, 2, 3), (2, 0), (3,), (1, 3, 0)][i % 4])
    for manager in (want, got):
        manager.leave(2)
    join(9, 25)
    for i in range(230):  # beyond the narrowest width
        talk([(9, 0), (0, 1, 3, 9), (0,)][i % 3])
    assert {n for n, *_ in loop.steps} <= {1, 2, 4} <= set(SIZES)
    assert max(len(loop.steps), len(loop.decisions)) <= 12
    assert bool(loop.decisions) == policy.startswith(("window", "rkv"))


@needs_cuda
def test_draws_belong_to_sequence_and_position() -> None:
    """Drawn in the graph as `generate` draws outside of it: alone and in a batch the same tokens."""
    together = ran("triton", "full", **DRAWS["sampled"])
    sampled = engine("triton").stream(
        questions()[:1], policy="full", max_new_tokens=80, batch_size=1, **DRAWS["sampled"]
    )
    for _ in sampled.steps():
        pass
    assert sampled.result.token_ids == together.results[0].token_ids[: len(sampled.result.token_ids)]


@needs_cuda
def test_too_small_a_pool() -> None:
    """Noticed in the step that finds no page, and not before."""
    decoder = on_gpu(triton_backend())
    units = 2 * 2  # of two layers and heads
    manager = cache_for(decoder, Full(storage=Storage(block=4)), rows=2, tokens=100, pages=6 * units)
    for seq, n in ((0, 8), (1, 4)):  # two pages and one of each unit: three are free
        manager.join(seq, 100, n)
        step(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0))
    tokens = [1, 2]
    for _ in range(4):  # a page each, with four slots
        tokens = loop.step([0, 1], tokens)
    assert manager.store.slots.table.free_pages.free == units
    with pytest.raises(MinithinkError, match=r"The KV pool of 24 pages is exhausted: use a smaller --batch-size"):
        loop.step([0, 1], tokens)
    assert [manager.length(seq) for seq in (0, 1)] == [12, 8]


@needs_cuda
def test_the_last_page_suffices() -> None:
    decoder = on_gpu(triton_backend())
    manager = cache_for(decoder, Full(storage=Storage(block=4)), rows=1, tokens=100, pages=3 * 4)
    manager.join(5, 100, 4)
    step(decoder, manager, {5: [1, 2, 3, 4]})
    loop, tokens = DecodeLoop(decoder, manager, SamplingParams(temperature=0)), [1]
    for _ in range(8):
        tokens = loop.step([5], tokens)
    assert (manager.length(5), manager.store.slots.table.free_pages.free) == (12, 0)
    with pytest.raises(MinithinkError, match="exhausted"):
        loop.step([5], tokens)


# -- captures


class Knot:
    """An object that only Python's collector can free, with all that it holds."""

    def __init__(self, held: object = None) -> None:
        self.held = held
        self.itself = self


@needs_cuda
def test_a_capture_survives_the_garbage_of_earlier_ones() -> None:
    """1,000 captures. In each of them the graph before becomes garbage, and the collector runs as often as it can."""
    earlier = list[object]()
    weight = torch.eye(64, device="cuda")

    def launch(values: Tensor, out: Tensor) -> None:
        x = weight
        if torch.cuda.is_current_stream_capturing() and earlier:
            Knot(earlier.pop())
        for _ in range(20):
            x = x @ weight
            Knot()
        out.copy_(values.sum() + x[0, 0].long())

    values = torch.ones(len(FIELDS), 4, dtype=torch.int64)
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what is there already need not be looked at 1,000 times
    gc.set_threshold(5, 1, 1)
    try:
        for _ in range(1000):
            out = torch.zeros(1, dtype=torch.int64, device="cuda")
            captured = loop_module.Captured(launch, values, out, torch.cuda.graph_pool_handle())
            assert captured.replay(values).item() == values.sum() + 1
            earlier.append(captured)
            del captured
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError])
def test_nothing_is_collected_during_a_capture(enabled: bool, error: type[Exception] | None) -> None:
    """Afterwards the collector is on or off as it was."""
    freed = list[str]()
    garbage = Knot()
    weakref.finalize(garbage, freed.append, "freed")
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(error) if error else nullcontext(), loop_module.no_collections():
            del garbage
            for _ in range(10_000):
                Knot()
            assert not freed
            if error:
                raise error
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


# -- which graphs there are and what they are given, by a stand-in: no GPU is needed


class Launched:
    """In place of `Captured`: launches anew what that replays, and remembers the values."""

    def __init__(self, run: Callable[[Tensor, Tensor], object], values: Tensor, out: Tensor, pool: Any) -> None:
        self.run, self.out, self.seen = run, out, list[Tensor]()
        idle = values.clone()
        idle[ACTIVE] = 0
        run(idle, out)

    def replay(self, values: Tensor) -> Tensor:
        self.seen.append(values)
        self.run(values, self.out)
        return self.out


@pytest.fixture
def by_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that run on a CPU, decisions too."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(manager_module, "NARROWEST", 8)


@pytest.mark.parametrize("policy", ["window:budget=12,schedule=interval:5", "rkv:budget=12,buffer=0,alpha=4,lam=1"])
@pytest.mark.usefixtures("by_launches")
def test_who_pads_a_graph_stays_as_it_is(policy: str) -> None:
    """A sequence that pauses while it holds more than its budget, or between two evictions: tokens and queries."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    got, want = (
        manager_for(decoder, parse(policy), backend=ONE_BY_ONE, rows=6, tokens=90, columns="fit", poison=False)
        for _ in range(2)
    )
    loop = DecodeLoop(decoder, got, SamplingParams(temperature=0))
    for seq in range(4):
        for manager in (got, want):
            manager.join(seq, 90, 10)
            feed(decoder, manager, {seq: text_of(decoder.config, 10, seq)})
    for i, seqs in enumerate([(0, 1, 2, 3)] * 9 + [(1, 2, 3), (3, 1, 2), (0,), (0, 3, 2)] * 4):
        fed = {seq: (5 * seq + i) % 19 for seq in seqs}
        feed(decoder, want, {seq: [token] for seq, token in fed.items()})
        loop.step(list(fed), list(fed.values()))
        assert_same_state(f"{policy}, step {i}", got, want, range(4), exact=False)
    decisions = [values for graph in loop.decisions.values() for values in graph.seen]  # type: ignore[attr-defined]
    assert (4, 3) in [(values.shape[1], int(values[ACTIVE].sum())) for values in decisions]


class SeesAll(KVManager):
    """Shows its policy all rows in every step."""

    tells_due = False  # type: ignore[assignment]


@pytest.mark.parametrize(
    "policy",
    [
        "window:budget=12,schedule=interval:5",
        "rkv:budget=16,buffer=6,alpha=4,exempt_answer=true",
        "rkv:budget=9,buffer=4+quant:fmt=fp8",
        "rkv:budget=9,buffer=4+quant:fmt=nvfp4,buffer=5",
        "quant:fmt=nvfp4",
        "crystal_kv_lite:budget=18",
        "ada_snapkv:budget=12,buffer=4,alpha=3",
        "pyramidkv:budget=12,buffer=4,alpha=3,beta=4",
        "crystal_kv:budget=18,realloc_every=4,min_budget=2",
        "dynts:budget=20,local=5",
        "dynts:budget=18,select=random",
        "skipkv:budget=26,schedule=interval:5",
        "seal:at=every+rkv:budget=16,buffer=6,alpha=4",
        "skipkv:budget=26,schedule=interval:5,at=boundary,tau=0.5",
        "h2o:budget=14",
        "tova:budget=14",
        "scissorhands:budget=14,recent=3,history=5,buffer=4",
        "raas:budget=18",
        "raas:budget=16,page=3",
        "raas:budget=16,page=3,form=official",
        "lazy_eviction:budget=14,window=4,alpha=0.05",
        "morphkv:budget=14,schedule=interval:3",
        "keydiff:budget=14",
        "knorm:budget=14",
        "triattention:budget=14,buffer=4",
        "triattention:budget=18,buffer=4,share=all",
        "quant:fmt=nvfp4,by=token,buffer=16",
        "kivi:bits=4,group=16,residual=16",
        "sepllm:budget=15,initial=2,separators=4,window=5",
        f"thinkv:budget=34,g=4,{SEGMENTS}",
        f"tbe:budget=24,{SEGMENTS}",
        "thinkv:budget=34,tau=8,g=4,retention=4/2,block=2,thoughts=keyword",
        PM_KVQ,
        f"{PM_KVQ}+window:budget=19",
        "needs_oracle:budget=24,local=3,ratio=0.6",
    ],
)
@pytest.mark.usefixtures("by_launches")
def test_what_graphs_are_given(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step its sequences, each decision the rows that are due, each flush those whose buffers are full, all
    padded with other rows, each once. A policy that is shown all rows instead decides the same."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    options: dict[str, Any] = {"rows": 6, "tokens": 90, "columns": "fit", "think_ids": (7, 8), "poison": False}
    got, want = (manager_for(decoder, parse(policy), backend=ONE_BY_ONE, **options) for _ in range(2))
    want.__class__ = SeesAll
    loop = DecodeLoop(decoder, got, SamplingParams(temperature=0))
    full: list[list[int]] = []  # the rows whose buffers the other one has flushed
    flushed = want.store.flushed
    monkeypatch.setattr(want.store, "flushed", lambda rows: (rows and full.append(list(rows)), flushed(rows)))
    seqs, last, draw = [4, 2, 7, 3, 9], dict[int, int](), torch.Generator().manual_seed(1)
    for seq in seqs:
        for manager in (got, want):
            manager.join(seq, 90, seq)
            last[seq] = int(feed(decoder, manager, {seq: text_of(decoder.config, seq, seq)})[seq][-1].argmax())
    for i in range(40):
        batch = [seqs[j] for j in torch.randperm(5, generator=draw)][: (5, 3, 1, 2)[i % 4]]
        fed = {seq: 8 if i == 33 else last[seq] for seq in batch}
        logits = feed(decoder, want, {seq: [token] for seq, token in fed.items()})
        drawn = loop.step(list(fed), list(fed.values()))
        assert drawn == [int(logits[seq].argmax()) for seq in fed]
        last.update(zip(fed, drawn, strict=True))
        assert_same_state(f"{policy}, step {i}", got, want, seqs, exact=False)
    steps = [values for graph in loop.steps.values() for values in graph.seen]  # type: ignore[attr-defined]
    decisions = [values for graph in loop.decisions.values() for values in graph.seen]  # type: ignore[attr-defined]
    assert len(steps) == 40
    for values in (*steps, *decisions):
        assert len(values[0].unique()) == values.shape[1] in (1, 2, 4, 6)
    assert bool(decisions) == (not policy.startswith(("quant", "kivi", "pm_kvq", "needs_oracle")))
    assert len(decisions) < 40 or policy.startswith("h2o")  # which adds up attention in every step
    for values in decisions:
        due = int(values[ACTIVE].sum())
        assert 0 < due <= values.shape[1] < 2 * due or values.shape[1] == 6
    flushes = [values for graph in loop.flushes.values() for values in graph.seen]  # type: ignore[attr-defined]
    given = [values[0][values[ACTIVE].bool()].tolist() for values in flushes]
    assert sorted(given) == sorted(full)
    assert bool(full) == (
        "buffer=5" in policy or policy.startswith(("quant:fmt=nvfp4,by", "kivi", "thinkv", "pm_kvq"))
    )
    for rows, values in zip(given, flushes, strict=True):
        assert len(values[0].unique()) == values.shape[1] == next(n for n in (1, 2, 4, 6) if n >= len(rows))
    assert {len(values) for values in steps} == {len(FIELDS)}
    assert len(loop.decisions) <= 4 * 4 * 2


@pytest.mark.usefixtures("by_launches")
def test_a_decision_that_is_not_captured_waits_until_a_row_is_due() -> None:
    """PM-KVQ's tokens change in few steps. Its `decide` is called in these, and may read the device's memory."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    policy = parse(PM_KVQ)
    asked = list[tuple[list[int], bool]]()
    decide = policy.decide

    def watched(step: Any) -> Any:
        asked.append((step.row.tolist(), step.asks))
        return decide(step)

    policy.decide = watched  # type: ignore[method-assign]
    manager = manager_for(decoder, policy, backend=ONE_BY_ONE, rows=3, tokens=60, columns="fit", poison=False)
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0))
    for seq, n in ((0, 4), (1, 20)):
        manager.join(seq, 60, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    asked.clear()
    for i in range(30):
        loop.step([0, 1], [i % 19, 3])
    assert manager.store.kinds == [[1, 2, 3], [1, 2, 3], []]
    assert {tuple(rows) for rows, _ in asked} == {(0,), (1,)}
    assert len(asked) <= 2 * 6
    assert all(asks for _, asks in asked)


@pytest.mark.parametrize(
    "policy",
    [
        "quant:fmt=nvfp4,by=token",
        "kivi:bits=4,group=16,residual=16",
        "quant:fmt=fp8,buffer=5",
        "pm_kvq:bits=4,max_len=48,sink=1,window=16,group=16",
    ],
)
@pytest.mark.usefixtures("by_launches")
def test_who_pads_a_flush_keeps_its_buffer(policy: str) -> None:
    """Three buffers are full, the fourth lacks a token: the tokens are those of steps that are not captured."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    got, want = (
        manager_for(decoder, parse(policy), backend=ONE_BY_ONE, rows=5, tokens=90, columns="fit") for _ in range(2)
    )
    loop, last = DecodeLoop(decoder, got, SamplingParams(temperature=0), sizes=()), [0, 1, 2, 3]
    for seq in range(4):
        for manager in (got, want):
            manager.join(seq, 90, 10)
            feed(decoder, manager, {seq: text_of(decoder.config, 10, seq)})
    for i in range(19):
        fed = {seq: last[seq] for seq in ((0, 1, 2) if i == 0 else (3, 0, 1, 2))}
        logits = feed(decoder, want, {seq: [token] for seq, token in fed.items()})
        drawn = dict(zip(fed, loop.step(list(fed), list(fed.values())), strict=True))
        assert drawn == {seq: int(logits[seq].argmax()) for seq in fed}, f"step {i}"
        assert_same_state(f"{policy}, step {i}", got, want, range(4), exact=False)
        last = [drawn.get(seq, last[seq]) for seq in range(4)]
    flushes = [values for graph in loop.flushes.values() for values in graph.seen]  # type: ignore[attr-defined]
    assert {n for n, *_ in loop.steps} == {5}, "a step has all rows"
    assert {(4, 3), (1, 1)} == {(values.shape[1], int(values[ACTIVE].sum())) for values in flushes}


class Careful(Launched):
    """Where capturing, with nobody active, changes nothing that any row holds, and what the host decides of a step is
    at each replay what it was then."""

    cache: KVManager

    def __init__(self, run: Callable[[Tensor, Tensor], object], values: Tensor, out: Tensor, pool: Any) -> None:
        rows, store = range(self.cache.shape.rows), self.cache.store
        before = [content(self.cache, row) | observed(self.cache, row) for row in rows]
        free = store.slots.table.free_pages.free, store.slots.free_groups.free
        super().__init__(run, values, out, pool)
        for row, want in enumerate(before):
            assert_same_content(f"row {row}, captured", content(self.cache, row) | observed(self.cache, row), want)
        assert (store.slots.table.free_pages.free, store.slots.free_groups.free) == free
        assert not store.slots.overflow
        self.host = self.decided()

    def decided(self) -> tuple[Any, ...]:
        """Width, formats, and where things are."""
        store = self.cache.store
        addresses = [x.data_ptr() for x in (*store.tensors(), *self.cache.accounts.observed())]
        return store.lists.columns_read, set(store.slots.used), self.cache.captures_decisions, addresses

    def replay(self, values: Tensor) -> Tensor:
        assert self.decided() == self.host
        return super().replay(values)


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "window:budget=12,schedule=interval:5",
        "quant:fmt=nvfp4,by=token,buffer=16",
        "rkv:budget=15,buffer=4,alpha=3+quant:fmt=fp8",
        "crystal_kv_lite:budget=18",
        "crystal_kv:budget=18,realloc_every=4,min_budget=2",
        "dynts:budget=20,local=5",
        "skipkv:budget=26,schedule=interval:5",
        "seal:at=every+rkv:budget=16,buffer=6,alpha=4",
        "h2o:budget=14",
        "raas:budget=18",
        "lazy_eviction:budget=14,window=4,alpha=0.05",
        "sepllm:budget=15,initial=2,separators=4,window=5",
        f"thinkv:budget=34,g=4,{SEGMENTS}",
        "thinkv:budget=34,tau=8,g=4,retention=4/2,block=2,thoughts=keyword",
        PM_KVQ,
    ],
)
@pytest.mark.usefixtures("by_launches")
def test_sequences_come_and_go_between_steps(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They join, pause and leave, and rows are used again: each draws what it draws by steps that are not captured.
    What the host says of rows in a step is what it knows of them, of idle ones too; widths follow the lanes."""
    monkeypatch.setattr(loop_module, "Captured", Careful)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Careful if cache.capturable else None)
    decoder, draw = with_backend(decoder_of(0), ONE_BY_ONE), torch.Generator().manual_seed(2)
    options: dict[str, Any] = {"rows": 5, "tokens": 60, "columns": "fit", "poison": False}
    got, want = (manager_for(decoder, parse(policy), backend=ONE_BY_ONE, **options) for _ in range(2))
    monkeypatch.setattr(Careful, "cache", got, raising=False)
    loop, store = DecodeLoop(decoder, got, SamplingParams(temperature=0), sizes=(1, 2, 3)), got.store
    last, ends, number, widths = dict[int, int](), dict[int, int](), 0, list[int]()

    def some(high: int) -> int:
        return int(torch.randint(high, (), generator=draw))

    slow = text_of(decoder.config, 9, 99)  # whose prompt is half read for some steps: then there are plain tokens
    for i in range(45):
        for manager in (got, want) if i in (15, 20) else ():
            if i == 15:
                manager.join(99, 60, 9)
            feed(decoder, manager, {99: slow[:5] if i == 15 else slow[5:]})
            if i == 20:
                manager.leave(99)
        while len(last) < 4 and (not last or some(3) == 0):
            n = 1 + some(12)
            for manager in (got, want):
                manager.join(number, 60, n)
                last[number] = int(
                    feed(decoder, manager, {number: text_of(decoder.config, n, i)})[number][-1].argmax()
                )
            ends[number] = min(60, n + 1 + some(50))
            number += 1
        seqs = [list(last)[j] for j in torch.randperm(len(last), generator=draw)]
        seqs = seqs[: 1 + some(len(seqs))] if i % 3 else seqs
        rows = [got.row_of(seq) for seq in seqs]
        lengths, waiting = list(store.lengths), list(store.waiting)
        steps = [len(graph.seen) for graph in loop.steps.values()]  # type: ignore[attr-defined]
        logits = feed(decoder, want, {seq: [last[seq]] for seq in seqs})
        drawn = loop.step(seqs, [last[seq] for seq in seqs])
        assert drawn == [int(logits[seq].argmax()) for seq in seqs], f"step {i}"
        [values] = [
            graph.seen[-1]  # type: ignore[attr-defined]
            for graph, before in zip(loop.steps.values(), [*steps, 0], strict=False)
            if len(graph.seen) > before  # type: ignore[attr-defined]
        ]
        at, active, after, _, _, tokens, waits, numbers, _ = values
        size = next((size for size in (1, 2, 3) if size >= len(seqs)), 5)
        idle = [row for row in range(5) if row not in rows][: size - len(rows)]
        assert at.tolist() == rows + idle
        assert active.tolist() == [1] * len(rows) + [0] * len(idle)
        assert after.tolist() == [lengths[row] + 1 for row in at]
        assert waits.tolist() == [waiting[row] for row in at]
        assert numbers[: len(seqs)].tolist() == seqs
        assert tokens[: len(seqs)].tolist() == [last[seq] for seq in seqs]
        last.update(zip(seqs, drawn, strict=True))
        assert_same_state(f"{policy}, step {i}", got, want, last, exact=False)
        held = store.lists.count.amax((0, 2)).tolist()
        assert all(most >= n for most, n in zip(store.lists.longest, held, strict=True))
        assert store.lists.columns_read == store.lists.columns >= max(held)
        assert {f for seq in last for f in formats(got, seq)} <= store.slots.used | {255}
        widths.append(store.lists.columns_read)
        for seq in [seq for seq in last if got.length(seq) == ends[seq]]:
            for manager in (got, want):
                manager.leave(seq)
            del last[seq]
    assert number > 6
    assert min(widths) < max(widths)
    assert {width for _, _, width, *_ in loop.steps} == set(widths)


def as_kernels(backend: Backend) -> Backend:
    """The same functions, in which nobody looks for what a graph cannot capture: on a GPU they are kernels."""

    def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **named)

        return call

    names = {field.name for field in fields(Backend)} - {"name", "capturable", *TORCH}
    return replace(backend, **{name: hidden(getattr(backend, name)) for name in names})


class Strict(Launched):
    """Refuses what a CUDA graph cannot capture, where the host reads the device's memory first of all."""

    def __init__(self, run: Callable[[Tensor, Tensor], object], values: Tensor, out: Tensor, pool: Any) -> None:
        def watched(values: Tensor, out: Tensor) -> None:
            with AsksNothing():
                run(values, out)

        super().__init__(watched, values, out, pool)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.usefixtures("by_launches")
def test_what_is_captured_asks_the_host_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that draw tokens or read given texts, decisions and flushes."""
    monkeypatch.setattr(loop_module, "Captured", Strict)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Strict if cache.capturable else None)
    decoder = with_backend(decoder_of(0), as_kernels(ONE_BY_ONE))
    options: dict[str, Any] = {"rows": 3, "tokens": 60, "columns": "fit", "think_ids": (7, 8), "poison": False}
    manager = manager_for(decoder, parse(policy), backend=decoder.backend, **options)
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0), sizes=(1, 3))
    for seq, n in ((0, 13), (1, 9)):
        manager.join(seq, 60, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    words = text_of(decoder.config, 40, 5)
    for i in range(20):
        seqs = [0, 1] if i % 3 else [1]
        fed = [words[i + seq] for seq in seqs]
        if i % 4 == 1:
            loop.read(seqs, fed, [words[i + seq + 1] for seq in seqs])
        else:
            loop.step(seqs, fed)
    assert loop.steps
    assert {key.compares for key in loop.steps} == {False, True}
    after_prompts = not isinstance(manager.policy, SnapKV)
    assert bool(loop.decisions) == (manager.captures_decisions and after_prompts)
    assert bool(loop.flushes) == (0 < manager.store.storage.buffer <= 16)


@pytest.mark.usefixtures("by_launches")
def test_rows_of_a_graph() -> None:
    """As few as there are graphs for, or all; the idle ones are those with the lowest numbers."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    manager = manager_for(decoder, parse("full"), backend=ONE_BY_ONE, rows=6, tokens=20, columns="fit")
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0))
    for rows, sizes, want in (
        ([4], (1, 2, 4, 8), [4]),
        ([4, 0, 2], (1, 2, 4, 8), [4, 0, 2, 1]),
        ([5, 1, 2, 0, 3], (1, 2, 4, 8), [5, 1, 2, 0, 3, 4]),
        ([1], (), [1, 0, 2, 3, 4, 5]),
        ([2], (8, 256), [2, 0, 1, 3, 4, 5]),
    ):
        padded = loop._padded(Batch.of(row=rows, token=[7] * len(rows)), sizes)
        assert padded.row.tolist() == want
        idle = len(want) - len(rows)
        assert padded.active.tolist() == [True] * len(rows) + [False] * idle
        assert padded.token.tolist() == [7] * len(rows) + [0] * idle


@pytest.mark.parametrize("by_loop", [True, False])
@pytest.mark.usefixtures("by_launches")
def test_a_pool_that_is_too_small_here_too(by_loop: bool) -> None:
    """The step that finds no page says so, and counts none of its tokens; nor does the next one go on. Steps that
    `begin_step` begins say it too: the host does not check the pool where a loop captures."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    manager = manager_for(
        decoder, Full(storage=Storage(block=4)), backend=ONE_BY_ONE, rows=2, columns="fit", pages=6 * 4, poison=False
    )  # six pages for each of four units: two and one for the prompts, three are free
    for seq, n in ((0, 8), (1, 4)):
        manager.join(seq, 60, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    loop, tokens = DecodeLoop(decoder, manager, SamplingParams(temperature=0)), [1, 2]

    def step() -> list[int]:
        if by_loop:
            return loop.step([0, 1], tokens)
        logits = feed(decoder, manager, {seq: [token] for seq, token in enumerate(tokens)})
        return [int(logits[seq].argmax()) for seq in (0, 1)]

    for _ in range(4):  # a page each, with four slots
        tokens = step()
    assert manager.store.slots.table.free_pages.free == 4
    for _ in range(2):
        with pytest.raises(MinithinkError, match=r"The KV pool of 24 pages is exhausted: use a smaller --batch-size"):
            step()
        assert [manager.length(seq) for seq in (0, 1)] == manager.store.lengths == [12, 8]


@pytest.mark.usefixtures("by_launches")
def test_a_step_may_be_launched_before_it_is_asked_for() -> None:
    """Then it is the step of these sequences and tokens, and of no others."""
    decoder, drawn = with_backend(decoder_of(0), ONE_BY_ONE), list[list[int]]()
    for ahead in (False, True):
        policy = parse("rkv:budget=12,buffer=4,alpha=3")
        manager = manager_for(decoder, policy, backend=ONE_BY_ONE, rows=2, columns="fit", poison=False)
        for seq, n in ((0, 8), (1, 4)):
            manager.join(seq, 60, n)
            feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
        loop, tokens = DecodeLoop(decoder, manager, SamplingParams(temperature=0)), [1, 2]
        for _ in range(12):
            if ahead:
                loop.launch([0, 1], tokens)
                for seqs, others in (([0, 1], [3, 4]), ([1, 0], tokens), ([0], tokens[:1])):
                    with pytest.raises(ValueError, match="the step under way feeds other tokens"):
                        loop.step(seqs, others)
                with pytest.raises(ValueError, match="a step is under way already"):
                    loop.launch([0, 1], tokens)
            tokens = loop.step([0, 1], tokens)
            drawn.append([*tokens, manager.length(0), manager.held(0), manager.held(1)])
    assert drawn[:12] == drawn[12:]
    assert drawn[-1][-2] < 20, "tokens were evicted"


@pytest.mark.parametrize("by_loop", [True, False])
@pytest.mark.usefixtures("by_launches")
def test_a_buffer_without_room_is_noticed_by_the_next_step(by_loop: bool) -> None:
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    storage = Storage(("fp8",), buffer=4, block=4, tail="keep")
    manager = manager_for(
        decoder, Full(storage=storage), backend=ONE_BY_ONE, rows=1, columns="fit", pages=4 * 2, poison=False
    )
    size = manager.store.pages.layouts[1].slots
    manager.join(0, 60, 1)
    feed(decoder, manager, {0: [1]})
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0))
    step = (lambda token: loop.step([0], [token])) if by_loop else lambda token: feed(decoder, manager, {0: [token]})
    for i in range(2 * size + 3):  # two pages a unit are full, and the buffer with this token
        step(i % 9)
    assert bool(manager.store.slots.overflow)
    assert (manager.length(0), manager.store.waiting) == (2 * size + 4, [0])
    with pytest.raises(MinithinkError, match="The KV pool of 8 pages is exhausted"):
        step(1)
    assert manager.length(0) == 2 * size + 4


class Witness:
    """A recorder that remembers the steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], list[int]]] = []

    def joined(self, manager: KVManager, seq: int, row: int) -> None: ...

    def noted(self, *args: Any) -> None: ...

    def evicting(self, *args: Any) -> None: ...

    def left(self, seq: int) -> None: ...

    def stepped(self, rows: Sequence[int], counts: Sequence[int], ids: Sequence[int], edits: Any) -> None:
        assert list(counts) == [1] * len(rows) or not self.steps
        self.steps.append((list(rows), list(ids)))


def test_who_watches_sees_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not captured then, nor asked for in the step, and are the same; who watches learns of every step."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    backend = ONE_BY_ONE
    decoder = with_backend(decoder_of(0), backend)
    lanes = []
    for watched in (False, True):
        manager = manager_for(
            decoder, parse("window:budget=12"), backend=backend, rows=2, tokens=60, columns="fit", poison=False
        )
        witness = Witness()
        manager.recorder = witness if watched else None
        if watched:
            monkeypatch.setattr(manager, "due", None)
        manager.join(0, 60, 5)
        feed(decoder, manager, {0: text_of(decoder.config, 5, 0)})
        loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0), sizes=())
        for i in range(15):
            loop.step([0], [i])
        assert {n for n, *_ in loop.decisions} == (set() if watched else {1}), "whatever the sizes of steps"
        assert {key.decides for key in loop.steps} == {not watched}
        assert witness.steps[1:] == ([([0], [i]) for i in range(15)] if watched else [])
        lanes.append(kept(manager, 0))
    assert lanes[0] == lanes[1] == [list(range(8, 20))]


@pytest.mark.parametrize("before", [False, True])
def test_who_watches_may_come_and_go_during_a_step(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """A step that was launched with a witness, and ends without one, or the other way round, evicts all the same."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    backend = ONE_BY_ONE
    decoder = with_backend(decoder_of(0), backend)
    manager = manager_for(
        decoder, parse("window:budget=12"), backend=backend, rows=2, tokens=60, columns="fit", poison=False
    )
    manager.join(0, 60, 5)
    feed(decoder, manager, {0: text_of(decoder.config, 5, 0)})
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0), sizes=())
    for i in range(15):
        manager.recorder = Witness() if before else None
        loop.launch([0], [i])
        manager.recorder = None if before else Witness()
        loop.step([0], [i])
        assert manager.held(0) == min(12, 6 + i)
    assert kept(manager, 0) == [list(range(8, 20))]


@pytest.mark.parametrize(
    ("tokens", "capacity", "error", "message"),
    [
        (40, 9, ValueError, "sequence 3 has 9 tokens of 9: 1 do not fit"),
        (8, 40, UsageError, "A lane may hold 10 tokens and the width was fixed to 9: use a smaller budget or"),
    ],
)
@pytest.mark.usefixtures("by_launches")
def test_what_does_not_fit_is_refused_before_the_step(
    tokens: int, capacity: int, error: type[Exception], message: str
) -> None:
    """More tokens than were announced, and more than a list has room for. The sequence beside it goes on."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    manager = manager_for(
        decoder, parse("full"), backend=ONE_BY_ONE, rows=2, tokens=tokens, columns="fit", poison=False, pages=99
    )
    for seq, n, most in ((3, 5, capacity), (4, 1, 40)):
        manager.join(seq, most, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0))
    for i in range(4):
        loop.step([4, 3], [i, 1])
    before = {row: content(manager, row) for row in range(2)}
    for seqs in ((3,), (4, 3)):
        with pytest.raises(error, match=message):
            loop.step(seqs, [1] * len(seqs))
    for row, want in before.items():
        assert_same_content(f"row {row}", content(manager, row), want)
    assert [manager.length(seq) for seq in (3, 4)] == [9, 5]
    loop.step([4], [2])
    assert_same_content("who sits beside it", content(manager, 0), before[0])


@pytest.mark.parametrize("columns", [None, "fit"])
def test_steps_that_are_not_captured(columns: Any) -> None:
    """On a CPU each part of a step is a call: nothing is captured, and the tokens are those of whole steps."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    policy = "rkv:budget=9,buffer=4,alpha=3"
    options: dict[str, Any] = {"tokens": 60, "columns": columns, "backend": ONE_BY_ONE}
    got, want = (manager_for(decoder, parse(policy), **options) for _ in range(2))
    loop, last = DecodeLoop(decoder, got, SamplingParams(temperature=0)), {0: 1, 1: 2}
    for seq in last:
        for manager in (got, want):
            manager.join(seq, 60, 5)
            feed(decoder, manager, {seq: text_of(decoder.config, 5, seq)})
    for i in range(20):
        seqs = (0, 1) if i % 3 else (1,)
        logits = feed(decoder, want, {seq: [last[seq]] for seq in seqs})
        drawn = loop.step(seqs, [last[seq] for seq in seqs])
        assert drawn == [int(logits[seq].argmax()) for seq in seqs]
        last.update(zip(seqs, drawn, strict=True))
        assert_same_state(f"step {i}", got, want, (0, 1))
    assert not loop.captures
    assert not loop.steps | loop.decisions | loop.flushes
    assert got.held(1) < 14


def test_steering_is_not_captured() -> None:
    """A policy that steers may ask the host; without fixed widths addresses change."""
    decoder = random_decoder(example_config())
    fixed, loose = (manager_for(decoder, parse("full"), columns=columns) for columns in ("fit", None))
    assert fixed.capturable
    assert not loose.capturable
    fixed.captures_steering = False
    assert not fixed.capturable
    assert loop_module.capturer(loose) is loop_module.capturer(fixed) is None, "there is no GPU"


@dataclass
class Glancing(Policy):
    """Sees attention after every fourth token, and does nothing."""

    budget: int = 80
    name = "glancing"
    demands = (Demand(See.MASS, every=4),)

    def decide(self, step: Step) -> tuple[()]:
        return ()


@pytest.mark.usefixtures("by_launches")
def test_a_graph_for_steps_that_observe_and_one_for_the_others() -> None:
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    got, want = (
        manager_for(decoder, Glancing(), backend=ONE_BY_ONE, rows=2, tokens=90, columns="fit") for _ in range(2)
    )
    loop = DecodeLoop(decoder, got, SamplingParams(temperature=0))
    for seq in range(2):
        for manager in (got, want):
            manager.join(seq, 90, 5)
            feed(decoder, manager, {seq: text_of(decoder.config, 5, seq)})
    for i in range(12):
        # the second sequence is two tokens behind, and both are observed when either is due
        fed = {seq: (3 * seq + i) % 19 for seq in ((0,) if i < 2 else (0, 1))}
        feed(decoder, want, {seq: [token] for seq, token in fed.items()})
        due = bool(loop.cache.demands_now(list(fed)))
        assert due == any((i + 1 - 2 * seq) % 4 == 0 for seq in fed)
        loop.step(list(fed), list(fed.values()))
        for key, mass in want.observations.mass.items():
            assert_close(f"mass {key}, step {i}", got.observations.mass[key], mass, atol=1e-6)
    runs = {
        observed: sum(len(g.seen) for k, g in loop.steps.items() if k.observed == observed)  # type: ignore[attr-defined]
        for observed in [(), Glancing.demands]
    }
    assert runs == {(): 7, Glancing.demands: 5}
