"""R-KV: the worked example of its code, when it evicts, and what it evicts in a running decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.backend import REFERENCE
from minithink.errors import UsageError
from minithink.kv.contract import Edit, Evict, Policy, Step
from minithink.kv.reading import Reading
from minithink.kv.schedule import share_of
from minithink.kv.stack import Stack
from minithink.policies.rkv import Rkv
from minithink.policies.snapkv_decode import SnapKVDecode
from tests.policies.by_rows import layer_scores
from tests.policies.drive import follow, held, tokens_of
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)
THIN = random_decoder(
    example_config(
        hidden_size=4, intermediate_size=4, num_heads=1, num_kv_heads=1, head_dim=2, num_layers=1, max_position=1024
    )
)
NEVER = 10**6  # no token

# --- the score ----------------------------------------------------------------------------------------------

KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])
QUERIES = torch.tensor([[(1, 0.2), (0.3, 1)], [(0.5, -0.5), (1, 0.5)]])
SIX = SimpleNamespace(
    shape=SimpleNamespace(layers=1),
    ops=REFERENCE,
    any=lambda x: bool(x.any()),
    note=lambda *_: None,
    budget=torch.full((1, 1, 1), 4, dtype=torch.int32),
    active=torch.ones(1, dtype=torch.bool),
    clock=torch.tensor([2]),
    prompt=torch.tensor([4]),
    thinking=torch.ones(1, dtype=torch.bool),
    pos=lambda layer=None: torch.arange(6).view(1, 1, 6)[(None,) if layer is None else ...],
    held=lambda layer=None: torch.full((1, 1), 6)[(None,) if layer is None else ...],
    protected=lambda layer=None: torch.zeros(1, 1, 6, dtype=torch.bool)[(None,) if layer is None else ...],
    keys=lambda layer, rows: KEYS[None, None],
    queries=lambda layer: QUERIES[None],
)


@pytest.mark.parametrize(
    ("lam", "kernel_size", "want", "kept"),
    [
        (0.1, 1, [-0.1489, -0.1317, -0.1558, -0.1304], [1, 3, 4, 5]),
        (0.1, 3, [-0.1489, -0.1284, -0.1340, -0.1304], [1, 3, 4, 5]),
        (0.07, 3, [-0.1658, -0.1447, -0.1494, -0.1415], [1, 3, 4, 5]),
        (0.9, 3, None, [0, 1, 4, 5]),
    ],
)
def test_worked_example(lam: float, kernel_size: int, want: list[float] | None, kept: list[int]) -> None:
    """What `rkv/compression/r1_kv.py` gives for 6 keys, a window of 2 and a budget of 4."""
    policy, step = Rkv(budget=4, lam=lam, alpha=2, buffer=2, kernel_size=kernel_size), SIX
    if want is not None:
        assert layer_scores(policy, step)[0, 0, :4].tolist() == pytest.approx(want, abs=6e-5)
    (edit,) = policy.decide(step)  # type: ignore[arg-type]
    assert edit.layer is None
    assert (~edit.drop[0, 0, 0]).nonzero().flatten().tolist() == kept


# --- when ---------------------------------------------------------------------------------------------------


def evictions(policy: Policy, prompt: int, steps: int) -> list[tuple[int, int, int]]:
    """(tokens of the sequence so far, held before, held after) of every eviction."""
    out, before = [], 0
    for i, manager in enumerate(follow(policy, [prompt], steps, decoder=THIN)):
        before, now = before + (1 if i else prompt), manager.held(0)
        if now < before:
            out.append((prompt + i, before, now))
        before = now
    return out


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        (100, [(257, 257, 256), (385, 384, 256), (513, 384, 256)]),
        (300, [(300, 300, 256), (385, 341, 256), (513, 384, 256)]),
        (256, [(257, 257, 256), (385, 384, 256), (513, 384, 256)]),
    ],
)
def test_the_global_clock_is_the_codes(prompt: int, want: list[tuple[int, int, int]]) -> None:
    assert evictions(Rkv(budget=256, global_clock=True), prompt, 515 - prompt) == want


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        (9, [(28, 28, 21), (35, 28, 21), (42, 28, 21)]),
        (25, [(28, 28, 21), (35, 28, 21), (42, 28, 21)]),
        (30, [(30, 30, 21), (37, 28, 21), (44, 28, 21)]),
    ],
)
def test_the_buffer_fills_and_is_emptied(prompt: int, want: list[tuple[int, int, int]]) -> None:
    assert evictions(Rkv(budget=21, buffer=7), prompt, 45 - prompt) == want


def test_without_a_buffer_one_token_goes_every_step() -> None:
    assert evictions(Rkv(budget=21, buffer=0), 19, 5) == [(t, 22, 21) for t in (22, 23, 24)]


def test_the_common_schedules_go_before_its_own() -> None:
    want = [(24, 24, 21), (29, 26, 21)]
    for policy in (Rkv(budget=21, schedule="interval:5"), Rkv(budget=21, schedule="interval:5", global_clock=True)):
        assert evictions(policy, 19, 11) == want
        assert policy.limit == 26
    assert evictions(Rkv(budget=25, schedule="sawtooth:25/21"), 19, 11) == [(25, 25, 21), (29, 25, 21)]


@settings(max_examples=20)
@given(st.floats(0, 1), st.integers(1, 8), st.booleans(), st.sampled_from([Rkv, SnapKVDecode]))
def test_recent_tokens_stay(recent: float, alpha: int, protect: bool, kind: type[Rkv]) -> None:
    """As many as the share says, or α; the rest of the budget goes to older tokens, chosen by score."""
    policy = kind(budget=24, buffer=6, alpha=alpha, recent=recent, protect_prompt=protect)
    newest, room = share_of(24 - 8 * protect, recent), 24 - 8 * protect  # 8: the prompt
    for cache in follow(policy, [8], 60):
        for lane in held(cache, 0):
            last = max(lane)
            assert {*range(max(0, last + 1 - min(max(alpha, newest), room)), last + 1)} <= {*lane}
            assert len(lane) < 30


def test_how_many_recent_tokens_stay() -> None:
    """At least α, as far as there is room; the share is a decimal number, for int(0.7 · 90) is 62."""
    room = torch.tensor([0, 5, 10, 12, 90], dtype=torch.int32)
    newest = Rkv(budget=90, recent=0.7).window_size(room)
    assert newest.dtype == torch.int32
    assert newest.tolist() == [0, 5, 8, 8, 63]
    assert Rkv(budget=90).window_size(room).tolist() == [0, 5, 8, 8, 8]


@pytest.mark.parametrize("global_clock", [False, True])
@pytest.mark.parametrize("exempt", [False, True])
def test_the_answer_is_exempt_if_asked(global_clock: bool, exempt: bool) -> None:
    policy = Rkv(budget=21, buffer=4, exempt_answer=exempt, global_clock=global_clock)
    text = tokens_of(0, 60, THIN)
    close = text[32]
    end = text.index(close, 19) - 19  # from the end of this step on the model answers
    sizes = [m.held(0) for m in follow(policy, [19], 41, decoder=THIN, think_ids=(NEVER, close))]
    assert max(sizes[: end + 1]) <= 25
    if exempt:
        assert sizes[end:] == list(range(sizes[end], sizes[end] + len(sizes) - end))
        assert sizes[-1] > 25
    else:
        assert max(sizes) <= 25


# --- what ---------------------------------------------------------------------------------------------------


@dataclass
class Watched(Rkv):
    """Notes what it saw and what it evicted."""

    def setup(self, shape: Any) -> None:
        super().setup(shape)
        self.notes: list[tuple[Any, ...]] = []

    def decide(self, step: Step) -> Iterator[Evict]:
        due, keep = self.due(step)
        edits = list(super().decide(step))
        assert [e.layer for e in edits] == ([None] if due.any() else [])
        for layer in range(step.shape.layers if edits else 0):
            self.notes.append(
                (
                    step.keys(layer),
                    step.queries(layer),
                    step.held(layer).clone(),
                    step.protected(layer).clone(),
                    due[layer],
                    keep[layer],
                    edits[0].drop[layer],
                )
            )
        yield from edits


def plain(k: Tensor, q: Tensor, budget: int, protected: list[bool], p: Rkv) -> tuple[set[int], bool]:
    """One lane as the code has it: k [S, D], q [g, α, D]. The columns kept, and whether a tie could be meant."""
    s, count = len(k), sum(protected)
    alpha = min(p.alpha, budget - count)
    logits = (q @ k.T / k.shape[-1] ** 0.5).amax(0)[:, : s - alpha]
    importance = logits.softmax(-1).mean(0)
    side = p.kernel_size // 2
    importance = torch.stack([importance[max(0, j - side) : j + side + 1].max() for j in range(s - alpha)])
    unit = k / (k.norm(dim=-1, keepdim=True) + 1e-8)
    c = unit @ unit.T
    c.fill_diagonal_(0)
    for i in range(s):
        similar = (c[i] > p.threshold).nonzero().flatten()
        c[i, int(similar[-1]) if len(similar) else 0] = 0
    z = p.lam * importance - (1 - p.lam) * c.mean(0).softmax(0)[: s - alpha]
    kept = {j for j in range(s) if protected[j] or j >= s - alpha}
    ranked = sorted((j for j in range(s - alpha) if not protected[j]), key=lambda j: (-float(z[j]), j))
    room = budget - len(kept)
    near = 0 < room < len(ranked) and abs(float(z[ranked[room - 1]] - z[ranked[room]])) < 1e-6
    return kept | set(ranked[:room]), near


@given(
    prompts=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    budget=st.integers(2, 12),
    alpha=st.integers(1, 4),
    buffer=st.integers(0, 5),
    kernel_size=st.sampled_from([1, 3, 7]),
    lam=st.sampled_from([0.1, 0.5, 1.0]),
    threshold=st.sampled_from([0.5, 0.9]),
    protect=st.booleans(),
    global_clock=st.booleans(),
)
@settings(max_examples=settings.default.max_examples * 3 // 10)
def test_decisions_are_the_codes(
    prompts: list[int],
    budget: int,
    alpha: int,
    buffer: int,
    kernel_size: int,
    lam: float,
    threshold: float,
    protect: bool,
    global_clock: bool,
) -> None:
    """In every lane of a ragged batch, beside an idle row; and no lane ever exceeds its limit."""
    if protect:
        budget += max(prompts)
    policy = Watched(
        budget=budget,
        lam=lam,
        alpha=alpha,
        buffer=buffer,
        threshold=threshold,
        kernel_size=kernel_size,
        global_clock=global_clock and buffer > 0,
        protect_prompt=protect,
    )
    for manager in follow(policy, prompts, 12, rows=len(prompts) + 1):
        for seq in range(len(prompts)):
            assert manager.held(seq) <= budget + buffer
            for kept in held(manager, seq):
                last = manager.length(seq)
                window = range(max(0, last - min(alpha, budget - protect * prompts[seq])), last)
                assert set(kept) >= set(window) | set(range(protect * prompts[seq]))
    for k, q, count, protected, due, keep, drop in policy.notes:
        assert q.shape[2] == alpha
        for b in range(k.shape[0]):
            for h in range(k.shape[1]):
                n = int(count[b, h])
                if not due[b, h]:
                    assert not drop[b, h].any()
                    continue
                group = q[b].unflatten(0, (k.shape[1], -1))[h]
                want, near = plain(k[b, h, :n], group, int(keep[b, h]), protected[b, h, :n].tolist(), policy)
                got = {j for j in range(n) if not drop[b, h, j]}
                assert len(got) == int(keep[b, h])
                assert got == want or near


def test_a_batch_is_no_worse_than_its_parts() -> None:
    prompts, steps = [3, 17, 9], 25

    def run(seqs: list[int]) -> dict[int, list[list[list[int]]]]:
        policy = Rkv(budget=12, alpha=3, buffer=4)
        states = follow(policy, [prompts[i] for i in seqs], steps, seqs=seqs, rows=3)
        history = [{seq: held(manager, seq) for seq in seqs} for manager in states]
        return {seq: [at[seq] for at in history] for seq in seqs}

    together = run([0, 1, 2])
    for seq in range(3):
        assert run([seq])[seq] == together[seq]


@pytest.mark.parametrize("how", ["gather", "overlapped"])
def test_compaction_changes_nothing_that_is_kept(how: Any) -> None:
    """Nor any key or value."""
    policies = (Rkv(budget=12, alpha=3, buffer=4, compaction=name) for name in ("none", how))
    plain, moved = (list(follow(p, [3, 17, 9], 25, rows=3))[-1] for p in policies)
    assert plain.store.compaction is None
    assert moved.store.compaction is not None
    for seq in range(3):
        assert held(moved, seq) == held(plain, seq)
    for layer in range(2):
        for got, want in zip(Reading(moved.store)(layer), Reading(plain.store)(layer), strict=True):
            assert torch.equal(got, want)


def test_nobody_due_costs_nothing() -> None:
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def call(*args: Any, **named: Any) -> Tensor:
            calls[name] += 1
            result: Tensor = getattr(REFERENCE, name)(*args, **named)
            return result

        return call

    backend = replace(
        REFERENCE, **{n: counting(n) for n in ("window_importance", "redundancy", "running_redundancy")}
    )
    for gap, op in ((6, "running_redundancy"), (9, "redundancy")):
        calls.clear()
        policy = Rkv(budget=12, alpha=3, buffer=gap)
        for i, _ in enumerate(follow(policy, [5, 8], 20, backend=backend)):
            # at 12 + gap tokens, and `gap` later again; two layers each
            want = 2 * sum(i >= at + n * gap for at in (7 + gap, 4 + gap) for n in (0, 1))
            assert calls == ({"window_importance": want, op: want} if want else {})


@dataclass
class Newest(Policy):
    """Another that evicts: every 7 tokens, so that 10 stay, in all heads alike."""

    budget: int | None = 10
    name = "newest"
    scope = "sequence"
    slack = 6

    def decide(self, step: Step) -> Iterable[Edit]:
        column = torch.arange(step.pos().shape[-1])
        yield Evict(
            (step.active[None, :, None] & (step.clock % 7 == 0)[None, :, None])[..., None]
            & (column < step.held()[..., None] - 10)
        )


def test_in_a_stack() -> None:
    """Beside another that evicts: each lane is scored by what it holds, whoever has emptied it."""
    policy = Stack([Newest(), Rkv(budget=12, alpha=3, buffer=4)])
    sizes = [[len(lane) for lane in held(m, 0)] for m in follow(policy, [17], 25)]  # [step][lane]
    assert all(max(sizes[i]) <= (10 if i % 7 == 0 else 15) for i in range(26))
    assert any(b == 12 for one, two in pairwise(sizes) for a, b in zip(one, two, strict=True) if a == 15)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lam": 1.5}, "from 0 to 1"),
        ({"lam": -0.1}, "from 0 to 1"),
        ({"recent": 1.1}, "recent is 1.1; it must be"),
        ({"recent": -0.1}, "recent is -0.1; it must be"),
        ({"recent": float("nan")}, "recent is nan; it must be"),
        ({"alpha": 0}, "alpha must be at least 1"),
        ({"buffer": -1}, "buffer at least 0"),
        ({"buffer": 0, "global_clock": True}, "at least 1"),
        ({"kernel_size": 4}, "odd"),
        ({"kernel_size": 0}, "odd"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Rkv(budget=300, **wrong)
