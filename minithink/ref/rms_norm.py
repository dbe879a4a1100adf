"""RMSNorm (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis; the arithmetic is float32 for every dtype.

        x32 = x.float()
        y = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    A decoding step has 33 of these, so the number of calls counts. On GPUs torch has it in one. On CPUs torch's one
    call runs a dozen inside, but LayerNorm is a single loop, and LayerNorm of (x, −x) is RMSNorm: its mean is 0 and
    its variance mean(x²).

    Args:
        x: [..., d] in any floating dtype.
        weight: [d].
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`.
    """
    d = x.shape[-1]
    if x.is_cpu and x.dtype == torch.float32:
        both = torch.cat((x, -x), dim=-1)  # [..., 2d]
        return F.layer_norm(both, (2 * d,), None, None, eps).narrow(-1, 0, d) * weight
    return F.rms_norm(x, weight.shape, weight, eps)
