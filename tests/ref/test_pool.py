"""Pooling along a sequence: the numbers of SnapKV's code, and what makes no sense."""

from __future__ import annotations

import pytest
import torch

from minithink.ref.pool import pool
from tests.compare import assert_close


@pytest.mark.parametrize(
    ("pooling", "want"), [("avg", [0.3413, 0.4218, 0.3949, 0.2288]), ("max", [0.5255, 0.5255, 0.4985, 0.4450])]
)
def test_pooling_of_snapkv(pooling: str, want: list[float]) -> None:
    """What `snapkv_utils.py` gives: at the ends the average is still over 3."""
    score = torch.tensor([0.5255, 0.4985, 0.2413, 0.4450, torch.nan])
    got = pool(score, torch.arange(5) < 4, 3, pooling)
    assert_close("pooled", got, torch.tensor([*want, 0.0]), atol=6e-5)


@pytest.mark.parametrize(("kernel_size", "pooling"), [(2, "max"), (0, "max"), (3, "mean")])
def test_what_makes_no_sense_is_refused(kernel_size: int, pooling: str) -> None:
    with pytest.raises(ValueError, match="must be odd"):
        pool(torch.zeros(3), torch.ones(3, dtype=torch.bool), kernel_size, pooling)
