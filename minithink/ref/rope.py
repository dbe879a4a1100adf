"""Rotary position embedding (Su et al. 2021), in the half-split layout of Llama and Qwen checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (a, b) = (x_i, x_{i + D/2}) of every head by the angle of that token's position.

        (a, b)·(cos, cos) + (b, a)·(−sin, sin) = (a·cos − b·sin, b·cos + a·sin)

    Args:
        x: [N, H, D], queries or keys of N tokens.
        cos, sin: [N, 1, D] float32, of each token's angles: `cos` holds (cos, cos), `sin` holds (−sin, sin).

    Returns:
        [N, H, D] in the dtype of `x`; the arithmetic is float32.
    """
    half = x.shape[-1] // 2
    x32 = x.float()
    swapped = x32.roll(half, dims=-1)  # (b, a)
    rotated = torch.addcmul(x32 * cos, swapped, sin)
    return rotated.to(x.dtype)
