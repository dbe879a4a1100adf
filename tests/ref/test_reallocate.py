"""Algorithm 2: the worked examples, the same by fractions and a search for c, and what holds for every input."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.reallocate import reallocate
from tests.compare import assert_same

Heads = list[list[int]]  # a number for each head of each layer


def flat(x: Heads) -> list[int]:
    return [n for layer in x for n in layer]


def moved(crf: Any, budget: Heads, low: Heads, high: Heads, damping: float) -> list[int]:
    """New budgets of one row, head after head."""
    sums = torch.tensor(crf, dtype=torch.float64).unsqueeze(1)
    bounds = (torch.tensor(x, dtype=torch.int32).unsqueeze(1) for x in (budget, low, high))
    new = reallocate(sums, *bounds, torch.tensor([True]), damping)
    assert new.dtype == torch.int32
    return new.flatten().tolist()


# --- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damping", "every", "want"),
    [
        (1.0, 32, [[4, 4, 5, 27], [5, 10, 12, 13], [4, 4, 5, 27]]),  # without end
        (0.5, 32, [[5, 6, 9, 20], [5, 6, 9, 20]]),
        (1.0, 8, [[4, 7, 11, 18], [6, 6, 6, 22]]),  # one head can fill no more than 18, then 26
    ],
)
def test_two_layers_of_two_heads(damping: float, every: int, want: Heads) -> None:
    """Budgets are full, and CRF does not depend on them; the prompt and `min_budget` take 4 tokens."""
    budget = [[10, 10], [10, 10]]
    for new in want:
        high = [[b + every for b in layer] for layer in budget]
        assert moved([[9, 16], [25, 144]], budget, [[4, 4]] * 2, high, damping) == new
        budget = [new[:2], new[2:]]


@pytest.mark.parametrize(
    ("damping", "budget", "low", "high", "want"),
    [
        (1.0, [10, 10, 10, 10], 0, 40, [1.856, 3.299, 5.155, 29.691]),
        (1.0, [10, 10, 10, 10], 4, 42, [4, 4, 4.734, 27.266]),
        (1.0, [4, 4, 5, 27], 0, 40, [5.353, 9.517, 12.160, 12.970]),
        (0.5, [10, 10, 10, 10], 0, 40, [4.762, 6.349, 8.497, 20.392]),
        (0.5, [5, 6, 9, 20], 0, 40, [4.762, 6.349, 8.497, 20.392]),
        (1.0, [10, 10, 10, 10], 4, 18, [4, 7.024, 10.976, 18]),
        (1.0, [4, 7, 11, 18], 0, 40, [5.567, 5.656, 6.367, 22.411]),
    ],
)
def test_targets_before_they_are_rounded(
    damping: float, budget: list[int], low: int, high: int, want: list[float]
) -> None:
    """With a thousand times as many tokens all is the same but for the rounding."""

    def thousands(*tokens: int) -> Heads:
        return [[1000 * n for n in tokens[:2]], [1000 * n for n in tokens[2:]]]

    got = moved([[9, 16], [25, 144]], thousands(*budget), thousands(*[low] * 4), thousands(*[high] * 4), damping)
    assert [n / 1000 for n in got] == pytest.approx(want, abs=0.0011)


def test_of_equal_remainders_the_lower_head_gets_the_token() -> None:
    assert moved([[7.0] * 4], [[1, 4, 3, 2]], [[1] * 4], [[9] * 4], 0.5) == [3, 3, 2, 2]
    assert moved([[7.0], [7.0], [7.0]], [[4], [3], [3]], [[1]] * 3, [[9]] * 3, 0.5) == [4, 3, 3]


def test_a_level_without_hits_keeps_its_shares() -> None:
    low, high = [[1, 1], [1, 1]], [[40, 40], [40, 40]]
    assert moved([[0, 0], [0, 0]], [[9, 3], [7, 1]], low, high, 0.5) == [9, 3, 7, 1]
    # √CRF: layers 3 : 1, heads 2 : 1, and in the second layer 3 : 1 as they were
    assert moved([[4, 1], [0, 0]], [[9, 3], [9, 3]], low, high, 1.0)[2:] == [1, 1]
    assert moved([[0, 0], [2, 18]], [[9, 3], [9, 3]], [[2, 2], [2, 2]], high, 0.5) == [2, 2, 5, 15]


def test_a_head_without_hits_gets_what_the_others_cannot_hold() -> None:
    assert moved([[0, 5]], [[8, 8]], [[1, 1]], [[16, 10]], 0.5) == [6, 10]


@pytest.mark.parametrize(
    ("low", "high", "moves"), [([9, 9], [20, 20], True), ([1, 1], [7, 8], True), ([1, 1], [20, 20], False)]
)
def test_budgets_stay(low: list[int], high: list[int], moves: bool) -> None:
    """Where the bounds do not add up to B_total, as while nothing is scarce, and in rows that are not to move."""
    budget = torch.tensor([[[8, 8]]], dtype=torch.int32)
    bounds = (torch.tensor([[x]], dtype=torch.int32) for x in (low, high))
    new = reallocate(torch.tensor([[[1.0, 9.0]]], dtype=torch.float64), budget, *bounds, torch.tensor([moves]), 0.5)
    assert_same("budgets", new, budget)


# --- by fractions ---------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn, damping: float | None = None) -> tuple[Heads, Heads, Heads, Heads]:
    """CRF, budgets, low, high of one row, whose bounds admit B_total. CRFs are squares, so that both weights are
    fractions."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def numbers(least: int, most: int) -> Heads:
        return [[draw(st.integers(least, most)) for _ in range(heads)] for _ in range(layers)]

    crf, low = numbers(0, draw(st.sampled_from([1, 3, 20]))), numbers(1, 6)
    budget = [[least + draw(st.integers(0, 20)) for least in layer] for layer in low]
    held = [
        [draw(st.integers(least, most)) for least, most in zip(*of, strict=True)]
        for of in zip(low, budget, strict=True)
    ]
    every = draw(st.integers(1, 40))
    high = [[n + every for n in layer] for layer in held]
    assume(sum(map(sum, high)) >= sum(map(sum, budget)))
    return crf, budget, low, high


def by_fractions(crf: Heads, budget: Heads, low: Heads, high: Heads) -> list[int]:
    """The letter of algorithm 2 (damping 1), exact. c lies between two bounds, where the sum is a straight line."""
    total = sum(map(sum, budget))

    def shares(weights: list[Fraction], old: list[int]) -> list[Fraction]:
        weights = weights if any(weights) else [Fraction(b) for b in old]
        return [w / sum(weights) for w in weights]

    of_layer = shares([Fraction(sum(c), sum(b)) for c, b in zip(crf, budget, strict=True)], list(map(sum, budget)))
    x = [
        share * own
        for share, c, b in zip(of_layer, crf, budget, strict=True)
        for own in shares([Fraction(i, j) for i, j in zip(c, b, strict=True)], b)
    ]
    x = [max(share, Fraction(1, 2**34)) for share in x]
    lows, highs = flat(low), flat(high)

    def at(c: Fraction) -> list[Fraction]:
        return [min(max(c * share, Fraction(a)), Fraction(b)) for share, a, b in zip(x, lows, highs, strict=True)]

    borders = sorted(
        {Fraction(bound) / share for bounds in (lows, highs) for bound, share in zip(bounds, x, strict=True)}
    )
    below = max(c for c in borders if sum(at(c)) <= total)
    above = min((c for c in borders if sum(at(c)) >= total), default=below)
    slope = sum(at(above)) - sum(at(below))
    c = below + (above - below) * (total - sum(at(below))) / slope if slope else below
    exact = at(c)
    assert sum(exact) == total
    order = sorted(range(len(x)), key=lambda i: (-(exact[i] % 1), i))
    up = set(order[: total - sum(n // 1 for n in exact)])
    return [n // 1 + (i in up) for i, n in enumerate(exact)]


@given(rows())
def test_the_letter_by_fractions(row: tuple[Heads, Heads, Heads, Heads]) -> None:
    """To within the rounding of targets to 2^−34 of B_total, which may decide between equal remainders."""
    got, want = moved(*row, 1.0), by_fractions(*row)
    assert sum(got) == sum(want)
    assert all(abs(a - b) <= 1 for a, b in zip(got, want, strict=True))
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= 2


@given(rows(), st.sampled_from([0.25, 0.5, 0.8, 1.0]))
def test_the_sum_stays_and_bounds_hold(row: tuple[Heads, Heads, Heads, Heads], damping: float) -> None:
    crf, budget, low, high = row
    new = moved(crf, budget, low, high, damping)
    assert sum(new) == sum(map(sum, budget))
    assert all(a <= n <= b for a, n, b in zip(flat(low), new, flat(high), strict=True))


@given(rows(), st.sampled_from([0.5, 1.0]), st.randoms(use_true_random=False))
def test_the_order_of_heads_and_layers_does_not_matter(
    row: tuple[Heads, Heads, Heads, Heads], damping: float, random: Any
) -> None:
    """But for tokens that go by equal remainders: the multiset of budgets is the same, and no head differs by two."""
    crf, *_ = row
    layers = random.sample(range(len(crf)), len(crf))
    heads = random.sample(range(len(crf[0])), len(crf[0]))
    there = [layer * len(heads) + head for layer, head in product(layers, heads)]
    turned = [[[layer[h] for h in heads] for layer in (x[i] for i in layers)] for x in row]
    new, other = moved(*row, damping), moved(*turned, damping)
    assert all(abs(new[there[i]] - other[i]) <= 1 for i in range(len(new)))


@given(rows(), st.randoms(use_true_random=False))
def test_distinct_heads_do_not_depend_on_their_order(row: tuple[Heads, Heads, Heads, Heads], random: Any) -> None:
    """CRFs that no two heads share, irrational targets: no remainders are equal."""
    crf, budget, low, high = row
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]
    crf = [[primes[i * len(crf[0]) + j] for j in range(len(crf[0]))] for i in range(len(crf))]
    layers = random.sample(range(len(crf)), len(crf))
    heads = random.sample(range(len(crf[0])), len(crf[0]))
    turned = [[[layer[h] for h in heads] for layer in (x[i] for i in layers)] for x in (crf, budget, low, high)]
    new, other = moved(crf, budget, low, high, 0.5), moved(*turned, 0.5)
    there = [layer * len(heads) + head for layer, head in product(layers, heads)]
    assert [new[i] for i in there] == other


@given(rows(), st.integers(1, 300))
def test_half_damping_settles_at_once(row: tuple[Heads, Heads, Heads, Heads], every: int) -> None:
    """CRF that does not depend on budgets: √CRF is the target whatever the budgets were, and stays."""
    crf, budget, low, _ = row
    crf = [[n + 1 for n in layer] for layer in crf]
    most = [[sum(map(sum, budget))] * len(layer) for layer in budget]
    first = moved(crf, budget, low, most, 0.5)
    again = [first[i * len(low[0]) : (i + 1) * len(low[0])] for i in range(len(low))]
    assert moved(crf, again, low, most, 0.5) == first


@pytest.mark.parametrize("damping", [0.25, 0.5, 0.75, 1.0])
def test_the_distance_from_the_root_of_crf_shrinks_by_1_minus_2a(damping: float) -> None:
    """Constant CRF: √CRF is the fixed point of both levels, and log B's distance from it is multiplied by 1 − 2a."""
    crf, low, high = [[9, 16], [25, 144]], [[1, 1]] * 2, [[2**26] * 2] * 2
    budget = [[2**18, 2**20], [2**19, 2**21]]

    def distance(budget: Heads) -> list[float]:
        """Of the layers, then of the heads of each layer: √CRF of the layers is 5 and 13."""
        sums = [sum(layer) for layer in budget]
        pairs = [(sums, (5, 13)), *zip(budget, ((3, 4), (5, 12)), strict=True)]
        return [math.log(b[0] / b[1]) - math.log(root[0] / root[1]) for b, root in pairs]

    for _ in range(3):
        new = moved(crf, budget, low, high, damping)
        after = [new[:2], new[2:]]
        want = [(1 - 2 * damping) * d for d in distance(budget)]
        assert distance(after) == pytest.approx(want, abs=1e-4)
        budget = after


def test_without_damping_it_swings() -> None:
    """CRF (4, 1) at 20 tokens: (16, 4), (10, 10), (16, 4), …"""
    low, high, budget = [[1, 1]], [[20, 20]], [[10, 10]]
    seen = []
    for _ in range(4):
        seen.append(moved([[4, 1]], budget, low, high, 1.0))
        budget = [seen[-1]]
    assert seen == [[16, 4], [10, 10], [16, 4], [10, 10]]


def test_rows_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    crf = torch.rand(3, 5, 2, generator=generator, dtype=torch.float64)
    budget = torch.randint(3, 20, (3, 5, 2), generator=generator, dtype=torch.int32)
    low, high, moves = torch.full_like(budget, 2), budget + 30, torch.tensor([True, False, True, True, True])

    def of(rows: slice) -> Tensor:
        return reallocate(crf[:, rows], budget[:, rows], low[:, rows], high[:, rows], moves[rows], 0.5)

    assert_same("budgets", of(slice(5)), torch.cat([of(slice(i, i + 1)) for i in range(5)], 1))
