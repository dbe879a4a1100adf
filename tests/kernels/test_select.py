"""Selection windows: the kernel drops exactly what its twin drops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.select import select
from minithink.ref import select as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE


@given(
    shape=st.sampled_from([(1, 1, 1), (1, 3, 1), (2, 2, 2), (1, 4, 2), (1, 0, 1)]),
    width=st.integers(0, 50),
    block=st.sampled_from([16, 64]),
    kind=st.sampled_from(["random", "ties", "signs", "lost"]),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    shape: tuple[int, int, int], width: int, block: int, kind: str, shared: bool, seed: int
) -> None:
    """Ties; −∞ and NaN among the scores; windows that are empty, or smaller than what they may keep; lanes that hold
    no token, or hold less than their local window; lanes that are not due; NaN behind the last token's score."""
    n = shape[1]
    g, tokens = torch.Generator().manual_seed(seed), width + 20

    def whole(low: int, high: int, size: tuple[int, ...] = shape) -> torch.Tensor:
        return torch.randint(low, high, size, generator=g, dtype=torch.int32)

    score = torch.randn(n + 2, tokens, generator=g)
    if kind == "ties":
        score = torch.randint(3, score.shape, generator=g) / 2 - 0.5
    if kind == "signs":
        score = torch.tensor([-math.inf, math.inf, -0.0, 0.0, -1e-30, 1.0])[
            torch.randint(6, score.shape, generator=g)
        ]
    if kind == "lost":
        score = torch.where(torch.rand(score.shape, generator=g) < 0.1, torch.nan, score)
    held = whole(0, width + 1)
    pos = torch.full((*shape, width), -1, dtype=torch.int32)
    for lane in torch.cartesian_prod(*(torch.arange(x) for x in shape)).tolist() if held.numel() else []:
        count = int(held[tuple(lane)])
        pos[tuple(lane)][:count] = torch.randperm(tokens, generator=g)[:count].sort().values
    local, keep = whole(0, 8), whole(-1, width + 2)
    if shared:
        local, keep = (x[:, :, :1].expand(shape) for x in (local, keep))
    due = torch.rand(shape, generator=g) < 0.8
    arguments = score, pos, held, torch.randperm(n + 2, generator=g)[:n], whole(0, 9, (n,)), local, keep, due
    want = ref.select(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.select.BLOCK", block)
        got = select(*(x.to(DEVICE) for x in arguments))
    assert_same("select", got, want)
    assert not want[~due].any()


def test_a_long_lane() -> None:
    """As it is launched: more columns than one block, scores that tie across blocks, positions with gaps."""
    g = torch.Generator().manual_seed(5)
    score = torch.randint(-40, 40, (3, 6000), generator=g) / 8
    pos = torch.stack([torch.randperm(6000, generator=g)[:4000].sort().values for _ in range(2)]).int()[None, :, None]
    held = torch.tensor([4000, 3100], dtype=torch.int32).view(1, 2, 1)
    arguments = [
        score,
        pos,
        held,
        torch.tensor([2, 0]),
        torch.tensor([100, 60], dtype=torch.int32),
        torch.full_like(held, 1500),
        torch.full_like(held, 700),
        torch.ones_like(held, dtype=torch.bool),
    ]
    want = ref.select(*arguments)
    assert int(want.sum()) > 2000
    assert_same("select", select(*(x.to(DEVICE) for x in arguments)), want)


def test_the_example_of_the_spec() -> None:
    """M 3, W_l 3, k 2: of positions 3 to 6 the third and the fifth stay, of equal scores the older."""
    score = torch.tensor([[0.0, 0, 0, 0.9, 0.2, 0.6, 0.6, 0.3, 0.8, 0.6]])
    pos, one = torch.arange(10, dtype=torch.int32).view(1, 1, 1, 10), torch.ones(1, 1, 1, dtype=torch.int32)
    arguments = score, pos, 10 * one, torch.zeros(1, dtype=torch.int64), 3 * one.view(1), 3 * one, 2 * one, one.bool()
    for function in (select, ref.select):
        drop = function(*(x.to(DEVICE) for x in arguments))
        assert drop.flatten().nonzero().flatten().tolist() == [4, 6]
