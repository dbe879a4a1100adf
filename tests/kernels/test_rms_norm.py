"""RMSNorm: the kernel equals its twin, for rows with any strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.rms_norm import rms_norm
from minithink.ref import rms_norm as ref
from tests.compare import assert_close
from tests.kernels.device import DEVICE

# The twin is asked in float64, so that only the kernel rounds. Of the number type: half a unit in the last place,
# twice (the interpreter truncates what it stores as bfloat16); float32: the order of a sum, and a reciprocal root
# that GPUs give to two units.
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@given(
    leading=st.lists(st.integers(0, 4), max_size=4),
    width=st.sampled_from([1, 17, 64, 100, 128, 1024, 1536, 3000]),
    dtype=st.sampled_from(list(ROUNDING)),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    eps=st.sampled_from([1e-6, 1e-2]),
    of_heads=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    leading: list[int], width: int, dtype: torch.dtype, scale: float, eps: float, of_heads: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, width, generator=generator).mul(scale).to(DEVICE, dtype)
    weight = torch.randn(x.shape[-2:] if of_heads else width, generator=generator).to(DEVICE, dtype)
    got = rms_norm(x, weight, eps)
    assert got.dtype == dtype
    assert_close("rms_norm", got, ref.rms_norm(x.double(), weight.double(), eps), atol=1e-7, rtol=ROUNDING[dtype])


@given(
    n=st.integers(1, 5),
    before=st.integers(0, 3),
    heads=st.integers(1, 9),
    after=st.integers(0, 3),
    width=st.sampled_from([64, 80, 128]),
    gap=st.sampled_from([0, 0, 5]),
    every=st.sampled_from([1, 2]),
    dtype=st.sampled_from(list(ROUNDING)),
    of_heads=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_heads_inside_a_projection(
    n: int,
    before: int,
    heads: int,
    after: int,
    width: int,
    gap: int,
    every: int,
    dtype: torch.dtype,
    of_heads: bool,
    seed: int,
) -> None:
    """Rows that are read from a slice of something larger, the rest of which is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((n * every, before + heads + after, width + gap), torch.nan, device=DEVICE, dtype=dtype)
    x = whole[::every, before : before + heads, :width]
    x.copy_(torch.randn(n, heads, width, generator=generator))
    weight = torch.randn(x.shape[-2:] if of_heads else width, generator=generator).to(DEVICE, dtype)
    got = rms_norm(x, weight, 1e-6)
    assert got.is_contiguous()
    assert_close("of heads", got, ref.rms_norm(x.double(), weight.double(), 1e-6), atol=1e-7, rtol=ROUNDING[dtype])
    transposed = x.transpose(0, 2)  # the last axis is not dense
    weight = torch.randn(transposed.shape[-2:] if of_heads else n, generator=generator).to(DEVICE, dtype)
    want = ref.rms_norm(transposed.double(), weight.double(), 1e-6)
    assert_close("of columns", rms_norm(transposed, weight, 1e-6), want, atol=1e-7, rtol=ROUNDING[dtype])


def test_strided_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8, 64, device=DEVICE)[:, 2:6]
    want = ref.rms_norm(x, torch.ones(64, device=DEVICE), 1e-6)

    def refuse(self: torch.Tensor) -> torch.Tensor:
        assert self.dim() == 1, "a copy of the input"
        return self

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    got = rms_norm(x, torch.ones(64, device=DEVICE), 1e-6)
    monkeypatch.undo()
    assert_close("rms_norm", got, want, atol=1e-7, rtol=2e-6)


@pytest.mark.parametrize(("width", "dtype"), [(8192, torch.bfloat16), (8192, torch.float32), (5000, torch.float16)])
def test_statistics_are_float32(width: int, dtype: torch.dtype) -> None:
    """Squares of 300 overflow float16, and a bfloat16 sum of thousands of them stalls."""
    x = (300 * torch.randn(2, width, generator=torch.Generator().manual_seed(0))).to(DEVICE, dtype)
    weight = torch.linspace(0.5, 2, width).to(DEVICE, dtype)
    want = ref.rms_norm(x.double(), weight.double(), 1e-6)
    assert_close("rms_norm", rms_norm(x, weight, 1e-6), want, atol=1e-7, rtol=ROUNDING[dtype])
