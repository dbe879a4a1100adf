"""How far two ways to type segments agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minithink.text.thoughts import NAMES, REASONING, TRANSITION


def fold(labels: Tensor, types: int) -> Tensor:
    """Labels of three types, reduced to |T| types. With |T| = 2 transitions count as reasoning: both lie above the
    one threshold."""
    return labels if types == 3 else torch.where(labels == TRANSITION, REASONING, labels)


def confusion(a: Tensor, b: Tensor) -> Tensor:
    """Segments by their types in a (rows) and b (columns): int64 [3, 3], in the order of NAMES."""
    return torch.bincount(a.long() * len(NAMES) + b.long(), minlength=len(NAMES) ** 2).view(len(NAMES), -1)


def kappa(a: Tensor, b: Tensor) -> float:
    """Cohen's κ: agreement beyond what the two shares of types give by chance; 1: all agree, 0: as chance does."""
    table = confusion(a, b).double()
    n = table.sum()
    same = table.trace() / n
    chance = (table.sum(0) * table.sum(1)).sum() / n**2
    return float((same - chance) / (1 - chance)) if chance < 1 else 1.0


def compare(a: Tensor, b: Tensor) -> dict[str, Any]:
    """Every measure of agreement, as JSON. a, b: uint8 [N], N ≥ 1, the types of the same segments."""
    return {
        "segments": len(a),
        "agree": float((a == b).double().mean()),
        "kappa": kappa(a, b),
        "majority": float(b.bincount().max() / len(b)),  # agreement if a were b's most frequent type everywhere
        "confusion": confusion(a, b).tolist(),
    }
