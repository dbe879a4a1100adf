"""LazyEviction: the score's table, the worked example of its code, its laws, and a running decoder."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See
from minithink.policies import parse
from minithink.policies.lazy_eviction import LazyEviction, importance
from tests.policies.by_rows import by_rows, remembered, step_of
from tests.policies.drive import follow, held

torch.set_num_threads(1)

# --- by hand ------------------------------------------------------------------------------------------------

TABLE = {  # (MRI, t − TS) → I, of the authors' code
    (0, 0): 0.5379,
    (0, 1): 0,
    (0, 9): 0,
    (1, 0): 1.5379,
    (1, 1): 1.2384,
    (1, 5): 1.0049,
    (2, 0): 1.0758,
    (2, 1): 0.9027,
    (2, 5): 0.5965,
    (5, 0): 0.5739,
    (5, 1): 0.4989,
    (5, 5): 0.2744,
    (10, 0): 0.5381,
    (10, 5): 0.3651,
}


def test_the_score() -> None:
    mri, pause = torch.tensor(list(TABLE), dtype=torch.int32).T
    assert importance(pause, mri).tolist() == pytest.approx(list(TABLE.values()), abs=6e-5)


def test_worked_example() -> None:
    """One head, a prompt of three tokens, α = 0.1, W = 2, a budget of 5."""
    rows = (
        [0.5, 0.05, 0.25, 0.2],
        [0.4, 0.05, 0.05, 0.3, 0.2],
        [0.3, 0.05, 0.05, 0.05, 0.3, 0.25],
        [0.3, 0.04, 0.2, 0.06, 0.05, 0.15, 0.2],
    )
    policy = LazyEviction(budget=5, window=2, alpha=0.1)
    steps = by_rows(policy, 3, rows)
    want = (
        ([1, 0, 1, 1], [1, 0, 1, 1]),
        ([2, 0, 1, 2, 2], [1, 0, 1, 1, 1]),
        ([3, 0, 1, 2, 3, 3], [1, 0, 1, 1, 1, 1]),
    )
    for kept, known in zip(steps, want, strict=False):
        assert kept == list(range(len(known[0])))
        assert remembered(policy, kept) == list(known)
    step = step_of(policy, 3, 4, range(7), rows[3])
    policy.watch(step)
    assert remembered(policy, range(7)) == [[4, 0, 4, 2, 3, 4, 4], [1, 0, 3, 1, 1, 1, 1]]
    score = [1.5379, 0, 0.7763, 1.0949, 1.2384, 1.5379, 1.5379]
    assert policy.scores(step, None).flatten().tolist() == pytest.approx(score, abs=6e-5)
    (edit,) = policy.decide(step)
    stay = [p for p, drop in enumerate(edit.drop.flatten().tolist()) if not drop]
    assert stay == [0, 3, 4, 5, 6]
    assert remembered(policy, stay) == [[4, 2, 3, 4, 4], [1, 1, 1, 1, 1]]
    following = step_of(policy, 3, 5, [*stay, 7], [0.0] * 6)
    policy.watch(following)  # entries close up
    assert [x.flatten().tolist()[:6] for x in policy.state()] == [[*stay, 7], [4, 2, 3, 4, 4, 4], [1] * 5 + [0]]


def test_defaults() -> None:
    """W = 32 is minithink's, α that of the authors for Qwen 7B. A lane may hold W tokens more than its budget."""
    policy = LazyEviction(budget=9)
    assert (policy.window, policy.alpha, policy.protect_prompt) == (32, 1e-4, False)
    assert policy.slack == 32
    assert policy.limit == 41


@pytest.mark.parametrize("group", ["mean", "max"])
def test_query_heads_share_stamps(group: Any) -> None:
    assert LazyEviction(budget=9, group=group).demands == (Demand(See.MASS, group=group, prompt=False),)
    assert LazyEviction(budget=9).group == "mean"


# --- laws ---------------------------------------------------------------------------------------------------

ROW = st.lists(st.integers(0, 9), min_size=40, max_size=40)


@given(
    st.lists(ROW, min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 12), st.integers(1, 5), st.booleans()
)
def test_against_plain_histories(rows: list[list[int]], prompt: int, budget: int, window: int, protect: bool) -> None:
    """Each token lists the steps at which it recurred. Of equal scores the older token is kept."""
    # The manager cuts a longer prompt when it is read, and these rows begin after it.
    budget = budget + prompt if protect else max(budget, prompt - window)
    policy = LazyEviction(budget=budget, window=window, alpha=0.5, protect_prompt=protect)
    weights = [[x / 10 for x in row] for row in rows]
    steps = {p: [0] for p in range(prompt)}
    for t, (kept, row) in enumerate(zip(by_rows(policy, prompt, weights), weights, strict=True), start=1):
        steps[prompt + t - 1] = [t - 1]
        for i, p in enumerate(sorted(steps)):
            if row[i] >= 0.5:
                steps[p].append(t)
        if t % window == 0 and len(steps) > budget:
            free = [p for p in sorted(steps) if p >= prompt or not protect]
            room = budget - (prompt if protect else 0)
            newest = free[-min(room, window) :]
            older = sorted((p for p in free if p not in newest), key=lambda p: (-worth(steps[p], t), p))
            stay = {*older[: room - len(newest)], *newest, *(p for p in steps if p not in free)}
            steps = {p: times for p, times in steps.items() if p in stay}
        assert kept == sorted(steps)
        assert len(kept) <= max(budget + window, prompt + window)


def worth(times: list[int], t: int) -> float:
    """I by the formula, rounded as float32 rounds it."""
    mri = max((b - a for a, b in pairwise(times)), default=0)
    return float(importance(torch.tensor(t - times[-1]), torch.tensor(mri)))


@given(mri=st.integers(1, 300), pause=st.integers(0, 300))
def test_a_longer_pause_is_worth_less(mri: int, pause: int) -> None:
    """And a token that never recurred is worth nothing, once it is older than a step."""
    now, later, never = importance(torch.tensor([pause, pause + 1, pause + 1]), torch.tensor([mri, mri, 0])).tolist()
    assert now >= later >= never
    assert never < 1e-30
    exact = 2 / (1 + math.exp(1 + pause / (mri + 1e-5))) if pause / mri < 600 else 0.0
    exact += 2 / (1 + math.exp(mri - 1))
    assert now == pytest.approx(exact, rel=1e-4, abs=1e-30)


@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=3), budget=st.integers(4, 14), window=st.integers(1, 6)
)
@settings(max_examples=settings.default.max_examples // 4)
def test_when_heads_evict(prompts: list[int], budget: int, window: int) -> None:
    """At every W-th token, down to the budget; the last W tokens stay, in every lane of a ragged batch."""
    policy = LazyEviction(budget=budget, window=window, alpha=0.1)
    before: dict[int, list[list[int]]] = {}
    for i, manager in enumerate(follow(policy, prompts, 25, rows=len(prompts) + 1)):
        for seq, n in enumerate(prompts):
            mine = held(manager, seq)
            for lane, had in zip(mine, before.get(seq, [list(range(n))] * len(mine)), strict=True):
                new = [n + i - 1] * (i > 0)
                if i % window == 0 and len(had + new) > budget:
                    assert len(lane) == budget
                    assert lane[-min(window, budget) :] == (had + new)[-min(window, budget) :]
                else:
                    assert lane == had + new
                assert len(lane) <= budget + window
            before[seq] = mine


def test_idle_rows_do_not_evict() -> None:
    """While a graph is captured, a decision is shown all rows."""
    policy = LazyEviction(budget=2, window=1)
    step = step_of(policy, 1, 3, range(4), [0.0] * 4)
    assert policy.due(step)[0].all()
    step.active = ~step.active
    assert not policy.due(step)[0].any()


@pytest.mark.parametrize("text", ["window=0", "alpha=0", "alpha=1.5"])
def test_settings_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="lazy_eviction"):
        parse(f"lazy_eviction:budget=9,{text}")
