"""The residual connection with its norm against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.add_rms_norm import add_rms_norm
from tests.compare import assert_close, assert_same


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    eps=st.sampled_from([1e-6, 1e-2]),
    seed=st.integers(0, 999),
)
def test_formula(shape: list[int], eps: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, *shape, generator=generator).unbind()
    weight = torch.randn(shape[-1], generator=generator)
    normed, summed = add_rms_norm(x, residual, weight, eps)
    assert_same("summed", summed, x + residual)
    wide = summed.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    assert_close("normed", normed, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_sees_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual = torch.full((64,), 0.25).to(dtype), torch.full((64,), 1024.0).to(dtype)
    x[0] = -1024  # the only place where x is not lost: the sum is 0 there and 1024 elsewhere
    normed, summed = add_rms_norm(x, residual, torch.ones(64).to(dtype), 0.0)
    assert summed.dtype == normed.dtype == dtype
    assert summed.tolist() == [0.0] + [1024.0] * 63
    assert_close("normed", normed[1:], torch.full((63,), (64 / 63) ** 0.5), atol=0, rtol=2**-8)
