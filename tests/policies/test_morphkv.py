"""MorphKV: the worked example of its code, its code's order of events, and a running decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from minithink.kv.contract import Evict, Step
from minithink.policies import parse
from minithink.policies.morphkv import MorphKV
from minithink.ref.window_peak import window_peak
from tests.policies.by_rows import layer_scores, step_of
from tests.policies.drive import Ear, follow, held

torch.set_num_threads(1)

# --- by hand ------------------------------------------------------------------------------------------------

KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])
QUERIES = torch.tensor([[(1, 0.2), (0.3, 1)], [(0.5, -0.5), (1, 0.5)]])  # of two heads, at tokens 4 and 5
P = torch.tensor([[0.4785, 0.4274, 0.0941], [0.4633, 0.4022, 0.1344]])  # token 4's, over the first three keys


def step_with(policy: MorphKV, held: Sequence[int], queries: Tensor, keys: Tensor = KEYS) -> Any:
    """The step in which the last token held came; one KV head, two query heads [2, rows, D]."""
    step = step_of(policy, 1, held[-1], held, [0.0] * len(held))
    more = {"queries": lambda layer: queries[None], "keys": lambda layer, rows: keys[None, None, list(held)]}
    return SimpleNamespace(**{**vars(step), **more})


def test_worked_example() -> None:
    """W = 2, C = 4. The code chooses in the step of token 5, by token 4's query; here the step of token 4 does."""
    policy = MorphKV(budget=4, window=2)
    assert policy.demands[0].rows == 1
    step = step_with(policy, range(5), QUERIES[:, :1])
    for fuse in ("max", "sum"):  # over one query
        score = layer_scores(replace(policy, fuse=fuse), step)  # type: ignore[arg-type]
        assert score[0, 0, :3].tolist() == pytest.approx(P.amax(0).tolist(), abs=6e-5)
    (edit,) = policy.decide(step)
    stay = [p for p, drop in enumerate(edit.drop.flatten().tolist()) if not drop]
    assert stay == [0, 1, 3, 4]  # beside which token 5 comes
    assert not list(policy.decide(step_with(policy, range(4), QUERIES[:, :1])))  # a full head keeps all


def test_lanes_that_are_not_due_have_no_key_to_score() -> None:
    """Two KV heads hold five tokens each, and one of them may keep five."""
    policy, scored = MorphKV(budget=4, window=2), list[Tensor]()

    def spy(q: Tensor, k: Tensor, valid: Tensor, fuse: str) -> Tensor:
        scored.append(valid)
        return window_peak(q, k, valid, fuse)

    step = step_of(policy, 1, 4, range(5), [[0.0] * 5] * 2)
    step.budget, step.ops = torch.tensor([[[5, 4]]]), replace(REFERENCE, window_peak=spy)
    step.queries, step.keys = lambda layer: QUERIES[None, :, :1], lambda layer, rows: KEYS[:5].expand(1, 2, 5, 2)
    (edit,) = policy.decide(step)
    assert [valid.tolist() for valid in scored] == [[[[False] * 5, [True] * 3 + [False] * 2]]]
    assert edit.drop.sum(-1).tolist() == [[[0, 1]]]


def test_several_queries() -> None:
    """The maximum over the group comes after the softmax, and before the sum over queries."""
    policy = MorphKV(budget=4, window=2, queries="W")
    assert policy.demands[0].rows == 2
    step = step_with(policy, range(6), QUERIES)
    p = (QUERIES @ KEYS[:4].T / 2**0.5).softmax(-1)  # [heads, queries, keys]
    for fuse, want in (("max", p.amax((0, 1))), ("sum", p.amax(0).sum(0))):
        score = layer_scores(replace(policy, fuse=fuse), step)  # type: ignore[arg-type]
        assert score[0, 0, :4].tolist() == pytest.approx(want.tolist(), abs=1e-6)


def test_defaults() -> None:
    """Those of the command line of the authors' code."""
    policy = MorphKV(budget=9)
    assert (policy.window, policy.queries, policy.fuse, policy.protect_prompt) == (3, "W-1", "max", False)


def test_the_softmax_stays_in_float32() -> None:
    """Over queries and keys of 16 bits."""
    q, k = QUERIES.bfloat16(), KEYS.bfloat16()
    policy = MorphKV(budget=4, window=2, queries="W")
    step = step_with(policy, range(6), q, k)
    want = (q.float() @ k[:4].float().T / 2**0.5).softmax(-1).amax((0, 1))
    got = layer_scores(policy, step)[0, 0, :4]
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(want.tolist(), rel=1e-6)


@given(
    window=st.integers(2, 4), more=st.integers(0, 5), fuse=st.sampled_from(["max", "sum"]), seed=st.integers(0, 99)
)
def test_the_code_attends_to_the_same_tokens(window: int, more: int, fuse: Any, seed: int) -> None:
    """The code chooses within each step, from C + 2 tokens, without the current query and the last W + 1 tokens."""
    draw = torch.Generator().manual_seed(seed)
    q, k, budget = torch.randn(2, 25, 2, generator=draw), torch.randn(25, 2, generator=draw), window + more
    policy = MorphKV(budget=budget, window=window, fuse=fuse)
    ours, theirs = [0], [0]
    for t in range(1, 25):
        ours, theirs = [*ours, t], [*theirs, t]
        if (n := len(theirs)) >= budget + 1:
            older = theirs[: n - window - 1]
            a = (q[:, t - window + 1 : t] @ k[older].T / 2**0.5).softmax(-1).amax(0)
            s = a.amax(0) if fuse == "max" else a.sum(0)
            best = s.sort(descending=True, stable=True).indices[: budget - window].tolist()
            theirs = [*sorted(older[i] for i in best), *theirs[n - window - 1 :]]
        assert ours == theirs
        for edit in policy.decide(step_with(policy, ours, q[:, t - window + 2 : t + 1], k)):
            ours = [p for p, drop in zip(ours, edit.drop.flatten().tolist(), strict=True) if not drop]


# --- a running decoder --------------------------------------------------------------------------------------


@dataclass
class Watched(MorphKV):
    """Notes what it saw and what it evicted."""

    def setup(self, shape: Any) -> None:
        super().setup(shape)
        self.seen: list[tuple[Tensor, ...]] = []

    def decide(self, step: Step) -> Iterable[Evict]:
        due, _ = self.due(step)
        for edit in super().decide(step):
            for layer in range(step.shape.layers):
                of_layer = step.held(layer).clone(), step.protected(layer), due[layer], edit.drop[layer]
                self.seen.append((step.keys(layer), step.queries(layer), *of_layer))
            yield edit


def plain(k: Tensor, q: Tensor, fixed: int, p: MorphKV) -> tuple[set[int], bool]:
    """One KV head as the code has it: k [n, D], q [g, rows, D] → the columns kept, and whether a tie could be meant.
    fixed: protected columns."""
    assert p.budget is not None
    n, room = len(k), p.budget - fixed
    window = min(p.window, room)
    a = (q @ k[: n - window].T / k.shape[-1] ** 0.5).softmax(-1).amax(0)  # [rows, n − window]
    s = (a.amax(0) if p.fuse == "max" else a.sum(0)).tolist()
    ranked = sorted(range(fixed, n - window), key=lambda j: (-s[j], j))
    room -= window
    near = 0 < room < len(ranked) and abs(s[ranked[room - 1]] - s[ranked[room]]) < 1e-6
    return {*range(fixed), *ranked[:room], *range(n - window, n)}, near


@given(
    prompts=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    more=st.integers(0, 8),
    window=st.integers(2, 6),
    queries=st.sampled_from(["W-1", "W"]),
    fuse=st.sampled_from(["max", "sum"]),
    protect=st.booleans(),
)
@settings(max_examples=settings.default.max_examples // 4)
def test_it_chooses_as_the_code_does(
    prompts: list[int], more: int, window: int, queries: Any, fuse: Any, protect: bool
) -> None:
    """In every lane of a ragged batch, beside an idle row."""
    budget = 1 + more + (max(prompts) if protect else 0)
    policy = Watched(budget=budget, window=window, queries=queries, fuse=fuse, protect_prompt=protect)
    for i, manager in enumerate(follow(policy, prompts, 16, rows=len(prompts) + 1)):
        for seq, n in enumerate(prompts):
            for lane in held(manager, seq):
                assert len(lane) == min(n + i, budget)
                assert lane[-min(window, budget) :][-1] == n + i - 1
    assert policy.seen or all(n + 16 <= budget for n in prompts)
    for k, q, count, protected, due, drop in policy.seen:
        for b, h in due.nonzero().tolist():
            n, fixed = int(count[b, h]), int(protected[b, h].sum())
            group = q.shape[1] // k.shape[1]
            want, near = plain(k[b, h, :n], q[b, h * group : (h + 1) * group], fixed, policy)
            got = set((~drop[b, h, :n]).nonzero().flatten().tolist())
            assert got == want or (near and len(got) == len(want))


@pytest.mark.parametrize("text", ["window=1", "window=0,queries=W"])
def test_settings_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="morphkv"):
        parse(f"morphkv:budget=9,{text}")


@pytest.mark.parametrize("protect", [False, True])
def test_a_recorder_hears_the_scores_of_older_tokens_that_may_go(protect: bool) -> None:
    """Not of the window, which stays in any case, nor of a protected prompt."""
    ear = Ear()
    steps = follow(MorphKV(9, window=3, protect_prompt=protect), [5], 12)
    for manager in steps:
        manager.recorder = ear
        if manager.length(0) > 10:
            count = int(ear.where.sum(-1).max())
            assert ear.where.sum(-1).eq(count).all()
            # ten tokens are held before one goes: three are the window, and five may be a protected prompt
            assert count == (2 if protect else 7)
            assert not ear.where[..., -3:].any()
