"""Muon, which makes the update of a matrix orthogonal (Jordan et al. 2024), for many matrices of few shapes.

    m ← 0.95 m + 0.05 g;  u = 0.05 g + 0.95 m
    W ← W − lr · weight_decay · W − lr · 0.2 √max(rows, columns) · orthogonal(u)

The factor is that of Liu et al. 2025: a step changes a weight about as much as AdamW's would, so both can share one
learning rate. `torch.optim.Muon` computes the same, one matrix after the other, in thousands of small calls. Here all
matrices of one shape go through each call together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan et al.: the steepest start, and singular values end near 1
ITERATIONS = 5


def orthogonal(updates: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1, by Newton and Schulz's iteration. [n, a, b] → bfloat16."""
    x = updates.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For matrices only. The state of a parameter is its `momentum_buffer`, as that of `torch.optim.Muon`."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                self._step(matrices, group["momentum"], group["lr"], group["weight_decay"], max(shape))

    def _step(self, matrices: list[Tensor], momentum: float, lr: float, decay: float, longest: int) -> None:
        grads = [p.grad for p in matrices if p.grad is not None]
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = orthogonal(torch.stack(torch._foreach_lerp(grads, buffers, momentum)))
        torch._foreach_mul_(matrices, 1 - lr * decay)
        torch._foreach_add_(matrices, list(updates.float().unbind()), alpha=-lr * 0.2 * math.sqrt(longest))
