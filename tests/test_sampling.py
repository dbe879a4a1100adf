"""Sampling: the filters are transformers', the noise is Philox, the draws have the right distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.sampling import Sampler, SamplingParams, filter_logits, gumbel, philox, sample, uniform
from tests.compare import assert_same

torch.set_num_threads(1)

# Random123, tests/kat_vectors: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
U64 = st.integers(0, 2**64 - 1)
# Values that repeat and lie on a coarse grid, so that ties and exact boundaries are common, and any others.
GRID = st.integers(-6, 6).map(lambda n: n * 0.5)
LOGIT = st.one_of(GRID, st.floats(-30, 30, width=32))


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


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


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter: str, key: str, want: str) -> None:
    low, high = words(key)
    assert [int(w) for w in philox([torch.tensor(c) for c in words(counter)], (low, high))] == words(want)


def test_uniform_counts_as_documented() -> None:
    """Seed, sequence and position of more than 32 bits or the top bit set, each in the word where it belongs."""
    seed, sequence, position, vocab = 0xA4093822_F99F31D0, 0x83707344_93198A2E, 0x85A308D3, 11
    got = uniform(seed, torch.tensor([sequence - 2**64]), torch.tensor([position]), vocab)[0]
    for v in range(vocab):
        counter = [torch.tensor(c) for c in (v // 4, position, 0x93198A2E, 0x83707344)]
        word = int(philox(counter, (0xF99F31D0, 0xA4093822))[v % 4])
        assert float(got[v]) == pytest.approx((word + 0.5) / 2**32, rel=2**-23)


@pytest.mark.parametrize("word", [0, 1, 2**24, 2**31, 2**32 - 2**8, 2**32 - 1])
def test_extreme_words_stay_inside_and_finite(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minithink.sampling.philox", lambda counter, key: [torch.full((1, 1), word)] * 4)
    zero = torch.tensor([0])
    assert 0 < float(uniform(0, zero, zero, 4)[0, 0]) < 1
    assert gumbel(0, zero, zero, 4).isfinite().all()


@given(logits=logits(), params=params())
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


def test_noise_differs_with_every_part_of_its_key() -> None:
    def noise(seed: int, sequence: int, position: int) -> Tensor:
        return gumbel(seed, torch.tensor([sequence]), torch.tensor([position]), 64)[0]

    keys = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1)]
    rows = torch.stack([noise(*key) for key in keys])
    assert rows.unique().numel() > 0.99 * rows.numel()


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
            "minithink.sampling.gumbel",
            lambda seed, s, p, v: torch.randn(len(s), v, generator=normal) * math.pi / math.sqrt(6),
        )
    counts = draw_counts(logits, SamplingParams(temperature=temperature))
    assert chi_square(counts, (logits.double() / 0.7).softmax(-1)) > 100


def test_uniforms_are_uniform() -> None:
    u = uniform(3, torch.arange(50), torch.arange(50), 1000).flatten()
    counts = torch.histc(u, bins=64, min=0, max=1).double()
    assert chi_square(counts, torch.full((64,), 1 / 64)) < 104  # 63 degrees of freedom, once in a thousand times
    assert u.min() > 0
    assert u.max() < 1


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
