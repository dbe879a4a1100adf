"""SnapKV: the worked example of its code, what it keeps of a prompt in a running decoder, and stacks with others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.backend import REFERENCE
from minithink.errors import UsageError
from minithink.kv.contract import Evict, Policy, See, Step
from minithink.kv.sizes import check_budget, needs
from minithink.kv.stack import Stack
from minithink.policies import parse
from minithink.policies.snapkv import SnapKV
from minithink.policies.thinkv import Tbe, ThinKV
from minithink.policies.window import Window
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION
from tests.policies.drive import follow, followed, formats, held
from tests.policies.test_thinkv import ALONE, WIDE, Plain, told

torch.set_num_threads(1)

# --- by hand ------------------------------------------------------------------------------------------------

KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])
QUERIES = torch.tensor([[(1, 0.2), (0.3, 1)], [(0.5, -0.5), (1, 0.5)]])  # of two heads, at tokens 4 and 5
AVERAGE = [[0.3413, 0.4218, 0.3949, 0.2288], [0.4138, 0.4723, 0.3441, 0.1484]]
SUM = [[0.5255, 0.4985, 0.2413, 0.4450], [0.6542, 0.5871, 0.1756, 0.2695]]
LARGEST = [[0.5255, 0.5255, 0.4985, 0.4450], [0.6542, 0.6542, 0.5871, 0.2695]]


def six(p: Tensor) -> Any:
    """A step whose prompt of six tokens was just read. p: attention rows [Hkv, 2, 6]."""
    one, heads = torch.ones(1, dtype=torch.bool), len(p)
    return SimpleNamespace(
        shape=SimpleNamespace(layers=1),
        any=lambda x: bool(x.any()),
        note=lambda *_: None,
        ops=REFERENCE,
        budget=torch.full((1, 1, heads), 10**6, dtype=torch.int32),
        active=one,
        clock=torch.tensor([0]),
        prompt=torch.tensor([6]),
        pos=lambda: torch.arange(6).expand(1, 1, heads, 6),
        held=lambda: torch.full((1, 1, heads), 6),
        rows=lambda layer: p[None],
    )


def attention() -> Tensor:
    """Of both queries of both heads, causal: [2, 2, 6]."""
    logits = QUERIES @ KEYS.T / 2**0.5
    logits[:, 0, 5] = -torch.inf
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("kernel_size", "pooling", "want", "kept"),
    [
        (1, "max", SUM, [{0, 1}, {0, 1}]),
        (3, "avg", AVERAGE, [{1, 2}, {0, 1}]),
        (3, "max", LARGEST, [{0, 1}, {0, 1}]),
    ],
)
def test_worked_example(kernel_size: int, pooling: Any, want: list[list[float]], kept: list[set[int]]) -> None:
    """What the official code keeps for every query head, where each has a KV head of its own: W = 2, cap 4."""
    policy, step = SnapKV(cap=4, window=2, kernel_size=kernel_size, pooling=pooling), six(attention())
    older = torch.arange(6).expand(1, 2, 6) < 4
    score = policy.score(step, 0, older)[0]
    assert score[:, :4].flatten().tolist() == pytest.approx([*want[0], *want[1]], abs=6e-5)
    assert not score[:, 4:].any()
    (edit,) = policy.decide(step)
    assert edit.layer is None
    got = [set((~drop).nonzero().flatten().tolist()) for drop in edit.drop[0, 0]]
    assert got == [{*own, 4, 5} for own in kept]
    for wrong in ({"active": ~step.active}, {"clock": step.clock + 1}):  # it is being read, or was read before
        assert not list(policy.decide(SimpleNamespace(**{**vars(step), **wrong})))  # type: ignore[arg-type]


def test_two_heads_that_share_a_kv_head() -> None:
    """kvpress's figures, which has the mean over the window where the code has the sum."""
    policy, step = SnapKV(cap=4, window=2, kernel_size=3, pooling="avg"), six(attention().mean(0, keepdim=True))
    score = policy.score(step, 0, torch.arange(6)[None, None] < 4)
    assert (score[0, 0, :4] / 2).tolist() == pytest.approx([0.1888, 0.2235, 0.1848, 0.0943], abs=6e-5)


# --- what ---------------------------------------------------------------------------------------------------


@dataclass
class Watched(SnapKV):
    """Notes what it saw and what it evicted."""

    def setup(self, shape: Any) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.demands = (*self.demands, *(replace(d, what=See.QUERY) for d in self.demands))  # the queries themselves

    def decide(self, step: Step) -> Iterator[Evict]:
        for edit in super().decide(step):
            for layer in range(step.shape.layers):
                ring = step.observations.queries[layer]  # type: ignore[attr-defined]
                self.seen.append((step.keys(layer), ring.clone(), step.held(layer).clone(), edit.drop[layer]))
            yield edit


def plain(k: Tensor, q: Tensor, p: SnapKV) -> tuple[set[int], bool]:
    """One KV head as the code has it: k [n, D], q [g, W, D] → the columns kept, and whether a tie could be meant."""
    n, w = len(k), p.window
    logits = q @ k.T / k.shape[-1] ** 0.5
    own = torch.arange(n - w, n)[:, None]
    attention = logits.masked_fill(torch.arange(n) > own, -torch.inf).softmax(-1)  # [g, W, n]
    one = attention.mean(0) if p.group == "mean" else attention.amax(0)
    s, side = one.sum(0)[: n - w].tolist(), p.kernel_size // 2
    if p.pooling == "max":
        s = [max(s[max(0, j - side) : j + side + 1]) for j in range(n - w)]
    else:
        s = [sum(s[max(0, j - side) : j + side + 1]) / p.kernel_size for j in range(n - w)]
    ranked = sorted(range(n - w), key=lambda j: (-s[j], j))
    room = p.cap - w
    near = abs(s[ranked[room - 1]] - s[ranked[room]]) < 1e-6
    return {*ranked[:room], *range(n - w, n)}, near


@given(
    prompts=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    cap=st.integers(2, 14),
    window=st.integers(1, 6),
    kernel_size=st.sampled_from([1, 3, 7]),
    pooling=st.sampled_from(["max", "avg"]),
    group=st.sampled_from(["mean", "max"]),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_a_prompt_is_cut_once_as_the_code_does(
    prompts: list[int], cap: int, window: int, kernel_size: int, pooling: Any, group: Any
) -> None:
    """In every lane of a ragged batch, beside an idle row; what is generated stays."""
    policy = Watched(cap=cap, window=min(window, cap - 1), kernel_size=kernel_size, pooling=pooling, group=group)
    cut = [n for n in prompts if n > cap]
    first: dict[int, list[list[int]]] = {}
    for i, manager in enumerate(follow(policy, prompts, 4, rows=len(prompts) + 1)):
        assert len(policy.seen) == 2 * len(cut)  # layers; never again
        assert not manager.demands_now(range(len(prompts)))
        for seq, n in enumerate(prompts):
            mine = held(manager, seq)
            first.setdefault(seq, mine)
            assert mine == [[*lane, *range(n, n + i)] for lane in first[seq]]
            assert all(len(lane) == min(n, cap) for lane in first[seq])
    assert policy.limit is None
    for k, ring, count, drop in policy.seen:
        for b, h in (count > cap).nonzero().tolist():
            n = int(count[b, h])
            if not drop[b, h].any():
                continue  # it waits for a step of its own, or has been cut
            w = policy.window
            q = ring[b].unflatten(0, (k.shape[1], -1))[h][:, [(n - w + i) % ring.shape[2] for i in range(w)]]
            want, near = plain(k[b, h, :n], q, policy)
            got = {j for j in range(n) if not drop[b, h, j]}
            assert len(got) == cap
            assert got == want or near
    assert sum(bool(drop[b].any()) for *_, drop in policy.seen for b in range(len(drop))) == 2 * len(cut)


# --- beside others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [Window(16, protect_prompt=True), ThinKV(32, tau=8, g=4, types=1, retention="2")])
def test_what_it_lets_go_is_gone_and_the_rest_is_protected(other: Policy) -> None:
    """Though the other one protects prompts."""
    mine = {"cap": 9, "window": 3, "kernel_size": 3}
    want = held(followed(SnapKV(**mine), [20], 0, decoder=WIDE), 0)  # type: ignore[arg-type]
    assert len({tuple(lane) for lane in want}) > 1  # every head chooses for itself
    members = [SnapKV(**mine), other]  # type: ignore[arg-type]
    for stack in (Stack(members), Stack(members[::-1])):
        assert stack.protect_prompt
        assert stack.cap == 9
        for manager in follow(stack, [20], 50, decoder=WIDE):
            lanes = held(manager, 0)
            assert [[p for p in lane if p < 20] for lane in lanes] == want
            assert stack.limit is not None
            assert max(map(len, lanes)) <= stack.limit
        assert max(map(len, lanes)) < 9 + 50


def test_the_smallest_cap_of_a_stack_is_its_own() -> None:
    stack = Stack([SnapKV(cap=12, window=2), Window(30), SnapKV(cap=8, window=2)])
    assert stack.cap == 8
    assert Stack([Window(30), Window(20)]).cap is None
    assert max(len(lane) for lane in held(followed(stack, [25], 0), 0)) <= 8


def test_thinkv_anneals_segments_behind_what_is_left_of_the_prompt() -> None:
    """Types are told; the plain rules of ThinKV, for a prompt of `cap` tokens; budgets count these alone."""
    types, tau, prompt, cap = [REASONING, EXECUTION, TRANSITION, REASONING, TRANSITION], 6, 17, 5
    for budget in (14, 60):
        policy = told(Tbe, types)(budget=budget, tau=tau, retention="4/2/1", **ALONE)
        rules = Plain(cap, types, policy)
        stack = Stack([SnapKV(cap=cap, window=2), policy])
        for clock, manager in enumerate(follow(stack, [prompt], 30)):
            if clock:
                rules.step(clock)
            for lane in held(manager, 0):
                got = [sum(p < prompt for p in lane), *(0 for _ in rules.size)]
                for p in (p for p in lane if p >= prompt):
                    got[1 + (p - prompt) // tau] += 1
                assert got == [cap, *rules.size], f"after {clock} tokens"
        assert policy.cases[:, 0].tolist() == rules.cases
        assert min(rules.cases) > 0 or budget == 60


def test_what_is_left_of_the_prompt_is_quantized() -> None:
    policy = told(ThinKV, [TRANSITION])(budget=100, tau=8, g=4, precision="R4E4T2", **ALONE)
    stack = Stack([SnapKV(cap=9, window=3), policy])
    manager = followed(stack, [20], 10, decoder=WIDE)
    found = formats(manager, 0)
    reasoning, transition = policy.storage.thoughts[REASONING], policy.storage.thoughts[TRANSITION]
    assert found == [reasoning] * 9 + [transition] * 8 + ["waits"] * 2


def test_a_budget_must_hold_what_is_left_of_the_prompt() -> None:
    text = "snapkv:cap=40+thinkv:budget={},tau=16,types=1,retention=4"
    check_budget(parse(text.format(61)), 10**6)
    check_budget(parse(text.format(60)), 39)
    with pytest.raises(UsageError, match="prompt of 40 and 21 tokens beside it: give at least 61"):
        check_budget(parse(text.format(60)), 10**6)


def test_the_pool_has_pages_for_what_is_left_of_the_prompt() -> None:
    """Beside those in which it is read."""
    quantized = parse("snapkv:cap=64+window:budget=80+quant:fmt=fp8")
    long, short = (needs(quantized, 16, torch.float32, 600, n) for n in (500, 64))
    assert long.pages == short.pages < -(-500 // 16)
    assert long.prompt_pages >= 7 * short.prompt_pages
    window = parse("snapkv:cap=64+window:budget=80")
    assert needs(window, 16, torch.float32, 600, 500).pages >= -(-500 // 16)  # read where they stay


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv:window=0", "window is 0 and cap 2048 tokens"),
        ("snapkv:cap=32", "window is 32 and cap 32 tokens"),
        ("snapkv:cap=-1", "cap -1"),
        ("snapkv:kernel_size=4", "kernel_size is 4 keys; it must be odd"),
        ("snapkv:kernel_size=-1", "it must be odd"),
        ("snapkv:pooling=min", "cannot have pooling=min"),
        ("snapkv:group=none", "cannot have group=none"),
        ("snapkv:budget=64", "no hyperparameter 'budget'"),
    ],
)
def test_nonsense_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_a_budget_from_outside_is_the_others() -> None:
    with pytest.raises(UsageError, match="the policy snapkv takes none"):
        parse("snapkv", budget=64)
    stack = parse("snapkv:cap=40+window", budget=64)
    assert (stack.budget, stack.limit, stack.cap) == (64, 64, 40)
