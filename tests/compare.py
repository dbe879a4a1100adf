"""Comparisons that say, when they fail, what differs, by how much and where."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(name: str, got: Tensor, want: Tensor, atol: float, rtol: float = 0.0) -> None:
    """|got − want| ≤ atol + rtol · |want| for every element, and no NaN in either."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    got64, want64 = got.detach().double().cpu(), want.detach().double().cpu()
    error = (got64 - want64).abs()
    excess = torch.where(error.isnan(), torch.inf, error - (atol + rtol * want64.abs()))
    if got64.numel() == 0 or excess.max() <= 0:
        return
    flat = int(excess.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
    relative = error / want64.abs().clamp_min(1e-30)
    raise AssertionError(
        f"{name}: {int((excess > 0).sum())} of {error.numel()} elements differ by more than {atol:g} + {rtol:g}·|x|; "
        f"largest error {error.flatten()[flat]:.3g} (relative {relative.flatten()[flat]:.3g}) at {where}: "
        f"got {got64.flatten()[flat]:.9g}, want {want64.flatten()[flat]:.9g}"
    )


def assert_same(name: str, got: Tensor, want: Tensor) -> None:
    """Bit for bit."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    assert_close(name, got, want, atol=0.0)


def margins(logits: Tensor) -> Tensor:
    """Largest minus second largest logit. logits: [n, V] → [n]."""
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]
