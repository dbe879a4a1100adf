"""How far two ways to type segments agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minithink.policies.thinkv import NAMES, REASONING, TRANSITION


def fold(labels: Tensor, types: int) -> Tensor:
    """Labels of three types as types that there are: with |T| = 2, transitions count as reasoning, whose side of the
    threshold is theirs."""
    return labels if types == 3 else torch.where(labels == TRANSITION, REASONING, labels)


def confusion(a: Tensor, b: Tensor) -> Tensor:
    """Segments by their types in a (rows) and b (columns): int64 [3, 3], in the order of NAMES."""
    return torch.bincount(a.long() * len(NAMES) + b.long(), minlength=len(NAMES) ** 2).view(len(NAMES), -1)


def kappa(a: Tensor, b: Tensor) -> float:
    """Cohen's κ: agreement beyond what the two shares of types give by chance; 1: all agree, 0: as chance does."""
    table = confusion(a, b).double()
    n = table.sum()
    same, chance = table.trace() / n, (table.sum(0) * table.sum(1)).sum() / n**2
    return float((same - chance) / (1 - chance)) if chance < 1 else 1.0


def compare(a: Tensor, b: Tensor) -> dict[str, Any]:
    """All of it, as JSON. a, b: uint8 [N], N ≥ 1."""
    return {
        "segments": len(a),
        "agree": float((a == b).double().mean()),
        "kappa": kappa(a, b),
        "majority": float(b.bincount().max() / len(b)),  # that b's most frequent type alone would agree
        "confusion": confusion(a, b).tolist(),
    }
