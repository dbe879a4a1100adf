"""SwiGLU against its formula: the gate comes first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.swiglu import swiglu
from tests.compare import assert_close


@given(n=st.integers(1, 5), f=st.integers(1, 40), scale=st.sampled_from([0.1, 1.0, 30.0]), seed=st.integers(0, 999))
def test_formula(n: int, f: int, scale: float, seed: int) -> None:
    x = scale * torch.randn(n, 2 * f, generator=torch.Generator().manual_seed(seed))
    gate, up = x.double()[:, :f], x.double()[:, f:]
    assert_close("swiglu", swiglu(x), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=1e-5)


# silu rounds once and the product once more: half a unit in the last place each
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_precision(dtype: torch.dtype, rtol: float) -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = swiglu(x)
    assert got.dtype == dtype
    assert_close(f"{dtype}", got, swiglu(x.double()), atol=1e-6, rtol=rtol)
