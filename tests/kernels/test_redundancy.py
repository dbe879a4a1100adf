"""Redundancy: the kernel equals its twin where no cosine lies so near the threshold that rounding would decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.redundancy import redundancy
from minithink.ref import redundancy as ref
from tests.compare import assert_close
from tests.kernels.device import DEVICE

MARGIN = 1e-5  # between any cosine and the threshold


def decided(k: Tensor, valid: Tensor, threshold: float) -> bool:
    """Whether every cosine is clearly above or below the threshold."""
    k = k.double().masked_fill(~valid.unsqueeze(-1), 0.0)
    unit = k / (k.norm(dim=-1, keepdim=True) + 1e-8)
    apart = (unit @ unit.transpose(-1, -2) - threshold).abs() > MARGIN
    return bool((apart | torch.eye(k.shape[2], dtype=torch.bool)).all())


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 35)),
    dim=st.sampled_from([1, 3, 16, 33, 64, 96]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    threshold=st.sampled_from([0.51, 0.9, 0.013, -0.29, 1.5]),
    alike=st.sampled_from([0.0, 1.0, 3.0]),
    scale=st.sampled_from([1.0, 1e-3, 100.0]),
    shared=st.booleans(),
    holes=st.booleans(),
    data=st.data(),
)
def test_equals_its_twin(
    shape: tuple[int, int, int],
    dim: int,
    dtype: torch.dtype,
    threshold: float,
    alike: float,
    scale: float,
    shared: bool,
    holes: bool,
    data: st.DataObject,
) -> None:
    """Lanes of differing length, some of them empty or of one key; NaN where not valid; keys that resemble each other
    more or less, some of them zero; strided keys."""
    b, hkv, s = shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    k = torch.randn(b, s, hkv, dim, generator=generator).transpose(1, 2)
    k = (k + alike * torch.randn(b, hkv, 1, dim, generator=generator)) * scale
    k[:, :, s // 3] = 0.0
    k = k.to(dtype)
    heads = 1 if shared else hkv
    lengths = data.draw(st.lists(st.sampled_from([0, 1, s // 2, s]), min_size=b * heads, max_size=b * heads))
    valid = torch.arange(s) < torch.tensor(lengths).view(b, heads, 1)
    if holes:
        valid &= torch.rand(valid.shape, generator=generator) < 0.7
    assume(decided(k, valid, threshold))
    k = k.masked_fill(~valid.unsqueeze(-1), torch.nan)
    want = ref.redundancy(k, valid, threshold)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.redundancy.BLOCK", 16)
        patch.setattr("minithink.kernels.redundancy.SOFTMAX_BLOCK", 16)
        got = redundancy(k.to(DEVICE), valid.to(DEVICE), threshold)
    assert_close("redundancy", got, want, atol=1e-7, rtol=1e-5)


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-2, -1, 0, 1, 2])), min_size=1, max_size=35),
    threshold=st.sampled_from([0.5, 0.0, 1.0, -0.5]),
)
def test_repeated_keys(rows: list[tuple[int, int]], threshold: float) -> None:
    """Multiples of four directions: all cosines are exactly −1, 0 or 1, also where they equal the threshold."""
    k = torch.zeros(1, 1, len(rows), 4)
    for i, (axis, value) in enumerate(rows):
        k[0, 0, i, axis] = value
    valid = torch.ones(1, 1, len(rows), dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.redundancy.BLOCK", 16)
        got = redundancy(k.to(DEVICE), valid.to(DEVICE), threshold)
    assert_close("redundancy", got, ref.redundancy(k, valid, threshold), atol=1e-7, rtol=1e-6)


def test_as_it_is_launched() -> None:
    """Blocks of full size, the same answer twice, and keys in a view whose last axis is not the fastest."""
    k = torch.randn(1, 2, 128, 150, generator=torch.Generator().manual_seed(3)).transpose(2, 3)
    valid = torch.arange(150) < torch.tensor([150, 70]).view(1, 2, 1)
    assert decided(k, valid, 0.2)
    got, again = (redundancy(k.to(DEVICE), valid.to(DEVICE), 0.2) for _ in range(2))
    assert_close("redundancy", got, ref.redundancy(k, valid, 0.2), atol=1e-7, rtol=1e-5)
    assert torch.equal(got, again)


def test_many_blocks() -> None:
    """More of them than a program sums at a time; cosines of −1, 0 and 1."""
    generator = torch.Generator().manual_seed(5)
    k = torch.eye(16)[torch.randint(16, (1, 1, 270), generator=generator)]
    k = k * (1 - 2 * torch.randint(2, (1, 1, 270, 1), generator=generator))
    valid = torch.ones(1, 1, 270, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.redundancy.BLOCK", 16)
        got = redundancy(k.to(DEVICE), valid.to(DEVICE))
    assert_close("redundancy", got, ref.redundancy(k, valid), atol=1e-8, rtol=1e-6)


def test_nothing_to_do() -> None:
    none = torch.zeros(2, 1, 5, dtype=torch.bool, device=DEVICE)
    k = torch.full((2, 3, 5, 64), torch.nan, device=DEVICE)
    assert not redundancy(k, none).any()
    assert redundancy(k[:, :, :0], none[..., :0]).shape == (2, 3, 0)
