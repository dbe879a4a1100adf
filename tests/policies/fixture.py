"""Keys and queries of the worked examples that several methods share."""

from __future__ import annotations

import torch
from torch import Tensor

KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])
H0 = torch.tensor([(1, 0.2), (0.3, 1)])  # queries of tokens 4 and 5, of both query heads
H1 = torch.tensor([(0.5, -0.5), (1, 0.5)])


def attention(q: Tensor, k: Tensor) -> Tensor:
    """Logits q·k/√D: [n, T]."""
    return q @ k.T / k.shape[-1] ** 0.5
