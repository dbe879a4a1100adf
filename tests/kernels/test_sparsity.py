"""Sparsity: the kernel counts exactly what its twin counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.sparsity import sparsity
from minithink.ref import sparsity as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE

TINY = torch.finfo(torch.float32).smallest_normal


def weights(kind: str, shape: tuple[int, ...], share: float, generator: torch.Generator) -> Tensor:
    """Of attention, float32."""
    if kind == "border":  # a largest weight, and neighbours in float32 of its share
        largest = torch.rand(*shape[:-1], 1, generator=generator)
        border = (share * largest).view(torch.int32)
        p = (border + torch.randint(-1, 2, shape, generator=generator, dtype=torch.int32)).view(torch.float32)
        return torch.where(torch.rand(shape, generator=generator) < 0.2, largest, p)
    if kind == "equal":
        return torch.full(shape, 1 / 7)
    if kind == "extreme":
        pool = torch.tensor([0.0, TINY, TINY / 4, 1e-30, 1.0, 3e38, math.inf])
        return pool[torch.randint(len(pool), shape, generator=generator)]
    return torch.randn(shape, generator=generator).mul(4).softmax(-1)


@given(
    lead=st.sampled_from([(), (1,), (3,), (2, 1, 2), (0,)]),
    heads=st.sampled_from([1, 2, 3, 8]),
    width=st.integers(1, 70),
    kind=st.sampled_from(["random", "border", "equal", "extreme"]),
    share=st.sampled_from([0.01, 0.01, 0.3, 1.0]),
    held=st.sampled_from([0.0, 0.5, 1.0]),
    poison=st.sampled_from([math.nan, math.inf, 9.0]),
    shared=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    lead: tuple[int, ...],
    heads: int,
    width: int,
    kind: str,
    share: float,
    held: float,
    poison: float,
    shared: bool,
    strided: bool,
    seed: int,
) -> None:
    """Bit for bit: weights at the very border, rows without tokens, of one, of equal ones; NaN where none is; one
    mask for all heads or for all rows."""
    generator = torch.Generator().manual_seed(seed)
    p = weights(kind, (*lead, heads, width), share, generator)
    valid = torch.rand(*lead, 1 if shared else heads, width, generator=generator) < held
    if width > 1:
        valid[..., 0, :] &= torch.rand(*lead, 1, generator=generator) < 0.8  # some heads have no token
    if (
        strided and lead and lead[0]
    ):  # views: the same tokens in every row, weights whose last axis is not the fastest
        valid = valid[:1].expand(lead[0], *valid.shape[1:])
    p = p.masked_fill(~valid, poison)
    if strided:
        p = p.transpose(-1, -2).contiguous().transpose(-1, -2)
    want = ref.sparsity(p, valid, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.sparsity.BLOCK", 16)
        got = sparsity(p.to(DEVICE), valid.to(DEVICE), share)
    assert_same("sparsity", got, want)


def test_a_long_row() -> None:
    """As it is launched: more tokens than a block, the largest weight in the last one; heads of different length."""
    p = torch.rand(2, 8, 1500, generator=torch.Generator().manual_seed(1))
    p[:, :, 1400] = 30.0
    valid = torch.arange(1500) < torch.tensor([1500, 1401, 700, 1, 0, 513, 512, 3]).view(8, 1)
    got = sparsity(p.to(DEVICE), valid.to(DEVICE))
    assert_same("sparsity", got, ref.sparsity(p, valid))
    assert 0 < float(got[0]) < 0.1  # 3 in 10 of two heads, 1 in 100 of most


def test_rows_of_many_layers_and_sequences() -> None:
    """Each as alone, whatever stands beside it."""
    p = torch.rand(3, 4, 2, 40, generator=torch.Generator().manual_seed(2)).pow(6).to(DEVICE)
    valid = torch.rand(3, 4, 1, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.7
    together = sparsity(p, valid)
    assert together.unique().numel() == 12
    for i in range(3):
        for j in range(4):
            assert_same("a row", together[i, j], sparsity(p[i, j], valid[i, j]))


def test_nothing_to_do() -> None:
    none = torch.zeros(2, 1, 5, dtype=torch.bool, device=DEVICE)
    p = torch.full((2, 3, 5), torch.nan, device=DEVICE)
    assert sparsity(p, none).tolist() == [0.0, 0.0]
    assert sparsity(p[:0], none[:0]).shape == (0,)
    assert sparsity(p[..., :0], none[..., :0]).tolist() == [0.0, 0.0]
