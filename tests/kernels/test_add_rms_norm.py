"""The residual connection with its norm: the kernel equals its twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.add_rms_norm import add_rms_norm
from minithink.ref import add_rms_norm as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE

# of the number type: half a unit in the last place, twice (the interpreter truncates what it stores as bfloat16);
# float32: the order of a sum, and a reciprocal root that GPUs give to two units
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    width=st.sampled_from([1, 17, 64, 100, 1024, 1536, 3000]),
    gap=st.sampled_from([0, 0, 3]),
    dtype=st.sampled_from(list(ROUNDING)),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    eps=st.sampled_from([1e-6, 1e-2]),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    leading: list[int], width: int, gap: int, dtype: torch.dtype, scale: float, eps: float, seed: int
) -> None:
    """A gap between the rows of x is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((*leading, width + gap), torch.nan, device=DEVICE, dtype=dtype)[..., :width]
    x.copy_(torch.randn(*leading, width, generator=generator).mul(scale))
    residual = torch.randn(*leading, width, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(width, generator=generator).to(DEVICE, dtype)
    before = x.clone(), residual.clone()
    normed, summed = add_rms_norm(x, residual, weight, eps)
    assert normed.dtype == summed.dtype == dtype
    assert normed.is_contiguous()
    assert summed.is_contiguous()
    assert_close("summed", summed, x.float() + residual.float(), atol=0, rtol=ROUNDING[dtype])
    # Of the kernel's own sum, however that was rounded; and the twin does as much.
    want, _ = ref.add_rms_norm(torch.zeros_like(summed).float(), summed.float(), weight.float(), eps)
    assert_close("normed", normed, want, atol=1e-7, rtol=ROUNDING[dtype])
    want, rounded = ref.add_rms_norm(x, residual, weight, eps)
    if dtype != torch.bfloat16:  # a sum of two is rounded once, in either
        assert_same("summed", summed, rounded)
    assert_close("twin", normed, want, atol=1e-7, rtol=3 * ROUNDING[dtype])
    assert_same("x is left alone", x, before[0])
    assert_same("residual is left alone", residual, before[1])


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 1), (torch.bfloat16, 8)])
def test_the_norm_sees_what_is_stored(dtype: torch.dtype, unit: int) -> None:
    """The one number of x that is not 0 is lost in the sum's rounding, so that all results are equal."""
    x = torch.zeros(2, 64, device=DEVICE, dtype=dtype)
    x[:, 5] = unit * 15 / 32  # almost half of a unit in the last place of 1024
    residual = torch.full_like(x, 1024)
    # Just below 2, where half of such a unit in a factor is enough to change the rounded product.
    weight = torch.full((64,), 2 - unit / 1024, device=DEVICE, dtype=dtype)
    normed, summed = add_rms_norm(x, residual, weight, 1e-6)
    assert_same("summed", summed, residual)
    assert len(normed.unique()) == 1
