"""SkipKV's score: the kernel equals its twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.cumulative_score import cumulative_score
from minithink.ref import cumulative_score as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE


@given(
    shape=st.sampled_from([(1, 1, 1), (2, 3, 2), (1, 2, 3), (0, 1, 2), (1, 0, 2)]),
    width=st.integers(0, 40),
    sigma=st.sampled_from([0.0, 0.1, 1.0]),
    lies=st.sampled_from(["whole", "wide", "turned"]),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(shape: tuple[int, int, int], width: int, sigma: float, lies: str, seed: int) -> None:
    """Lanes of differing length, rows in any order; positions in a wider tensor, or with any strides."""
    g = torch.Generator().manual_seed(seed)
    (layers, n, heads), rows, tokens = shape, shape[1] + 2, 60
    number = torch.randint(9, (rows, tokens), generator=g, dtype=torch.int32)
    penalty = torch.rand(rows, 9, generator=g) * (torch.rand(rows, 9, generator=g) < 0.5)
    pos = torch.stack(
        [torch.randperm(tokens, generator=g)[: width + 3].sort().values for _ in range(layers * n * heads)]
        or [torch.empty(0)]
    ).int()
    pos = pos.view(*shape, width + 3)
    held = torch.randint(width + 1, shape, generator=g)
    pos = torch.where(torch.arange(width + 3) < held[..., None], pos, -1)
    pos = pos[..., :width] if lies == "wide" else pos[..., :width].clone()
    pos = pos.mT.contiguous().mT if lies == "turned" else pos
    importance, redundancy = torch.rand(2, *shape, width, generator=g)
    at = torch.randperm(rows, generator=g)[:n]
    arguments = importance, redundancy, pos, at, number, penalty
    want = ref.cumulative_score(*arguments, sigma)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.cumulative_score.BLOCK", 16)
        got = cumulative_score(*(x.to(DEVICE) for x in arguments), sigma)
    there = pos >= 0
    assert_close("Z", got[0].cpu()[there], want[0][there], atol=1e-6)
    assert_same("λ", got[1], want[1])
