"""H2O: the worked example, and plain sums beside a running decoder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.errors import UsageError
from minithink.policies import parse
from minithink.policies.h2o import H2O
from tests.policies.by_rows import remembered, shape_of, step_of
from tests.policies.drive import followed, held
from tests.policies.fixture import KEYS, attention

QUERIES = torch.tensor([(1, 0), (0.5, 0.5), (0, 1), (-0.5, 1), (1, 0.2), (0.3, 1)])


def run(policy: H2O, mass: torch.Tensor, prompt: int, steps: int) -> list[tuple[list[int], list[float]]]:
    """What a lane holds, and the scores, after the prompt and each step. mass: [T, T], row t of token t's query over
    all tokens; the policy sees the tokens that are held, renormalised."""
    policy.setup(shape_of(policy, 1))
    lane, out = list(range(prompt)), []
    for clock in range(steps + 1):
        lane = [*lane, prompt + clock - 1] if clock else lane
        if clock:
            row = mass[prompt + clock - 1, lane]
            row = row / row.sum()
        else:
            row = torch.stack([mass[t] / mass[t].sum() for t in range(prompt)]).sum(0)[lane]
        for edit in policy.decide(step_of(policy, prompt, clock, lane, row.tolist())):
            lane = [p for p, drop in zip(lane, edit.drop.flatten().tolist(), strict=True) if not drop]  # type: ignore
        out.append((lane, remembered(policy, lane)[0]))
    return out


def test_worked_example() -> None:
    """Two heavy hitters, two recent tokens (spec §4, the authors' code)."""
    (first, s0), (second, s1), (third, s2) = run(H2O(budget=4), attention(QUERIES, KEYS).exp().tril(), 4, 2)
    assert (first, second, third) == ([0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 4, 5])
    assert s0 == pytest.approx([1.8174, 0.8722, 0.8687, 0.4418], abs=1e-4)
    assert s1 == pytest.approx([2.2045, 1.2179, 0.5877, 0.0451], abs=1e-4)
    assert s2 == pytest.approx([2.3702, 1.4009, 0.1213, 0.2168], abs=1e-4)


@given(
    prompt=st.integers(1, 6),
    steps=st.integers(1, 12),
    budget=st.integers(2, 9),
    recent=st.sampled_from([0, 0.5, 1]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_plain_sums(prompt: int, steps: int, budget: int, recent: float, seed: int) -> None:
    """As with a dictionary of sums: the newest stay, and of the others those with the largest sum."""
    mass = torch.rand(prompt + steps, prompt + steps, generator=torch.Generator().manual_seed(seed)).tril() + 0.01
    mass = mass.tril()
    sums, lane = dict[int, float](), list(range(prompt))
    for clock, (kept, score) in enumerate(run(H2O(budget=budget, recent=recent), mass, prompt, steps)):
        new = range(prompt) if clock == 0 else [prompt + clock - 1]
        lane = [*lane, *new] if clock else lane
        for t in new:
            seen = mass[t, lane] / mass[t, lane].sum()
            for p, x in zip(lane, seen.tolist(), strict=True):
                sums[p] = sums.get(p, 0.0) + x
        if len(lane) > budget:
            last = lane[len(lane) - int(budget * recent) :]
            others = sorted(set(lane) - set(last), key=lambda p: (-sums[p], p))[: budget - len(last)]
            lane = sorted([*others, *last])
        sums = {p: sums[p] for p in lane}
        assert kept == lane
        assert score == pytest.approx([sums[p] for p in lane], abs=1e-4)


def test_every_head_for_itself_and_recent_tokens_stay() -> None:
    manager = followed(parse("h2o:budget=10"), [6, 3], 30)
    for seq, length in ((0, 36), (1, 33)):
        tables = held(manager, seq)
        assert all(table[-5:] == list(range(length - 5, length)) and len(table) == 10 for table in tables)
        assert len({tuple(table) for table in tables}) > 1


def test_a_recorder_sees_the_scores_of_the_tokens_that_may_go() -> None:
    """The sums of all tokens, and that the newest two of four are no candidates, nor the protected prompt."""
    policy = H2O(budget=4, protect_prompt=True)
    policy.setup(shape_of(policy, 1))
    step, told = step_of(policy, 1, 4, [0, 1, 2, 3, 4], [0.1, 0.3, 0.2, 0.15, 0.25]), []
    step.note = lambda score, candidate: told.append((score.flatten().tolist(), candidate.flatten().tolist()))
    list(policy.decide(step))
    ((score, candidate),) = told
    assert score == pytest.approx([0.1, 0.3, 0.2, 0.15, 0.25])
    assert candidate == [False, True, True, True, False]  # ⌊3/2⌋ = 1 of the three places beside the prompt is recent


def test_a_new_sequence_finds_no_scores() -> None:
    """After `reset` a row's state is that of a policy that has seen nothing."""
    policy, fresh = H2O(budget=4), H2O(budget=4)
    fresh.setup(shape_of(fresh, 1))
    run(policy, attention(QUERIES, KEYS).exp().tril(), 4, 2)
    assert not all(torch.equal(a, b) for a, b in zip(policy.state(), fresh.state(), strict=True))
    policy.reset(0)
    assert all(torch.equal(a, b) for a, b in zip(policy.state(), fresh.state(), strict=True))


@pytest.mark.parametrize("recent", ["1.1", "-0.1", "nan"])
def test_bad_values(recent: str) -> None:
    with pytest.raises(UsageError, match=rf"recent is {recent}; it must be from 0 to 1"):
        parse(f"h2o:budget=8,recent={recent}")
