"""The best candidates: the kernel keeps exactly what its twin keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.keep_best import keep_best
from minithink.ref import keep_best as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE

INF, NAN = math.inf, math.nan


def scores(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if kind == "ties":  # −1, −0.0, 0.0 and 1
        sign = 1 - 2.0 * torch.randint(2, shape, generator=generator)
        return (sign * torch.randint(2, shape, generator=generator)).to(dtype)
    if kind == "close":  # neighbours in the number type: the last digits decide
        bits = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
        one = torch.tensor(-1.0 if torch.rand((), generator=generator) < 0.5 else 1.0, dtype=dtype).view(bits)
        return (one + torch.randint(-300, 300, shape, generator=generator)).to(bits).view(dtype)
    if kind == "extreme":
        tiny, huge = torch.finfo(dtype).smallest_normal / 8, torch.finfo(dtype).max
        pool = torch.tensor([-INF, INF, huge, -huge, tiny, -tiny, 0.0, -0.0, 1.0], dtype=dtype)
        return pool[torch.randint(len(pool), shape, generator=generator)]
    return torch.randn(shape, generator=generator, dtype=dtype)


@given(
    lead=st.sampled_from([(), (1,), (3,), (2, 1, 2), (0,)]),
    width=st.integers(0, 40),
    block=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kind=st.sampled_from(["random", "ties", "close", "extreme"]),
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    poison=st.sampled_from([NAN, INF, -INF, 0.0]),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    lead: tuple[int, ...],
    width: int,
    block: int,
    dtype: torch.dtype,
    kind: str,
    share: float,
    poison: float,
    shared: bool,
    seed: int,
) -> None:
    """Ties, neighbouring numbers, infinities; lanes without candidates; counts from −1 to more than there are."""
    generator = torch.Generator().manual_seed(seed)
    score = scores(kind, (*lead, width), dtype, generator)
    candidate = torch.rand(*lead, width, generator=generator) < share
    count = torch.randint(-1, width + 2, lead, generator=generator, dtype=torch.int32 if seed % 2 else torch.int64)
    score = score.masked_fill(~candidate, poison)
    if shared and lead:  # views: the same scores and candidates in every lane
        score, candidate = (x[:1].expand(lead[0], *x.shape[1:]) for x in (score, candidate))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.keep_best.BLOCK", block)
        got = keep_best(score.to(DEVICE), candidate.to(DEVICE), count.to(DEVICE))
    assert_same("keep_best", got, ref.keep_best(score, candidate, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_lane(dtype: torch.dtype) -> None:
    """As it is launched: more columns than one block, candidates that tie across blocks."""
    score = torch.randint(-5, 5, (2, 2500), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    candidate, count = score.roll(7) > -4, torch.tensor([900, 1], device=DEVICE)
    assert_same("keep_best", keep_best(score, candidate, count), ref.keep_best(score, candidate, count))


def test_candidates_that_are_nan_count() -> None:
    """They stand above all others, the older first, as in the twin."""
    score = torch.tensor([1.0, NAN, INF, -NAN, -INF, NAN, NAN], device=DEVICE)
    candidate = torch.tensor([1, 1, 1, 1, 1, 0, 1], dtype=torch.bool, device=DEVICE)
    for n in range(8):
        count = torch.tensor(n, device=DEVICE)
        # torch's sort on a GPU knows two kinds of NaN, by the sign
        want = ref.keep_best(score.cpu(), candidate.cpu(), count.cpu()).to(DEVICE)
        assert_same("keep_best", keep_best(score, candidate, count), want)


def test_half_precision_is_taken() -> None:
    score = torch.randn(3, 9, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    candidate, count = torch.ones_like(score, dtype=torch.bool), torch.tensor([2, 5, 8], device=DEVICE)
    assert_same("keep_best", keep_best(score, candidate, count), ref.keep_best(score, candidate, count))
