"""LRFU: the kernel's hits are exactly its twin's where sums of masses are exact, else but for those on the edge."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.lrfu import hit_set, lrfu
from minithink.ref import lrfu as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE

LEADS = st.sampled_from([(), (1,), (3,), (2, 1, 2), (0,)])
P = st.sampled_from([2**-20, 0.5, 0.875, 0.9, 1.0])


def masses(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "ties":  # multiples of 1/4
        return torch.randint(4, shape, generator=generator) / 4
    if kind == "powers":  # one token outweighs all that follow it
        return 2.0 ** -torch.randint(26, shape, generator=generator)
    if kind == "zero":
        return torch.zeros(shape)
    return torch.randint(1 << 20, shape, generator=generator) / (1 << 20)  # "many": few of them equal


@given(
    lead=LEADS,
    width=st.integers(0, 40),
    block=st.sampled_from([16, 64]),
    kind=st.sampled_from(["ties", "powers", "many", "zero"]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
    p=P,
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_hit_set_of_dyadic_masses(
    lead: tuple[int, ...], width: int, block: int, kind: str, dtype: torch.dtype, p: float, share: float, seed: int
) -> None:
    """Exactly the twin's: their sums are exact in whichever order."""
    generator = torch.Generator().manual_seed(seed)
    mass = masses(kind, (*lead, width), generator).to(dtype)
    valid = torch.rand(*lead, width, generator=generator) < share
    mass = mass.masked_fill(~valid, torch.nan if seed % 2 else 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.lrfu.BLOCK", block)
        got = hit_set(mass.to(DEVICE), valid.to(DEVICE), p)
    assert_same("hit set", got, ref.hit_set(mass, valid, p))


@pytest.mark.parametrize("p", [0.3, 0.9, 0.99, 1.0])
def test_hit_set_of_real_attention(p: float) -> None:
    """As it is launched, on probabilities: the twin's but for tokens before which the sum is the share, within the
    rounding of float64."""
    logits = 3 * torch.randn(3, 2100, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    mass, valid = logits.softmax(-1).float(), torch.arange(2100) < torch.tensor([[2100], [1500], [1]])
    got = hit_set(mass.to(DEVICE), valid.to(DEVICE), p).cpu()
    masked = mass.masked_fill(~valid, 0.0).double()
    ordered, order = masked.sort(dim=-1, descending=True, stable=True)
    before = torch.zeros_like(masked).scatter(-1, order, ordered.cumsum(-1) - ordered)
    total = masked.sum(-1, keepdim=True)
    on_edge = (before - p * total).abs() < 1e-12 * total
    assert not ((got != ref.hit_set(mass, valid, p)) & ~on_edge).any()
    assert not (got & ~valid).any()
    assert (on_edge & (masked > 0)).sum() < 5


@pytest.mark.filterwarnings("ignore:divide by zero")  # log2 of a CRF of 0, in the interpreter
@given(
    lead=LEADS,
    width=st.integers(0, 33),
    block=st.sampled_from([16, 64]),
    lam=st.sampled_from([0.0, 0.01, 0.5, 0.6, 0.99, 1.0]),
    p=P,
    now=st.sampled_from([0, 3, 2000, 3_000_000]),
    clocks=st.sampled_from(["one", "lane", "token"]),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    lead: tuple[int, ...], width: int, block: int, lam: float, p: float, now: int, clocks: str, seed: int
) -> None:
    """Old and recent hits, tokens that were never hit, ages below 0; one time for all, a lane's or every token's."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, width)
    mass = masses("ties", shape, generator)
    valid, counted = (torch.rand(shape, generator=generator) < share for share in (0.9, seed % 3 / 2))
    mass = mass.masked_fill(~valid, torch.nan)
    crf = torch.tensor([0.0, 1.0, 1.5, 2.6])[torch.randint(4, shape, generator=generator)]
    ages = torch.tensor([-1, 0, 1, 2, 40, 1999])
    last = (now - ages[torch.randint(6, shape, generator=generator)] * (1 + now // 2000)).to(torch.int32)
    t = {"one": torch.tensor(now), "lane": torch.full((*lead[1:], 1), now), "token": torch.full(shape, now)}[clocks]
    if clocks != "one":
        t = (t + torch.randint(3, t.shape, generator=generator)).to(torch.int32)
    tensors = mass, valid, counted, crf, last, t
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.lrfu.BLOCK", block)
        got = lrfu(*(x.to(DEVICE) for x in tensors), lam, p)
    want = ref.lrfu(*tensors, lam, p)
    assert_close("crf", got[0], want[0], atol=0.0, rtol=2**-23)
    assert_same("last", got[1], want[1])
    lost = want[2] == -math.inf
    assert torch.equal(got[2].cpu() == -math.inf, lost)
    # One step of the grid, one bit of a float32, and double precision's rounding of some millions.
    atol = 2**-30 + 2**-22 * (got[0].cpu() != want[0])
    error = (got[2].cpu() - want[2]).masked_fill(lost, 0.0).abs()
    assert (error <= atol + 1e-15 * want[2].masked_fill(lost, 0.0).abs()).all(), (got[2], want[2])
    assert torch.equal((got[2] * 2**30).round(), got[2] * 2**30)


def test_scores_of_one_half_are_exact() -> None:
    """With CRF a power of 2 they are whole numbers, whatever the age."""
    n = 64
    crf = torch.exp2(torch.arange(n, dtype=torch.float32) % 7)
    last = (torch.arange(n, dtype=torch.int32) ** 2).flip(0)
    valid, mass, t = torch.ones(n, dtype=torch.bool), torch.arange(n) / 64, torch.tensor(5000)
    tensors = mass, valid, valid, crf, last, t
    got, want = lrfu(*(x.to(DEVICE) for x in tensors), 0.5, 0.5), ref.lrfu(*tensors, 0.5, 0.5)
    for name, a, b in zip(("crf", "last", "score"), got, want, strict=True):
        assert_same(name, a, b)


def test_equal_histories_tie() -> None:
    """In whatever column a token stands: so keep_best may keep the older."""
    n = 37
    valid, t = torch.ones(n, dtype=torch.bool, device=DEVICE), torch.tensor(0, device=DEVICE)
    state = torch.ones(n, device=DEVICE), torch.zeros(n, dtype=torch.int32, device=DEVICE)
    for step in (1, 4, 5, 11, 30, 31):
        *state, score = lrfu(valid.float(), valid, valid, *state, t + step, 0.63, 1.0)  # type: ignore
    *_, score = lrfu(torch.zeros(n, device=DEVICE), valid, valid, *state, t + 77, 0.63, 1.0)  # type: ignore[misc]
    assert len(set(score.tolist())) == 1
