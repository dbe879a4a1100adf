"""Rotary position embedding (Su et al. 2021), in the half-split layout of Llama and Qwen checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of every head by the angle of that token's position.

    Args:
        x: [N, H, D], queries or keys of N tokens.
        cos, sin: [N, D/2] float32, of each token's angles.

    Returns:
        [N, H, D] in the dtype of `x`; the arithmetic is float32.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # one angle for all heads
    a, b = x.float().chunk(2, dim=-1)  # [N, H, D/2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
