"""Rank correlations: by hand, and by the definition.

To run it alone: pytest tests/evaluate/test_rank_correlation.py
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.evaluate.rank_correlation import FEWEST, correlation_difference, interval, spearman

VALUES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12)


def test_by_hand() -> None:
    """1 − 6 Σd² / (n (n² − 1)), where no values are equal."""
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([3, 1, 2, 4, 5], [0.1, 0.2, 0.3, 0.9, 0.5]) == pytest.approx(1 - 6 * (4 + 1 + 1 + 1 + 1) / 120)
    assert spearman([1, 1], [1, 2]) is None, "there is no order"


@given(VALUES)
def test_it_is_the_correlation_of_mean_ranks(pairs: list[tuple[int, int]]) -> None:
    def ranks(values: list[int]) -> list[float]:
        ordered = sorted(values)
        return [np.mean([i for i, other in enumerate(ordered) if other == value]) for value in values]

    x = [a for a, _ in pairs]
    y = [b for _, b in pairs]
    found = spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1])


def test_the_interval_is_of_resampled_policies() -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=20)
    y = x + draw.normal(size=20)
    low, high = interval(x, y) or (0.0, 0.0)
    assert -1 <= low < spearman(x, y) < high <= 1
    assert interval(x, y) == (low, high), "the seed decides"
    assert interval(x, y, seed=1) != (low, high)
    drawn = np.random.default_rng(0).integers(20, size=(200, 20))
    each = [spearman(x[one], y[one]) for one in drawn]
    assert interval(x, y, resamples=200) == pytest.approx(tuple(np.quantile(each, [0.025, 0.975])))
    wide = interval(x[:8], y[:8]) or (0.0, 0.0)
    assert wide[1] - wide[0] > high - low, "fewer policies say less"


def test_no_interval() -> None:
    few = range(FEWEST - 1)
    assert interval(few, few) is None
    assert interval([1] * 9, range(9)) is None
    assert interval([*range(FEWEST)], [*range(FEWEST)]) == (1, 1)
    assert interval([0, 0, 0, 0, 1], [0, 0, 0, 0, 1]) == pytest.approx((1, 1)), "draws without an order are left out"


def test_the_interval_of_a_difference_is_of_the_same_draws() -> None:
    draw = np.random.default_rng(2)
    y = draw.normal(size=20)
    x, other = (y + wide * draw.normal(size=20) for wide in (0.1, 9))
    drawn = np.random.default_rng(0).integers(20, size=(200, 20))
    each = [spearman(x[one], y[one]) - spearman(other[one], y[one]) for one in drawn]
    less, low, high = correlation_difference(x, other, y, resamples=200) or (0, 0, 0)
    assert less == pytest.approx(spearman(x, y) - spearman(other, y))
    assert (low, high) == pytest.approx(tuple(np.quantile(each, [0.025, 0.975])))
    assert low > 0, "an order with less noise is more like it"
    assert correlation_difference(x, x, y) == (0, 0, 0)
    few = range(FEWEST - 1)
    assert correlation_difference(few, few, few) is None
    assert correlation_difference([1] * 9, range(9), range(9)) is None
    assert correlation_difference(range(9), [1] * 9, range(9)) is None
