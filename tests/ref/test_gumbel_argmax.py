"""The draw with counter-based noise: the words are Philox's, the uniforms uniform, the token the largest sum's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.gumbel_argmax import gumbel, gumbel_argmax, philox, uniform
from tests.compare import assert_same

# Random123, tests/kat_vectors: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


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
    monkeypatch.setattr("minithink.ref.gumbel_argmax.philox", lambda counter, key: [torch.full((1, 1), word)] * 4)
    zero = torch.tensor([0])
    assert 0 < float(uniform(0, zero, zero, 4)[0, 0]) < 1
    assert gumbel(0, zero, zero, 4).isfinite().all()


def test_noise_differs_with_every_part_of_its_key() -> None:
    def noise(seed: int, sequence: int, position: int) -> Tensor:
        return gumbel(seed, torch.tensor([sequence]), torch.tensor([position]), 64)[0]

    keys = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1)]
    rows = torch.stack([noise(*key) for key in keys])
    assert rows.unique().numel() > 0.99 * rows.numel()


def test_uniforms_are_uniform() -> None:
    u = uniform(3, torch.arange(50), torch.arange(50), 1000).flatten()
    counts = torch.histc(u, bins=64, min=0, max=1).double()
    expected = u.numel() / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 104  # 63 degrees of freedom: chance exceeds it once in a thousand times
    assert u.min() > 0
    assert u.max() < 1


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 40),
    infinite=st.sampled_from([0.0, 0.5, 0.95]),
    seed=st.integers(0, 2**64 - 1),
    drawn=st.integers(0, 2**31),
)
def test_the_token_is_that_of_the_largest_sum(
    rows: int, columns: int, infinite: float, seed: int, drawn: int
) -> None:
    generator = torch.Generator().manual_seed(drawn)
    logits = torch.randn(rows, columns, generator=generator)
    logits[torch.rand(rows, columns, generator=generator) < infinite] = -math.inf
    logits[:, columns // 2] = 0
    sequence, position = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=generator).unbind()
    got = gumbel_argmax(logits, seed, sequence, position)
    for i in range(rows):
        noise = gumbel(seed, sequence[i : i + 1], position[i : i + 1], columns)[0]
        sums = [float(v) for v in logits[i] + noise]
        assert got[i] == max(range(columns), key=lambda v: (sums[v], -v))
        assert logits[i, got[i]] > -math.inf
    assert_same("int64", got, got.long())


def test_of_equals_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minithink.ref.gumbel_argmax.gumbel", lambda seed, s, p, v: torch.zeros(len(s), v))
    zero = torch.zeros(2, dtype=torch.int64)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-math.inf] * 4])
    assert gumbel_argmax(logits, 0, zero, zero).tolist() == [1, 0]
