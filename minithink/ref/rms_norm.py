"""RMSNorm (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; the statistics are float32 for every dtype.

    Args:
        x: [..., d] in any floating dtype.
        weight: [d].
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)
