"""Ada-SnapKV: the worked example of its code. `test_snapkv_decode.py` has it in a running decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.policies import parse
from minithink.policies.ada_snapkv import AdaSnapKV, normalized
from minithink.ref.keep_best import keep_best
from minithink.ref.keep_shared import keep_shared
from tests.policies.drive import Ear, follow

SCORES = torch.tensor([[0.50, 0.20, 0.10, 0.08, 0.07, 0.05], [0.20, 0.18, 0.17, 0.16, 0.15, 0.14]])


def of_the_code(score: Tensor, b: int, floor: float) -> list[int]:
    """Tokens of each head as `adaptive_snapkv/monkeypatch/snapkv_utils.py` counts them."""
    heads, width = score.shape
    best = score.flatten().topk(heads * b).indices // width
    of_head = torch.bincount(best, minlength=heads)
    return (of_head * (1 - floor) + int(b * floor)).round().int().tolist()


@pytest.mark.parametrize("floor", [0.2, 0.5])
def test_heads_that_share_a_budget_by_hand(floor: float) -> None:
    """Two heads with 3 tokens each on average: the code keeps 2 and 3, the exact sum is 2 and 4."""
    assert of_the_code(SCORES, 3, 0.0) == [2, 4]
    assert of_the_code(SCORES, 3, floor) == [2, 3]
    every = torch.ones_like(SCORES, dtype=torch.bool)
    weighed = normalized(SCORES, every, keep_best(SCORES, every, torch.tensor([3, 3])))
    assert (weighed / SCORES)[:, 0].tolist() == pytest.approx([0.80, 0.55])
    for score in (SCORES, weighed):
        kept = keep_shared(score, every, torch.tensor(6), torch.full((2,), int(3 * floor), dtype=torch.int32))
        assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 1], [0, 1, 2, 3]]


def test_heads_without_a_score_are_not_weighed() -> None:
    """Nothing is divided by zero."""
    score, every = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    assert torch.equal(normalized(score, every, keep_best(score, every, torch.tensor([1, 0]))), score)


def test_the_sums_of_heads_are_exact() -> None:
    """In float32 the best token alone would be all of its head: 2²⁵ + 1 = 2²⁵."""
    score, every = torch.tensor([[2.0**25, *[1.0] * 64]]), torch.ones(1, 65, dtype=torch.bool)
    got = normalized(score, every, keep_best(score, every, torch.tensor([1])))
    assert float(got[0, 0]) == float(torch.tensor(2.0**25 * (2.0**25 / (2.0**25 + 64)), dtype=torch.float32))
    assert float(got[0, 0]) < 2.0**25


def test_defaults() -> None:
    """Of the authors' code."""
    policy = AdaSnapKV(budget=64)
    assert (policy.floor, policy.normalize) == (0.2, False)


def test_a_recorder_hears_the_scores_of_older_tokens_in_rows_that_are_due() -> None:
    """Not the newest tokens', and of no row that does not evict; tokens that go have no higher score than those that
    stay in their layer."""

    class Listener(Ear):
        def evicting(self, step: Any, edits: Any, drop: Tensor) -> None:
            pos, held = step.pos(), step.held()
            due = drop.flatten(2).any(2).any(0)  # bool [B]
            assert due.any()
            column = torch.arange(pos.shape[-1])
            old = (pos >= 0) & (column < (held - 4)[..., None]) & due[None, :, None, None]
            assert torch.equal(self.where, old)
            for layer in range(len(pos)):
                for row in due.nonzero().flatten().tolist():
                    goes, stays = drop[layer, row], (old & ~drop)[layer, row]
                    if stays.any():  # with a floor, heads would keep tokens of low scores
                        assert self.score[layer, row][goes].max() <= self.score[layer, row][stays].min()
            seen.append(due.tolist())

    policy, seen = AdaSnapKV(budget=14, buffer=3, alpha=4, floor=0.0), list[list[bool]]()
    for manager in follow(policy, [4, 6], 24):
        manager.recorder = Listener()
    assert [True, False] in seen
    assert [False, True] in seen


@pytest.mark.parametrize("floor", ["1.5", "-0.1"])
def test_a_floor_is_a_share(floor: str) -> None:
    with pytest.raises(UsageError, match=f"floor is {floor}; it must be from 0 to 1"):
        parse(f"ada_snapkv:floor={floor}", budget=64)
