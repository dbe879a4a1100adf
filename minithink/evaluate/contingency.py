"""Tables of counts: do rows and columns have anything to do with each other?"""

from __future__ import annotations

from torch import Tensor


def chi_squared(table: Tensor) -> float:
    """Pearson's χ² of a table of counts: 0 if rows and columns have nothing to do with each other. [n, m]."""
    table = table.double()
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    return float(((table - expected) ** 2 / expected.clamp(min=1e-12)).sum())


def cramers_v(table: Tensor) -> float:
    """χ² on a scale from 0, unrelated, to 1, where one of the two decides the other. table: counts, [n, m]."""
    least = min(int((table.sum(0) > 0).sum()), int((table.sum(1) > 0).sum()))
    return (chi_squared(table) / (float(table.sum()) * (least - 1))) ** 0.5 if least > 1 else 0.0
