"""Intervals, against closed forms, against all resamples there are, and against a plain loop."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.evaluate.intervals import bootstrap, wilson

# 1 − 2/3 is not quite 1/3.
VALUES = st.lists(st.sampled_from([0, 1 / 4, 1 / 3, 1 - 2 / 3, 1 / 2, 2 / 3, 1]), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("right", "n", "want"),
    # From the closed form, by hand: at 0 of n the upper end is z²/(n + z²).
    [(0, 10, (0.0, 0.27753)), (10, 10, (0.72247, 1.0)), (5, 10, (0.23659, 0.76341)), (95, 100, (0.88825, 0.97846))],
)
def test_wilson(right: int, n: int, want: tuple[float, float]) -> None:
    assert wilson(right / n, n) == pytest.approx(want, abs=1e-5)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=5))
def test_the_bootstrap_is_that_of_all_resamples(values: list[int]) -> None:
    """Every one of the nⁿ resamples, once: the quantiles' ranks are off by what 100,000 draws leave of chance."""
    n = len(values)
    counts = Counter(Fraction(sum(resample), n) for resample in itertools.product(values, repeat=n))
    found = bootstrap(values, resamples=100_000)
    if found is None:
        assert len(counts) == 1
        return
    for end, rank in zip(found, (0.025, 0.975), strict=True):
        below = sum(c for mean, c in counts.items() if float(mean) < end - 1e-9) / n**n
        up_to = sum(c for mean, c in counts.items() if float(mean) <= end + 1e-9) / n**n
        assert below - 0.004 <= rank <= up_to + 0.004


def test_the_bootstrap_is_that_of_a_plain_loop() -> None:
    rng = random.Random(0)
    values = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(150)]
    means = sorted(sum(rng.choices(values, k=150)) / 150 for _ in range(20_000))
    found = bootstrap(values)
    assert found is not None
    # A quantile of 10,000 draws has a standard error of 0.001 here.
    assert found == pytest.approx((means[500], means[19_500]), abs=0.006)


def test_the_bootstrap_is_the_same_with_every_numpy() -> None:
    """The draws of `numpy.random.Generator` are others from numpy 2.5 on, and end at 0.750925 and 0.844503."""
    values = [0.0] * 200 + [1.0] * 210 + [math.sqrt(2)] * 190
    assert bootstrap(values) == pytest.approx((0.751094, 0.844570), abs=1e-6)


def test_the_bootstrap_near_the_normal_interval() -> None:
    """400 values of 0 and 1, half and half: 1.96 · 0.5 / √400 on both sides."""
    found = bootstrap([0.0, 1.0] * 200)
    assert found == pytest.approx((0.5 - 0.049, 0.5 + 0.049), abs=0.004)


@given(VALUES, st.randoms(use_true_random=False), st.integers(0, 3))
def test_laws_of_the_bootstrap(values: list[float], rng: random.Random, seed: int) -> None:
    found = bootstrap(values, seed, resamples=500)
    shuffled = rng.sample(values, len(values))
    assert bootstrap(shuffled, seed, resamples=500) == found, "the order does not matter"
    if found is None:
        assert len({round(value, 12) for value in values}) == 1
        return
    low, high = found
    mean = sum(values) / len(values)
    assert min(values) - 1e-12 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= max(values) + 1e-12


@given(st.lists(st.sampled_from([-1, -2 / 3, -1 / 3, 0, 1 / 3, 1 - 2 / 3, 1]), max_size=30), st.integers(0, 3))
@example([-1, 0, 1], 0)
def test_the_interval_of_the_negatives_is_mirrored(values: list[float], seed: int) -> None:
    found = bootstrap(values, seed, resamples=500)
    mirrored = bootstrap([-value for value in values], seed, resamples=500)
    if found is None:
        assert mirrored is None
        return
    low, high = found
    assert mirrored == (-high, -low)


def test_the_seed_decides_the_resamples() -> None:
    values = [i / 7 for i in range(20)]
    assert bootstrap(values, 1) == bootstrap(values, 1) != bootstrap(values, 2)
    wide, narrow = bootstrap(values, confidence=0.99), bootstrap(values, confidence=0.5)
    assert wide is not None
    assert narrow is not None
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize("values", [[], [0.0], [1.0] * 50, [2 / 3 - 1 / 3, 1 / 3, 1 - 2 / 3]])
def test_equal_values_have_no_bootstrap(values: list[float]) -> None:
    """Also those that only rounding tells apart."""
    assert bootstrap(values) is None
