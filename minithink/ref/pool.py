"""Pooling along a sequence: in SnapKV and R-KV the neighbours of an important key count as important too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pool(score: Tensor, valid: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """Pool every valid key's score with those of its (kernel_size − 1)/2 neighbours on each side.

    Args:
        score: float [..., S]; anything (also NaN) where not valid.
        valid: bool, of the same shape or broadcast.
        kernel_size: odd; 1 changes nothing.
        pooling: "max", or "avg": the sum divided by kernel_size. At the ends there are fewer keys, but the divisor
            stays, as in the papers' code (torch's count_include_pad).

    Returns:
        The shape and dtype of `score`; 0 where not valid.

    Raises:
        ValueError: kernel_size is not odd, or pooling is unknown.
    """
    if kernel_size < 1 or kernel_size % 2 == 0 or pooling not in ("max", "avg"):
        raise ValueError(f"kernel_size {kernel_size} must be odd, and pooling {pooling!r} max or avg")
    side = kernel_size // 2
    outside = -torch.inf if pooling == "max" else 0.0
    score = score.masked_fill(~valid, outside)
    flat = score.reshape(-1, 1, score.shape[-1])
    if pooling == "max":
        pooled = F.max_pool1d(flat, kernel_size, stride=1, padding=side)
    else:
        pooled = F.avg_pool1d(flat, kernel_size, stride=1, padding=side)
    pooled = pooled.view_as(score)
    return pooled.masked_fill(~valid, 0.0)
