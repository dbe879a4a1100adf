"""Random: fair lots, that depend on nothing but the sequence itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.policies.random import Random, lots
from tests.compare import assert_same
from tests.policies.drive import follow, followed, held

torch.set_num_threads(1)


@settings(max_examples=30)
@given(st.integers(1, 9), st.sampled_from(["head", "layer", "sequence"]), st.integers(0, 2**64 - 1), st.booleans())
def test_the_newest_stays_and_the_budget_is_used(budget: int, scope: str, seed: int, protect: bool) -> None:
    prompt = 3 if protect else 12
    budget += 3 * protect
    tables = {"head": 4, "layer": 2, "sequence": 1}[scope]
    before = [list(range(prompt))] * tables
    for i, manager in enumerate(follow(Random(budget, seed, scope, protect_prompt=protect), [prompt], 8)):
        now = held(manager, 0)
        assert len(now) == tables
        for old, kept in zip(before, now, strict=True):
            assert len(kept) == min(prompt + i, budget)
            assert kept[-1] == prompt + i - 1
            assert set(kept) <= {*old, prompt + i - 1}, "an evicted token came back"
            assert not protect or kept[:3] == [0, 1, 2]
        before = now


def test_the_newest_stays_when_nothing_else_may() -> None:
    sizes = []
    for i, manager in enumerate(follow(Random(6, schedule="sawtooth:6/5", protect_prompt=True), [4], 9)):
        assert held(manager, 0)[0][-1] == 3 + i
        sizes.append(len(held(manager, 0)[0]))
    assert sizes == [4, 5, 5, 5, 5, 5, 5, 5, 5, 5]


def test_lanes_and_seeds_differ() -> None:
    one, again, other = (followed(Random(8, seed), [24], 0) for seed in (1, 1, 2**32 + 1))
    assert held(one, 0) == held(again, 0)
    assert held(one, 0) != held(other, 0)
    assert len({tuple(lane) for lane in held(one, 0)}) == 4


def test_a_lot_is_keyed_by_each_word_and_not_by_the_row() -> None:
    pos = torch.arange(5, dtype=torch.int32).expand(2, 3, 2, 5)
    got = lots(7, torch.tensor([4, 4, 5], dtype=torch.int32), pos)
    assert_same("rows of equal clocks", got[:, 0], got[:, 1])
    assert got[:, 1:].unique().numel() == 2 * 2 * 2 * 5  # layers, clocks, heads, positions
    assert got.min() >= 0
    assert got.max() < 2**32
    for seed in (8, 7 + 2**32, 0):
        assert not torch.isin(lots(seed, torch.tensor([4, 4, 5]), pos), got).any()


@pytest.mark.parametrize("dimension", range(4))
def test_lots_are_uniform_and_independent(dimension: int) -> None:
    """χ² over 16 bins of the lots, and of pairs of lots that are neighbours in one of their words."""
    pos = torch.arange(32).expand(16, 8, 16, 32)
    bins = lots(3, torch.arange(8), pos) >> 28
    n = 16
    neighbours = bins * n + bins.roll(1, dimension)
    for what, counts in (
        ("one", bins.flatten().bincount(minlength=n)),
        ("pairs", neighbours.flatten().bincount(minlength=n * n)),
    ):
        expected = bins.numel() / len(counts)
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        freedom = len(counts) - 1
        assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5, f"{what}: χ² is {chi2:.0f} of {freedom}"


def test_every_token_is_kept_as_often() -> None:
    """Of 12 tokens 5 are kept, the newest always: each other token by 4 / 11 of all lanes and seeds."""
    kept = torch.zeros(12)
    for seed in range(120):
        manager = followed(Random(5, seed), [12], 0)
        for lane in held(manager, 0):
            kept[lane] += 1
    trials, p = 480, 4 / 11
    assert kept[11] == trials
    assert ((kept[:11] - trials * p).abs() < 4.5 * (trials * p * (1 - p)) ** 0.5).all(), kept
