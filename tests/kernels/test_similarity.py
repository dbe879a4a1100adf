"""Similarity of sentences: the kernel remembers what its twin does, where no similarity lies so near τ that rounding
would decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.similarity import similarity
from minithink.ref import similarity as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE

MARGIN = 1e-5  # between any similarity and τ


def known_of(rows: int, d: int, most: int, tokens: int, device: Any) -> tuple[Tensor, ...]:
    """What is known of rows that have read nothing."""
    count = torch.zeros(rows, 2, dtype=torch.int32, device=device)
    count[:, 0] = 1
    return (
        torch.zeros(rows, d, device=device),
        torch.zeros(rows, most, d, device=device),
        torch.zeros(rows, tokens + 2, device=device),
        torch.zeros(rows, tokens + 1, dtype=torch.int32, device=device),
        count,
    )


@given(
    n=st.integers(0, 3),
    idle=st.integers(0, 2),
    d=st.sampled_from([1, 5, 16, 40]),
    most=st.sampled_from([1, 3, 7]),
    steps=st.integers(1, 24),
    ends=st.sampled_from([0.2, 0.6, 1.0]),
    alike=st.sampled_from([0.0, 1.0, 4.0]),
    tau=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    zeros=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    n: int,
    idle: int,
    d: int,
    most: int,
    steps: int,
    ends: float,
    alike: float,
    tau: float,
    dtype: torch.dtype,
    zeros: bool,
    seed: int,
) -> None:
    """Several rows, step by step, some not active; more sentences than the ring holds; hidden states of zeros."""
    g = torch.Generator().manual_seed(seed)
    rows, common = n + idle, torch.randn(d, generator=g)
    want = known_of(rows, d, most, steps, "cpu")
    want[1].normal_(generator=g)  # what lies in the ring's empty slots means nothing
    got = tuple(x.to(DEVICE, copy=True) for x in want)
    for step in range(steps):
        hidden = (torch.randn(n, d, generator=g) + alike * common).to(dtype) * (not zeros or step % 3 > 0)
        at, active = torch.randperm(rows, generator=g)[:n], torch.rand(n, generator=g) < 0.8
        closes = active & (torch.rand(n, generator=g) < ends)
        position = torch.full((n,), step)
        ended = at[want[4][at, 1] > 0]
        own = want[0][ended] / want[0][ended].norm(dim=-1, keepdim=True).clamp(min=1e-30)
        lam = want[1][ended] @ own[..., None]
        assume(bool(((lam == 0) | ((lam - tau).abs() > MARGIN)).all()))
        ref.similarity(hidden, at, active, position, closes, want, tau)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minithink.kernels.similarity.BLOCK", 2)
            patch.setattr("minithink.kernels.similarity.DEPTH", 16)
            arguments = (x.to(DEVICE) for x in (hidden, at, active, position, closes))
            similarity(*arguments, got, tau)  # type: ignore[arg-type]
        for name, a, b in zip(("total", "vector", "penalty"), got, want, strict=False):
            assert_close(name, a, b, atol=1e-5, rtol=1e-5)
        assert_same("which are flagged", got[2].cpu() > 0, want[2] > 0)
        for name, a, b in zip(("number", "count"), got[3:], want[3:], strict=True):
            assert_same(name, a, b)


@pytest.mark.parametrize(("tau", "flagged"), [(1.0, False), (0.999, True)])
def test_a_similarity_of_tau_is_not_above_it(tau: float, flagged: bool) -> None:
    """Two equal sentences of one token, whose similarity is exactly 1; the third token makes the second one known."""
    known = known_of(1, 2, 3, 3, DEVICE)
    at, on = torch.tensor([0], device=DEVICE), torch.ones(1, dtype=torch.bool, device=DEVICE)
    for position in range(3):
        here = torch.tensor([position], device=DEVICE)
        similarity(torch.tensor([[2.0, 0.0]], device=DEVICE), at, on, here, on, known, tau)  # type: ignore[arg-type]
    assert known[2][0].tolist() == [0, float(flagged), 0, 0, 0]
    assert known[3][0].tolist() == [1, 2, 3, 0]
