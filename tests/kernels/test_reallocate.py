"""Algorithm 2: the kernel's budgets are exactly its twin's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.reallocate import reallocate
from minithink.ref import reallocate as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE


def drawn(shape: tuple[int, int, int], kind: str, seed: int) -> tuple[Tensor, ...]:
    """CRF, budgets, low, high, moves."""
    generator = torch.Generator().manual_seed(seed)
    crf = torch.randint(5, shape, generator=generator).double()
    if kind == "real":
        crf = crf * torch.rand(shape, generator=generator, dtype=torch.float64)
    elif kind == "equal":
        crf = torch.full_like(crf, seed % 3)
    elif kind == "far":
        crf = 10.0 ** (6 * crf - 12)
    low = torch.randint(1, 6, shape, generator=generator, dtype=torch.int32)
    budget = low + torch.randint(0, 40, shape, generator=generator, dtype=torch.int32)
    held = low + ((budget - low) * torch.rand(shape, generator=generator)).int()
    high = held + int(torch.randint(0, 60, (), generator=generator))
    return crf, budget, low, high, torch.rand(shape[1], generator=generator) < 0.8


@given(
    shape=st.sampled_from([(1, 1, 1), (1, 2, 4), (2, 3, 2), (3, 1, 5), (5, 2, 3), (2, 0, 2), (0, 2, 3)]),
    kind=st.sampled_from(["ties", "real", "equal", "far"]),
    damping=st.sampled_from([0.3, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(shape: tuple[int, int, int], kind: str, damping: float, seed: int) -> None:
    """Heads without hits, equal heads, bounds that bind, bounds that do not add up, rows that do not move."""
    tensors = drawn(shape, kind, seed)
    got = reallocate(*(x.to(DEVICE) for x in tensors), damping)
    assert_same("budgets", got, ref.reallocate(*tensors, damping))


@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_many_heads(damping: float) -> None:
    """As many as a model of 8 billion parameters has, and budgets as long as its sequences; inputs are views."""
    generator = torch.Generator().manual_seed(5)
    crf = (40 * torch.rand(4, 8, 32, generator=generator, dtype=torch.float64)).movedim(-1, 0)  # [32, 4, 8]
    budget, low = torch.full((32, 4, 8), 4096, dtype=torch.int32), torch.full((1, 4, 1), 216, dtype=torch.int32)
    low, moves = low.expand(budget.shape), torch.ones(4, dtype=torch.bool)
    for _ in range(3):
        high = budget + 128
        tensors = crf, budget, low, high, moves
        got = reallocate(*(x.to(DEVICE) for x in tensors), damping)
        assert_same("budgets", got, ref.reallocate(*tensors, damping))
        assert (got.sum((0, 2)) == 4096 * 256).all()
        assert not torch.equal(got.cpu(), budget)
        budget = got.cpu()


@pytest.mark.parametrize(("low", "high"), [(9, 20), (1, 7), (1, 20), (8, 8)])
def test_bounds_that_allow_no_budgets(low: int, high: int) -> None:
    """Lower bounds above B_total, upper bounds below it: budgets stay. Then bounds that allow some."""
    crf, budget = torch.tensor([[[1.0, 9.0]]], dtype=torch.float64), torch.full((1, 1, 2), 8, dtype=torch.int32)
    tensors = crf, budget, torch.full_like(budget, low), torch.full_like(budget, high), torch.tensor([True])
    got = reallocate(*(x.to(DEVICE) for x in tensors), 0.5)
    assert_same("budgets", got, ref.reallocate(*tensors, 0.5))
    assert got.flatten().tolist() == ([4, 12] if (low, high) == (1, 20) else [8, 8])
