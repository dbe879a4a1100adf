"""Annealing: the kernel says exactly what its twin says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from minithink.kernels.anneal import anneal
from minithink.ref import anneal as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.ref.test_anneal import TAU, Row, batches, tensors


def assert_twins(arguments: tuple[Tensor, ...], *options: Any) -> tuple[Tensor, ...]:
    """The kernel says what its twin says, and leaves everything as it does; → goal, and the arguments."""
    ours, twins = ([x.to(DEVICE, copy=True) for x in arguments] for _ in range(2))
    goal, want = anneal(*ours, *options), ref.anneal(*twins, *options)
    assert_same("goal", goal, want)
    names = "size", "excess", "kind", "level", "cases", "at", "clock", "active"
    for name, x, y in zip(names, ours, twins, strict=True):
        assert_same(name, x, y)
    return goal, *ours


@given(batches())
def test_as_the_twin(case: tuple[list[Row], tuple[int, ...], bool, bool]) -> None:
    batch, *options = case
    assert_twins(tensors(batch), TAU, *options)


@pytest.mark.parametrize("segments", [1, 16, 17, 130, 258])
@pytest.mark.parametrize("hard", [False, True])
def test_long_sequences(segments: int, hard: bool) -> None:
    """As many segments as 32 k tokens have, at the paper's schedule; more lists than are compared at a time."""
    draw, retention, tau = torch.Generator().manual_seed(segments), (64, 32, 16, 8, 4), 128
    level = torch.randint(6, (7, segments), generator=draw)
    most = torch.tensor([tau, *retention])[level]
    kind = torch.randint(3, (7, segments), generator=draw).to(torch.uint8)
    at = torch.tensor([6, 0, 3, 1, 5])
    clock = torch.randint(tau * segments, (5,), generator=draw) + 1
    ended = torch.tensor([True, False, True, True, False])
    clock = torch.where(ended, (clock + tau - 1) // tau * tau, clock).int()
    size = (torch.rand(3, 5, 7, segments, generator=draw) * (most[at][:, None] + 1)).int()
    past = torch.arange(segments) > ((clock - 1) // tau)[:, None]
    size.masked_fill_(past[:, None], 0)
    excess = (torch.rand(3, 5, 7, generator=draw) * (size.sum(-1) + 4)).int() - 2
    excess[:, 2] = torch.arange(21).view(3, 7).int() - 19  # one lane has a token too many
    cases, active = torch.zeros(2, 7, dtype=torch.int32), torch.tensor([True, True, True, True, False])
    arguments = size, excess, kind, level.to(torch.uint8), cases, at, clock, active
    _, *after = assert_twins(arguments, tau, retention, hard, True)
    assert hard or segments == 1 or (after[4] > 0).any()


@pytest.mark.parametrize("shape", [(2, 0, 1, 3), (1, 2, 1, 0)])
def test_nothing_to_anneal(shape: tuple[int, ...]) -> None:
    size = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    state = torch.zeros(4, shape[-1], dtype=torch.uint8, device=DEVICE)
    cases = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    none = torch.zeros(shape[1], dtype=torch.int32, device=DEVICE)
    goal = anneal(
        size,
        size[..., 0] if shape[-1] else none[None, :, None],
        state,
        state,
        cases,
        none.long(),
        none,
        none.bool(),
        4,
        (4, 2),
        True,
        True,
    )
    assert goal.shape == (shape[1], shape[-1])
    assert not cases.any()
