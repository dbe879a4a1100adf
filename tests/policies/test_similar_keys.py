"""What R-KV remembers if it evicts often: it changes nothing that is kept, and is no larger than it must be.

To run it alone: pytest tests/policies/test_similar_keys.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minithink.kv.contract import Shape
from minithink.kv.stack import Stack
from minithink.policies import parse
from minithink.policies.rkv import Rkv
from tests.policies.drive import DECODER, TINY, follow, held, tokens_of

torch.set_num_threads(1)
NEVER = 10**6  # no token


@pytest.mark.parametrize(
    "options",
    [
        {"buffer": 0},
        {"buffer": 0, "protect_prompt": True, "threshold": 0.9},
        {"buffer": 3},
        {"buffer": 4, "global_clock": True, "recent": 0.4},
        {"buffer": 2, "exempt_answer": True},
        {"schedule": "interval:1"},
        {"schedule": "interval:5"},
        {"schedule": "sawtooth:16/9", "budget": None},
    ],
)
def test_what_is_remembered_changes_nothing_that_is_kept(options: dict[str, Any]) -> None:
    """In every lane after every step; prompts are shorter and longer than the budget."""
    close = tokens_of(0, 60, DECODER)[40]

    def run(often: int) -> list[list[list[int]]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minithink.policies.similar_keys.OFTEN", often)
            policy = Rkv(**{"budget": 24, "alpha": 3, **options})
            states = follow(policy, [3, 19, 11], 60, rows=4, think_ids=(NEVER, close))
            histories = [[held(manager, seq) for seq in range(3)] for manager in states]
        assert bool([*policy.state()]) == (often > 0)
        return [lanes for history in histories for lanes in history]

    assert run(8) == run(-1)


@pytest.mark.parametrize(
    ("options", "remembers"),
    [
        ({"buffer": 0}, True),
        ({"buffer": 8}, True),
        ({"buffer": 9}, False),
        ({}, False),
        ({"buffer": 0, "lam": 1.0}, False),
        ({"schedule": "interval:8"}, True),
        ({"schedule": "interval:9", "buffer": 0}, False),
        ({"schedule": "sawtooth:30/22"}, True),
        ({"schedule": "sawtooth:30/20"}, False),
        ({"schedule": "share:.5/3", "buffer": 0}, False),
    ],
)
def test_what_is_remembered(options: dict[str, Any], remembers: bool) -> None:
    """8 bytes for each token of a lane, the newest one included, if it evicts at least every 8 tokens."""
    policy = Rkv(budget=30, **options)
    policy.setup(Shape.of(TINY, policy, rows=3, tokens=500, device="cpu", dtype=torch.float32))
    assert policy.limit is not None
    lanes = TINY.num_layers * 3 * TINY.num_kv_heads
    assert sum(x.nbytes for x in policy.state()) == (8 * lanes * (policy.limit + 1) if remembers else 0)


def test_nothing_is_remembered_of_keys_that_change() -> None:
    """Another policy of the stack quantizes them later."""
    rkv = Rkv(budget=30, buffer=0)
    for text, remembers in (("quant:fmt=nvfp4", False), ("kivi", False), ("window:budget=40", True)):
        stack = Stack([rkv, parse(text)])
        stack.setup(Shape.of(TINY, stack, rows=1, tokens=500, device="cpu", dtype=torch.float32))
        assert bool([*rkv.state()]) == remembers


def test_reset_forgets_one_row() -> None:
    """The next sequence there has tokens of the same positions. The laws of `test_laws.py` try that."""
    shape = Shape.of(TINY, Rkv(budget=30, buffer=0), rows=2, tokens=500, device="cpu", dtype=torch.float32)
    policy = Rkv(budget=30, buffer=0)
    policy.setup(shape)
    fresh = [x.clone() for x in policy.state()]
    for x in policy.state():
        x[:] = 7
    policy.reset(1)
    for x, was in zip(policy.state(), fresh, strict=True):
        assert torch.equal(x[:, 1], was[:, 1])
        assert (x[:, 0] == 7).all()
