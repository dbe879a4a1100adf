"""LRFU: the recursion is the sum over all hits, small cases by hand, LRU and LFU at its ends, no underflow."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.decode_attention import group_reduce
from minithink.ref.lrfu import STEPS, Decay, Scaled, decayed, hit_set, lrfu, power_of_2, window
from tests.compare import assert_same

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


def state_of(n: int, crf: float = 1.0) -> tuple[Tensor, Tensor]:
    """CRF and τ of n tokens that came at time 0."""
    return torch.full((n,), crf, dtype=torch.float64), torch.zeros(n, dtype=torch.int32)


def step(hits: list[bool] | Tensor, state: tuple[Tensor, Tensor], t: int, decay: Decay) -> tuple[Any, Scaled]:
    """The state after a step in which these tokens are hit, and CRF decayed to t."""
    mass = torch.as_tensor(hits).float()  # with p = 1 these are the hits
    valid = torch.ones(mass.shape, dtype=torch.bool)
    crf, last, now = lrfu(mass, valid, valid, *state, torch.tensor(t), decay, 1.0)
    return (crf, last), now


def follow(trace: list[list[bool]], lam: float, crf: float = 1.0) -> tuple[Tensor, Tensor, Scaled]:
    """Five tokens that came at time 0, hit as the trace says at times 1, 2, …"""
    decay = Decay(lam)
    state = state_of(5, crf)
    now = decayed(*state, torch.tensor(0), decay)
    for t, hits in enumerate(trace, start=1):
        state, now = step(hits, state, t, decay)
    return *state, now


def keys(now: Scaled) -> list[tuple[int, float]]:
    """Of each token, what compares as its CRF does."""
    return list(zip(*(x.tolist() for x in now.ordered()), strict=True))


def test_by_hand() -> None:
    """λ = ½: hits at 1 and 3, at 2, never, at 1, 2 and 3, at 3."""
    trace = [[True, False, False, True, False], [False, True, False, True, False], [True, False, False, True, True]]
    crf, last, now = follow(trace, 0.5)
    # just after the last hit: 1 + ½²(1 + ½); 1 + ½²; 1; 1 + ½(1 + ½(1 + ½)); 1 + ½³
    assert crf.tolist() == [1.375, 1.25, 1.0, 1.875, 1.125]
    assert last.tolist() == [3, 2, 0, 3, 3]
    want = torch.tensor([1.375, 0.625, 0.125, 1.875, 1.125], dtype=torch.float64)  # at time 3
    assert_same("decayed", now.number(), want)


HITS = ((1, 2, 3, 4, 5), (1, 6), (1, 2, 4))  # of tokens a, b, c


def test_three_tokens_by_hand() -> None:
    """λ = 0.6, no reward for birth: the values at every step, and what is stored."""
    decay = Decay(0.6)
    state = state_of(3, 0.0)
    values = []
    for t in range(1, 7):
        state, now = step([t in hits for hits in HITS], state, t, decay)
        values.append(now.number().tolist())
    assert [pytest.approx(v, rel=1e-14) for v in zip(*values, strict=True)] == [
        (1, 1.6, 1.96, 2.176, 2.3056, 1.38336),
        (1, 0.6, 0.36, 0.216, 0.1296, 1.07776),
        (1, 1.6, 0.96, 1.576, 0.9456, 0.56736),
    ]
    assert state[0].tolist() == pytest.approx([2.3056, 1.07776, 1.576], rel=1e-14)
    assert state[1].tolist() == [5, 6, 4]


@pytest.mark.parametrize(
    ("lam", "want"),
    [(1.0, [5, 2, 3]), (0.6, [1.38336, 1.07776, 0.56736]), (0.5, [0.96875, 1.03125, 0.34375]), (0.0, [0, 1, 0])],
)
def test_three_tokens_under_four_decays(lam: float, want: list[float]) -> None:
    decay = Decay(lam)
    state = state_of(3, 0.0)
    for t in range(1, 7):
        state, now = step([t in hits for hits in HITS], state, t, decay)
    assert now.number().tolist() == pytest.approx(want, rel=1e-14)
    assert state[1].tolist() == [5, 6, 4]


def test_where_float32_would_be_0() -> None:
    """Hits 250 and 300 steps ago, at λ = 0.6."""
    last = torch.tensor([50, 0], dtype=torch.int32)
    now = decayed(torch.ones(2).double(), last, torch.tensor(300), Decay(0.6))
    assert now.log2().tolist() == pytest.approx([-184.2, -221.1], abs=0.05)
    assert torch.tensor(0.6) ** 300 == 0


@given(trace=TRACE, lam=st.sampled_from([0.0, 0.1, 0.5, 0.6, 0.95, 1.0]), birth=st.sampled_from([0, 1]))
def test_the_recursion_is_the_sum_over_all_hits(trace: list[list[bool]], lam: float, birth: int) -> None:
    _, last, crf = follow(trace, lam, float(birth))
    now, exact = len(trace), Fraction(lam)
    for i in range(5):
        hits = [t for t, row in enumerate(trace, start=1) if row[i]]
        want = sum((exact ** (now - t) for t in hits), birth * exact**now)
        assert float(crf.number()[i]) == pytest.approx(float(want), rel=1e-14)
        assert int(last[i]) == max(hits, default=0)


def test_only_counted_hits_count() -> None:
    crf = torch.tensor([1.0, 2.0, 0.0]).double()
    last = torch.tensor([3, 5, 7], dtype=torch.int32)
    valid, mass, t = bools(1, 1, 0), torch.tensor([0.5, 0.5, torch.nan]), torch.tensor(7)
    got = lrfu(mass, valid, bools(0, 1, 0), crf, last, t, Decay(0.5), 1.0)
    assert_same("crf", got[0], torch.tensor([1.0, 1.5, 0.0]).double())
    assert_same("last", got[1], torch.tensor([3, 7, 7], dtype=torch.int32))
    assert got[2].log2().tolist() == [-4.0, pytest.approx(math.log2(1.5)), -math.inf]


@pytest.mark.parametrize("lam", [0.01, 0.5, 0.6, 0.99])
def test_old_hits_do_not_underflow(lam: float) -> None:
    """Tokens last hit some 100,000 steps ago are told apart, by recency and by frequency."""
    crf = torch.tensor([1.0, 1.0, 1.0 + 2.0**-50], dtype=torch.float64)
    last = torch.tensor([5, 6, 6], dtype=torch.int32)
    older, newer, more = keys(decayed(crf, last, torch.tensor(100_000), Decay(lam)))
    assert older < newer < more


def test_equal_histories_tie() -> None:
    """In whatever column a token stands: vectorised and single elements may differ in their last bits."""
    n = 37
    decay = Decay(0.63)
    state = state_of(n)
    for t in (1, 4, 5, 11, 30, 31):
        state, _ = step(torch.ones(n), state, t, decay)
    _, now = step(torch.zeros(n), state, 77, decay)
    assert len(set(keys(now))) == 1


@given(trace=TRACE, lam=st.floats(0.35, 0.5))
def test_up_to_one_half_the_newest_hit_decides(trace: list[list[bool]], lam: float) -> None:
    """One hit outweighs all older ones together: tokens compare by their newest hits, then by those before."""
    *_, now = follow(trace, lam)
    history = [[row[i] for row in reversed(trace)] for i in range(5)]
    score = keys(now)
    for i in range(5):
        for j in range(5):
            if history[i] != history[j]:
                assert (score[i] < score[j]) == (history[i] < history[j])


@given(seed=st.integers(0, 999), lam=st.sampled_from([1e-3, 0.2, 0.3, 0.49999, 0.5]))
def test_up_to_one_half_lrfu_is_lru(seed: int, lam: float) -> None:
    """Over long histories, where float64 has rounded: never does a token outlive one that was hit later."""
    hits = torch.rand(60, 5, generator=torch.Generator().manual_seed(seed)) < torch.tensor([0.02, 0.1, 0.3, 0.9, 1])
    hits[torch.tensor(seed % 60) :, 4] = False  # a long row of hits ends
    _, last, now = follow(hits.tolist(), lam)
    score = keys(now)
    for i in range(5):
        for j in range(5):
            if last[i] < last[j]:
                assert (score[i], last[i]) < (score[j], last[j])


@given(trace=TRACE)
def test_without_memory_it_is_lru_and_without_decay_lfu(trace: list[list[bool]]) -> None:
    score = follow(trace, 0.0)[2].log2()
    assert score.isneginf().tolist() == [not hit for hit in trace[-1]]
    assert all(x == 0 for x in score[score.isfinite()].tolist())
    *_, now = follow(trace, 1.0)
    count = torch.tensor(trace).sum(0) + 1
    assert_same("hits", now.number(), count.double())


# --- exact arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 1e-3, 0.1, 0.5, 0.6, 0.999, 1.0])
@pytest.mark.parametrize("age", [0, 1, 2, 700, STEPS - 1, STEPS, 3 * STEPS + 5])
def test_a_power_is_exact_but_for_its_last_bits(lam: float, age: int) -> None:
    """A CRF of 1 decays to λ^age, whose entries of the tables are rounded once."""
    last = torch.zeros(1, dtype=torch.int32)
    t = torch.tensor(age)
    value, exponent = decayed(torch.ones(1).double(), last, t, Decay(lam))
    got = Fraction(value.item()) * Fraction(2) ** int(exponent)
    assert abs(got - Fraction(lam) ** age) <= Fraction(lam) ** age * Fraction(2) ** -51


def test_ages_beyond_the_tables_count_as_the_oldest_there() -> None:
    last = torch.tensor([0, 9], dtype=torch.int32)
    decay = Decay(0.6)
    oldest, other = keys(decayed(torch.ones(2).double(), last, torch.tensor(STEPS**2 + 20), decay))
    assert oldest == other


def test_a_hit_39_steps_before_the_last_one_counts() -> None:
    """λ = 0.6, hits at 1 and 40 against one at 40: 1.0000000022 is more than 1. In float32 both are 1."""
    state = state_of(2, 0.0)
    decay = Decay(0.6)
    for t in range(1, 41):
        state, now = step([t in (1, 40), t == 40], state, t, decay)
    more, less = now.number().tolist()
    assert more == pytest.approx(1 + 0.6**39, rel=1e-15)
    assert keys(now)[0] > keys(now)[1]
    assert less == 1
    assert torch.tensor(more).float() == 1


def exact_values(hits: Tensor, lam: float) -> list[int]:
    """Each token's CRF after the last step, in units of a power of 2 that all share. λ is a multiple of one."""
    numerator, denominator = lam.as_integer_ratio()
    values = [0] * hits.shape[1]
    unit = 1
    for row in hits.tolist():
        unit *= denominator
        values = [value * numerator + hit * unit for value, hit in zip(values, row, strict=True)]
    return values


def drawn(seed: int, steps: int, tokens: int) -> Tensor:
    """Long histories, bool [steps, tokens]. Every second one repeats the newest part of its neighbour's."""
    g = torch.Generator().manual_seed(seed)
    hits = torch.rand(steps, tokens, generator=g) < torch.tensor([0.02, 0.1, 0.3, 0.9])[seed % 4]
    for i in range(1, tokens, 2):
        same = int(torch.randint(1, 90, (), generator=g))
        hits[-same:, i] = hits[-same:, i - 1]
    return hits


def after(hits: Tensor, lam: float) -> tuple[list[tuple[int, float]], list[int]]:
    """Keys and last hits after the last step."""
    decay = Decay(lam)
    state = state_of(hits.shape[1], 0.0)
    for t, row in enumerate(hits, start=1):
        state, now = step(row, state, t, decay)
    return keys(now), state[1].tolist()


@pytest.mark.parametrize("lam", [0.1, 0.3, 0.5, 0.6, 0.7, 0.9, 0.99])
def test_long_histories_compare_as_exact_numbers_do(lam: float) -> None:
    """All pairs whose exact CRFs differ by more than 2^−50 of their size; the others may tie."""
    compared = 0
    for seed in range(8):
        hits = drawn(seed, 250, 16)
        values = exact_values(hits, lam)
        (score, _) = after(hits, lam)
        for i in range(16):
            for j in range(i):
                if abs(values[i] - values[j]) << 50 > max(values[i], values[j]):
                    assert (score[i] > score[j]) == (values[i] > values[j])
                    compared += 1
    assert compared > 500


def first_difference(a: list[bool], b: list[bool]) -> int:
    """Steps from the last hit of either back to the newest step in which one is hit and the other is not."""
    last = max(i for i, both in enumerate(zip(a, b, strict=True)) if any(both))
    return last - max(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)


@pytest.mark.parametrize("lam", [1e-3, 0.05, 0.1, 0.2, 0.3, 0.4, 0.4999, 0.5])
def test_up_to_one_half_all_decays_decide_alike_within_the_window(lam: float) -> None:
    """On long histories: by the newest hits. Beyond the window tokens may tie, and never swap."""
    sure = beyond = 0
    for seed in range(8):
        hits = drawn(seed, 250, 16)
        score, last = after(hits, lam)
        history = hits.T.tolist()
        for i in range(16):
            for j in range(i):
                if history[i] == history[j]:
                    assert score[i] == score[j]
                    continue
                newer, older = (i, j) if history[i][::-1] > history[j][::-1] else (j, i)
                assert (score[newer], last[newer]) >= (score[older], last[older])
                steps = first_difference(history[i], history[j])
                if last[i] == last[j] and steps < window(lam, bits=50):
                    assert score[newer] > score[older]
                    sure += 1
                if steps > window(lam) + 1:
                    beyond += 1
    assert sure > 50
    assert beyond > 5


@pytest.mark.parametrize(("lam", "steps"), [(0.5, 53), (0.6, 72), (0.9, 349), (0.1, 16)])
def test_the_window_is_where_a_hit_weighs_half_a_unit_of_the_last_place(lam: float, steps: int) -> None:
    assert round(window(lam)) == steps
    assert 1 + lam ** (window(lam) + 1) == 1.0
    assert 1 + lam ** (window(lam) - 2) > 1.0


def test_sums_of_attention_are_not_rounded() -> None:
    """In float32 a sum of 1 and many small parts stays 1, and the small parts would not be hits."""
    mass = torch.cat((torch.ones(1), torch.full((999,), 2.0**-26)))
    assert hit_set(mass, torch.ones(1000, dtype=torch.bool), 1.0).all()


def test_the_smallest_power_has_full_precision() -> None:
    exponent = torch.tensor([-1021, -1022, -1023, -5000, 1023], dtype=torch.int32)
    assert power_of_2(exponent).tolist() == [2.0**-1021, 2.0**-1022, 2.0**-1022, 2.0**-1022, 2.0**1023]


def test_nothing_is_below_every_number() -> None:
    exponent, _ = Scaled(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0, -5000])).ordered()
    assert exponent[0] < exponent[1]


def test_a_decay_to_nothing() -> None:
    decay = Decay(0.0)
    assert decay.log2 == -math.inf
    assert decay.factor[:2].tolist() == [1.0, 0.0]
