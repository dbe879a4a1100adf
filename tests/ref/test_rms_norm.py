"""RMSNorm against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.rms_norm import rms_norm
from tests.compare import assert_close


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
    eps=st.sampled_from([1e-6, 1e-2]),
    of_heads=st.booleans(),
    seed=st.integers(0, 999),
)
def test_formula(shape: list[int], scale: float, eps: float, of_heads: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(shape, generator=generator)
    weight = torch.randn(shape[-2:] if of_heads else shape[-1:], generator=generator)
    assert_close(f"{shape}, scale {scale}", rms_norm(x, weight, eps), formula(x, weight, eps), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_precision_has_float32_statistics(dtype: torch.dtype, rtol: float, of_heads: bool) -> None:
    """Squares of 300 overflow float16, and a bfloat16 sum of 4096 of them stalls; two roundings remain."""
    x = (300 * torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))).to(dtype)
    weight = torch.linspace(0.5, 2, 4096).to(dtype)
    if of_heads:
        weight = torch.stack([weight.roll(shift) for shift in range(4)])
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    assert_close(f"{dtype}", got, formula(x, weight, 1e-6), atol=1e-5, rtol=rtol)
