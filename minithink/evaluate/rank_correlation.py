"""Do two measurements put policies into the same order? Spearman's rank correlation, with an interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minithink.evaluate.intervals import CONFIDENCE, RESAMPLES

FEWEST = 4  # policies: below that an interval says nothing


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's ρ (1904): the correlation of the ranks, where equal values share the mean of their ranks. None: all
    values of one side are equal.

    Args:
        x: a value for each policy.
        y: the same, in the same order.
    """
    [found] = _correlations(np.asarray([x], np.float64), np.asarray([y], np.float64))
    return None if np.isnan(found) else float(found)


def interval(
    x: Sequence[float],
    y: Sequence[float],
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of Spearman's ρ over policies, not over problems: it says how much the order
    depends on which policies happen to be compared.

    Args:
        x, y: as of `spearman`.
        seed: of the resamples.
        resamples: how many. Those in which all values of one side are equal are left out.
        confidence: the share of the resamples inside.

    Returns:
        The two ends; None for fewer than FEWEST policies, or where all values of one side are equal.
    """
    n = len(x)
    if n < FEWEST or spearman(x, y) is None:
        return None
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    found = _correlations(np.asarray(x, np.float64)[drawn], np.asarray(y, np.float64)[drawn])
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(found, [tail, 1 - tail])
    return float(low), float(high)


def _correlations(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman's ρ of each row; NaN where all values of one side are equal. x, y: [rows, n]."""
    a = _centred_ranks(x)
    b = _centred_ranks(y)
    both = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((a * b).sum(1) / both)


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many values of its row are smaller than a value, less how many are larger: twice its rank from the middle.
    values: [rows, n]."""
    out = np.empty_like(values)
    for column in range(values.shape[1]):
        own = values[:, column, None]
        out[:, column] = (own > values).sum(1) - (own < values).sum(1)
    return out
