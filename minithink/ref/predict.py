"""The importance predictor of DynTS: three layers on a token's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def predict(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """s = softplus(softplus(softplus(h·W1)·W2)·W3) (DynTS §4.1; eq. 11 counts these products and no bias).

    Activations between layers have the weights' dtype; softplus is computed in float32.

    Args:
        hidden: [N, d], any float dtype: the last layer's hidden states after the final norm.
        weights: W1 [d, 2d], W2 [2d, d/2] and W3 [d/2, 1], of one dtype.

    Returns:
        float32 [N], at least 0.
    """
    first, second, last = weights
    x = hidden.to(first.dtype)
    for weight in (first, second):
        y = (x @ weight).float()
        x = F.softplus(y).to(weight.dtype)
    y = x.float() @ last.float()  # [N, 1]
    return F.softplus(y)[:, 0]
