"""How well scores are predicted (DynTS): MSE (eq. 8), Kendall's τ, and the share of important tokens that is found.

The predictor is compared with one that knows only a token's position. It predicts the mean of the training traces'
scores at that position, in bins of `BIN` tokens. No function of the bin has a smaller MSE on the training traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

TOP = 0.2  # of the thinking tokens: the most important ones
FOUND_IN = (20, 30, 40, 50, 60, 70, 80, 90)  # p: per cent of the tokens that the prediction ranks first
BIN = 32  # tokens
ROWS = 1024  # of a table of pairs that is in memory at once


def kendall(a: Tensor, b: Tensor) -> float:
    """Kendall's τ_b: pairs that agree less pairs that disagree, over √(pairs untied in a · pairs untied in b).
    NaN: all of a or all of b are equal. a, b: [n]."""
    same = untied_a = untied_b = 0.0
    for rows in range(0, len(a), ROWS):
        x = (a[rows : rows + ROWS, None] - a).sign()
        y = (b[rows : rows + ROWS, None] - b).sign()
        same += float((x * y).sum(dtype=torch.float64))
        untied_a += float(x.abs().sum(dtype=torch.float64))
        untied_b += float(y.abs().sum(dtype=torch.float64))
    below = (untied_a * untied_b) ** 0.5
    return same / below if below else float("nan")


def first(score: Tensor, share: float) -> Tensor:
    """The tokens with the highest scores, of equals the older: bool [n]. share: of all tokens, at least one token."""
    order = score.argsort(descending=True, stable=True)[: max(1, int(share * len(score)))]
    return torch.zeros_like(score, dtype=torch.bool).index_fill_(0, order, True)


def overlap(predicted: Tensor, truth: Tensor, percent: int) -> float:
    """The share of the true top 20 % that is among the predicted top p %. predicted, truth: [L]."""
    best = first(truth, TOP)
    return float((first(predicted, percent / 100) & best).sum() / best.sum())


def quality(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """MSE, τ (NaN: it is undefined) and all overlaps of one trace. predicted, truth: float [L], of one device."""
    found = {"mse": float((predicted - truth).square().mean()), "tau": kendall(predicted, truth)}
    return found | {f"top_{p}": overlap(predicted, truth, p) for p in FOUND_IN}


def mean(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Means over traces, each name over the traces that have it; None: no trace has it."""
    out = dict[str, Any]()
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] == row[name]]
        out[name] = fmean(values) if values else None
    return out


def by_position(truths: Iterable[Tensor]) -> Callable[[int], Tensor]:
    """A predictor that knows positions only, from the scores of the training traces: tokens of a trace → their
    predictions. Behind the longest training trace it repeats its last bin."""
    sums = torch.zeros(0)
    counts = torch.zeros(0)
    for truth in truths:
        bins = torch.arange(len(truth)) // BIN
        more = max(0, int(bins[-1]) + 1 - len(sums))
        sums, counts = (torch.nn.functional.pad(x, (0, more)) for x in (sums, counts))
        sums.index_add_(0, bins, truth.float().cpu())
        counts.index_add_(0, bins, torch.ones(len(truth)))
    means = sums / counts
    return lambda n: means[(torch.arange(n) // BIN).clamp(max=len(means) - 1)]
