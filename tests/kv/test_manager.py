"""KVManager: a full cache is a forward pass over the whole text; evicted, observed, steered and pulled tokens are
what a computation over the whole history says they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import minithink.kv.observe as observe_module
from minithink.backend import choose
from minithink.config import ModelConfig
from minithink.errors import UsageError
from minithink.kv.contract import (
    SCOPES,
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
from minithink.kv.sizes import Needs, check_budget, needs
from minithink.kv.stack import Stack
from minithink.kv.table import Exhausted
from minithink.kv.view import View
from minithink.model import Rope
from minithink.policies import parse
from minithink.ref.rope import rope
from tests.compare import assert_close, assert_same
from tests.drive import full_cache, prompt_logits, step
from tests.kernels.device import DEVICE
from tests.kv.run import Cut, Full, Spy, feed, kept, manager_for, masked_logits, observed, text_of
from tests.kv.test_plain import paged, plain
from tests.policies.test_laws import decoder_of
from tests.strategies import MAX_POSITION, ROPES, configs, example_config, random_decoder

torch.set_num_threads(1)

# What changes no number, for the model computes in float32.
EXACT = (
    Storage(),
    Storage(block=1),
    Storage(thoughts=("fp32",), block=2),
    Storage(thoughts=("fp32",), buffer=4, block=4),
    Storage(thoughts=("fp32",), buffer=4, block=4, tail="keep", sink=2),
)


def assert_equal_logits(name: str, got: Tensor, want: Tensor, exact: Tensor | None = None) -> None:
    """Within 1e-5 of the largest logit: all are products of one residual stream, and share its rounding.

    exact: the same in float64, but for RoPE's angles. Some random models magnify rounding: then `got` may be four
    times as far from it as `want`, in float32, is.
    """
    atol = 1e-5 * max(1.0, float(want.abs().max()))
    if exact is None:
        assert_close(name, got, want, atol=atol)
    else:
        assert_close(name, got, exact, atol=max(atol, 4 * float((want - exact).abs().max())))


# -- law 3: a full cache


@given(
    config=configs(),
    scope=st.sampled_from(SCOPES),
    storage=st.sampled_from(EXACT),
    data=st.data(),
    seed=st.integers(0, 999),
)
def test_a_full_cache_is_a_forward_pass_over_the_text(
    config: ModelConfig, scope: Scope, storage: Storage, data: st.DataObject, seed: int
) -> None:
    """Prompts in chunks, texts of any lengths, sequences that join and leave, steps of some of them in any order."""
    decoder = random_decoder(config, seed)
    manager = manager_for(decoder, Full(scope, storage))
    texts: dict[int, list[int]] = {}  # of the running sequences
    every: list[list[int]] = []  # of all that ever were
    prompts: list[int] = []
    logits: dict[int, list[Tensor]] = defaultdict(list)
    for _ in range(data.draw(st.integers(2, 14))):
        if not texts or (len(texts) < 3 and data.draw(st.booleans())):
            seq, n = len(every), data.draw(st.integers(1, 30))
            every.append(text_of(config, n, seed + seq))
            prompts.append(data.draw(st.integers(1, n)))
            texts[seq] = every[seq]
            manager.join(seq, n, prompts[seq])
        reading = [s for s in texts if manager.length(s) < prompts[s]]
        going = [s for s in texts if prompts[s] <= manager.length(s)]
        group = reading if reading and (not going or data.draw(st.booleans())) else going
        chunks = {}
        for s in data.draw(st.permutations(group))[: data.draw(st.integers(1, 3))]:
            start = manager.length(s)
            count = data.draw(st.integers(1, prompts[s] - start)) if start < prompts[s] else 1
            chunks[s] = texts[s][start : start + count]
        for s, rows in feed(decoder, manager, chunks).items():
            logits[s].append(rows)
        for s in list(texts):
            if manager.length(s) == len(texts[s]) or data.draw(st.integers(0, 9)) == 9:
                manager.leave(s)
                del texts[s]
    double = deepcopy(decoder).double()
    for s, parts in logits.items():
        got = torch.cat(parts)
        want, exact = (prompt_logits(d, every[s])[: len(got)] for d in (decoder, double))
        assert_equal_logits(f"sequence {s}", got, want, exact)
    for s in list(texts):
        assert manager.held(s) == manager.length(s)
        manager.leave(s)
    assert manager.store.slots.table.free_pages.free == manager.store.slots.table.free_pages.count
    assert not observed(manager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_full_cache_in_half_precision(scope: Scope, dtype: torch.dtype) -> None:
    """Every stored number is the rounded one: as far from float32 as FullCache in the same dtype."""
    config = example_config(num_layers=3)
    text, exact = text_of(config, 40, 1), random_decoder(config)
    want = prompt_logits(exact, text)
    decoder = random_decoder(config).to(dtype)
    cache, manager = full_cache(decoder), manager_for(decoder, Full(scope))
    cache.join(0, 40)
    manager.join(0, 40, 11)
    chunks = [text[:4], text[4:11], *([t] for t in text[11:])]
    got = torch.cat([feed(decoder, manager, {0: chunk})[0] for chunk in chunks])
    full = torch.cat([step(decoder, cache, [0], [chunk])[0] for chunk in chunks])
    assert got.dtype == dtype
    error = (full - want).abs().max()
    assert error > 0
    assert_close("logits", got, full, atol=2 * float(error))


# -- evictions


def visible_of(held: list[set[int]], prompt: int) -> Tensor:
    """The prompt sees itself; afterwards token i sees what was held before it, and itself: bool [n, n]."""
    n = prompt + len(held)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    for i, tokens in enumerate(held, start=prompt):
        visible[i] = torch.tensor([j in tokens or j == i for j in range(n)])
    return visible


def window(prompt: int, n: int, schedule: str, budget: int, slack: int, protect: bool) -> list[set[int]]:
    """What the window holds before each of the tokens prompt … n − 1, and after the last."""
    first = set(range(prompt)) if protect else set()
    held, out = set(range(prompt)), []
    for clock in range(n - prompt + 1):
        if clock:
            held = held | {prompt + clock - 1}
        name, _, rest = schedule.partition(":")
        over, keep = len(held) >= budget + max(1, slack), budget
        if name == "interval":
            over = clock % int(rest) == 0 and len(held) > budget
        elif name == "sawtooth":
            grow, keep = map(int, rest.split("/"))
            over = len(held) >= grow
        if over:
            rest_of = sorted(held - first)
            room = max(0, keep - len(first))
            held = first | set(rest_of[len(rest_of) - min(room, len(rest_of)) :])
        out.append(held)
    return out


@given(
    config=configs(),
    scope=st.sampled_from(SCOPES),
    storage=st.sampled_from(EXACT),
    prompt=st.integers(1, 20),
    more=st.integers(1, 20),
    budget=st.integers(1, 12),
    slack=st.integers(0, 4),
    protect=st.booleans(),
    kind=st.sampled_from(["every", "interval", "sawtooth"]),
    seed=st.integers(0, 99),
)
def test_evicted_tokens_are_gone_and_no_others(
    config: ModelConfig,
    scope: Scope,
    storage: Storage,
    prompt: int,
    more: int,
    budget: int,
    slack: int,
    protect: bool,
    kind: str,
    seed: int,
) -> None:
    """All three schedules: the positions kept, and the logits of a forward pass that sees only these."""
    decoder, n = random_decoder(config, seed), prompt + more
    if protect:
        budget += prompt
    schedule = {"every": "every", "interval": f"interval:{slack + 2}", "sawtooth": f"sawtooth:{budget + 2}/{budget}"}
    policy = Cut(budget, scope=scope, storage=storage, slack=slack, schedule=schedule[kind], protect_prompt=protect)
    manager, text = manager_for(decoder, policy, rows=2), text_of(config, n, seed)
    held = window(prompt, n, schedule[kind], budget, slack, protect)
    assert policy.limit is not None
    assert max(map(len, held)) <= policy.limit
    manager.join(4, n, prompt)
    other = 1 if protect else 4  # tokens: a protected prompt must fit into what a sawtooth keeps
    manager.join(5, 9, other, budget=5)  # another one, which only reads its prompt, at another time
    logits = []
    for i, chunk in enumerate([text[:prompt], *([t] for t in text[prompt:])]):
        logits.append(feed(decoder, manager, {4: chunk})[4])
        assert all(lane == sorted(held[i]) for lane in kept(manager, 4)), (i, kept(manager, 4), held[i])
        if i < 2 * (other > 1):
            feed(decoder, manager, {5: [i, i]})
    seen = visible_of(held[:-1], prompt)
    want, exact = (masked_logits(d, text, seen) for d in (decoder, deepcopy(decoder).double()))
    assert_equal_logits("logits", torch.cat(logits), want, exact)


def test_a_sequence_may_have_a_budget_of_its_own() -> None:
    config = example_config()
    decoder, text = random_decoder(config), text_of(config, 20, 0)
    manager = manager_for(decoder, Cut(9))
    manager.join(0, 20, 12)
    manager.join(1, 20, 12, budget=3)
    feed(decoder, manager, {0: text[:12], 1: text[:12]})
    feed(decoder, manager, {1: [1], 0: [2]})
    assert (manager.held(0), manager.held(1)) == (9, 3)
    assert (manager.length(0), manager.length(1)) == (13, 13)
    manager.leave(1)
    manager.join(2, 20, 12)  # in the same row: the policy's own again
    feed(decoder, manager, {2: text[:12]})
    assert manager.held(2) == 9


class PerHead(Cut):
    """At the end of the prompt, other budgets for the heads of layer 1."""

    def decide(self, step: Step) -> Iterable[Edit]:
        yield from super().decide(step)
        tokens = step.budget[1].clone()
        tokens[step.active & (step.clock == 0)] = torch.tensor([2, 5], dtype=torch.int32)
        yield SetBudget(tokens, 1)


def test_lanes_may_have_budgets_of_their_own() -> None:
    config = example_config()
    decoder = random_decoder(config)
    manager = manager_for(decoder, PerHead(4))
    manager.join(0, 30, 9)
    manager.join(1, 30, 9)
    feed(decoder, manager, {1: text_of(config, 9, 0)})
    assert [len(lane) for lane in kept(manager, 1)] == [4, 4, 4, 4]  # they hold from now on
    for token in range(3):
        feed(decoder, manager, {1: [token]})
    assert [lane[0] for lane in kept(manager, 1)] == [8, 8, 10, 7]
    assert manager.budgets[id(manager.policy)][:, 0].eq(4).all()


# -- protection, and what is refused


@pytest.mark.parametrize("scope", SCOPES)
def test_an_edit_of_one_layer_leaves_the_others_alone(scope: Scope) -> None:
    """Where layers share a table, it is that table's edit."""

    class InOneLayer(Full):
        def decide(self, step: Step) -> Iterable[Edit]:
            pos = step.pos(1)
            yield Evict((pos >= 0) & (pos < 4), layer=1)
            yield Evict((pos >= 6) & (pos < 8), layer=1)

    config = example_config()
    decoder = random_decoder(config)
    manager = manager_for(decoder, InOneLayer(scope))
    manager.join(0, 20, 9)
    feed(decoder, manager, {0: text_of(config, 9, 0)})
    everything, late = list(range(9)), [4, 5, 8]
    heads = config.num_kv_heads if scope == "head" else 1
    assert kept(manager, 0) == ([late] if scope == "sequence" else [everything] * heads + [late] * heads)


def test_a_protected_prompt_needs_room() -> None:
    config = example_config()
    decoder = random_decoder(config)
    policy = Cut(6, protect_prompt=True)
    manager = manager_for(decoder, policy)
    before = manager.ledger()
    for refused in (6, 7):
        with pytest.raises(UsageError, match=rf"budget of 6 tokens.*prompt of {refused}.*at least {refused + 1}"):
            manager.join(0, 20, refused)
        with pytest.raises(UsageError):
            manager.check(refused)
    assert manager.sequences.rows == [None] * 3
    assert manager.ledger() == before
    manager.join(0, 20, 6, budget=7)
    manager.join(1, 20, 5)
    feed(decoder, manager, {0: [1] * 6, 1: [2] * 5})
    for token in range(4):
        feed(decoder, manager, {0: [token], 1: [token]})
    assert kept(manager, 0) == [[0, 1, 2, 3, 4, 5, 9]] * 4
    assert kept(manager, 1) == [[0, 1, 2, 3, 4, 8]] * 4


class Careless(Cut):
    """Evicts all but the newest token, protected or not, and demands 8 bits for all."""

    def decide(self, step: Step) -> Iterable[Edit]:
        pos = step.pos()
        yield Evict(step.active[:, None, None] & (pos < pos.amax(-1, keepdim=True)))
        yield Requantize(step.active[:, None, None] & (pos >= 0), "int8")


def test_what_is_protected_cannot_be_evicted() -> None:
    """By whatever policy; it may be stored in another format."""
    decoder = random_decoder(example_config(head_dim=16))
    storage = Storage(also=("int8",))
    manager = manager_for(decoder, Careless(None, protect_prompt=True, storage=storage))
    manager.join(0, 20, 5)
    manager.join(1, 20, 3)
    feed(decoder, manager, {0: [1] * 5, 1: [1] * 3})
    for token in range(4):
        feed(decoder, manager, {0: [token]})
    assert kept(manager, 0) == [[0, 1, 2, 3, 4, 8]] * 4
    assert kept(manager, 1) == [[0, 1, 2]] * 4
    assert (manager.store.format()[:, 0][manager.store.lists.positions()[:, 0] >= 0] == 1).all()


@pytest.mark.parametrize("budget", [0, -3, 2**30 + 1])
def test_a_budget_is_positive_and_fits_into_32_bits(budget: int) -> None:
    with pytest.raises(UsageError, match=rf"a budget of {budget} tokens makes no sense: give 1 to"):
        check_budget(Cut(8), 3, budget)
    with pytest.raises(UsageError, match=rf"a budget of {budget} tokens makes no sense: give 1 to"):
        check_budget(Cut(budget), 3)


def test_a_sawtooth_must_leave_room_for_a_protected_prompt() -> None:
    check_budget(Cut(9, schedule="sawtooth:9/4", protect_prompt=True), 3)
    with pytest.raises(UsageError, match="a schedule that keeps 4 tokens cannot hold the protected prompt of 4"):
        check_budget(Cut(9, schedule="sawtooth:9/4", protect_prompt=True), 4)
    for policy in (Cut(None, schedule="sawtooth:9/4"), Stack([Cut(9), Cut(9, schedule="sawtooth:9/4")])):
        policy.protect_prompt = True
        with pytest.raises(UsageError, match="keeps 4 tokens cannot hold the protected prompt of 4"):
            check_budget(policy, 4)


def test_a_stack_protects_the_prompt_for_all_its_members() -> None:
    decoder = random_decoder(example_config())
    manager = manager_for(decoder, Stack([Cut(30, protect_prompt=True), Cut(6)]))
    with pytest.raises(UsageError, match="budget of 6 tokens cannot hold the protected prompt of 7"):
        manager.join(0, 20, 7)
    manager.join(0, 20, 5)


# -- the think stage

OPEN, CLOSE = 7, 8


class Stage(Cut):
    """Remembers the think stage that it sees."""

    def setup(self, shape: Any) -> None:
        self.seen: list[list[bool]] = []

    def decide(self, step: Step) -> Iterable[Edit]:
        self.seen.append((step.thinking & step.active).tolist())
        yield from super().decide(step)


def test_the_think_stage_opens_and_closes() -> None:
    config = example_config()
    decoder = random_decoder(config)
    policy = Stage(4, exempt_answer=True)
    manager = manager_for(decoder, policy, rows=2, think_ids=(OPEN, CLOSE))
    manager.join(0, 30, 3, thinking=True)  # the prompt ends inside
    manager.join(1, 30, 3, thinking=False)
    feed(decoder, manager, {0: [1, OPEN, CLOSE], 1: [1, CLOSE, OPEN]})  # what a prompt says changes nothing
    texts = {0: [1, 1, 1, CLOSE, 1, 1, 1], 1: [1, OPEN, 1, 1, 1, CLOSE, 1]}
    held = []
    for pair in zip(*texts.values(), strict=True):
        feed(decoder, manager, {0: pair[:1], 1: pair[1:]})
        held.append((manager.held(0), manager.held(1)))
    # Sequence 1 counts as thinking before it opens the stage, for it might never do so.
    want = [
        (True, False),
        (True, True),
        (True, True),
        (True, True),
        (False, True),
        (False, True),
        (False, False),
        (False, False),
    ]
    assert policy.seen == [list(x) for x in want]
    # whoever thinks keeps 4, and the answer is appended beside
    assert held == [(4, 4), (4, 4), (4, 4), (5, 4), (6, 4), (7, 5), (8, 6)]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ([1, 1, 1, 1], [False, True, True, True, True]),  # it never thinks
        ([OPEN, 1, CLOSE, 1], [False, True, True, False, False]),  # as a model does that thinks
        ([1, 1, CLOSE, 1], [False, True, True, False, False]),
        ([1, CLOSE, 1, OPEN], [False, True, False, False, True]),
    ],
)
def test_a_text_that_never_opens_the_stage_counts_as_thinking(text: list[int], want: list[bool]) -> None:
    """From its first token on; the end of the prompt says nothing yet. Its budget holds."""
    decoder = random_decoder(example_config())
    policy = Stage(4, exempt_answer=True)
    manager = manager_for(decoder, policy, rows=1, think_ids=(OPEN, CLOSE))
    manager.join(0, 30, 6, thinking=False)
    feed(decoder, manager, {0: [1] * 6})
    assert manager.held(0) == 6
    for token in text:
        feed(decoder, manager, {0: [token]})
        if manager.policy.seen[-1] == [True]:  # type: ignore[attr-defined]
            assert manager.held(0) == 4
    assert policy.seen == [[thinks] for thinks in want]


def test_a_text_that_answers_does_not_think_beside_one_that_never_opens_the_stage() -> None:
    decoder = random_decoder(example_config())
    policy = Stage(4, exempt_answer=True)
    manager = manager_for(decoder, policy, rows=2, think_ids=(OPEN, CLOSE))
    manager.join(0, 30, 3, thinking=True)
    manager.join(1, 30, 3, thinking=False)
    feed(decoder, manager, {0: [1, 1, 1], 1: [1, 1, 1]})
    for token in (CLOSE, 1, 1, 1):
        feed(decoder, manager, {0: [token], 1: [1]})
        assert policy.seen[-1] == [False, True]
    assert (manager.held(0), manager.held(1)) == (7, 4)


def test_without_think_tokens_a_sequence_always_thinks() -> None:
    decoder = random_decoder(example_config())
    policy = Stage(4, exempt_answer=True)
    manager = manager_for(decoder, policy, think_ids=(OPEN, None))
    manager.join(0, 30, 6, thinking=False)
    feed(decoder, manager, {0: [1] * 6})
    feed(decoder, manager, {0: [OPEN]})
    assert policy.seen == [[True, False, False]] * 2
    assert manager.held(0) == 4


# -- observations


class Watch(Cut):
    """Keeps copies of all that it demands, of every sequence and clock, when its own demand is due."""

    what = See(0)
    every = 1

    def setup(self, shape: Any) -> None:
        # (row, clock) → name → layer → what was seen
        self.seen: dict[tuple[int, int], dict[str, dict[int, Tensor]]] = {}

    def decide(self, step: Step) -> Iterable[Edit]:
        for row in range(step.shape.rows):
            clock = int(step.clock[row])
            if not step.active[row] or clock % self.every:
                continue
            here = self.seen[row, clock] = defaultdict(dict)
            for layer in range(step.shape.layers):
                here["pos"][layer] = step.pos(layer)[row].clone().cpu()
                if See.MASS in self.what:
                    here["mass"][layer] = step.mass(layer)[row].clone().cpu()
                if See.ROWS in self.what:
                    here["rows"][layer] = step.rows(layer)[row].clone().cpu()
                if See.QUERY in self.what:
                    here["queries"][layer] = step.queries(layer)[row].clone().cpu()
            for layer in (0, -1) if See.HIDDEN in self.what else ():
                here["hidden"][layer] = step.hidden(layer)[row].clone().cpu()
        yield from super().decide(step)


def watch(what: See, budget: int | None = None, every: int = 1, **fields: Any) -> Watch:
    """The policy, with one demand."""
    rest = {name: fields.pop(name) for name in ("rows", "group", "layers") if name in fields}
    policy = Watch(budget, demands=(Demand(what, every=every, **rest),), **fields)
    policy.what, policy.every = what, every
    return policy


def attention_of(spy: Spy, seq: int, layer: int, query: int, pos: Tensor, group: str) -> Tensor:
    """Probabilities [Hkv or Hq, S] that a query gives to the tokens at pos [Ht, S] (−1: none), reduced by group."""
    config = spy.manager.config
    cos, sin = Rope(config).at(torch.arange(MAX_POSITION))
    q, k = spy.get("q", seq, layer), spy.get("k", seq, layer)
    q, k = (rope(x.float(), cos[: len(x)], sin[: len(x)]).double() for x in (q, k))
    q_i = q[query].view(config.num_kv_heads, -1, config.head_dim)  # [Hkv, g, D]
    pos = pos.expand(config.num_kv_heads, -1)
    out = []
    for head in range(config.num_kv_heads):
        valid = (pos[head] >= 0) & (pos[head] <= query)
        logits = q_i[head] @ k[pos[head].clamp(min=0).long(), head].T / config.head_dim**0.5  # [g, S]
        if group == "max_logit":
            logits = logits.amax(0, keepdim=True)
        p = torch.where(valid, logits, -torch.inf).softmax(-1).nan_to_num(0.0)
        reduced = {"sum": p.sum(0), "mean": p.mean(0), "max": p.amax(0), "max_logit": p[0]}
        out.append(p if group == "none" else reduced[group][None])
    return torch.cat(out)


def run_watched(
    policy: Policy, prompts: dict[int, int], steps: int, backend: str = "reference", **changes: Any
) -> tuple[KVManager, Spy]:
    """Sequences 0, 1, … read their prompts in chunks of 3, and whoever has done so generates in between."""
    config = example_config(num_heads=6, **changes)
    decoder = random_decoder(config, 3).to(DEVICE if backend == "triton" else "cpu")
    manager = manager_for(decoder, policy, rows=len(prompts), backend=choose(backend, decoder.embed.device))
    spy, texts = Spy(manager), {s: text_of(config, n + steps, s) for s, n in prompts.items()}
    for s, n in prompts.items():
        manager.join(s, n + steps, n)
    while any(manager.length(s) < len(texts[s]) for s in texts):
        reading = {s: texts[s][(a := manager.length(s)) : min(n, a + 3)] for s, n in prompts.items()}
        if chunks := {s: chunk for s, chunk in reading.items() if chunk}:
            feed(decoder, manager, chunks, spy)
        going = {s: texts[s][manager.length(s) :][:1] for s, n in prompts.items() if manager.length(s) >= n}
        if chunks := {s: chunk for s, chunk in going.items() if chunk}:
            feed(decoder, manager, chunks, spy)
    return manager, spy


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("group", ["sum", "mean", "max", "max_logit", "none"])
def test_mass_is_the_softmax(group: str, scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompt: of all its queries, though it came in chunks while another sequence generated."""
    monkeypatch.setattr(observe_module, "QUERY_BLOCK", 2)
    policy = watch(See.MASS, budget=5, group=group, scope=scope)
    prompts = {0: 4, 1: 11}
    _, spy = run_watched(policy, prompts, 9)
    assert len(policy.seen) == 2 * 10
    for (row, clock), here in policy.seen.items():
        last = prompts[row] + clock - 1
        for layer in range(2):
            pos, got = here["pos"][layer], here["mass"][layer]
            queries = range(prompts[row]) if clock == 0 else (last,)
            want = torch.stack([attention_of(spy, row, layer, i, pos, group) for i in queries]).sum(0)
            assert_close(f"row {row}, clock {clock}, layer {layer}", got, want, atol=1e-5)
    assert max(int(h["pos"][0].max()) for h in policy.seen.values()) == 19


@pytest.mark.parametrize("group", ["mean", "max_logit", "none"])
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_are_the_last_queries_attention(rows: int, group: str) -> None:
    policy = watch(See.ROWS, budget=6, rows=rows, group=group)
    prompts = {0: 2, 1: 10}
    _, spy = run_watched(policy, prompts, 7)
    for (row, clock), here in policy.seen.items():
        last = prompts[row] + clock - 1
        for layer in range(2):
            pos, got = here["pos"][layer], here["rows"][layer]
            for i in range(rows):
                query = last - rows + 1 + i
                name = f"row {row}, clock {clock}, query {query}"
                want = torch.zeros_like(got[:, i], dtype=torch.float64)
                if query >= 0:
                    want = attention_of(spy, row, layer, query, pos, group)
                assert_close(name, got[:, i], want, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_the_newest_row_needs_no_second_look_at_the_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the attention, when it is due, and beside MASS by the same rule or another; no query is kept."""
    demands = Demand(See.ROWS, every=3, group="max_logit"), Demand(See.ROWS | See.MASS, frozenset({1}), group="sum")
    monkeypatch.setattr(View, "keys", None)
    both = demands[0], Demand(See.MASS, every=3, group="max_logit")
    for rows in (demands[:1], demands[::-1], both):
        policy = watch(See.ROWS, budget=6, every=3)
        policy.demands = rows
        prompts = {0: 2, 1: 7}
        manager, spy = run_watched(policy, prompts, 4, name)
        assert sorted(policy.seen) == [(0, 0), (0, 3), (1, 0), (1, 3)]
        for (row, clock), here in policy.seen.items():
            for layer in range(2):
                group = "sum" if demands[1] in rows and layer == 1 else "max_logit"
                want = attention_of(spy, row, layer, prompts[row] + clock - 1, here["pos"][layer], group)
                assert_close(f"row {row}, clock {clock}", here["rows"][layer][:, 0], want, atol=1e-5)
        assert not manager.observations.queries.numel()


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_queries_span_chunks(rows: int) -> None:
    policy = watch(See.QUERY, budget=6, rows=rows)
    prompts = {0: 2, 1: 10}
    manager, spy = run_watched(policy, prompts, 7)
    cos, sin = Rope(manager.config).at(torch.arange(MAX_POSITION))
    for (row, clock), here in policy.seen.items():
        end = prompts[row] + clock
        for layer in range(2):
            q = spy.get("q", row, layer)[:end]
            q = torch.nn.functional.pad(rope(q.float(), cos[:end], sin[:end]), (0, 0, 0, 0, rows, 0))[-rows:]
            assert_close(f"row {row}, clock {clock}", here["queries"][layer], q.transpose(0, 1), atol=1e-6)


def test_hidden_is_the_residual_stream_and_the_final_norm() -> None:
    policy = watch(See.HIDDEN, budget=6, layers=frozenset({0, -1}))
    prompts = {0: 2, 1: 10}
    manager, spy = run_watched(policy, prompts, 7)
    assert set(manager.observations.hidden) == {0, -1}
    for (row, clock), here in policy.seen.items():
        for layer in (0, -1):
            want = spy.get("after", row, layer)[prompts[row] + clock - 1]
            assert_close(f"row {row}, clock {clock}, layer {layer}", here["hidden"][layer], want, atol=0)


def test_all_layers_are_not_the_final_norm() -> None:
    manager, _ = run_watched(Cut(None, demands=(Demand(See.HIDDEN),)), {0: 3}, 2)
    assert set(manager.observations.hidden) == {0, 1}


def test_only_demanded_layers_are_observed() -> None:
    for what in (See.MASS, See.QUERY, See.HIDDEN):
        manager, _ = run_watched(Cut(None, demands=(Demand(what, frozenset({1})),)), {0: 3}, 2)
        assert dict(observed(manager)) == {what.name: 3}


@pytest.mark.parametrize("cache", [plain, paged])
@pytest.mark.parametrize(
    ("what", "read"),
    [
        (See.MASS, lambda step: step.mass(0)),
        (See.MASS, lambda step: step.mass()),
        (See.ROWS, lambda step: step.rows(0)),
        (See.QUERY, lambda step: step.queries(0)),
        (See.HIDDEN, lambda step: step.hidden(0)),
    ],
)
def test_what_was_not_demanded_is_refused(cache: Any, what: See, read: Callable[[Step], Tensor]) -> None:
    class Curious(Cut):
        def decide(self, step: Step) -> Iterable[Edit]:
            read(step)
            return ()

    decoder = decoder_of(0)
    wrong_layer = Curious(None, demands=(Demand(what, frozenset({1})),))
    for policy in (Curious(None), wrong_layer):
        manager = cache(decoder, policy)
        manager.join(0, 9, 3)
        sentence = f"The policy cut reads {what.name} of layer 0, which it has not demanded: add Demand"
        with pytest.raises(UsageError, match=re.escape(sentence)):
            feed(decoder, manager, {0: [3, 2, 1]})


@pytest.mark.parametrize("cache", [plain, paged])
def test_all_layers_do_not_show_the_final_norm(cache: Any) -> None:
    class Curious(Cut):
        def decide(self, step: Step) -> Iterable[Edit]:
            step.hidden(-1)
            return ()

    decoder = decoder_of(0)
    manager = cache(decoder, Curious(None, demands=(Demand(See.HIDDEN),)))
    manager.join(0, 9, 3)
    with pytest.raises(UsageError, match="reads HIDDEN of layer -1, which it has not demanded"):
        feed(decoder, manager, {0: [3, 2, 1]})


def test_a_policy_that_demands_nothing_costs_nothing() -> None:
    manager, _ = run_watched(Cut(4), {0: 5, 1: 3}, 4)
    assert not observed(manager)
    assert not manager.observations.mass
    assert not manager.observations.hidden
    assert manager.ledger().observations == 0


def test_clocks_are_those_of_each_sequence() -> None:
    """Every third generated token of each: what is seen is right, and nothing is computed when nobody is due."""
    policy = watch(See.MASS, every=3, group="mean")
    prompts = {0: 3, 1: 10}  # chunks of 3: the second is 3 steps behind, and due at the same time
    manager, spy = run_watched(policy, prompts, 8)
    for (row, clock), here in policy.seen.items():
        queries = range(prompts[row]) if clock == 0 else (prompts[row] + clock - 1,)
        want = torch.stack([attention_of(spy, row, 0, i, here["pos"][0], "mean") for i in queries]).sum(0)
        assert_close(f"row {row}, clock {clock}", here["mass"][0], want, atol=1e-5)
    assert sorted(policy.seen) == [(0, 0), (0, 3), (0, 6), (1, 0), (1, 3), (1, 6)]
    # in 2 layers: 5 chunks, and tokens 3 (of 0), 6 (of 0) with 3 (of 1), 6 (of 1)
    assert observed(manager)["MASS"] == 2 * (5 + 3)


@pytest.mark.parametrize(
    "demands",
    [
        *((Demand(what, every=3),) for what in See),
        (Demand(See.MASS, every=3), Demand(See.MASS, frozenset({1}), group="sum")),
        (Demand(See.MASS, every=3), Demand(See.MASS, frozenset({0}))),
    ],
)
def test_whose_turn_it_is_changes_not_a_bit(demands: tuple[Demand, ...]) -> None:
    """Law 2 at a fixed shape: a sequence's logits are the same bits whether its companion's demand is due or not."""
    config = example_config()
    decoder, text, seen = random_decoder(config), text_of(config, 20, 0), []
    for lag in range(3):
        manager = manager_for(decoder, Cut(6, demands=demands), rows=2, columns=MAX_POSITION)
        for s in (0, 1):
            manager.join(s, 20, 5)
        feed(decoder, manager, {1: text[:5]})
        for token in range(lag):
            feed(decoder, manager, {1: [token]})
        feed(decoder, manager, {0: text[:5]})
        seen.append(torch.cat([feed(decoder, manager, {0: [t], 1: [lag]})[0] for t in text[5:14]]))
    assert_same("one token behind", seen[1], seen[0])
    assert_same("two tokens behind", seen[2], seen[0])


# -- steering


class Steer(Cut):
    """Adds a vector of its row's number after layer 0, and remembers what it saw."""

    def setup(self, shape: Any) -> None:
        self.seen: list[tuple[list[int], ...]] = []

    def steer(self, step: Step, layer: int, hidden: Tensor) -> Tensor:
        if layer != 0:
            return hidden
        assert step.active.all()
        self.seen.append(tuple(x.tolist() for x in (step.row, step.tokens, step.clock, step.prompt)))
        return hidden + (step.row[:, None] + 1)


def test_steering_touches_decoding_rows_only() -> None:
    config = example_config()
    decoder = random_decoder(config)
    policy = Steer(None, demands=(Demand(See.HIDDEN, frozenset({0})),))
    manager = manager_for(decoder, policy)
    spy = Spy(manager)
    for s in (3, 4, 5):
        manager.join(s, 20, 4)
    texts = {s: text_of(config, 9, s) for s in (3, 4, 5)}
    for s in texts:
        got = feed(decoder, manager, {s: texts[s][:4]}, spy)[s]
        assert_equal_logits("prompt", got, prompt_logits(decoder, texts[s][:4]))
    feed(decoder, manager, {5: [1], 3: [2]}, spy)
    feed(decoder, manager, {4: [1]}, spy)
    assert policy.seen == [([2, 0], [1, 2], [1, 1], [4, 4]), ([1], [1], [1], [4])]
    for row, s in enumerate((3, 4, 5)):
        before, after = spy.get("before", s, 0), spy.get("after", s, 0)
        assert_same("in the prompt", after[:4], before[:4])
        assert_close("in the answer", after[4:], before[4:] + row + 1, atol=1e-6)
        assert_close("what is observed", manager.observations.hidden[0][row], after[-1], atol=0)
        for layer in (1, -1):
            assert_same("elsewhere", spy.get("after", s, layer), spy.get("before", s, layer))


def test_a_policy_that_does_not_steer_is_not_asked() -> None:
    decoder = random_decoder(example_config())
    assert not manager_for(decoder, Stack([Cut(4), Full()])).steers
    assert manager_for(decoder, Stack([Cut(4), Steer(4)])).steers


# -- cache positions


class Sinks(Cut):
    """The first `pull` tokens and the newest, at the positions that they have in the cache."""

    def decide(self, step: Step) -> Iterable[Edit]:
        due, keep = self.due(step)
        pos = step.pos()
        newest = pos.amax(-1, keepdim=True) - (keep[..., None] - self.pull)  # the last that goes
        yield Evict(due[..., None] & (pos >= self.pull) & (pos <= newest))


@given(
    config=st.sampled_from(ROPES).flatmap(lambda kind: configs(rope=kind)),
    scope=st.sampled_from(SCOPES),
    pull=st.integers(1, 5),
    recent=st.integers(1, 6),
    prompt=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_pulled_tokens_stand_before_the_next_that_is_held(
    config: ModelConfig, scope: Scope, pull: int, recent: int, prompt: int, seed: int
) -> None:
    """StreamingLLM (§3.2): attention by positions in the cache, which is every key rotated anew."""
    decoder = random_decoder(config, seed)
    # a demand for every third token: attention is the same whether it is observed or not
    policy = Sinks(pull + recent, pull=pull, scope=scope, demands=(Demand(See.MASS, every=3),))
    manager, text = manager_for(decoder, policy, rows=2), text_of(config, prompt + 8, seed)
    spy = Spy(manager)
    manager.join(0, 40, prompt)
    manager.join(1, 40, 2)
    feed(decoder, manager, {0: text[:prompt]}, spy)
    feed(decoder, manager, {1: text[:2]}, spy)
    table, group = Rope(config), config.num_heads // config.num_kv_heads
    for i in range(prompt, prompt + 8):
        held = [*kept(manager, 0)[0], i]
        feed(decoder, manager, {1: [0], 0: [text[i]]} if i % 2 else {0: [text[i]]}, spy)
        cos, sin = table.at(torch.arange(len(held)))  # positions in the cache
        for layer in range(config.num_layers):
            q, k, v = (spy.get(x, 0, layer).float() for x in "qkv")
            q_i = rope(q[i : i + 1], cos[-1:], sin[-1:])[0]
            k_i = rope(k[held], cos, sin).repeat_interleave(group, 1)
            p = (torch.einsum("hd,shd->hs", q_i, k_i) / config.head_dim**0.5).softmax(-1)
            want = torch.einsum("hs,shd->hd", p, v[held].repeat_interleave(group, 1))
            scale = float(v.abs().max()) * max(1.0, float(q_i.norm(dim=-1).max() * k_i.norm(dim=-1).max()))
            assert_close(f"token {i}, layer {layer}", spy.get("out", 0, layer)[i], want, atol=3e-6 * scale)


# -- misuse, exhaustion, rows that are used again


def test_misuse_is_an_error() -> None:
    decoder = random_decoder(example_config())
    manager = manager_for(decoder, Full(), rows=2)
    manager.join(1, 9, 3)
    with pytest.raises(ValueError, match="sequence 1 is in the cache already"):
        manager.join(1, 9, 3)
    manager.join(2, 9, 2)
    with pytest.raises(ValueError, match="all 2 rows are taken; sequence 3 must wait"):
        manager.join(3, 9, 3)
    with pytest.raises(ValueError, match="prompt of 2 tokens and brings more"):
        manager.begin_step([2], [3])
    feed(decoder, manager, {1: [1, 2, 3]})
    with pytest.raises(ValueError, match="reads prompts or generates, not both"):
        manager.begin_step([1, 2], [1, 1])
    with pytest.raises(ValueError, match="one token a step, not 2"):
        manager.begin_step([1], [2])
    with pytest.raises(ValueError, match=r"zip|argument"):
        manager.begin_step([1], [1, 1])
    for call in (manager.leave, manager.length, manager.held, lambda s: manager.begin_step([s], [1])):
        with pytest.raises(KeyError):
            call(7)
    with pytest.raises(ValueError, match="begin_step first"):
        manager.end_step()
    assert manager.length(1) == manager.held(1) == 3
    assert manager.length(2) == 0
    got = torch.cat([feed(decoder, manager, {1: [4]})[1], feed(decoder, manager, {1: [5]})[1]])
    assert_equal_logits("after all of this", got, prompt_logits(decoder, [1, 2, 3, 4, 5])[3:])


@pytest.mark.parametrize("scope", SCOPES)
def test_exhaustion_changes_nothing(scope: Scope) -> None:
    config = example_config()
    decoder, texts = random_decoder(config), [text_of(config, 30, s) for s in range(3)]
    per = manager_for(decoder, Full(scope)).shape.tables
    units = per[0] * per[2]  # of a sequence
    manager = manager_for(decoder, Full(scope, Storage(block=2)), pages=7 * units)  # 14 tokens of any sequences
    for s in range(3):
        manager.join(s, 30, 5)
    logits = {0: [feed(decoder, manager, {0: texts[0][:5]})[0]], 1: [feed(decoder, manager, {1: texts[1][:5]})[1]]}
    before = manager.ledger()
    with pytest.raises(Exhausted, match=r"appending 5 tokens to 1 sequences needs \d+ pages and \d+ of"):
        feed(decoder, manager, {2: texts[2][:5]})
    assert (manager.ledger(), manager.length(2), manager.held(2)) == (before, 0, 0)
    for s, rows in feed(decoder, manager, {s: [texts[s][5]] for s in (0, 1)}).items():
        logits[s].append(rows)
    before = manager.ledger()
    with pytest.raises(Exhausted, match="appending 2 tokens to 2 sequences"):
        feed(decoder, manager, {s: [texts[s][6]] for s in (0, 1)})
    assert manager.ledger() == before
    manager.leave(1)
    logits[2] = [feed(decoder, manager, {2: texts[2][:5]})[2]]  # there is room now
    n = manager.length(0)
    logits[0].append(feed(decoder, manager, {0: [texts[0][n]]})[0])
    for s, parts in logits.items():
        got = torch.cat(parts)
        assert_equal_logits(f"sequence {s}", got, prompt_logits(decoder, texts[s][: len(got)]))


PM_KVQ = "pm_kvq:bits=4,max_len=24,sink=2,window=6,group=16,block=2"


@pytest.mark.parametrize(
    ("text", "tokens", "prompt", "want"),  # pages, pages for the prompt, scale rows, width
    [
        ("full", 100, 30, Needs(7, 0, 0, 101)),  # 16 tokens a page, and one to write
        ("window:budget=40", 100, 30, Needs(3, 0, 0, 42)),  # 41 before the oldest goes
        ("window:budget=20", 100, 34, Needs(3, 0, 0, 35)),  # the prompt is read as a whole
        ("quant:fmt=int8", 100, 30, Needs(7, 8, 0, 101)),  # 4 plain tokens where 16 are quantized
        ("kivi:group=16,residual=16,block=4", 100, 30, Needs(7, 30, 9, 101)),  # 7 groups, a short one, one more
        ("window:budget=5+quant:fmt=int8,by=token", 300, 6, Needs(1, 2, 6, 7)),  # survivors of as many groups
        ("ada_snapkv:budget=20,buffer=4", 100, 18, Needs(7, 0, 0, 101)),  # a lane may hold all, and keep its pages
        (PM_KVQ, 100, 30, Needs(19 + 10 + 2, 30, 0, 101)),  # 37 tokens in 16 and in 8 bits, and the sink
    ],
)
def test_what_a_sequence_needs(text: str, tokens: int, prompt: int, want: Needs) -> None:
    """Counted by hand, for heads of 16 numbers."""
    assert needs(parse(text), 16, torch.float32, tokens, prompt) == want


@pytest.mark.parametrize(("group", "buffer", "want"), [(16, 24, 19), (16, 12, 19), (16, 32, 15), (32, 48, 11)])
def test_groups_that_do_not_fill_a_buffer(group: int, buffer: int, want: int) -> None:
    """A short one whenever it is full: for all of them there are rows of scales."""
    storage = Storage((f"int4:group={group},by=token/int4:group=16",), buffer=buffer, tail="keep")
    decoder = random_decoder(example_config(head_dim=16, max_position=200))
    manager = manager_for(decoder, Full(storage=storage), rows=1, tokens=200, prompt=1, poison=False)
    rows = manager.store.slots.free_groups
    assert rows.count == want * 4  # of two layers and heads
    manager.join(0, 200, 1)
    for i in range(200):
        feed(decoder, manager, {0: [i % 7]})
    assert rows.count - rows.free == 200 // buffer * -(-buffer // group) * 4


def test_as_many_prompts_are_read_at_once_as_the_pool_was_made_for() -> None:
    """Each in full precision until its last chunk."""
    decoder = random_decoder(example_config(head_dim=16))
    every, single = (manager_for(decoder, parse("quant:fmt=int4"), tokens=32, prompts=n) for n in (None, 1))
    for manager in (every, single):
        for seq in range(3):
            manager.join(seq, 32, 32)
        feed(decoder, manager, {0: [1] * 31})
    feed(decoder, every, {1: [1] * 31, 2: [1] * 31})
    with pytest.raises(Exhausted):
        feed(decoder, single, {1: [1] * 31, 2: [1] * 31})


class Thoughts(Watch):
    """Opens a segment of type 1 with the first generated token; types 0 and 1 are equal in format."""

    def decide(self, step: Step) -> Iterable[Edit]:
        self.thoughts = step.thought.tolist()
        yield from super().decide(step)
        opened = step.active & (step.clock == 1)
        yield OpenSegment(opened, opened.to(torch.uint8))


@pytest.mark.parametrize("rows", [4, 1])
def test_a_row_that_is_used_again_remembers_nothing(rows: int) -> None:
    """Mass, queries, hidden states, thoughts and budgets of the last sequence are gone, and so are its numbers."""
    what = See.MASS | See.QUERY | See.HIDDEN | See.ROWS
    config, seen = example_config(), []
    decoder = random_decoder(config)
    text = text_of(config, 12, 0)
    for first in (False, True):
        storage = Storage(thoughts=("fp32", "fp32"), block=4)
        policy = Thoughts(5, storage=storage, demands=(Demand(what, frozenset({-1, 0, 1}), rows=rows),))
        policy.what = what
        manager = manager_for(decoder, policy, rows=1, columns=MAX_POSITION)
        if first:
            manager.join(0, 40, 20, budget=9)
            feed(decoder, manager, {0: text_of(config, 20, 1)})
            for token in range(3):
                feed(decoder, manager, {0: [token]})
            assert policy.thoughts == [1]
            manager.leave(0)
        policy.seen.clear()
        manager.join(1, 12, 2)
        logits = [feed(decoder, manager, {1: text[:1]})[1], feed(decoder, manager, {1: text[1:2]})[1]]
        assert policy.thoughts == [0]
        assert manager.store.entries(0, 0, 0)[0].starts == (0,)
        logits += [feed(decoder, manager, {1: [t]})[1] for t in text[2:]]
        seen.append((torch.cat(logits), policy.seen))
    assert_same("logits", seen[1][0], seen[0][0])
    assert seen[0][1].keys() == seen[1][1].keys() == {(0, clock) for clock in range(11)}
    for at, here in seen[0][1].items():
        for name, layers in here.items():
            for layer, want in layers.items():
                assert_same(f"{name} of layer {layer} at {at}", seen[1][1][at][name][layer], want)


def test_a_fixed_width_is_an_error_before_anything_changes() -> None:
    decoder = random_decoder(example_config())
    manager = manager_for(decoder, Full(), columns=6)
    manager.join(0, 9, 5)
    manager.join(1, 9, 7)
    feed(decoder, manager, {0: [1] * 5})
    before = manager.ledger()
    with pytest.raises(UsageError, match="may hold 7 tokens and the width was fixed to 6"):
        feed(decoder, manager, {1: [1] * 7})
    assert manager.ledger() == before
    assert manager.held(1) == 0
    feed(decoder, manager, {0: [1]})


class Resets(Cut):
    """Remembers which rows it was told to forget."""

    def setup(self, shape: Any) -> None:
        self.rows: list[int] = []

    def reset(self, row: int) -> None:
        self.rows.append(row)


def test_policies_are_told_whose_row_is_new() -> None:
    a, b = Resets(4), Resets(5)
    manager = manager_for(random_decoder(example_config()), Stack([a, b]))
    for seq in (5, 6, 7):
        manager.join(seq, 9, 3)
    manager.leave(6)
    manager.join(8, 9, 3)
    assert a.rows == b.rows == [0, 1, 2, 1]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_fixed_width_is_of_what_is_held(scope: Scope) -> None:
    """A sequence may become longer than the lists are wide, if enough of it is evicted; its numbers are the same."""
    config = example_config()
    decoder, text, seen = random_decoder(config), text_of(config, 40, 0), []
    for columns in (7, None):
        manager = manager_for(decoder, Cut(5, slack=2, scope=scope), columns=columns)
        manager.join(0, 40, 6)
        logits = [feed(decoder, manager, {0: text[:6]})[0], *(feed(decoder, manager, {0: [t]})[0] for t in text[6:])]
        assert manager.store.lists.positions().shape[-1] <= 7
        seen.append(torch.cat(logits))
    assert_equal_logits("logits", seen[0], seen[1])


def test_a_short_buffer_makes_short_groups() -> None:
    """Every four tokens take a row of key scales, though a group could hold sixteen."""
    policy = Policy()
    policy.storage = Storage(("int8:by=token/int8",), buffer=4)
    manager = manager_for(random_decoder(example_config()), policy, rows=1, tokens=24)
    manager.join(0, 24, 3)
    feed(random_decoder(example_config()), manager, {0: [1, 2, 3]})
    for token in range(21):
        feed(random_decoder(example_config()), manager, {0: [token]})
    assert manager.held(0) == 24
