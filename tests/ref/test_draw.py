"""Draws: the numbers of the specification's example, and the laws of lots and races."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.draw import GOLDEN, draw, mix
from tests.policies.test_random_attention import key_of


@pytest.mark.parametrize(
    ("head", "game", "first", "want"),
    [
        (0, 0, 0, [0.6293, 0.7561, 0.3593, 0.3069, 0.4564, 0.6027]),
        (1, 0, 2, [0.0763, 0.2534, 0.0885, 0.4542]),
        (0, 1, 4, [0.7727, 0.4492, 0.9661, 0.4934]),
    ],
)
def test_worked_example(head: int, game: int, first: int, want: list[float]) -> None:
    """u under the keys `0|a|0|head|round`."""
    pos = torch.arange(first, first + len(want), dtype=torch.int32)
    assert draw(torch.tensor(key_of(head, game)), pos).tolist() == pytest.approx(want, abs=5e-5)


def test_splitmix64() -> None:
    """The first numbers from state 1234567, as published with the generator."""
    x = torch.tensor([1234567])
    assert int(mix(x)) % 2**64 == 6457827717110365317


@given(seed=st.integers(-(2**63), 2**63 - 1), order=st.permutations(range(8)))
def test_a_lot_follows_its_position(seed: int, order: list[int]) -> None:
    key, pos = torch.tensor([seed, seed ^ 1]), torch.arange(8, dtype=torch.int32).expand(2, 8)
    u = draw(key, pos)
    assert (u >= 0).all()
    assert (u < 1).all()
    assert torch.equal(draw(key, pos[:, order]), u[:, order])
    assert torch.equal(draw(key[1:], pos[1:]), u[1:])


def test_a_lot_of_zero_has_a_score() -> None:
    """It is that of the next lot, 2⁻⁵³, so the token does not count as one of weight 0."""
    key, pos = torch.tensor(-GOLDEN), torch.zeros(1, dtype=torch.int32)
    assert draw(key, pos).tolist() == [0]
    assert draw(key, pos, torch.tensor([2.0])).tolist() == pytest.approx([-53 * math.log(2) / 2])


def test_a_race_draws_by_weight() -> None:
    """The winner of 20,000 races: token i in a share w_i of them; a token of weight 0 never."""
    weight = torch.tensor([0.5, 0.0, 0.3, 0.2])
    keys, pos = mix(torch.arange(20_000)), torch.arange(4, dtype=torch.int32)
    score = draw(keys, pos.expand(20_000, 4), weight.expand(20_000, 4))
    assert score[:, 1].isneginf().all()
    share = score.argmax(-1).bincount(minlength=4) / 20_000
    assert share.tolist() == pytest.approx(weight.tolist(), abs=0.02)
