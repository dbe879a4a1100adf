"""RMSNorm (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis; the arithmetic is float32 for every dtype.

        x32 = x.float()
        y = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    A decoding step of the embedded model has 25 of these, so the number of torch's operations counts. On GPUs
    `F.rms_norm` is one operation. On CPUs it runs a dozen; `vector_norm`, √(Σx²), is a single loop.

    Args:
        x: [..., d] in any floating dtype.
        weight: [d], or [H, d] for `x` [..., H, d]: one for each head. With [H, d], half precision is also rounded
            before the product with the weight.
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`.
    """
    d = x.shape[-1]
    if x.is_cpu and x.dtype == torch.float32:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # norm²/d + eps; as operands of `/` and `+`, Python's numbers would cost more than the arithmetic
        added = norm.new_full((), eps)
        mean_square = torch.addcmul(added, norm, norm, value=1 / d)
        return x * mean_square.rsqrt() * weight
    if weight.dim() == 1:
        return F.rms_norm(x, (d,), weight, eps)
    return F.rms_norm(x, (d,), None, eps) * weight
