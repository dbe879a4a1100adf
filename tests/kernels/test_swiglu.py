"""SwiGLU: the kernel equals its twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.swiglu import swiglu
from minithink.ref import swiglu as ref
from tests.compare import assert_close
from tests.kernels.device import DEVICE

# of the number type: half a unit in the last place, twice (the interpreter truncates what it stores as bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@given(
    rows=st.integers(0, 5),
    width=st.sampled_from([1, 2, 17, 768, 1024, 1025, 2500]),
    dtype=st.sampled_from(list(ROUNDING)),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(rows: int, width: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed)).mul(scale).to(DEVICE, dtype)
    want, got = ref.swiglu(x.float()), swiglu(x).float()
    # A GPU computes exp(−gate) as a power of two: gate · log2(e) is rounded, and that error grows with the gate.
    margin = ROUNDING[dtype] + x.float().chunk(2, -1)[0].abs() * 2**-23
    worst = (got - want).abs() - margin * want.abs() - (6e-8 if dtype == torch.float16 else 1e-30)
    assert got.shape == want.shape
    assert bool((worst <= 0).all()), f"off by {worst.max()} more than the margin"


@pytest.mark.parametrize("value", [0.0, 80.0, -80.0, 1e30, -1e30])
def test_extreme_gates(value: float) -> None:
    x = torch.tensor([[value, 2.0]], device=DEVICE)
    assert_close("swiglu", swiglu(x), ref.swiglu(x), atol=1e-30, rtol=1e-6)
