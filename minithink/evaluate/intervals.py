"""Intervals of 95 %: what a finite number of problems says of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000


def wilson(share: float, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval (1927) of a probability, from a share observed in n trials."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(
    values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """The percentile bootstrap interval (Efron 1979) of a mean.

    A resample draws n of the n values with replacement. The interval runs from the 2.5 % to the 97.5 % quantile of
    the resamples' means (linear between order statistics). Equal values are interchangeable, so a resample is drawn
    as the number of times that each distinct value occurs: one multinomial draw, of numpy's PCG64 with this seed.
    It comes from `RandomState`, whose draws are the same in every version of numpy: the newer `Generator` draws other
    numbers from numpy 2.5 on, and a page of numbers must not depend on who makes it.
    The order of the values does not matter, and the mean is always inside: where rounding would put it outside, the
    end is moved to it.
    The negated values have the mirrored interval, so A − B and B − A say the same. Resampling alone does not give
    this: a draw counts values from the smallest on, so with one seed the negated values give other resamples. Only
    one of the two signs is resampled, and the other one has its interval mirrored: the sign whose distinct values,
    compared as a list, are larger; if these are alike, the sign with the larger list of counts. If the counts are
    alike, too, the interval is symmetric around 0.

    Args:
        values: one a problem, finite; they count as equal where they agree to 12 decimals.
        seed: of the resamples.
        resamples: how many.
        confidence: the share of the resamples' means inside.

    Returns:
        The two ends; None where all values are equal, or there are none: resamples say nothing then.
    """
    n = len(values)
    distinct, counts = np.unique(np.round(np.asarray(values, np.float64), 12), return_counts=True)
    if len(distinct) < 2:
        return None
    given = (tuple(distinct), tuple(counts))
    negated = (tuple(-distinct[::-1]), tuple(counts[::-1]))
    drawn = max(given, negated)
    low, high = _quantiles(*drawn, seed=seed, resamples=resamples, confidence=confidence)
    if given == negated:
        half = (high - low) / 2
        low, high = 0.0 - half, half
    elif drawn == negated:
        low, high = 0.0 - high, 0.0 - low
    mean = math.fsum(values) / n
    return min(low, mean), max(high, mean)


@lru_cache(maxsize=10_000)
def _quantiles(
    distinct: tuple[float, ...], counts: tuple[int, ...], seed: int, resamples: int, confidence: float
) -> tuple[float, float]:
    """The two quantiles of the means of resamples. Tables ask again and again for the same values."""
    n = sum(counts)
    shares = np.asarray(counts) / n
    draws = np.random.RandomState(np.random.PCG64(seed))
    drawn = draws.multinomial(n, shares, size=resamples)  # [resamples, distinct values]
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn @ np.asarray(distinct) / n, [tail, 1 - tail])
    return float(low), float(high)
