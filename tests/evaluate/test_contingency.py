"""Tables of counts. Alone: pytest tests/evaluate/test_contingency.py"""

from __future__ import annotations

import pytest
import torch

from minithink.evaluate.contingency import chi_squared, cramers_v


def test_worked_numbers_of_chi_squared() -> None:
    """Of 40, 20 and 20 in rows and columns 10 are expected in each cell: 4 · 5² / 10 = 10, and V = √(10 / 40)."""
    table = torch.tensor([[15, 5], [5, 15]])
    assert chi_squared(table) == pytest.approx(10)
    assert cramers_v(table) == pytest.approx(0.5)
    assert cramers_v(torch.tensor([[7, 0, 0], [0, 0, 9], [0, 5, 0]])) == pytest.approx(1), "each decides the other"
    assert chi_squared(torch.tensor([[4, 8], [3, 6]])) == pytest.approx(0)
    assert cramers_v(torch.tensor([[4, 8], [0, 0]])) == 0, "one type for all"
