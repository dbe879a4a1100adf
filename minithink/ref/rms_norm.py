"""RMSNorm (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis; the arithmetic is float32 for every dtype.

    torch computes exactly this in one call. Written out it is six, and a decoding step has 33 of them:

        x32 = x.float()
        y = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    Args:
        x: [..., d] in any floating dtype.
        weight: [d].
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`.
    """
    return F.rms_norm(x, weight.shape, weight, eps)
