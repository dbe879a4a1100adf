"""The plain manager is the oracle: under every policy, the paged manager keeps, stores and computes what it does.

To run it alone: pytest tests/kv/test_plain.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import minithink.kv.manager as manager_module
from minithink.backend import REFERENCE, Backend, triton_backend
from minithink.kv.contract import (
    Demand,
    Edit,
    Evict,
    OpenSegment,
    Policy,
    Requantize,
    Scope,
    See,
    SetBudget,
    Step,
    Storage,
)
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.kv.schedule import Schedule
from minithink.kv.stack import Stack, members
from minithink.model import Decoder, Rope
from minithink.policies import parse
from tests.compare import assert_close, assert_same
from tests.conftest import PROFILE
from tests.kv.poison import poison
from tests.kv.run import Cut, feed, informed, text_of
from tests.kv.test_batches import ONE_BY_ONE, assert_width, coming, feed_batch, with_backend
from tests.kv.test_decisions import TEXTS as CAPTURED
from tests.kv.test_decisions import Apart
from tests.policies.test_laws import CLOSE, OPEN, decoder_of
from tests.policies.test_laws import TEXTS as SMALL
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)

# Every policy and every stack, and values that lag behind keys (`Storage.lag`).
TEXTS = [*SMALL, "kivi:bits=4,group=16,residual=16,flush=official"]
TOKENS = 70
EXAMPLES = 300 if PROFILE == "nightly" else 30
Cache = KVManager | PlainCache
Make = Callable[[], Policy]


def plain(decoder: Decoder, policy: Policy, rows: int = 1) -> PlainCache:
    return PlainCache(
        decoder.config,
        Rope(decoder.config),
        informed(policy, decoder.config),
        rows=rows,
        tokens=TOKENS,
        dtype=decoder.embed.dtype,
        think_ids=(OPEN, CLOSE),
    )


def paged(
    decoder: Decoder, policy: Policy, rows: int = 1, backend: Backend = REFERENCE, columns: Any = None
) -> KVManager:
    return KVManager(
        decoder.config,
        Rope(decoder.config),
        informed(policy, decoder.config),
        rows=rows,
        tokens=TOKENS,
        dtype=decoder.embed.dtype,
        think_ids=(OPEN, CLOSE),
        backend=backend,
        columns=columns,
    )


def lanes_of(cache: Cache, seq: int) -> list[list[tuple[int, int]]]:
    """What each table of a sequence holds, oldest first: position and format of every token."""
    pos = cache.positions(seq).flatten(0, 1).tolist()
    formats = cache.formats(seq).flatten(0, 1).tolist()
    return [[(p, f) for p, f in zip(*lane, strict=True) if p >= 0] for lane in zip(pos, formats, strict=True)]


def budgets_of(cache: Cache, seq: int) -> list[Tensor]:
    """Of every member of the policy: [Lt, Ht]."""
    if isinstance(cache, PlainCache):
        return [budget[:, 0] for budget in cache.sequences[seq].budgets.values()]
    return [budget[:, cache.row_of(seq)] for budget in cache.budgets.values()]


def assert_equal_caches(oracle: PlainCache, other: KVManager, seq: int) -> None:
    """Tokens, formats, budgets, bytes, and what people are told."""
    assert lanes_of(other, seq) == lanes_of(oracle, seq)
    lanes = oracle.sequences[seq].lanes
    empty = (lanes.positions() < 0).expand(*lanes.k.shape[:2], lanes.width)
    assert not lanes.k[:, :, : lanes.width][empty].any()
    assert not lanes.v[:, :, : lanes.width][empty].any()
    for got, want in zip(budgets_of(other, seq), budgets_of(oracle, seq), strict=True):
        assert_same("budget", got, want)
    got_bytes = other.account(seq)
    want_bytes = oracle.account(seq)
    for kind in ("payload", "scales", "buffers") if oracle.held(seq) else ():  # a full list of no token costs nothing
        assert getattr(got_bytes, kind) == getattr(want_bytes, kind), kind
    for what in ("length", "held", "counts"):
        assert getattr(other, what)(seq) == getattr(oracle, what)(seq), what
    assert_same_thoughts(oracle, other, seq)


def assert_same_thoughts(oracle: PlainCache, other: KVManager, seq: int) -> None:
    """And all that `told` says. Where decisions are captured, the host learns of a segment with its first token."""
    got = other.told(seq)
    want = oracle.told(seq)
    if other.captures_decisions and len(got.thoughts) < len(want.thoughts):
        coming_type = oracle.storage.names[coming(other)[other.row_of(seq)]]
        got = replace(got, thoughts=(*got.thoughts, coming_type))
    else:
        assert other.thought(seq) == oracle.thought(seq)
    assert got == want


def both_alone(decoder: Decoder, make: Make, prompt: int, chunk: int, steps: int, text: Sequence[int]) -> None:
    """One sequence in each of two caches: bit for bit the same, after every step."""
    caches = (plain(decoder, make()), paged(decoder, make()))
    for cache in caches:
        cache.join(0, TOKENS, prompt)
    counts = [min(chunk, prompt - start) for start in range(0, prompt, chunk)] + [1] * steps
    start = 0
    for count in counts:
        tokens = {0: text[start : start + count]}
        start += count
        want, got = (feed(decoder, cache, tokens)[0] for cache in caches)
        assert_same(f"logits at {start}", got, want)
        assert_equal_caches(*caches, seq=0)


@pytest.mark.parametrize("text", TEXTS)
def test_a_sequence_alone_is_equal_bit_for_bit(text: str) -> None:
    """Every policy and every stack, through prompt, think stage and answer."""
    seed = TEXTS.index(text) % 2
    decoder = decoder_of(seed)
    words = text_of(decoder.config, TOKENS, seed)
    words[45] = CLOSE
    both_alone(decoder, lambda: parse(text), prompt=13, chunk=6, steps=48, text=words)


@given(
    text=st.sampled_from(TEXTS),
    seed=st.integers(0, 2**20),
    prompt=st.integers(1, 24),
    chunk=st.integers(1, 24),
    close=st.integers(25, 40),
)
@settings(max_examples=EXAMPLES)
def test_any_text_and_any_prompt(text: str, seed: int, prompt: int, chunk: int, close: int) -> None:
    decoder = decoder_of(seed % 2)
    words = text_of(decoder.config, TOKENS, seed)
    words[close] = CLOSE
    policy = parse(text)
    if policy.protect_prompt and policy.budget is not None and policy.cap is None:
        keeps = [Schedule.parse(member.schedule).keep for member in members(policy)]
        least = min([policy.budget, *(keep for keep in keeps if keep is not None)])
        prompt = min(prompt, least - policy.beside)
    both_alone(decoder, lambda: parse(text), prompt=max(1, prompt), chunk=chunk, steps=30, text=words)


KEYS_BY_TOKEN = "int4:group=16,by=token/int4:group=16"
STORAGES = {
    "plain": Storage(),
    "two types": Storage(thoughts=("fp8", "nvfp4"), also=("int8",), names=("slow", "fast"), prompt=1),
    "a buffer": Storage(thoughts=("int8", "int4", "fp8"), also=("plain",), buffer=4, tail="keep", sink=2),
    "a buffer of one": Storage(thoughts=("int8", "fp8"), buffer=1, block=4),
    "a buffer that is never full": Storage(thoughts=("fp8",), buffer=100, tail="keep"),
    "a whole prompt": Storage(thoughts=("nvfp4",), also=("int8",), buffer=5),
    "rotated": Storage(thoughts=("tq4", "tq2/tq3"), also=("tq1", "int8"), buffer=3, block=4, prompt=1),
    "plain, with a buffer": Storage(thoughts=("plain", "fp16"), buffer=3, tail="keep", sink=1),
    "keys by token": Storage(thoughts=(KEYS_BY_TOKEN,), also=("int8", "plain"), buffer=7, block=4),
    "keys by token of two types": Storage(
        thoughts=(KEYS_BY_TOKEN, "ternary:group=16,by=token/fp8"),
        also=("int8",),
        prompt=1,
        buffer=6,
        tail="keep",
        sink=3,
    ),
    "integers that shrink": Storage(
        thoughts=("int16", "int8:params=fp32", "int4:params=fp32"),
        also=("int2:params=fp32",),
        buffer=4,
        tail="keep",
        sink=1,
        shrink=True,
    ),
}


class AnyEdits(Policy):
    """Draws its edits: of all layers or of one, of every kind, of tokens that are there or not."""

    name = "any_edits"

    def __init__(self, seed: int, scope: Scope, storage: Storage) -> None:
        self.scope = scope
        self.storage = storage
        self.protect_prompt = seed % 2 == 0
        self.random = torch.Generator().manual_seed(seed)

    def some(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random)

    def decide(self, step: Step) -> Iterable[Edit]:
        pos = step.pos()
        layer = int(self.some(1) * len(pos))
        if self.some(1) < 0.5:
            yield Evict(self.some(*pos.shape) < self.some(1) ** 4)
        if self.some(1) < 0.5:
            yield Evict(self.some(*pos.shape[1:]) < 0.2, layer)
        for fmt in self.storage.formats[1:]:
            if self.some(1) < 0.2:
                yield Requantize(self.some(*pos.shape) < 0.3, fmt)
            if self.some(1) < 0.1 and len(pos) > 1:
                yield Requantize(self.some(*pos.shape[1:]) < 0.3, fmt, layer)
        if self.storage.shrink and self.some(1) < 0.3:
            yield Requantize(self.some(*pos.shape) < 0.3, self.storage.formats[-1], how="shrink")
        if len(self.storage.thoughts) > 1 and self.some(1) < 0.3:
            yield OpenSegment(self.some(1) < 0.6, (self.some(1) * 2).to(torch.uint8))
        if self.some(1) < 0.3:
            yield SetBudget((self.some(*step.budget.shape[1:]) * 9 + 1).int(), layer)


@pytest.mark.parametrize("storage", STORAGES)
@given(
    seed=st.integers(0, 2**20),
    scope=st.sampled_from(["head", "layer", "sequence"]),
    stacked=st.booleans(),
    prompt=st.integers(0, 17),
)
@settings(max_examples=EXAMPLES // 3)
def test_any_edits(storage: str, seed: int, scope: Scope, stacked: bool, prompt: int) -> None:
    """Edits drawn at random: evictions, formats, segments and budgets, of all layers or of one."""
    decoder = decoder_of(seed % 2)

    def make() -> Policy:
        first = AnyEdits(seed, scope, STORAGES[storage])
        return Stack([first, AnyEdits(seed + 1, "layer", Storage())]) if stacked else first

    both_alone(decoder, make, prompt=prompt, chunk=5, steps=25, text=text_of(decoder.config, TOKENS, seed))


# -- what a policy sees


@dataclass
class Curious(Policy):
    """Looks at all there is to see, every second token, and evicts the oldest tokens."""

    budget: int | None = 11
    scope: Scope = "head"
    name = "curious"
    demands = (
        Demand(See.MASS, group="none", layers=frozenset({1}), every=2),
        Demand(See.MASS, group="max"),
        Demand(See.ROWS, group="max_logit", layers=frozenset({0}), prompt=False),
        Demand(See.ROWS, rows=3, layers=frozenset({1})),
        Demand(See.QUERY, rows=100, layers=frozenset({0})),  # more than a sequence has
        Demand(See.QUERY, rows=5),
        Demand(See.HIDDEN),
        Demand(See.HIDDEN, layers=frozenset({-1})),
    )

    def __post_init__(self) -> None:
        self.saw: list[tuple[str, Tensor]] = []

    def see(self, step: Step) -> None:
        names = ("row", "active", "clock", "prompt", "protects", "tokens", "thinking", "thought", "budget")
        self.saw = [(name, getattr(step, name).clone()) for name in names]
        for layer in (None, 0, 1):
            for name in ("pos", "held", "protected"):
                self.saw.append((f"{name} of {layer}", getattr(step, name)(layer).clone()))
            self.saw.append((f"format of {layer}", step.format(layer) * (step.pos(layer) >= 0)))
        for layer in (0, 1):
            for name in ("keys", "values", "queries", "hidden", "rows", "mass"):
                self.saw.append((f"{name} of {layer}", getattr(step, name)(layer).clone()))
        self.saw.append(("hidden of -1", step.hidden(-1)))
        for part in step.segments(4, 6):
            self.saw.append(("segments", part))

    def decide(self, step: Step) -> list[Edit]:
        self.see(step)
        return list(Cut(self.budget).decide(step))


@pytest.mark.parametrize("scope", ["head", "layer", "sequence"])
@pytest.mark.parametrize("prompt", [0, 1, 9])
def test_a_policy_sees_the_same(scope: Scope, prompt: int) -> None:
    decoder = decoder_of(0)
    policies = [Curious(scope=scope), Curious(scope=scope)]
    caches = [plain(decoder, policies[0]), paged(decoder, policies[1])]
    for cache in caches:
        cache.join(0, TOKENS, prompt, thinking=prompt != 9)
    words = text_of(decoder.config, TOKENS, prompt)
    words[20] = OPEN
    words[30] = CLOSE
    start = 0
    for count in (*[n for n in (prompt // 2, prompt - prompt // 2) if n], *[1] * 30):
        for cache in caches:
            feed(decoder, cache, {0: words[start : start + count]})
        start += count
        for (name, want), (_, got) in zip(policies[0].saw, policies[1].saw, strict=True):
            assert_same(f"{name} at {start}", got, want)
    assert len(policies[0].saw) > 30


def in_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` that takes the memory of the residual stream, as the kernels' does for many rows."""
    if bias is None or bias.dim() == 1:
        return REFERENCE.linear(x, weight, bias)
    return bias.addmm_(x, weight)


@pytest.mark.parametrize("make", [plain, paged])
def test_hidden_states_stay_as_they_were_when_the_residual_stream_goes_on(make: Callable[..., Cache]) -> None:
    seen = list[Tensor]()
    decoder = decoder_of(0)
    for backend in (REFERENCE, replace(REFERENCE, linear=in_place)):
        policy = Curious()
        cache = make(decoder, policy)
        cache.join(0, TOKENS, 9)
        feed(with_backend(decoder, backend), cache, {0: text_of(decoder.config, 9, 9)})
        seen.append(dict(policy.saw)["hidden of 0"])
    assert_close("hidden of 0", seen[1], seen[0], atol=1e-6)


@dataclass
class Scribbling(Policy):
    """Evicts the oldest tokens, and works in place on what it is shown: `word` says on what."""

    budget: int | None = 11
    word: str = ""
    name = "scribbling"
    demands = (Demand(See.MASS), Demand(See.ROWS, rows=3), Demand(See.QUERY, rows=5))

    def decide(self, step: Step) -> list[Edit]:
        edits = list(Cut(self.budget).decide(step))
        for layer in range(step.shape.layers):
            if self.word:
                shown = getattr(step, self.word)(layer)
                shown.copy_(shown + 1)
        return edits


@pytest.mark.parametrize("word", ["pos", "held", "format", "keys", "values", "queries", "mass", "rows"])
def test_a_policy_may_work_in_place_on_what_it_is_shown(word: str) -> None:
    decoder = decoder_of(0)
    policies = [Scribbling(), Scribbling(word=word)]
    caches = [plain(decoder, policy) for policy in policies]
    for cache in caches:
        cache.join(0, TOKENS, 9)
    words = text_of(decoder.config, TOKENS, 9)
    start = 0
    for count in (9, *[1] * 12):
        want, got = (feed(decoder, cache, {0: words[start : start + count]})[0] for cache in caches)
        start += count
        assert_same(f"logits at {start}", got, want)
        assert lanes_of(caches[1], 0) == lanes_of(caches[0], 0)
    seen = [cache.sequences[0].seen.queries for cache in caches]
    for layer in range(decoder.config.num_layers):
        assert_same(f"queries of layer {layer}", seen[1][layer], seen[0][layer])


# -- many sequences


ROWS = 4  # one more than there are sequences


class Lives:
    """Several sequences come, pause and leave, in a plain cache and in a paged one.

    The paged one lives as where CUDA graphs are captured: its decisions are made from tensors alone. A step begins
    either by `begin_step`, or by `begin`, beside idle rows and in another order.
    """

    def __init__(self, decoder: Decoder, make: Make, backend: Backend, seed: int) -> None:
        self.decoder = with_backend(decoder, ONE_BY_ONE)
        self.oracle = plain(decoder, make(), ROWS)
        self.other = paged(decoder, make(), ROWS, backend, columns="fit")
        self.other.captured = True
        if backend is REFERENCE:
            poison(self.other.store)
        self.apart = Apart(self.other, seed, asks_all=backend is REFERENCE)
        self.caches: tuple[Cache, Cache] = (self.oracle, self.other)
        # Where numbers are rounded to few bits, the last bit of a sum may tip a code, and logits differ visibly.
        self.exact = self.oracle.storage.formats == ("plain",)
        self.lengths: dict[int, int] = {}
        self.texts: dict[int, list[int]] = {}

    def join(self, seq: int, prompt: int, thinking: bool = True) -> None:
        self.texts[seq] = text_of(self.decoder.config, TOKENS, seq)
        self.lengths[seq] = 0
        for cache in self.caches:
            cache.join(seq, TOKENS, prompt, thinking)

    def leave(self, seq: int) -> None:
        del self.lengths[seq]
        for cache in self.caches:
            cache.leave(seq)

    def feed(self, counts: Mapping[int, int], by_parts: bool = False) -> None:
        """The next tokens of these sequences, in one step."""
        tokens = {seq: self.texts[seq][self.lengths[seq] : self.lengths[seq] + n] for seq, n in counts.items()}
        wanted = feed(self.decoder, self.oracle, tokens)
        got = self.feed_parts(tokens) if by_parts else feed(self.decoder, self.other, tokens)
        for seq, n in counts.items():
            self.lengths[seq] += n
            if self.exact:
                assert_close(f"logits of {seq}", got[seq], wanted[seq], atol=2e-4, rtol=2e-4)
        for seq in self.lengths:
            assert_equal_caches(self.oracle, self.other, seq)
        assert_width(self.other)

    def feed_parts(self, tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """A step by its parts: idle rows take part in it, and rows that are due decide as a batch of their own."""
        fed = {seq: chunk[0] for seq, chunk in tokens.items()}
        taken = {self.other.row_of(seq) for seq in fed}
        others = [row for row in range(ROWS) if row not in taken]
        idle = others[: self.apart.some(len(others) + 1)]
        turn = self.apart.some(ROWS)
        if self.other.captures_decisions:
            logits = self.apart.feed(self.decoder, fed, idle, turn)
        else:
            logits = feed_batch(self.decoder, self.other, fed, idle, turn)
        return {seq: x[None] for seq, x in logits.items()}


def live(decoder: Decoder, make: Make, backend: Backend, steps: int, seed: int) -> Lives:
    """Three sequences read their prompts together. Later one leaves, and another one reads its prompt beside them."""
    lives = Lives(decoder, make, backend, seed)
    prompts = {0: 13, 1: 5, 2: 9}
    late = 7
    for seq, n in prompts.items():
        lives.join(seq, n, thinking=seq != 2)
    lives.texts[0][13 + steps // 2] = CLOSE
    lives.texts[0][13 + steps * 3 // 4] = OPEN
    lives.feed({seq: n // 2 for seq, n in prompts.items()})
    lives.feed({seq: n - n // 2 for seq, n in reversed(prompts.items())})
    running = list(prompts)
    reads = 0
    for i in range(steps):
        if i == steps // 3:
            running.remove(1)
            lives.leave(1)
            reads = min(6, steps // 3)
            lives.join(late, reads)
        if reads:
            lives.feed({late: 1})
            reads -= 1
            if not reads:
                running.append(late)
        order = torch.randperm(len(running), generator=lives.apart.draw).tolist()
        some = len(order) if i % 3 else 1 + lives.apart.some(len(order))
        lives.feed({running[k]: 1 for k in order[:some]}, by_parts=i % 4 > 0)
    for seq in running:
        lives.leave(seq)
    assert lives.other.store.slots.table.free_pages.free == lives.other.store.slots.table.free_pages.count
    return lives


@pytest.mark.parametrize("text", [*TEXTS, *(text for text in CAPTURED if text not in TEXTS)])
def test_sequences_that_come_pause_and_leave(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, with rows that several sequences use one after the other, and with widths that follow the lanes."""
    monkeypatch.setattr(manager_module, "NARROWEST", 4)
    seed = [*TEXTS, *CAPTURED].index(text)
    lives = live(decoder_of(seed % 2), lambda: parse(text), REFERENCE, steps=40, seed=seed)
    if text in CAPTURED:
        assert lives.apart.decided


KERNELS = (
    "rkv:budget=12,buffer=2,alpha=3,kernel_size=3,compaction=gather",
    "rkv:budget=12,buffer=2,alpha=3,kernel_size=3,compaction=overlapped",
    "thinkv:budget=19,tau=4,g=4,retention=2/1,block=2,layers=0,thresholds=0.3/0.6",
    "window:budget=16+quant:fmt=int4,by=token",
    "triattention:budget=12,buffer=2,protect_prompt=false",
    "triattention:budget=14,buffer=2,share=all,protect_prompt=false+quant:fmt=int8,buffer=4",
    "triattention:budget=14,buffer=2,protect_prompt=false+quant:fmt=tq4,v_fmt=tq3",
)


@pytest.mark.parametrize("text", KERNELS)
def test_the_kernels_give_the_same(text: str) -> None:
    """The paged manager with all of its kernels, in the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the decoder of this test is on the CPU; tests/kv/test_decisions.py compares on a GPU")
    config = example_config(
        hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=23
    )
    lives = live(random_decoder(config, 3), lambda: parse(text), triton_backend(), steps=8, seed=3)
    assert lives.apart.decided


def test_it_runs_outside_of_inference_mode() -> None:
    """Where only gradients are off, as in the tutorials."""
    text = "thinkv:budget=34,tau=8,retention=4/2,g=4,block=2,layers=0/1,thresholds=0.21/0.31"
    decoder = decoder_of(0)
    caches = plain(decoder, parse(text)), plain(decoder, parse(text))
    words = text_of(decoder.config, TOKENS, 0)
    for cache in caches:
        cache.join(0, TOKENS, 20)
    start = 0
    for count in (11, 9, *[1] * 30):
        tokens = words[start : start + count]
        start += count
        want = feed(decoder, caches[0], {0: tokens})[0]
        with torch.no_grad():
            caches[1].begin_step([0], [count], tokens)
            got = decoder.logits(decoder(torch.tensor(tokens), caches[1]))
            caches[1].end_step()
        assert_same(f"logits at {start}", got, want)
        assert lanes_of(caches[1], 0) == lanes_of(caches[0], 0)


# -- what is refused


def test_wrong_calls_are_refused() -> None:
    decoder = decoder_of(0)
    cache = plain(decoder, parse("window:budget=12"), rows=1)
    cache.join(0, 10, 4)
    with pytest.raises(ValueError, match="sequence 0 is in the cache already"):
        cache.join(0, 10)
    with pytest.raises(ValueError, match="all 1 rows are taken; sequence 1 must wait"):
        cache.join(1, 10)
    with pytest.raises(ValueError, match="announced a prompt of 4 tokens and brings more"):
        cache.begin_step([0], [5])
    with pytest.raises(ValueError, match="a step needs sequences, each once"):
        cache.begin_step([0, 0], [1, 1])
    feed(decoder, cache, {0: [1, 2, 3, 4]})
    with pytest.raises(ValueError, match="it brings one token a step, not 2"):
        cache.begin_step([0], [2])
    for token in range(6):
        feed(decoder, cache, {0: [token]})
    with pytest.raises(ValueError, match="sequence 0 has 10 tokens of 10: 1 do not fit"):
        cache.begin_step([0], [1])
    cache.leave(0)
    cache.join(1, 10)
    assert cache.held(1) == 0
