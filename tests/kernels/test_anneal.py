"""Annealing: the kernel says exactly what its twin says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.anneal import anneal
from minithink.ref import anneal as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.ref.test_anneal import Row, batches, tensors


@given(batches(), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_as_the_twin(case: tuple[list[Row], tuple[int, ...], bool], dtype: torch.dtype, strided: bool) -> None:
    batch, retention, hard = case
    size, kind, level, *others = tensors(batch)
    if strided:  # views of wider tensors
        kind, level = (torch.stack((x, x + 1), -1)[..., 0] for x in (kind, level))
    arguments = size.to(dtype), kind, level, *others
    got = anneal(*(x.to(DEVICE) for x in arguments), retention, hard)
    for name, x, want in zip(("goal", "level", "cases"), got, ref.anneal(*arguments, retention, hard), strict=True):
        assert_same(name, x, want)


@pytest.mark.parametrize("segments", [1, 16, 17, 130, 258])
@pytest.mark.parametrize("hard", [False, True])
def test_long_sequences(segments: int, hard: bool) -> None:
    """As many segments as 32 k tokens have, at the paper's schedule; anything behind the running one."""
    draw, retention = torch.Generator().manual_seed(segments), (64, 32, 16, 8, 4)
    level = torch.randint(6, (5, segments), generator=draw)
    most = torch.tensor([128, *retention])[level]
    size = (torch.rand(5, segments, generator=draw) * (most + 1)).int()
    running = torch.randint(segments, (5,), generator=draw)
    size[torch.arange(segments) > running[:, None]] = 0
    kind = torch.randint(3, (5, segments), generator=draw).to(torch.uint8)
    excess = (torch.rand(5, generator=draw) * (size.sum(-1) + 4)).int() - 2
    ended = torch.tensor([True, False, True, True, False])
    turn = ended & torch.tensor([True, True, False, True, False])
    arguments = size, kind, level.to(torch.uint8), excess, running, ended, turn
    got = anneal(*(x.to(DEVICE) for x in arguments), retention, hard)
    want = ref.anneal(*arguments, retention, hard)
    for name, x, y in zip(("goal", "level", "cases"), got, want, strict=True):
        assert_same(name, x, y)
    assert hard or segments == 1 or (want[2] > 0).any()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_anneal(shape: tuple[int, int]) -> None:
    size = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    none = torch.zeros(shape[0], dtype=torch.int32, device=DEVICE)
    goal, level, cases = anneal(size, size.byte(), size.byte(), none, none, none.bool(), none.bool(), (4, 2), True)
    assert goal.shape == level.shape == shape
    assert cases.tolist() == [[0] * shape[0]] * 2
