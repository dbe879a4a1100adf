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
    if len(x) < FEWEST or spearman(x, y) is None:
        return None
    drawn = _draws(len(x), seed, resamples)
    return _ends(_correlations(_resampled(x, drawn), _resampled(y, drawn)), confidence)


def correlation_difference(
    x: Sequence[float],
    other: Sequence[float],
    y: Sequence[float],
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> tuple[float, float, float] | None:
    """ρ(x, y) − ρ(other, y): which of two orders is more like a third? And its percentile bootstrap interval. Both
    correlations are of the same policies in every resample, because they share what they have in common.

    Args:
        x, other, y: a value for each policy, in the same order.
        seed, resamples, confidence: as of `interval`.

    Returns:
        The difference and the two ends; None as of `interval`.
    """
    first = spearman(x, y)
    second = spearman(other, y)
    if len(x) < FEWEST or first is None or second is None:
        return None
    drawn = _draws(len(x), seed, resamples)
    third = _resampled(y, drawn)
    found = _correlations(_resampled(x, drawn), third) - _correlations(_resampled(other, drawn), third)
    return first - second, *_ends(found, confidence)


def _draws(n: int, seed: int, resamples: int) -> NDArray[np.int64]:
    """Which policies each resample has: [resamples, n]."""
    return np.random.default_rng(seed).integers(n, size=(resamples, n))


def _resampled(values: Sequence[float], drawn: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values of each resample's policies: [resamples, n]."""
    return np.asarray(values, np.float64)[drawn]


def _ends(found: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Between which two values that share of the resamples lies; NaN do not count."""
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
