"""Knorm: the worked example, and a running decoder.

To run it alone: pytest tests/policies/test_knorm.py
"""

from __future__ import annotations

import pytest
import torch

from minithink.errors import UsageError
from minithink.policies.knorm import Knorm
from tests.compare import assert_close
from tests.policies.by_rows import layer_scores
from tests.policies.drive import follow, held
from tests.policies.fixture import KEYS
from tests.policies.test_keydiff import kept, step


def test_worked_example() -> None:
    policy = Knorm(budget=4)
    score = layer_scores(policy, step(policy, KEYS))
    want = -torch.tensor([2.0, 1.811077, 1.118034, 1.627882, 1.019804, 1.0])
    assert_close("scores", score[0, 0], want, atol=1e-6)
    assert kept(policy, KEYS) == [2, 3, 4, 5]


def test_of_equal_lengths_the_older_stays() -> None:
    keys = torch.tensor([(3.0, 4.0), (5.0, 0.0), (0.0, 5.0)])
    assert kept(Knorm(budget=2), keys) == [0, 1]


def test_rounding_does_not_decide() -> None:
    """Keys as RoPE leaves them: the same key at 40 positions, whose lengths differ in their last bits."""
    key = torch.tensor([1.3, 0.7])
    angle = torch.arange(40.0)
    cos = angle.cos()
    sin = angle.sin()
    turned = torch.stack((key[0] * cos - key[1] * sin, key[1] * cos + key[0] * sin), 1)
    assert len(turned.norm(dim=-1).unique()) > 1
    assert kept(Knorm(budget=10), turned) == list(range(10))


def test_the_newest_tokens_stay_if_one_asks() -> None:
    keys = KEYS.flip(0)
    assert kept(Knorm(budget=4), keys) == [0, 1, 2, 3]
    assert kept(Knorm(budget=4, recent=1), keys) == [0, 1, 3, 5]


def test_a_protected_prompt_stays() -> None:
    assert kept(Knorm(budget=4, protect_prompt=True), KEYS, prompt=2) == [0, 1, 4, 5]


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(UsageError, match="knorm: recent is -1"):
        Knorm(budget=4, recent=-1)


def test_lanes_hold_as_many_tokens_as_they_may() -> None:
    for i, manager in enumerate(follow(Knorm(budget=9), [14, 3], 20)):
        for seq, prompt in ((0, 14), (1, 3)):
            assert {len(lane) for lane in held(manager, seq)} == {min(9, prompt + i)}
