"""Comparisons that say, when they fail, what differs, by how much and where."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.config import RopeScaling


def assert_close(name: str, got: Tensor, want: Tensor, atol: float, rtol: float = 0.0) -> None:
    """|got − want| ≤ atol + rtol · |want| for every element, and no NaN in either."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    if _equal(got, want):  # most are, and copies in 64 bits take far longer than to see it
        return
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


def _equal(got: Tensor, want: Tensor) -> bool:
    """Whether all numbers are finite and equal. torch cannot compare floats of 8 bits, nor tensors on two devices."""
    if got.dtype != want.dtype or got.device != want.device or (got.is_floating_point() and got.itemsize == 1):
        return False
    return torch.equal(got, want) and bool(want.isfinite().all())


def assert_same(name: str, got: Tensor, want: Tensor) -> None:
    """Bit for bit."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    assert_close(name, got, want, atol=0.0)


def margins(logits: Tensor) -> Tensor:
    """Largest minus second largest logit. logits: [n, V] → [n]."""
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


def rope_tolerance(rope: RopeScaling) -> float:
    """The relative difference of frequencies that rounding explains: 1/(θ^x·s) and θ^−x/s are both right, and differ
    in the last bit. Where llama3 mixes, keep = (turns − low)/(high − low) passes on three roundings of turns ≤ high,
    and freq·(keep + (1 − keep)/s) up to s − 1 times as much, relatively."""
    tolerance = 4e-7
    if rope.kind == "llama3":
        high, low = rope.high_freq_factor, rope.low_freq_factor
        tolerance += 3 * 2**-24 * high / (high - low) * (rope.factor - 1)
    return tolerance
