"""Random Attention: the worked example, when it evicts, and how long tokens stay."""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.backend import REFERENCE
from minithink.errors import UsageError
from minithink.kv.contract import Policy
from minithink.kv.sizes import check_budget
from minithink.policies import random_attention
from minithink.policies.random import Random
from minithink.policies.random_attention import RandomAttention, keys
from tests.policies.drive import follow, followed, held

torch.set_num_threads(1)


def key_of(head: int, game: int) -> int:
    """blake2b of `seed|sample|layer|head|round`, as int64."""
    return int.from_bytes(blake2b(f"0|a|0|{head}|{game}".encode(), digest_size=8).digest(), "little", signed=True)


def step_of(pos: list[list[int]], prompt: int, budget: int, protects: int) -> Any:
    """A step of one layer and row whose heads hold these positions."""
    held_now = torch.tensor(pos, dtype=torch.int32)[None, None]
    return SimpleNamespace(
        ops=REFERENCE,
        any=lambda x: bool(x.any()),
        active=torch.ones(1, dtype=torch.bool),
        note=lambda *_: None,
        clock=torch.tensor([2]),
        prompt=torch.tensor([prompt]),
        protects=torch.tensor([protects]),
        budget=torch.full((1, 1, len(pos)), budget, dtype=torch.int32),
        wants_scores=False,
        pos=lambda layer=None: held_now if layer is None else held_now[layer],
        held=lambda: (held_now >= 0).sum(-1),
        protected=lambda: held_now < protects,
        shape=SimpleNamespace(layers=1, rows=1, kv_heads=len(pos)),
    )


def stays(policy: Any, step: Any) -> list[list[int]]:
    (edit,) = policy.decide(step)
    rows = zip(step.pos()[0, 0], edit.drop[0, 0], strict=True)
    return [pos[~drop].tolist() for pos, drop in rows]


@pytest.mark.parametrize("clip", [False, True])
def test_worked_example(monkeypatch: pytest.MonkeyPatch, clip: bool) -> None:
    """Two rounds of two heads: prompt {0, 1}, B = 6, b = 2, eight tokens held. A prompt that fits is not clipped."""
    policy, protects = RandomAttention(budget=6, buffer=2, clip=clip, protect_prompt=not clip), 0 if clip else 2
    monkeypatch.setattr(random_attention, "keys", lambda *_: torch.tensor([[[key_of(0, 0), key_of(1, 0)]]]))
    first = stays(policy, step_of([list(range(8))] * 2, 2, 6, protects))
    assert first == [[0, 1, 4, 5, 6, 7], [0, 1, 3, 5, 6, 7]]
    monkeypatch.setattr(random_attention, "keys", lambda *_: torch.tensor([[[key_of(0, 1), key_of(1, 1)]]]))
    second = stays(policy, step_of([[*kept, 8, 9] for kept in first], 2, 6, protects))
    assert second == [[0, 1, 4, 6, 8, 9], [0, 1, 5, 6, 8, 9]]


def test_a_prompt_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused; with clip its first B − b − 1 tokens stay."""
    with pytest.raises(UsageError, match="budget"):
        check_budget(RandomAttention(budget=8, buffer=2), 6)
    check_budget(RandomAttention(budget=9, buffer=2), 6)
    monkeypatch.setattr(random_attention, "keys", lambda *_: torch.tensor([[[key_of(0, 0), key_of(1, 0)]]]))
    policy = RandomAttention(budget=6, buffer=2, clip=True, protect_prompt=False)
    assert stays(policy, step_of([list(range(8))] * 2, 6, 6, 0)) == [[0, 1, 2, 5, 6, 7]] * 2


def test_clip_makes_room_for_what_the_schedule_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 8 tokens 5 stay: the last 2, the first 5 − 2 − 1 of the prompt's, and one that is drawn."""
    monkeypatch.setattr(random_attention, "keys", lambda seed, _: torch.tensor([[[seed]]]))
    drawn = set()
    for seed in range(20):
        policy = RandomAttention(8, 2, seed, clip=True, protect_prompt=False, schedule="sawtooth:8/5")
        (kept,) = stays(policy, step_of([list(range(8))], 6, 8, 0))
        assert [*kept[:2], *kept[3:]] == [0, 1, 6, 7]
        drawn.add(kept[2])
    assert drawn == {2, 3, 4, 5}


def test_lanes_evict_each_at_its_own_time() -> None:
    """Of two heads, one holds B + b tokens and the other one less."""
    full, short = stays(RandomAttention(budget=6, buffer=2), step_of([list(range(8)), [*range(7), -1]], 2, 6, 2))
    assert len(full) == 6
    assert short == [*range(7), -1]


def test_defaults() -> None:
    policy = RandomAttention(budget=100)
    assert (policy.buffer, policy.scope, policy.clip, policy.protect_prompt) == (64, "head", False, True)


@pytest.mark.parametrize("options", [{"buffer": 0}, {"clip": True}])
def test_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="random_attention"):
        RandomAttention(budget=9, **options)


def test_it_saws_between_budget_and_buffer() -> None:
    """The prompt and the last b tokens stay; b tokens go once B + b are held."""
    policy, before = RandomAttention(budget=14, buffer=4), 6
    for i, manager in enumerate(follow(policy, [6], 40)):
        now = manager.held(0)
        assert now == (14 if before == 17 else before + (i > 0))
        for table in held(manager, 0):
            assert table[:6] == list(range(6))
            assert table[-4:] == list(range(2 + i, 6 + i))
        before = now


@settings(deadline=None, max_examples=10)
@given(seqs=st.permutations([0, 1, 2]), alone=st.integers(0, 2), scope=st.sampled_from(["head", "layer"]))
def test_draws_do_not_depend_on_the_batch(seqs: list[int], alone: int, scope: Any) -> None:
    prompts = [5, 8, 3]
    together = followed(
        RandomAttention(budget=14, buffer=4, scope=scope), [prompts[seq] for seq in seqs], 25, seqs=seqs
    )
    single = followed(RandomAttention(budget=14, buffer=4, scope=scope), [prompts[alone]], 25, seqs=[alone])
    assert held(together, alone) == held(single, alone)
    assert len(set(map(tuple, held(single, alone)))) == (4 if scope == "head" else 2)  # layers and heads differ


def test_survival() -> None:
    """A token behind prompt and window survives r rounds with p^r, p = 1 − b/(B − n). Every round draws anew."""
    lanes, pos, budget, buffer = 4000, list(range(24)), 20, 4
    policy = RandomAttention(budget=budget, buffer=buffer)
    step = step_of([pos] * lanes, 4, budget, 4)
    kept = torch.tensor(stays(policy, step))
    rounds = 3
    for r in range(1, rounds):
        more = torch.arange(24 + 4 * (r - 1), 24 + 4 * r).expand(lanes, -1)
        step = step_of(torch.cat((kept, more), 1).tolist(), 4, budget, 4)
        step.clock += 4 * r
        kept = torch.tensor(stays(policy, step))
    p = 1 - buffer / (budget - 4)
    for token in (4, 11, 19):
        assert (kept == token).any(1).float().mean().item() == pytest.approx(p**rounds, abs=0.03)


@pytest.mark.parametrize("policy", [RandomAttention(budget=12, buffer=1), Random(budget=12, protect_prompt=True)])
def test_without_a_window_it_is_random(policy: Policy) -> None:
    """With b = 1 a token of age a is held with (1 − 1/(B − n))^a, as `random` holds it."""
    lanes, prompt = 3000, 4
    kept = torch.arange(12).expand(lanes, -1)
    for clock in range(9, 9 + 12):
        step = step_of(torch.nn.functional.pad(kept, (0, 1), value=prompt + clock - 1).tolist(), prompt, 12, prompt)
        step.clock = torch.tensor([clock])
        kept = torch.tensor(stays(policy, step))
    for age in (0, 1, 2, 5, 11):
        held_now = (kept == prompt + 20 - 1 - age).any(1).float().mean().item()
        assert held_now == pytest.approx((1 - 1 / 8) ** age, abs=0.04)


def test_keys_differ() -> None:
    """By seed, layer, head, prompt and round."""
    step, got = step_of([[0, 1]] * 5, 2, 1, 0), list[int]()
    for seed, clock, prompt in ((0, 2, 2), (1, 2, 2), (0, 3, 2), (0, 2, 3), (-1, 2, 2)):
        step.clock, step.prompt = torch.tensor([clock]), torch.tensor([prompt])
        got += keys(seed, step).flatten().tolist()
    assert len(set(got)) == 25
    assert all(a != b for a, b in pairwise(sorted(got)))


def test_seeds_differ() -> None:
    step = step_of([list(range(40))], 2, 20, 2)
    first, again, other = (stays(RandomAttention(budget=20, buffer=4, seed=seed), step) for seed in (1, 1, 2))
    assert first == again != other
