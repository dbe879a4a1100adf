"""Sampling: the filters are transformers', the draws have the right distribution, whatever runs beside them."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.sampling import NO_TOKEN, Sampler, SamplingParams, filter_logits, sample
from tests.compare import assert_same

torch.set_num_threads(1)

U64 = st.integers(0, 2**64 - 1)
# Values that repeat and lie on a coarse grid, so that ties and exact boundaries are common, and any others.
GRID = st.integers(-6, 6).map(lambda n: n * 0.5)
LOGIT = st.one_of(GRID, st.floats(-30, 30, width=32))


@st.composite
def logits(draw: st.DrawFn) -> Tensor:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    values = draw(st.lists(LOGIT, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float32).view(rows, columns)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([1.0, 0.6, 0.25, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 100])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.25, 1e-6]) | st.floats(0.01, 1)),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        seed=draw(U64),
    )


@given(logits=logits(), params=params())
@example(logits=torch.zeros(1, 4), params=SamplingParams(top_p=0.5))  # the boundary, without rounding
@example(logits=torch.tensor([[0.0, 1.0]]), params=SamplingParams(top_p=1e-9))  # 1 − top_p is 1 in float32
@example(logits=torch.linspace(0, 1, 8)[None], params=SamplingParams(top_k=4, top_p=0.5))  # the order matters
@example(logits=torch.tensor([[0.0, 200.0]]), params=SamplingParams())  # 1 keeps all, whatever underflows
def test_filters_equal_transformers(logits: Tensor, params: SamplingParams) -> None:
    from transformers.generation import logits_process as theirs

    want = logits
    if params.temperature != 1:
        want = theirs.TemperatureLogitsWarper(params.temperature)(None, want)
    if params.top_k:
        want = theirs.TopKLogitsWarper(params.top_k)(None, want)
    if params.top_p < 1:
        want = theirs.TopPLogitsWarper(params.top_p)(None, want)
    if params.min_p:
        want = theirs.MinPLogitsWarper(params.min_p)(None, want)
    got = filter_logits(logits, params)
    case = f"{params}\n{logits}\ngot  {got}\nwant {want}"
    # Of equal logits at the boundary of top-p as many are kept; transformers' sort is not stable and may keep others.
    assert torch.equal(got.sort(-1).values, want.sort(-1).values), case
    assert got.isfinite().any(-1).all(), case
    kept, scaled = got.isfinite(), filter_logits(logits, replace(params, top_k=0, top_p=1.0, min_p=0.0))
    assert torch.equal(got[kept], scaled[kept]), case
    # Ours keeps the larger ids: whatever is kept beats, as (logit, id), all that is removed.
    rank = scaled.sort(dim=-1, stable=True).indices.argsort(-1)  # [B, V]
    worst_kept = rank.masked_fill(~kept, logits.shape[-1]).amin(-1)
    assert (rank.masked_fill(kept, -1).amax(-1) < worst_kept).all(), case


def test_half_precision_is_filtered_in_float32() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = SamplingParams(temperature=0.6, top_p=0.9, min_p=0.01)
    got = filter_logits(logits, params)
    assert got.dtype == torch.float32
    assert torch.equal(got, filter_logits(logits.float(), params))


@given(data=st.data(), logits=logits(), params=params())
def test_sampler_equals_its_definition(data: st.DataObject, logits: Tensor, params: SamplingParams) -> None:
    rows = logits.shape[0]
    sequences = data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows, unique=True))
    sampler = Sampler(params, logits.shape[1])
    sampler.block = 4  # so that several blocks are drawn
    for start in data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6)):
        positions = [start + i for i in range(rows)]
        want = sample(logits, params, torch.tensor(sequences), torch.tensor(positions))
        assert_same("tokens", sampler.sample(logits, sequences, positions), want)
    sampler.drop(sequences[0])
    assert sequences[0] not in sampler._noise


def test_sampler_equals_its_definition_at_the_boundaries() -> None:
    """Of many tokens that are drawn often; the boundary is a sum, which the two add up in different orders."""
    generator, number, position = torch.Generator().manual_seed(0), [0] * 60, list(range(60))
    for logits in torch.randn(60, 1, 40, generator=generator).expand(-1, 60, -1):
        p = logits[0].softmax(-1).sort(descending=True).values
        for params in (
            SamplingParams(top_p=float(p[:12].sum())),
            SamplingParams(min_p=float(p[12] / p[0])),
            SamplingParams(top_k=5),
        ):
            want = sample(logits, params, torch.tensor(number), torch.tensor(position))
            assert_same("tokens", Sampler(params, 40).sample(logits, number, position), want)


@given(data=st.data(), logits=logits(), params=params())
def test_a_row_does_not_depend_on_the_others(data: st.DataObject, logits: Tensor, params: SamplingParams) -> None:
    rows = logits.shape[0]
    numbers = torch.tensor(data.draw(st.lists(st.integers(0, 2**40), min_size=rows, max_size=rows)))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 2**20), min_size=rows, max_size=rows)))
    together = sample(logits, params, numbers, positions)
    again = sample(logits, params, numbers, positions)
    alone = [sample(logits[i : i + 1], params, numbers[i : i + 1], positions[i : i + 1]) for i in range(rows)]
    assert_same("again", again, together)
    assert_same("alone", torch.cat(alone), together)


@given(data=st.data(), logits=logits(), params=params(), greedy=st.booleans())
def test_no_token_is_drawn_from_logits_that_are_not_finite(
    data: st.DataObject, logits: Tensor, params: SamplingParams, greedy: bool
) -> None:
    """NaN or ∞ anywhere in a row, or −∞ everywhere; −∞ at some tokens is a mask. Other rows have their tokens."""
    params = replace(params, temperature=0.0) if greedy else params
    rows, columns = logits.shape
    numbers, positions = torch.arange(rows), torch.arange(rows)
    want = sample(logits, params, numbers, positions)
    assert (want >= 0).all()
    broken = data.draw(st.lists(st.sampled_from(["", "nan", "inf", "all"]), min_size=rows, max_size=rows))
    spoilt = logits.clone()
    for row, how in enumerate(broken):
        if how == "all":
            spoilt[row] = -torch.inf
        elif how:
            spoilt[row, data.draw(st.integers(0, columns - 1))] = float(how)
    want = want.masked_fill(torch.tensor([bool(how) for how in broken]), NO_TOKEN)
    assert_same("tokens", sample(spoilt, params, numbers, positions), want)
    sampler = Sampler(params, columns)
    assert_same("sampler", sampler.sample(spoilt, numbers.tolist(), positions.tolist()), want)
    assert_same("half", sample(spoilt.half(), params, numbers, positions) == NO_TOKEN, want == NO_TOKEN)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Σ (observed − expected)² / expected."""
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draw_counts(logits: Tensor, params: SamplingParams, draws: int = 20000) -> Tensor:
    """How often each token is drawn, over positions of several sequences."""
    number = torch.arange(draws)
    tokens = sample(logits.expand(draws, -1), params, number % 7, number // 7)
    return torch.bincount(tokens, minlength=logits.numel()).double()


def test_draws_have_the_right_distribution() -> None:
    """16 tokens: 15 degrees of freedom, of which chance exceeds 37.7 once in a thousand times."""
    logits = torch.linspace(-2, 2, 16)
    for seed in (0, 1, 2**63):
        counts = draw_counts(logits, SamplingParams(temperature=0.7, seed=seed))
        assert chi_square(counts, (logits.double() / 0.7).softmax(-1)) < 37.7


@pytest.mark.parametrize("wrong", ["temperature", "noise"])
def test_the_chi_square_test_can_fail(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, temperature = torch.linspace(-2, 2, 16), 0.7
    if wrong == "temperature":
        temperature = 0.75
    else:  # Gaussian noise of a Gumbel's variance
        normal = torch.Generator().manual_seed(0)
        monkeypatch.setattr(
            "minithink.ref.gumbel_argmax.gumbel",
            lambda seed, s, p, v: torch.randn(len(s), v, generator=normal) * math.pi / math.sqrt(6),
        )
    counts = draw_counts(logits, SamplingParams(temperature=temperature))
    assert chi_square(counts, (logits.double() / 0.7).softmax(-1)) > 100


def test_greedy_ignores_noise_and_filters() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9], [1.0, 0.0, 0.5]])
    params = SamplingParams(temperature=0, top_k=2, top_p=0.1, seed=9)
    zero = torch.zeros(2, dtype=torch.int64)
    assert sample(logits, params, zero, zero).tolist() == [1, 0]
    assert Sampler(params, 3).sample(logits, [0, 1], [0, 0]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", t) for t in (-1.0, 1e-9, math.nan, math.inf)),
        *(("top_p", p) for p in (0.0, 1.5, math.nan)),
        *(("min_p", p) for p in (-0.1, 1.1, math.nan)),
        *(("seed", s) for s in (-1, 2**64)),
        ("top_k", -1),
    ],
)
def test_nonsense_is_refused_with_its_value(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field.replace("_", ".")) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert str(value) in str(error.value)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k", "seed"])
@pytest.mark.parametrize("value", [10**400, -(10**400), "0.5" * 99, [1] * 99, None, True])
def test_values_of_any_size_and_type_are_refused_briefly(field: str, value: object) -> None:
    if field == "top_k" and value == 10**400:
        return  # it keeps all tokens, as every number above the vocabulary's size
    with pytest.raises(UsageError, match=field.replace("_", ".")) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("temperature", [2**64, 10**38, Fraction(1, 3), 3])
def test_temperatures_are_numbers_of_any_kind(temperature: Any) -> None:
    """torch divides by no integer of more than 64 bits."""
    logits = torch.tensor([[0.0, 3.0, 2.9]])
    params = SamplingParams(temperature=temperature, top_k=2**80)
    assert_same("logits", filter_logits(logits, params), logits / float(temperature))
    zero = torch.zeros(1, dtype=torch.int64)
    assert sample(logits, params, zero, zero).item() < 3
