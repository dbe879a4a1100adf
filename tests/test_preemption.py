"""A pool of pages that is too small: sequences are preempted, join again, and go on as if nothing had happened.

To run it alone: pytest tests/test_preemption.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minithink.evaluate.meter as meter_module
import minithink.evaluate.recall as recall_module
import minithink.loop as loop_module
import minithink.stream as stream_module
from minithink.engine import ROOM, Engine
from minithink.evaluate.meter import Seconds, meter
from minithink.evaluate.recall import Recall
from minithink.kv.manager import KVManager, bytes_for
from minithink.kv.sizes import needs, promised_pages
from minithink.kv.slots import Slots
from minithink.kv.table import Exhausted
from minithink.loaded import Loaded
from minithink.policies import parse
from minithink.sampling import Sampler, SamplingParams
from minithink.sequence import Result, Track
from minithink.stream import Stream
from tests.kv.run import informed, text_of
from tests.kv.test_batches import ONE_BY_ONE, with_backend
from tests.policies.test_laws import SMALL, TEXTS, decoder_of
from tests.test_loop import Launched

torch.set_num_threads(1)

ROWS = 3
PROMPTS = (13, 9, 11, 13)  # tokens
LIMITS = (34, 20, 27, 15)  # tokens that are generated


def fills(text: str) -> bool:
    """Whether sequences grow after their prompts, and not into other pages than these: so they fill a small pool."""
    policy = parse(text)
    return set(policy.storage.formats) == {"plain"} and (policy.budget is None or policy.budget > max(PROMPTS))


FILLING = [next(filter(fills, texts)) for texts in SMALL.values() if any(map(fills, texts))]  # one of each policy

# Bytes that depend on the other sequences. With late compaction a sequence gives pages back when the next one leaves,
# and oracles remember what all of them have said.
SHARED = {
    "compaction=overlapped": ("kv_ledger", "kv_bytes", "kv_free_bytes", "kv_bits"),
    "oracle:": ("kv_ledger", "kv_bytes"),
}

Lanes = list[list[int]]  # positions that each lane holds


def tracks(texts: Sequence[list[int] | None] = (None,) * 4) -> list[Track]:
    """texts: the tokens after the prompts, if they are given."""
    out = []
    for i, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        ids = text_of(decoder_of(0).config, prompt, i)
        out.append(Track(i, i, 0, ids, limit, "length", text=texts[i]))
    return out


def stream_of(engine: Engine, text: str, sequences: list[Track], pages: int | None = None, **options: Any) -> Stream:
    """A stream whose numbers do not depend, by a single bit, on which sequences run together. Pages are small."""
    decoder = with_backend(decoder_of(TEXTS.index(text) % 2), ONE_BY_ONE)
    loaded = Loaded(decoder, engine.tokenizer)
    loaded.columns = "fit"
    policy = informed(parse(text), decoder.config)
    policy.storage = replace(policy.storage, block=2)
    return Stream(
        loaded,
        sequences,
        SamplingParams(seed=5),
        batch_size=ROWS,
        stop=(),
        policy=policy,
        pages=pages,
        **options,
    )


def of_one(stream: Stream) -> int:
    """Pages that the longest of the sequences needs at worst, if it is alone."""
    cache = stream.cache
    assert isinstance(cache, KVManager)
    need = needs(cache.policy, cache.config.head_dim, cache.dtype, cache.shape.tokens, cache.prompt)
    return cache.store.units * (need.pages + need.prompt_pages)


@dataclass
class Seen:
    """What happened in a stream."""

    lanes: dict[tuple[int, int], Lanes] = field(default_factory=dict)  # after each token of each sequence
    steps: list[list[int]] = field(default_factory=list)  # the sequences with a new token
    preempted: list[int] = field(default_factory=list)  # sequences, in this order
    beside: list[list[int]] = field(default_factory=list)  # each time, those that ran


def run(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Run a stream to its end. A sequence that gets its tokens again must hold what it held the first time. When one
    was preempted, another must end before any prompt is read."""
    seen = Seen()
    full = False
    cache = stream.cache
    assert isinstance(cache, KVManager)

    def look(sequences: list[Track]) -> None:
        for s in sequences:
            assert s.tokens or not full
            lanes = cache.positions(s.number).flatten(0, 1).tolist()
            held = [[p for p in lane if p >= 0] for lane in lanes]
            assert seen.lanes.setdefault((s.number, len(s.tokens)), held) == held

    def restart(s: Track) -> None:
        nonlocal full
        full = True
        seen.preempted.append(s.number)
        seen.beside.append(sorted(cache.sequences.row_of))
        original(s)

    original = Track.restart
    stream.on_step = look
    with monkeypatch.context() as patch:
        patch.setattr(Track, "restart", restart)
        for advanced in stream.advances():
            seen.steps.append([s.number for s in advanced])
            full = full and not any(s.finish_reason for s in advanced)
    return seen


def facts(result: Result, text: str) -> dict[str, Any]:
    """All that a result says of its sequence alone, but how long it took."""
    out = asdict(result)
    left_out = ["prefill_seconds", "decode_seconds"]
    for part, names in SHARED.items():
        left_out += names if part in text else ()
    return {name: value for name, value in out.items() if name not in left_out}


def assert_same(text: str, got: Stream, want: Stream, seen: Seen, wanted: Seen) -> None:
    assert seen.lanes == wanted.lanes
    assert [facts(r, text) for r in got.results] == [facts(r, text) for r in want.results]
    assert [s.counts for s in got.sequences] == [s.counts for s in want.sequences]
    assert [s.losses for s in got.sequences] == [s.losses for s in want.sequences]
    # Every token is handed out once.
    tokens = Counter(number for step in seen.steps for number in step)
    assert tokens == {s.number: len(s.tokens) for s in got.sequences}


def refusing(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the cache say now and then that it has no room, by lot."""
    draw = Random(seed)
    monkeypatch.setattr(KVManager, "has_room", lambda *_: draw.random() > 0.15)


@pytest.mark.parametrize("text", TEXTS)
def test_a_preempted_sequence_goes_on_as_if_it_had_not_been(
    engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool with pages for one sequence, and whenever else there seems to be no room: the same tokens, the same
    lanes after each of them, the same bytes and counts."""
    want = stream_of(engine, text, tracks())
    wanted = run(want, monkeypatch)
    assert not wanted.preempted
    small = stream_of(engine, text, tracks(), pages=of_one(want))
    assert_same(text, small, want, run(small, monkeypatch), wanted)
    refusing(monkeypatch, seed=TEXTS.index(text))
    enough = stream_of(engine, text, tracks())
    enough._scarce = True
    seen = run(enough, monkeypatch)
    assert_same(text, enough, want, seen, wanted)
    assert seen.preempted


@pytest.mark.parametrize("text", FILLING)
def test_a_pool_that_is_far_too_small(engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps, which cannot ask how many pages are free, are launched ahead; texts are given; prompts are read
    together. The last sequence to join is preempted, and never the oldest."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(stream_module, "prompts_at_once", lambda rows: 2)

    def made(sequences: list[Track], pages: int | None = None) -> Stream:
        stream = stream_of(engine, text, sequences, pages, fixed=True)
        stream.ahead = True
        return stream

    drawing = made(tracks())
    wanted = run(drawing, monkeypatch)
    reading = made(tracks([s.tokens for s in drawing.sequences]))
    losses = run(reading, monkeypatch)
    preempted = 0
    for share in (1.0, 1.5):
        pages = round(of_one(drawing) * share)
        for want, expected in ((drawing, wanted), (reading, losses)):
            got = made(tracks([s.text for s in want.sequences]), pages)
            assert got._loop is not None
            assert got._loop.captures == got.cache.capturable  # type: ignore[union-attr]
            seen = run(got, monkeypatch)
            assert_same(text, got, want, seen, expected)
            preempted += len(seen.preempted)
            for number, others in zip(seen.preempted, seen.beside, strict=True):
                assert others, "the oldest is never preempted"
                assert number > max(others), "they joined in the order of their numbers"
    assert preempted


@pytest.mark.parametrize("text", TEXTS)
def test_no_step_opens_more_pages_than_were_counted(
    engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `has_room` counts before a step, and before prompts, bounds what is drawn until it is asked again."""
    counted = SimpleNamespace(most=0, drawn=0, steps=0, nearest=0.0)

    def counting(of: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Slots, *args: Any, **names: Any) -> Any:
            free = self.table.free_pages.free
            out = of(self, *args, **names)
            counted.drawn += free - self.table.free_pages.free
            assert counted.drawn <= counted.most
            counted.nearest = max(counted.nearest, counted.drawn / counted.most)
            return out

        return call

    def has_room(self: KVManager, seqs: Sequence[int], prompts: Sequence[int] = ()) -> bool:
        rows = self.sequences.of(seqs).rows
        counted.most = self.store.units * (self.store._opened_by_rows(rows) + self.store._opened_by_prompts(prompts))
        counted.drawn = 0
        counted.steps += 1
        return True

    for name in ("allocate", "allocate_many"):
        monkeypatch.setattr(Slots, name, counting(getattr(Slots, name)))
    monkeypatch.setattr(KVManager, "has_room", has_room)
    sequences = tracks()
    for s in sequences:
        s.limit = 34  # so that no sequence runs alone, for which nobody asks
    stream = stream_of(engine, text, sequences[:ROWS])
    stream._scarce = True
    for _ in stream.steps():
        pass
    assert counted.steps > 34
    assert counted.nearest > 0.1, "far from what is drawn: nothing could be wrong"


def test_a_sequence_that_does_not_fit_alone(engine: Engine) -> None:
    """Its prompt or its next token is refused in one sentence; what it has is not lost."""
    want = stream_of(engine, "full", tracks())
    for pages, tokens in ((want.cache.store.units * 6, 0), (want.cache.store.units * 9, 6)):  # type: ignore[union-attr]
        stream = stream_of(engine, "full", tracks(), pages=pages)
        with pytest.raises(Exhausted, match=r"The KV pool is exhausted: appending \d+ tokens to 1 sequences needs"):
            for _ in stream.steps():
                pass
        assert [r.generated_tokens for r in stream.results] == [tokens, 0, 0, 0]


def test_nothing_is_lost_while_sequences_wait_or_get_their_tokens_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every step results have all the tokens that were handed out, and chunks are their text."""
    want = stream_of(engine, "full", tracks())
    run(want, monkeypatch)
    stream = stream_of(engine, "full", tracks(), pages=of_one(want))
    handed = Counter[int]()
    texts = Counter[int]()
    waited = replayed = 0
    for chunk in stream:
        handed[chunk.prompt] += 1
        texts[chunk.prompt] += len(chunk.text)
        for result in stream.results:
            assert abs(result.generated_tokens - handed[result.prompt]) <= ROWS
            assert result.token_ids == want.results[result.prompt].token_ids[: result.generated_tokens]
        for s in stream.sequences:
            waited += s.preempted
            replayed += s.replays and not s.preempted
            assert not s.preempted or stream.results[s.number].kv_tokens == 0
    assert waited
    assert replayed
    assert [r.text for r in stream.results] == [r.text for r in want.results]
    assert [texts[r.prompt] for r in want.results] == [len(r.text) for r in want.results]
    assert handed == {r.prompt: r.generated_tokens for r in want.results}


def test_tokens_that_were_handed_out_stay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fed again even if others would be drawn now, as with sums of another shape."""
    draw = Random(0)

    def sample(self: Sampler, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.tensor([draw.randrange(logits.shape[1]) for _ in logits])

    monkeypatch.setattr(Sampler, "sample", sample)
    pages = of_one(stream_of(engine, "full", tracks()))
    stream = stream_of(engine, "full", tracks(), pages=pages)
    handed: list[list[int]] = [[], [], [], []]
    for chunk in stream:
        handed[chunk.prompt].append(chunk.token_id)
    assert [r.token_ids for r in stream.results] == handed
    assert any(s.again for s in stream.sequences)


def test_with_a_pool_for_the_worst_case_nobody_asks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(KVManager, "has_room", fail)
    stream = stream_of(engine, "full", tracks())
    assert sum(stream.steps()) == sum(LIMITS)
    assert not stream.cache.scarce  # type: ignore[union-attr]


# -- what is measured


@pytest.mark.parametrize("text", ["h2o:budget=18", "crystal_kv:budget=19,realloc_every=5,min_budget=3"])
def test_a_meter_counts_every_step_once(engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the sequence takes another row when it joins again."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(recall_module, "EVERY", 4)
    found = []
    for pages in (None, of_one(stream_of(engine, text, tracks())) * 5 // 4):
        stream = stream_of(engine, text, tracks(), pages)
        measure = meter(stream)
        recall = Recall(stream)
        stream.on_step = meter_module.both(measure, recall)
        held, noted = dict[int, Any](), dict[int, Any]()
        for advanced in stream.advances():
            ended = [s for s in advanced if s.finish_reason]
            for s, one in zip(ended, measure.take(ended), strict=True):
                held[s.number] = one
                noted[s.number] = [(query, x.tolist()) for query, x in recall._held[s.number]]
        found.append((held, noted, [bool(s.again) for s in stream.sequences]))
    (want, wanted, never), (got, noted, again) = found
    assert got == want
    assert noted == wanted
    assert len(noted[0]) == (LIMITS[0] - 1) // 4
    assert any(again)
    assert not any(never)


def test_seconds_add_up_to_the_time_that_passed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that waits, or gets its tokens again, takes no time of the others' steps."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: clock.now)
    want = stream_of(engine, "full", tracks())
    stream = stream_of(engine, "full", tracks(), pages=of_one(want))
    seconds = Seconds()
    own = Counter[int]()
    taken = dict[int, float]()
    for i, advanced in enumerate(stream.advances()):
        clock.now += 1.0 + i % 3
        for s in advanced:
            own[s.number] += (1.0 + i % 3) / len(advanced)  # type: ignore[assignment]
        seconds.step(advanced)
        taken |= {s.number: seconds.take(s) for s in advanced if s.finish_reason}
    assert any(s.again for s in stream.sequences)
    assert sum(taken.values()) == pytest.approx(clock.now)
    assert taken == pytest.approx(dict(own))


# -- how large the pool is, and how many sequences run at once


@pytest.mark.parametrize(
    ("text", "pages"),  # of 16 tokens, for texts of 100 tokens with prompts of 30
    [
        ("crystal_kv:budget=40", 4),  # 41 tokens, and a page: whatever one head holds
        ("crystal_kv_lite:budget=40,schedule=interval:8", 5),  # 49 tokens
        ("dynts:budget=40", 4),
        ("crystal_kv:budget=20,protect_prompt=false", 3),  # the prompt is read as a whole
        ("crystal_kv_lite:budget=20,protect_prompt=false", 3),
        ("crystal_kv:budget=300", 8),  # no more tokens than the text has
        ("window:budget=40", None),
        ("ada_snapkv:budget=40,buffer=8", 5),
        ("crystal_kv_lite:budget=40+quant:fmt=int8", 4),
        ("crystal_kv_lite:budget=40+tbq:tau=16,layers=0,thresholds=0.5/0.6", None),  # of which format?
        ("crystal_kv:budget=40+quant:fmt=int8", 4),
        ("tbe:budget=40,tau=8,layers=0,thresholds=0.4/0.5,hard_budget=false", None),  # it counts its peaks itself
        ("full", None),
    ],
)
def test_pages_that_are_promised(text: str, pages: int | None) -> None:
    """Counted by hand."""
    assert promised_pages(parse(text), 16, torch.float32, 100, 30) == pages


@pytest.mark.parametrize("policy", ["crystal_kv:budget=32", "crystal_kv_lite:budget=32", "dynts:budget=32,ratio=0"])
def test_a_batch_is_as_large_as_policies_promise(
    engine: Engine, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short. All thoughts are over at once, and the answers need more pages than were promised; the
    tokens are those of a pool for the worst case."""
    opens, closes = engine.tokenizer.think_ids
    sample = Sampler.sample

    def say(self: Sampler, logits: torch.Tensor, sequences: list[int], positions: list[int]) -> torch.Tensor:
        drawn = sample(self, logits, sequences, positions)
        tags = [{10: opens, 11: closes}.get(position) for position in positions]
        said = [int(token) if tag is None else tag for token, tag in zip(drawn, tags, strict=True)]
        return torch.tensor([max(1, token) for token in said])  # 0 would end the text

    monkeypatch.setattr(Sampler, "sample", say)
    prompts = [[9 + i] * 10 for i in range(6)]
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 90, "cache": "paged", "temperature": 0}
    roomy = engine.stream(prompts, **options)
    for _ in roomy.steps():
        pass

    def needed(rows: int, pages: Any = None) -> int:
        sizes = {"rows": rows, "tokens": 100, "prompt": 10}
        return bytes_for(engine.config, parse(policy), torch.float32, pages=pages, **sizes)

    assert needed(5, "promised") < needed(5)
    assert needed(1, "promised") == needed(1), "one sequence always ends"
    free = [math.ceil(needed(5, "promised") / ROOM)]
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: free[0])
    stream = engine.stream(prompts, **options)
    cache = stream.cache
    assert isinstance(cache, KVManager)
    assert cache.scarce
    assert stream.batch_size == 5
    assert cache.reserved_bytes() == needed(5, "promised")
    for _ in stream.steps():
        pass
    assert any(s.again for s in stream.sequences)
    assert [r.token_ids for r in stream.results] == [r.token_ids for r in roomy.results]
    texts = [[*prompt, *r.token_ids] for prompt, r in zip(prompts, roomy.results, strict=True)]
    reading = engine.reading(texts, policy, prompt_tokens=10, cache="paged")
    assert reading.cache.scarce  # type: ignore[union-attr]
    assert reading.batch_size == 5

    assert engine.stream(prompts, recorder=SimpleNamespace(), **options).batch_size < 5  # type: ignore[arg-type]
    assert engine.stream(prompts, fixed=True, **options).batch_size < 5, "each has a cache of its own"
    free[0] = needed(6)
    assert engine.stream(prompts, **options).cache.scarce, "a step needs memory, too"  # type: ignore[union-attr]
    free[0] = math.ceil(needed(6) / ROOM)
    assert not engine.stream(prompts, **options).cache.scarce  # type: ignore[union-attr]
