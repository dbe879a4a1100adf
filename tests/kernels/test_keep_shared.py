"""The best candidates of lanes that share places: the kernel keeps what its twin keeps, and the laws of the twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.keep_shared import keep_shared
from minithink.ref import keep_shared as ref
from minithink.ref.keep_best import keep_best
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.kernels.test_keep_best import INF, NAN, scores


@given(
    lead=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    heads=st.sampled_from([1, 2, 4, 7]),
    width=st.integers(0, 24),
    block=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kind=st.sampled_from(["random", "ties", "close", "extreme"]),
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    poison=st.sampled_from([NAN, INF, -INF, 0.0]),
    certain=st.sampled_from([0, 1, 5, 30]),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    lead: tuple[int, ...],
    heads: int,
    width: int,
    block: int,
    dtype: torch.dtype,
    kind: str,
    share: float,
    poison: float,
    certain: int,
    seed: int,
) -> None:
    """Ties within a lane and between lanes, infinities; lanes without candidates; floors and counts below 0, floors
    that come to more than the count, counts of more than there are."""
    generator = torch.Generator().manual_seed(seed)
    score = scores(kind, (*lead, heads, width), dtype, generator)
    candidate = torch.rand(*lead, heads, width, generator=generator) < share
    count = torch.randint(-1, heads * width + 2, lead, generator=generator, dtype=torch.int32)
    floor = torch.randint(-1, certain + 1, (*lead, heads), generator=generator, dtype=torch.int32)
    arguments = score.masked_fill(~candidate, poison), candidate, count, floor
    want = ref.keep_shared(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.keep_shared.BLOCK", block)
        assert_same("keep_shared", keep_shared(*(x.to(DEVICE) for x in arguments)), want)

    there = candidate.sum(-1)
    kept, least = want.sum(-1), torch.minimum(there, floor.clamp(min=0))
    assert not (want & ~candidate).any()
    assert (kept >= least).all()
    assert torch.equal(kept.sum(-1), torch.maximum(torch.minimum(count, there.sum(-1)), least.sum(-1)))
    # with as many places as the floors take, each lane is alone; without floors there is one long lane
    alone = ref.keep_shared(score, candidate, least.sum(-1), floor)
    assert torch.equal(alone, keep_best(score, candidate, floor))
    free = ref.keep_shared(score, candidate, count, torch.zeros_like(floor))
    assert torch.equal(free.flatten(-2), keep_best(score.flatten(-2), candidate.flatten(-2), count))


def test_long_lanes() -> None:
    """As it is launched: lanes longer than a block, ties across blocks and lanes, views."""
    generator = torch.Generator().manual_seed(1)
    score = torch.randint(-5, 5, (2, 1, 2500), generator=generator).float().expand(2, 4, 2500)
    candidate = torch.rand(2, 4, 2500, generator=generator) < 0.9
    count, floor = torch.tensor([3000, 700]), torch.tensor([[100, 900, 0, 30], [1, 2, 3, 4]])
    arguments = score, candidate, count, floor
    want = ref.keep_shared(*arguments)
    assert_same("keep_shared", keep_shared(*(x.to(DEVICE) for x in arguments)), want)
    assert want.sum((1, 2)).tolist() == [3000, 700]


@pytest.mark.parametrize("keep", [keep_shared, ref.keep_shared])
def test_ties_by_hand(keep: object) -> None:
    """Of equal scores the older of a lane, and among lanes the first; what is certain goes first, infinite or not."""
    score = torch.tensor([[1.0, 1, 1, INF], [1, 2, INF, INF]], device=DEVICE)
    candidate = torch.ones_like(score, dtype=torch.bool)
    candidate[0, 3] = False
    for count, floor, want in (
        (4, [0, 0], [[0], [1, 2, 3]]),
        (5, [0, 0], [[0, 1], [1, 2, 3]]),
        (4, [2, 0], [[0, 1], [2, 3]]),
        (4, [0, 2], [[0], [1, 2, 3]]),
        (2, [1, 1], [[0], [2]]),
        (2, [3, 1], [[0, 1, 2], [2]]),
    ):
        kept = keep(score, candidate, *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (count, floor)))  # type: ignore[operator]
        assert [row.nonzero().flatten().tolist() for row in kept] == want
