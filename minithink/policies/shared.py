"""Shared: KV heads of a sequence with unequal shares of one total. `ada_snapkv.py` and `pyramidkv.py` divide it.

Both choose tokens by SnapKV's importance (`snapkv_decode.py`). All heads of a sequence evict together, when they hold
budget + buffer tokens on average:

    B_total = L·Hkv·budget      tokens that all heads together hold afterwards

So between evictions they hold no more than with equal budgets. What a head keeps is its budget until the next
eviction.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minithink.kv.contract import Edit, Evict, SetBudget, Step
from minithink.policies.snapkv_decode import SnapKVDecode


class Shared(SnapKVDecode):
    """Lanes that divide one total. A subclass says which lane keeps how many tokens (`room`) or which (`drop`)."""

    @property
    def limit(self) -> int | None:
        return None  # no limit for one lane: only the sum of all is bounded

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which lanes must evict now, and how many each may keep on average: bool and int32, [L, B, Hkv]."""
        return super().due(step.with_budget(average(step.budget), average(step.held())))

    def decide(self, step: Step) -> Iterator[Edit]:
        """Evict, and make what each lane keeps its budget."""
        for edit in super().decide(step):
            assert isinstance(edit, Evict)
            yield SetBudget(self.shares(step, edit.drop))
            yield edit

    def shares(self, step: Step, drop: Tensor) -> Tensor:
        """The lanes' next budgets: int32 [L, B, Hkv]. drop: bool [L, B, Hkv, S], of rows that are due."""
        _, keep = self.due(step)
        # Where a schedule keeps fewer tokens than the budget, the difference is divided equally.
        spare = average(step.budget) - keep
        share = step.held() - drop.sum(-1, dtype=torch.int32) + spare
        # Budgets must add up. If lanes hold less than their shares (another policy has emptied them), budgets stay.
        exact = share.sum((0, 2)) == step.budget.sum((0, 2))  # bool [B]
        return torch.where(exact[None, :, None], share, step.budget)


def average(tokens: Tensor) -> Tensor:
    """Tokens of a lane on average over all lanes of its row, rounded up: int32 [L, B, Hkv]."""
    layers, _, heads = tokens.shape
    total = tokens.sum((0, 2))  # int64: budgets of idle rows are 2^30
    each = -(-total // (layers * heads))
    return each.int()[None, :, None].expand(tokens.shape)
