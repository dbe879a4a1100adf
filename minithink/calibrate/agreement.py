"""How far two ways to type segments agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minithink.evaluate.contingency import chi_squared, cramers_v
from minithink.text.thoughts import NAMES, REASONING, TRANSITION

EXCHANGES = 1999  # so many times types are exchanged at random


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


def related(a: Sequence[Tensor], b: Sequence[Tensor]) -> dict[str, float]:
    """Whether two ways to type the segments of texts have to do with each other at all, under whatever names.

    The usual probability of χ² takes segments for independent. Those of one text are not, and both types may follow
    how long the text is by then. So χ² is compared with what it is after the types `b` have been exchanged at random:
    among the segments of each text, which keeps what is common to a text; and among those of each third of a text,
    which also keeps most of what its length explains.

    Args:
        a, b: uint8 [n] for each text, the types of its segments; at least one segment in all.

    Returns:
        chi_squared and cramers_v of the table of all segments; p_in_texts and p_in_thirds, the shares of EXCHANGES
        after which χ² is at least as large; chance_in_texts and chance_in_thirds, the mean χ² after exchanges. The
        smallest possible share is 1 / (EXCHANGES + 1).
    """
    own = torch.cat(list(a))
    other = torch.cat(list(b))
    table = confusion(own, other)
    texts = [torch.full((len(x),), place) for place, x in enumerate(a)]
    thirds = [3 * place + 3 * torch.arange(len(x)) // len(x) for place, x in enumerate(a)]
    found = {"chi_squared": chi_squared(table), "cramers_v": cramers_v(table)}
    for name, groups in (("texts", texts), ("thirds", thirds)):
        p, chance = _exchanged(own, other, torch.cat(groups))
        found[f"p_in_{name}"] = p
        found[f"chance_in_{name}"] = chance
    return found


def _exchanged(a: Tensor, b: Tensor, groups: Tensor) -> tuple[float, float]:
    """How often χ² is at least as large as it is when types `b` are exchanged within groups, and its mean then.

    Args:
        a, b: uint8 [N], the types of the same segments.
        groups: int64 [N], ascending.
    """
    generator = torch.Generator().manual_seed(0)
    found = chi_squared(confusion(a, b))
    as_large = 0
    total = 0.0
    for _ in range(EXCHANGES):
        order = torch.argsort(groups + torch.rand(len(groups), generator=generator, dtype=torch.float64))
        value = chi_squared(confusion(a, b[order]))
        as_large += value >= found - 1e-9
        total += value
    return (as_large + 1) / (EXCHANGES + 1), total / EXCHANGES


def compare(a: Tensor, b: Tensor) -> dict[str, Any]:
    """Every measure of agreement, as JSON. a, b: uint8 [N], N ≥ 1, the types of the same segments."""
    return {
        "segments": len(a),
        "agree": float((a == b).double().mean()),
        "kappa": kappa(a, b),
        "majority": float(b.bincount().max() / len(b)),  # agreement if a were b's most frequent type everywhere
        "confusion": confusion(a, b).tolist(),
    }
