"""A stream: who runs when, what it says of every token, and what it knows when it ends or is left.

What is generated is scripted here; the law is what the text of all tokens says.
"""

from __future__ import annotations

import codecs
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minithink.loop as loop_module
import minithink.stream as stream_module
from minithink.checkpoint.memory import is_out_of_memory
from minithink.engine import Engine
from minithink.errors import MinithinkError
from minithink.kv.apart import Apart
from minithink.kv.contract import Policy, Shape
from minithink.kv.full import FullCache
from minithink.kv.ledger import Told
from minithink.kv.manager import KVManager, bytes_for
from minithink.loop import SIZES
from minithink.policies import parse
from minithink.sampling import Sampler, SamplingParams
from minithink.sequence import Result, Track
from minithink.stream import Stream, prompts_at_once
from minithink.text.thinking import Stage
from tests.fixtures_checkpoint import SPECIAL
from tests.test_engine import play
from tests.test_loop import Launched

torch.set_num_threads(1)

STOP, OPEN, CLOSE = SPECIAL.index("<|end|>"), SPECIAL.index("<think>"), SPECIAL.index("</think>")


def tracks(prompts: Sequence[Sequence[int]], limit: int = 99) -> list[Track]:
    return [Track(i, i, 0, list(prompt), limit, "length") for i, prompt in enumerate(prompts)]


def stream_of(engine: Engine, sequences: list[Track], batch_size: int, **options: Any) -> Stream:
    """Without what the engine adds; greedy."""
    options = {"params": SamplingParams(temperature=0.0), "stop": (), **options}
    return Stream(engine.loaded, sequences, batch_size=batch_size, **options)


def run(stream: Stream) -> list[list[int]]:
    """To its end → the numbers of the sequences that each step brought a token."""
    return [[s.number for s in advanced] for advanced in stream.advances()]


# -- texts, stops and stages


@settings(max_examples=60)
@given(data=st.data())
def test_a_stream_is_its_text(engine: Engine, data: st.DataObject) -> None:
    """Any tokens, characters of several tokens, tags, and texts and tokens that stop: chunks and result are what the
    decoded text says, with chunks or without."""
    words = engine.tokenizer.encode("Alpha sits left of Bravo. €ä")
    alphabet = st.sampled_from([*words, *words, OPEN, CLOSE])
    script = data.draw(st.lists(alphabet, min_size=1, max_size=14))
    whole = engine.tokenizer.decode(script)
    stops: list[str | int] = []
    for _ in range(data.draw(st.integers(0, 2))):
        start = data.draw(st.integers(0, len(whole)))
        stops.append(whole[start : start + data.draw(st.integers(1, 9))])
    if data.draw(st.booleans()):
        stops.append(data.draw(st.sampled_from(script)))
    prompt = engine.tokenizer.encode(data.draw(st.sampled_from(["x", "x<think>\n", "<think></think>"])))
    limit = data.draw(st.integers(1, len(script)))

    # Stopping tokens have no text; a stopping text may end in the middle of a token.
    ids = {STOP, *(s for s in stops if isinstance(s, int))}
    texts = [s for s in stops if isinstance(s, str) and s]
    n, reason = limit, "length"
    for i in range(limit):
        if script[i] in ids:
            n, reason = i + 1, "stop"
            break
        # before the last token what no later one can change: half a character is none yet, a stray byte is \ufffd
        bytes_said = b"".join(map(engine.tokenizer.token_bytes, script[: i + 1]))
        said = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes_said, final=i + 1 == limit)
        if any(text in said for text in texts):
            n, reason = i + 1, "stop"
            break
    tokens = script[:n]
    text = engine.tokenizer.decode(tokens[:-1] if tokens[-1] in ids else tokens)
    if any(stop in text for stop in texts):
        reason = "stop"
    cut = min([text.find(stop) for stop in texts if stop in text], default=len(text))

    with pytest.MonkeyPatch.context() as patch:
        for chunked in (True, False):
            play(patch, [script])
            stream = stream_of(engine, tracks([prompt], limit), 1, stop=stops)
            chunks = list(stream) if chunked else []
            if not chunked:
                run(stream)
            result = stream.result
            assert (result.token_ids, result.finish_reason) == (tokens, reason)
            assert result.text == text[:cut]
            assert (result.generated_tokens, result.prompt_tokens) == (n, len(prompt))
            stage = Stage(engine.tokenizer, prompt)
            stages = [stage.put(token, "") for token in tokens]  # the tags are tokens
            assert result.thinking_tokens == stages.count("think")
            if chunked:
                assert [c.token_id for c in chunks] == tokens
                assert [c.stage for c in chunks] == stages
                shown = "".join(c.text for c in chunks)
                assert text.startswith(shown.rstrip("\ufffd"))
                assert shown.startswith(text[:cut]) or text[:cut].endswith("\ufffd")


def test_chunks_show_characters_when_they_are_whole(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is left of one when the sequence ends: by a token, by a limit."""
    euro = [token for token in engine.tokenizer.encode("€") if token != STOP]
    assert len(euro) > 1
    script = [*euro, *engine.tokenizer.encode("a"), *euro[:-1], STOP]
    play(monkeypatch, [script])
    stream = stream_of(engine, tracks([[9]]), 1)
    texts = [chunk.text for chunk in stream]
    assert texts[: len(euro)] == [""] * (len(euro) - 1) + ["€"]
    assert texts[-1] == "\ufffd", "what stops has no text of its own; a started character ends with it"
    assert stream.result.text == "€a\ufffd"
    play(monkeypatch, [script])
    limited = stream_of(engine, tracks([[9]], 1), 1)
    assert [chunk.text for chunk in limited] == ["\ufffd"]


@pytest.mark.parametrize("split", range(1, 9))
def test_a_text_that_stops_over_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    """Wherever it is cut in two, with the longest text that is looked for as long as it, or longer."""
    stop, rest = "xyzzy 123", "Q and more"
    script = [t for part in ("Bravo ", stop[:split], stop[split:], rest) for t in engine.tokenizer.encode(part)]
    upto = len([t for part in ("Bravo ", stop[:split], stop[split:]) for t in engine.tokenizer.encode(part)])
    for stops in ([stop], [stop, "a text that is never said"], ["", stop, "b"]):
        play(monkeypatch, [script])
        stream = stream_of(engine, tracks([[9, 8]]), 1, stop=stops)
        run(stream)
        assert (stream.result.text, stream.result.finish_reason) == ("Bravo ", "stop")
        assert stream.result.token_ids == script[:upto]
    # that it was said in the prompt, or by another sequence, stops nobody
    play(monkeypatch, [engine.tokenizer.encode(stop[:5]), engine.tokenizer.encode(stop[5:])])
    other = stream_of(engine, tracks([engine.tokenizer.encode(stop)] * 2, 1), 2, stop=[stop])
    run(other)
    assert [r.finish_reason for r in other.results] == ["length"] * 2


def test_thoughts_of_chunks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the segment that runs when the token is drawn, as the cache knows it, and "" where it knows none;
    nobody asks where no texts are wanted."""
    asked = Counter[int]()
    names = count()

    def thought(cache: KVManager, seq: int) -> str:
        asked[seq] += 1
        return f"{seq}.{next(names)}"

    monkeypatch.setattr(KVManager, "thought", thought)
    stream = stream_of(engine, tracks([[9], [8]], 3), 2, policy=parse("full"))
    assert [c.thought for c in stream] == ["0.0", "1.1", "0.2", "1.3", "0.4", "1.5"]
    run(stream_of(engine, tracks([[9], [8]], 3), 2, policy=parse("full")))
    assert asked == {0: 3, 1: 3}
    assert {c.thought for c in stream_of(engine, tracks([[9]], 3), 1)} == {""}


def test_each_has_its_own_stage(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that run together one thinks from the beginning, the other begins later."""
    play(monkeypatch, [[9, CLOSE, 9, 9], [9, 9, OPEN, 9]])
    prompts = [engine.tokenizer.encode("a<think>\n"), engine.tokenizer.encode("a")]
    stages: list[list[str]] = [[], []]
    for chunk in stream_of(engine, tracks(prompts, 4), 2):
        stages[chunk.prompt].append(chunk.stage)
    assert stages == [["think", "think", "answer", "answer"], ["answer", "answer", "think", "think"]]


# -- who runs when


def test_ragged_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is free is taken in the same step by the next of the queue, whose prompt is read by itself."""
    scripts = [[9] * n + [STOP] for n in (2, 5, 0, 1)]
    play(monkeypatch, scripts)
    stream = stream_of(engine, tracks([[9], [9, 8], [7], [6, 6]]), 2)
    seen: list[tuple[list[int], list[int], list[int]]] = []
    stream.on_step = lambda now: seen.append(
        ([s.number for s in now], [len(s.tokens) for s in now], [stream.cache.held(s.number) for s in now])
    )
    steps = run(stream)
    assert steps == [[0], [1], [0, 1], [0, 1], [2], [3], [1, 3], [1], [1]]
    # called when the policy has acted, before the new token is taken, and before anybody leaves
    assert [now for now, _, _ in seen] == steps
    assert [held for _, _, held in seen] == [[1], [2], [2, 3], [3, 4], [1], [2], [5, 3], [6], [7]]
    assert [n for _, n, _ in seen] == [[0], [0], [1, 1], [2, 2], [0], [0], [3, 1], [4], [5]]
    assert [r.token_ids for r in stream.results] == scripts
    assert list(stream.steps()) == [], "it is over"


def test_prompts_that_are_read_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several are, a batch waits until so many rows are free, or as many as wait; and no pass is longer than a
    chunk."""
    monkeypatch.setattr(stream_module, "PREFILL_CHUNK", 7)
    play(monkeypatch, [[9] * n + [STOP] for n in (0, 3, 1, 2, 0, 0)])
    stream = stream_of(engine, tracks([[9] * n for n in (3, 4, 4, 3, 1, 20)]), 4)
    stream._together = 3
    assert run(stream) == [[0, 1], [2, 3], [1, 2, 3], [4], [5], [1, 3], [1]]
    assert [r.kv_tokens for r in stream.results] == [3, 7, 5, 5, 1, 20]
    play(monkeypatch, [[9]] * 2)
    tight = stream_of(engine, tracks([[9] * n for n in (3, 5)], 1), 4)
    tight._together = 3
    assert run(tight) == [[0], [1]]


def test_the_order_of_reading_changes_no_result(engine: Engine) -> None:
    """Short prompts may be read first: results stay in the order of the prompts, and a chunk names its prompt."""
    prompts = [[9] * n for n in (9, 3, 7, 3, 12)]
    options: dict[str, Any] = {"max_new_tokens": 4, "batch_size": 2, "temperature": 0.7, "num_samples": 2}
    plain = engine.generate(prompts, **options)
    stream = engine.stream(prompts, **options)
    stream.sequences.sort(key=lambda s: len(s.prompt))
    order = list(dict.fromkeys((chunk.prompt, chunk.sample) for chunk in stream))
    assert [prompt for prompt, _ in order] == [1, 1, 3, 3, 2, 2, 0, 0, 4, 4]
    assert [(r.prompt, r.sample, r.prompt_tokens) for r in stream.results] == [
        (i, k, len(prompt)) for i, prompt in enumerate(prompts) for k in range(2)
    ]
    assert [r.token_ids for r in stream.results] == [r.token_ids for r in plain]
    assert (stream.result.prompt, stream.result.sample) == (0, 0)


def test_prompts_at_once() -> None:
    assert [prompts_at_once(n) for n in (1, 31, 63, 64, 256)] == [1, 1, 1, 2, 8]


@pytest.mark.parametrize("fixed", [True, False])
def test_products_over_prompts_have_one_size_where_bits_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    """Rows of every pass over prompts and of every product with the head; the tokens are those of each alone."""
    monkeypatch.setattr(stream_module, "PREFILL_CHUNK", 16)
    prompts, rows, heads = [[9, 8, 7], [5] * 6, [4] * 11], list[int](), list[int]()
    alone = [engine.generate([p], max_new_tokens=4, policy="full")[0].token_ids for p in prompts]
    stream = stream_of(engine, tracks(prompts, 4), 3, policy=parse("full"))
    stream.fixed, stream._together = fixed, 3
    decoder = engine.decoder
    forward, logits = type(decoder).forward, type(decoder).logits

    def seen(self: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return forward(self, tokens, cache)

    def asked(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        heads.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(type(decoder), "forward", seen)
    monkeypatch.setattr(type(decoder), "logits", asked)
    assert run(stream)[:2] == [[0, 1], [2]]
    assert (rows[:2], heads[:2]) == (([16, 16], [3, 3]) if fixed else ([9, 11], [2, 1]))
    assert [r.token_ids for r in stream.results] == alone


def test_steps_have_one_size_where_bits_count(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each has its own cache, too: rows beside those that run are idle."""
    rows, forward = list[int](), type(engine.decoder).forward
    monkeypatch.setattr(
        type(engine.decoder), "forward", lambda self, x, c: (rows.append(len(x)), forward(self, x, c))[1]
    )
    play(monkeypatch, [[9] * 3, [9] * 2, [9] * 2])
    sequences = tracks([[9], [8, 7], [6]], 2)
    sequences[0].limit = 3
    assert run(stream_of(engine, sequences, 3, fixed=True)) == [[0], [1], [2], [0, 1, 2], [0]]
    assert rows == [1, 2, 1, 3, 3]


def test_what_a_cache_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes: how long it may become, its prompt, whether that ends in a thought, and a budget of its own."""
    joined: list[tuple[Any, ...]] = []
    join = KVManager.join
    monkeypatch.setattr(KVManager, "join", lambda self, *args: (joined.append(args), join(self, *args))[1])
    thinking = engine.tokenizer.encode("a<think>\n")
    sequences = tracks([[9, 8], thinking], 5)
    sequences[1].budget = 11
    stream = stream_of(engine, sequences, 2, policy=parse("window:budget=12"))
    run(stream)
    assert joined == [(0, 7, 2, False, None), (1, len(thinking) + 5, len(thinking), True, 11)]
    cache = stream.cache
    assert isinstance(cache, KVManager)
    assert (cache.shape.rows, cache.shape.tokens) == (2, max(7, len(thinking) + 5))
    assert cache.think_ids == (OPEN, CLOSE)


@pytest.mark.parametrize("rows", [2, 64])
def test_the_pool_is_made_for_the_longest_and_for_prompts_at_once(engine: Engine, rows: int) -> None:
    sequences = tracks([[9] * 3, [8] * 20, [7]], 5)
    sequences[0].limit = 30
    cache = stream_of(engine, sequences, rows, policy=parse("quant:fmt=int8")).cache
    sizes = {"rows": rows, "tokens": 33, "prompt": 20, "prompts": prompts_at_once(rows)}
    assert cache.reserved_bytes() == bytes_for(engine.config, parse("quant:fmt=int8"), torch.float32, **sizes)


class Once(Policy):
    """Is set up once."""

    name = "once"
    rows = 0

    def setup(self, shape: Shape) -> None:
        assert not self.rows
        self.rows = shape.rows


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.usefixtures("launched")
def test_what_the_loop_is_made_for(engine: Engine, fixed: bool) -> None:
    """All rows where bits count, else a few sizes; a policy that nobody else has set up; prompts read together."""
    stream = stream_of(engine, tracks([[9], [8]], 2), 64, policy=Once(), fixed=fixed)
    assert stream._loop is not None
    assert stream._loop.sizes == (() if fixed else SIZES)
    assert isinstance(stream.cache, KVManager)
    assert stream.cache.policy.rows == 64  # type: ignore[attr-defined]
    assert stream._together == 2
    assert run(stream) == [[0, 1], [0, 1]]
    assert stream_of(engine, tracks([[9]], 2), 64)._together == 1, "without a loop"


def test_which_cache(engine: Engine) -> None:
    """One for all, or where no bit may depend on others one for each; a recorder belongs to one manager."""
    three = tracks([[9], [8], [7]], 4)
    assert isinstance(stream_of(engine, three, 2).cache, FullCache)
    assert isinstance(stream_of(engine, three, 2, fixed=True).cache, Apart)
    policy = parse("window:budget=9")
    apart = stream_of(engine, three, 2, policy=policy, fixed=True)
    assert isinstance(apart.cache, Apart)
    run(apart)
    assert not apart.cache.caches, "everybody has left"
    with pytest.raises(ValueError, match="a recorder belongs to one manager"):
        stream_of(engine, three, 2, policy=policy, fixed=True, recorder=object())
    common = stream_of(engine, three, 2, policy=policy)
    assert isinstance(common.cache, KVManager)
    assert common.cache.shape.rows == 2
    assert common._loop is not None
    assert not common._loop.captures
    assert apart.cache.prepare(0, common.cache) is common.cache
    one, other = (apart.cache._make() for _ in range(2))
    assert isinstance(one, KVManager)
    assert isinstance(other, KVManager)
    assert one.policy is not other.policy, "each remembers for itself"
    assert one.shape.rows == 1


# -- usage


def test_usage_by_a_clock_that_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill lasts from joining to the first token, decoding from there to the last one."""
    ticks = count(1)
    monkeypatch.setattr(stream_module.time, "perf_counter", lambda: float(next(ticks)))
    play(monkeypatch, [[9] * 3 + [STOP], [9] * 2 + [STOP], [STOP]])
    stream = stream_of(engine, tracks([[9] * 4, [8], [7] * 2]), 2)
    run(stream)
    spent = [(r.prefill_seconds, r.decode_seconds) for r in stream.results]
    # 0: joined at 1, tokens at 2, 5, 6, 9; 1: joined at 3, tokens at 4, 5, 6; 2: joined at 7, token at 8
    assert spent == [(1.0, 7.0), (1.0, 2.0), (1.0, 0.0)]
    first, second, last = stream.results
    assert first.prefill_tokens_per_second == 4.0
    assert first.decode_tokens_per_second == pytest.approx(3 / 7)
    assert second.decode_tokens_per_second == 1.0
    assert last.decode_tokens_per_second == 0.0, "one token: no time has passed"


@pytest.mark.parametrize("policy", [None, "full", "window:budget=6", "quant:fmt=int8"])
def test_bytes_of_a_sequence(engine: Engine, monkeypatch: pytest.MonkeyPatch, policy: str | None) -> None:
    """At every moment those that the cache has of it; at its end those of the moment before it left."""
    play(monkeypatch, [[9] * 4 + [STOP], [9] * 2 + [STOP]])
    stream = stream_of(engine, tracks([[9] * 5, [8]]), 2, policy=parse(policy) if policy else None)
    full = engine.config.kv_bytes_per_token(engine.dtype.itemsize)
    last: dict[int, tuple[int, dict[str, int], int]] = {}

    def look(now: Sequence[Track]) -> None:
        for s in now:
            account = stream.cache.account(s.number)
            last[s.number] = account.held, account.as_dict(), stream.cache.held(s.number)

    stream.on_step = look
    for _ in stream.advances():
        for s, r in zip(stream.sequences, stream.results, strict=True):
            if s.began:
                total, kinds, held = last[s.number]
                assert (r.kv_bytes, r.kv_tokens) == (total, held)
                assert r.kv_ledger == {kind: size for kind, size in kinds.items() if kind != "reserve"}
                assert r.kv_full_bytes == (r.prompt_tokens + r.generated_tokens - 1) * full
                assert r.finish_reason == (s.finish_reason or "interrupted")
            else:
                assert (r.kv_bytes, r.kv_tokens, r.kv_full_bytes, r.prefill_seconds) == (0, 0, 0, 0.0)
    assert [r.kv_tokens for r in stream.results] == ([6, 3] if policy == "window:budget=6" else [9, 3])
    assert (stream.results[0].kv_bits is None) == (policy is None)


def test_what_is_told_of_a_sequence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments by type, bits and notes: of those that run as they are now, of those that ended as they were."""
    play(monkeypatch, [[9] * 9, [9] * 3 + [STOP], [9] * 9])

    def told(cache: KVManager, seq: int) -> Told:
        n = cache.length(seq)
        return Told(("R", "E", *["T"] * n), 3.5 + n, f"{n} of {seq}")

    monkeypatch.setattr(KVManager, "told", told)
    stream = stream_of(engine, tracks([[9] * 4, [8], [7]], 20), 2, policy=parse("full"))
    for advanced in stream.advances():
        if len(advanced[0].tokens) == 7:
            break
    got = [(r.finish_reason, r.kv_thoughts, r.kv_bits, r.kv_notes) for r in stream.results[:2]]
    assert got == [
        ("interrupted", {"R": 1, "E": 1, "T": 10}, 13.5, "10 of 0"),
        ("stop", {"R": 1, "E": 1, "T": 4}, 7.5, "4 of 1"),
    ]
    waits = tracks([[9]])
    assert stream_of(engine, waits, 1, policy=parse("full")).result.kv_thoughts == {}


# -- left, or stopped by what fails


def test_left_in_the_middle(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that ended everything is there, of those that run what they have, of those that wait nothing."""
    play(monkeypatch, [[9, STOP], [9] * 9, [9] * 9])
    stream = stream_of(engine, tracks([[9] * 3, [8] * 2, [7] * 5]), 1)
    chunks = iter(stream)
    for _ in range(4):
        next(chunks)
    reasons = [r.finish_reason for r in stream.results]
    assert reasons == ["stop", "interrupted", "interrupted"]
    assert [r.generated_tokens for r in stream.results] == [2, 2, 0]
    assert stream.result == stream.results[0]
    ended, running, waits = stream.results
    full = engine.config.kv_bytes_per_token(4)
    assert [r.kv_full_bytes for r in (ended, running, waits)] == [4 * full, 3 * full, 0]
    assert ended.prefill_seconds > 0 < running.prefill_seconds
    assert (waits.prefill_seconds, waits.decode_seconds, waits.text, waits.kv_bits) == (0.0, 0.0, "", None)
    assert waits.prefill_tokens_per_second == waits.decode_tokens_per_second == 0.0
    assert next(chunks).prompt == 1, "it can go on"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("CUDA out of memory. Tried to"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_memory_that_runs_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException, is_one: bool
) -> None:
    """One sentence with who ran and how long they were; other errors stay what they are."""
    assert is_out_of_memory(error) == is_one
    play(monkeypatch, [[STOP], *[[9] * 9] * 3])
    stream = stream_of(engine, tracks([[9] * 3, [8] * 2, [7], [6]]), 2)
    steps = stream.advances()
    for _ in range(4):  # the first one ends, two others run, the last one waits
        next(steps)

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(FullCache, "attend", fail)
    message = r"Out of memory with 2 sequences of up to 4 tokens at once: use a smaller --batch-size, fewer"
    with pytest.raises(MinithinkError if is_one else RuntimeError, match=message if is_one else "shape mismatch"):
        next(steps)
    assert [r.generated_tokens for r in stream.results] == [1, 2, 2, 0]


def test_memory_that_runs_out_while_a_prompt_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence has joined, and has no token."""

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(FullCache, "attend", fail)
    stream = stream_of(engine, tracks([[9] * 3, [8]]), 2)
    with pytest.raises(MinithinkError, match="Out of memory with 1 sequence of up to 3 tokens at once"):
        run(stream)
    result = stream.result
    assert (result.prefill_seconds, result.decode_seconds, result.kv_full_bytes) == (0.0, 0.0, 0)
    assert (result.finish_reason, result.token_ids) == ("interrupted", [])


# -- by the loop of graphs, whose steps are launched here


@pytest.fixture
def launched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of this engine step by the loop."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(engine.loaded, "columns", "fit")


def told_of(results: Sequence[Result]) -> list[tuple[Any, ...]]:
    return [(r.token_ids, r.finish_reason, r.kv_tokens, r.text, r.thinking_tokens) for r in results]


@pytest.mark.parametrize("policy", ["full", "window:budget=9", "quant:fmt=int8"])
@pytest.mark.parametrize("draw", [SamplingParams(temperature=0.0), SamplingParams(0.8, 20, 0.95, 0.0, 4)])
def test_by_the_loop(engine: Engine, request: pytest.FixtureRequest, policy: str, draw: SamplingParams) -> None:
    """The same tokens, sizes and ends as without it, in the same order; the loop's rows are the batch's."""
    prompts = [[9, 8, 7] * 3, [5] * 2, [11] * 6, [3], [4, 2]]

    def made(**options: Any) -> Stream:
        sequences = tracks(prompts, 14)
        sequences[1].limit = 3
        sequences[3].limit, sequences[3].limit_reason = 1, "context"
        return stream_of(engine, sequences, 2, params=draw, policy=parse(policy), stop=["z"], **options)

    want = made()
    order = run(want)
    assert want._loop is not None
    assert not want._loop.captures
    assert not want.sampler._noise, "of nobody who has ended"
    request.getfixturevalue("launched")
    for fixed, ahead in ((False, False), (True, False), (True, True)):
        got = made(fixed=fixed)
        got.ahead = ahead
        assert got._loop is not None
        assert run(got) == order
        assert told_of(got.results) == told_of(want.results)
        assert {size for size, *_ in got._loop.steps} == ({2} if fixed else {1, 2})
        assert got.cache.reserved_bytes() > 0
        assert not got.cache.sequences.row_of  # type: ignore[union-attr]


class Leaving(Policy):
    """A policy of a user, whose code ends the program."""

    def leave(self) -> None:
        sys.exit(0)


def without_room() -> None:
    raise MinithinkError("no room")


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("failure", "said"), [(without_room, "no room"), (Leaving().leave, "Leaving fails in `leave` .*SystemExit")]
)
def test_tokens_are_given_out_before_the_next_step_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, failure: Callable[[], None], said: str
) -> None:
    """A step that is launched ahead, and cannot be, takes nothing away from those who wait for the last one."""
    launch, calls = loop_module.DecodeLoop.launch, list[int]()

    def fail(self: loop_module.DecodeLoop, seqs: Sequence[int], *others: Any) -> None:
        calls.append(len(seqs))
        if len(calls) >= 4:
            failure()
        launch(self, seqs, *others)

    monkeypatch.setattr(loop_module.DecodeLoop, "launch", fail)
    stream = stream_of(engine, tracks([[9, 8], [5]], 14), 2, policy=parse("full"), fixed=True)
    stream.ahead = True
    steps = stream.advances()
    for _ in range(5):  # two prompts, and three steps
        next(steps)
    assert [len(s.tokens) for s in stream.sequences] == [4, 4]
    with pytest.raises(MinithinkError, match=said):
        next(steps)
    assert calls == [2] * 5


@pytest.mark.usefixtures("launched")
def test_who_counts_bytes_need_not_ask(engine: Engine) -> None:
    stream = stream_of(engine, tracks([[9, 8], [5]], 6), 2, policy=parse("full"), fixed=True)
    stream.accounts = False
    run(stream)
    assert [(len(r.token_ids), r.kv_bytes, r.kv_tokens) for r in stream.results] == [(6, 0, 0)] * 2


@pytest.mark.usefixtures("launched")
def test_the_loop_draws_by_sequence_and_position(engine: Engine) -> None:
    """As the sampler does, whatever row they are in: the third sequence has a row that another one had."""
    draw = SamplingParams(1.3, 0, 1.0, 0.0, 7)
    stream = stream_of(engine, tracks([[9, 8], [5] * 4, [3]], 6), 2, params=draw, policy=parse("full"))
    stream.sequences[0].limit = 2
    run(stream)
    for s in stream.sequences:
        hidden = torch.tensor(s.prompt + s.tokens[:-1])
        cache = stream.cache_of(None, 1)
        cache.join(0, 99, len(hidden))
        cache.begin_step([0], [len(hidden)])
        logits = engine.decoder.logits(engine.decoder(hidden, cache))[len(s.prompt) - 1 :]
        cache.end_step()
        sampler = Sampler(draw, engine.config.vocab_size)
        want = [int(sampler.sample(row[None], [s.number], [len(s.prompt) + i])[0]) for i, row in enumerate(logits)]
        assert s.tokens == want
