"""LRFU: the recursion is the sum over all hits, small cases by hand, LRU and LFU at its ends, no underflow."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.decode_attention import group_reduce
from minithink.ref.lrfu import hit_set, lrfu
from tests.compare import assert_close, assert_same

TRACE = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=12)  # hits of 5 tokens


def bools(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mass", "p", "want"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.5, [1, 0, 0, 0]),  # the token that reaches p is the last
        ([0.5, 0.25, 0.125, 0.125], 0.51, [1, 1, 0, 0]),
        ([0.125, 0.5, 0.125, 0.25], 0.8, [1, 1, 0, 1]),  # of equals the older
        ([0.25, 0.25, 0.25, 0.25], 0.75, [1, 1, 1, 0]),
        ([0.5, 0.25, 0.25, 0.0], 1.0, [1, 1, 1, 0]),  # nobody attends to the last
        ([4.0, 2.0, 1.0, 1.0], 0.75, [1, 1, 0, 0]),  # renormalised
        ([0.0, 0.0, 0.0, 0.0], 0.9, [0, 0, 0, 0]),
    ],
)
def test_hit_set_by_hand(mass: list[float], p: float, want: list[int]) -> None:
    valid = bools(1, 1, 1, 1, 0)
    assert hit_set(torch.tensor([*mass, torch.nan]), valid, p).tolist() == bools(*want, 0).tolist()


@pytest.mark.parametrize(
    ("sixteenths", "p", "want"),
    [
        ([5, 1, 3, 3, 2, 2], 0.9, {0, 2, 3, 4, 5}),
        ([5, 1, 3, 3, 2, 2], 0.75, {0, 2, 3, 4}),
        ([5, 1, 3, 3, 2, 2], 0.5, {0, 2}),
        ([5, 1, 3, 3, 2, 2], 1.0, {0, 1, 2, 3, 4, 5}),
        ([15, 1, 0, 0], 0.9, {0}),
        ([15, 1, 0, 0], 1.0, {0, 1}),
        ([12, 2, 1, 1], 0.9, {0, 1, 2}),  # a sink in the prompt
    ],
)
def test_hits_of_one_query(sixteenths: list[int], p: float, want: set[int]) -> None:
    mass = torch.tensor(sixteenths) / 16
    assert set(hit_set(mass, torch.ones_like(mass, dtype=torch.bool), p).nonzero().flatten().tolist()) == want


@pytest.mark.parametrize(("p", "want"), [(0.6, {0, 3}), (0.8, {0, 1, 3}), (0.9, {0, 1, 2, 3})])
def test_hits_of_a_group_of_queries(p: float, want: set[int]) -> None:
    """The largest probability of each token, renormalised: 4 2 2 4 of 12."""
    logits = (torch.tensor([[4.0, 2, 1, 1], [1, 1, 2, 4]]) / 8).log()[None, None]  # [1, Hkv, g, S]
    valid = torch.ones(1, 1, 4, dtype=torch.bool)
    mass = (group_reduce(logits, valid, "max") * 8).round() / 8  # the softmax is exact but for the last bit
    assert mass.tolist() == [[[0.5, 0.25, 0.25, 0.5]]]
    assert set(hit_set(mass, valid, p)[0, 0].nonzero().flatten().tolist()) == want


@given(parts=st.lists(st.integers(0, 9), min_size=1, max_size=9), over=st.integers(1, 8), lengths=st.integers(0, 9))
def test_hit_set_is_the_smallest_that_reaches_p(parts: list[int], over: int, lengths: int) -> None:
    valid = torch.arange(len(parts)) < lengths
    mass = torch.tensor(parts, dtype=torch.float32).masked_fill(~valid, torch.nan)
    got = hit_set(mass, valid, over / 8)
    inside = [x for x, v, hit in zip(parts, valid.tolist(), got.tolist(), strict=True) if v and hit]
    total = sum(x for x, v in zip(parts, valid.tolist(), strict=True) if v)
    assert not (got & ~valid).any()
    assert sum(inside) * 8 >= over * total
    assert all((sum(inside) - x) * 8 < over * total for x in inside)  # none can be spared
    outside = [x for x, v, hit in zip(parts, valid.tolist(), got.tolist(), strict=True) if v and not hit]
    assert min(inside, default=9) >= max(outside, default=0)


def follow(trace: list[list[bool]], lam: float, crf: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Five tokens that came at time 0, hit as the trace says at times 1, 2, …"""
    valid = torch.ones(5, dtype=torch.bool)
    state = torch.full((5,), crf), torch.zeros(5, dtype=torch.int32)
    score = torch.zeros(5, dtype=torch.float64)
    for t, hits in enumerate(trace, start=1):
        mass = torch.tensor(hits, dtype=torch.float32)  # with p = 1 these are the hits
        *state, score = lrfu(mass, valid, valid, *state, torch.tensor(t), lam, 1.0)  # type: ignore[assignment]
    return *state, score


def test_by_hand() -> None:
    """λ = ½: hits at 1 and 3, at 2, never, at 1, 2 and 3, at 3."""
    trace = [[True, False, False, True, False], [False, True, False, True, False], [True, False, False, True, True]]
    crf, last, score = follow(trace, 0.5)
    # just after the last hit: 1 + ½²(1 + ½); 1 + ½²; 1; 1 + ½(1 + ½(1 + ½)); 1 + ½³
    assert crf.tolist() == [1.375, 1.25, 1.0, 1.875, 1.125]
    assert last.tolist() == [3, 2, 0, 3, 3]
    want = torch.tensor([1.375, 0.625, 0.125, 1.875, 1.125], dtype=torch.float64)  # at time 3
    assert_close("decayed", score.exp2(), want, atol=1e-8)


HITS = ((1, 2, 3, 4, 5), (1, 6), (1, 2, 4))  # of tokens a, b, c


def test_three_tokens_by_hand() -> None:
    """λ = 0.6, no reward for birth: the values at every step, and what is stored."""
    valid, state = torch.ones(3, dtype=torch.bool), (torch.zeros(3), torch.zeros(3, dtype=torch.int32))
    values = []
    for t in range(1, 7):
        mass = torch.tensor([float(t in hits) for hits in HITS])
        *state, score = lrfu(mass, valid, valid, *state, torch.tensor(t), 0.6, 1.0)  # type: ignore[assignment]
        values.append(score.exp2().tolist())
    assert [pytest.approx(v, rel=1e-6) for v in zip(*values, strict=True)] == [
        (1, 1.6, 1.96, 2.176, 2.3056, 1.38336), (1, 0.6, 0.36, 0.216, 0.1296, 1.07776),
        (1, 1.6, 0.96, 1.576, 0.9456, 0.56736),
    ]  # fmt: skip
    assert state[0].tolist() == pytest.approx([2.3056, 1.07776, 1.576], rel=1e-6)
    assert state[1].tolist() == [5, 6, 4]


@pytest.mark.parametrize(
    ("lam", "want"),
    [(1.0, [5, 2, 3]), (0.6, [1.38336, 1.07776, 0.56736]), (0.5, [0.96875, 1.03125, 0.34375]), (0.0, [0, 1, 0])],
)
def test_three_tokens_under_four_decays(lam: float, want: list[float]) -> None:
    valid, state = torch.ones(3, dtype=torch.bool), (torch.zeros(3), torch.zeros(3, dtype=torch.int32))
    score = torch.zeros(3)
    for t in range(1, 7):
        mass = torch.tensor([float(t in hits) for hits in HITS])
        *state, score = lrfu(mass, valid, valid, *state, torch.tensor(t), lam, 1.0)  # type: ignore[assignment]
    assert score.exp2().tolist() == pytest.approx(want, rel=1e-6)
    assert state[1].tolist() == [5, 6, 4]


def test_where_float32_would_be_0() -> None:
    """Hits 250 and 300 steps ago, at λ = 0.6."""
    valid, last = torch.ones(2, dtype=torch.bool), torch.tensor([50, 0], dtype=torch.int32)
    score = lrfu(torch.zeros(2), valid, valid, torch.ones(2), last, torch.tensor(300), 0.6, 0.9)[2]
    assert score.tolist() == pytest.approx([-184.2, -221.1], abs=0.05)
    assert torch.tensor(0.6) ** 300 == 0


@given(trace=TRACE, lam=st.sampled_from([0.0, 0.1, 0.5, 0.6, 0.95, 1.0]), birth=st.sampled_from([0, 1]))
def test_the_recursion_is_the_sum_over_all_hits(trace: list[list[bool]], lam: float, birth: int) -> None:
    _, last, score = follow(trace, lam, float(birth))
    now, exact = len(trace), Fraction(lam)
    for i in range(5):
        hits = [t for t, row in enumerate(trace, start=1) if row[i]]
        want = sum((exact ** (now - t) for t in hits), birth * exact**now)
        assert float(score[i].exp2()) == pytest.approx(float(want), rel=1e-6)
        assert int(last[i]) == max(hits, default=0)


def test_only_counted_hits_count() -> None:
    crf, last = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3, 5, 7], dtype=torch.int32)
    valid, mass, t = bools(1, 1, 0), torch.tensor([0.5, 0.5, torch.nan]), torch.tensor(7)
    got = lrfu(mass, valid, bools(0, 1, 0), crf, last, t, 0.5, 1.0)
    assert_same("crf", got[0], torch.tensor([1.0, 1.5, 0.0]))
    assert_same("last", got[1], torch.tensor([3, 7, 7], dtype=torch.int32))
    assert got[2].tolist() == [-4.0, pytest.approx(math.log2(1.5)), -math.inf]


@pytest.mark.parametrize("lam", [0.01, 0.5, 0.6, 0.99])
def test_old_hits_do_not_underflow(lam: float) -> None:
    """Tokens last hit some 100,000 steps ago are told apart, by recency and by frequency."""
    crf = torch.tensor([1.0, 1.0, 1.001])
    last = torch.tensor([5, 6, 6], dtype=torch.int32)
    valid = torch.ones(3, dtype=torch.bool)
    score = lrfu(torch.zeros(3), valid, valid, crf, last, torch.tensor(100_000), lam, 0.9)[2]
    assert score.isfinite().all()
    assert score[0] < score[1] < score[2]


def test_equal_histories_tie() -> None:
    """In whatever column a token stands: vectorised and single elements may differ in their last bits."""
    n = 37
    valid = torch.ones(n, dtype=torch.bool)
    state = torch.ones(n), torch.zeros(n, dtype=torch.int32)
    for t in (1, 4, 5, 11, 30, 31):
        *state, score = lrfu(torch.ones(n), valid, valid, *state, torch.tensor(t), 0.63, 1.0)  # type: ignore
    *_, score = lrfu(torch.zeros(n), valid, valid, *state, torch.tensor(77), 0.63, 1.0)  # type: ignore[misc]
    assert len(set(score.tolist())) == 1
    assert torch.equal(score * 2**30, (score * 2**30).round()), "rounded, so that they tie on every device"


@given(trace=TRACE, lam=st.floats(0.35, 0.5))
def test_up_to_one_half_the_newest_hit_decides(trace: list[list[bool]], lam: float) -> None:
    """One hit outweighs all older ones together: tokens compare by their newest hits, then by those before."""
    *_, score = follow(trace, lam)
    history = [[row[i] for row in reversed(trace)] for i in range(5)]
    for i in range(5):
        for j in range(5):
            if history[i] != history[j]:
                assert (score[i] < score[j]) == (history[i] < history[j])


@given(seed=st.integers(0, 999), lam=st.sampled_from([1e-3, 0.2, 0.3, 0.49999, 0.5]))
def test_up_to_one_half_lrfu_is_lru(seed: int, lam: float) -> None:
    """Over long histories, where float32 has rounded: never does a token outlive one that was hit later."""
    hits = torch.rand(60, 5, generator=torch.Generator().manual_seed(seed)) < torch.tensor([0.02, 0.1, 0.3, 0.9, 1])
    hits[torch.tensor(seed % 60) :, 4] = False  # a long row of hits ends
    _, last, score = follow(hits.tolist(), lam)
    for i in range(5):
        for j in range(5):
            if last[i] < last[j]:
                assert (score[i], last[i]) < (score[j], last[j])


@given(trace=TRACE)
def test_without_memory_it_is_lru_and_without_decay_lfu(trace: list[list[bool]]) -> None:
    *_, score = follow(trace, 0.0)
    assert score.isneginf().tolist() == [not hit for hit in trace[-1]]
    assert all(x == 0 for x in score[score.isfinite()].tolist())
    *_, score = follow(trace, 1.0)
    count = torch.tensor(trace).sum(0) + 1
    assert_close("hits", score.exp2(), count.double(), atol=1e-7)
