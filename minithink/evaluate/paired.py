"""Two policies on the same problems: is one of them right more often, and is that more than chance?"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean

from minithink.evaluate.intervals import bootstrap


def difference(own: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The mean of differences in pairs, `less`, and its interval, `less_low` and `less_high`. own, other: a value for
    each problem, in the same order."""
    differences = [x - y for x, y in zip(own, other, strict=True)]
    low, high = bootstrap(differences) or (fmean(differences),) * 2
    return {"less": fmean(differences), "less_low": low, "less_high": high}


def mcnemar(own: Sequence[bool], other: Sequence[bool]) -> float:
    """The exact test of McNemar (1947), two-sided → the probability of a difference at least as large by chance.

    Only problems on which exactly one of the two is right count. If neither is better, each such problem falls to
    either side with probability 1/2, so their number on one side has a binomial distribution.

    Args:
        own: whether each problem was right.
        other: the same of the other policy, in the same order.
    """
    better = 0
    worse = 0
    for mine, theirs in zip(own, other, strict=True):
        better += mine and not theirs
        worse += theirs and not mine
    n = better + worse
    tail = sum(comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def holm(probabilities: Sequence[float]) -> list[float]:
    """The probabilities of several tests, corrected for their number (Holm 1979), in the same order.

    Reject where the corrected probability is at most α: then the chance that any true hypothesis is rejected is at
    most α, whatever the tests have to do with each other.
    """
    count = len(probabilities)
    order = sorted(range(count), key=lambda place: probabilities[place])
    corrected = [0.0] * count
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, (count - rank) * probabilities[place])
        corrected[place] = min(1.0, largest)
    return corrected
