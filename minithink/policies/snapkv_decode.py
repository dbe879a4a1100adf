"""SnapKV while decoding: again and again, keep the tokens that the newest queries attend to.

R-KV compares itself with SnapKV in this form. Once a KV head holds budget + buffer tokens, it evicts down to the
budget. It keeps the last α tokens, and of the older ones those with the largest importance

    Ĩ = pool(mean_w softmax_j max_g q_w·k_j/√D)

where w runs over the last α queries and g over the query heads of the KV head. This is R-KV without its redundancy
(λ = 1). So triggers, window, schedules and ties are those of `rkv.py`. `snapkv.py` is the paper's method, which
compresses the prompt once.

`Shared` is the common part of methods that divide the budgets of a row unequally (`ada_snapkv.py`, `pyramidkv.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from minithink.kv.contract import Edit, Evict, SetBudget, Step
from minithink.policies.rkv import Rkv


@dataclass
class SnapKVDecode(Rkv):
    """Importance alone, in every KV head for itself."""

    lam: float = field(default=1.0, init=False)
    threshold: float = field(default=0.5, init=False)
    compaction: Literal["none", "gather", "overlapped"] = field(default="none", init=False)

    name = "snapkv_decode"
    summary = "keep tokens that the newest queries attend to, again and again (SnapKV while decoding)"
    capturable = True
    scope = "head"

    def score(self, step: Step, layer: int, valid: Tensor, older: Tensor, rows: Tensor) -> Tensor:
        """Ĩ of the `older` tokens, float32 [B, Hkv, S]. Arguments: as in `Rkv.score`."""
        q, k = step.queries(layer), step.keys(layer, rows)  # [B, Hq, α, D], [B, Hkv, S, D]
        importance: Tensor = step.ops.window_importance(q, k, older, self.kernel_size, self.pooling)
        return importance


# Choices
#
# The formula follows Zefan-Cai/R-KV@d15c976 `rkv/compression/snapkv.py`. Where this differs:
#
# - Order: kept tokens stay in the order of their positions. The released code stores them in the order of their
#   scores, and so pools over neighbours in score from the second eviction on. On the same tensors 80 to 81 % of the
#   tokens that it keeps are kept here; with sorted survivors all are (see `rkv.py`).
# - It evicts when `buffer` tokens are gathered; `global_clock` is the code's rule (see `rkv.py`).
# - The softmax is float32 and is not rounded, and every lane is scored by its own tokens.
# - Of equal scores the older token is kept.
#
# Released code has other forms of SnapKV while decoding. DynTS's form averages attention over all layers and heads
# and does not pool; `schedule=share:r/l` evicts as often as DynTS. kvpress evicts every 512 tokens, and rotates the
# queries of its window to the newest position.


class Shared(SnapKVDecode):
    """Lanes with unequal shares of one total, B_total = L·Hkv·budget.

    All lanes of a row evict together, when they hold budget + buffer tokens on average, and afterwards hold B_total.
    So between steps they hold no more than with equal budgets. What a lane keeps is its budget until the next
    eviction.
    """

    @property
    def limit(self) -> int | None:
        return None  # no limit for one lane: only the sum of all is bounded

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which lanes must evict now, and how many each may keep on average: bool and int32, [L, B, Hkv]."""
        return super().due(step.with_budget(average(step.budget), average(step.held())))

    def settle(self, step: Step, drop: Tensor) -> Iterator[Edit]:
        """Evict, and make what each lane keeps its budget. drop: bool [L, B, Hkv, S], of rows that are due."""
        _, keep = self.due(step)
        # Where a schedule keeps fewer tokens than the budget, the difference is divided equally.
        share = step.held() - drop.sum(-1, dtype=torch.int32) + average(step.budget) - keep
        # Budgets must add up. If lanes hold less than their shares (another policy has emptied them), budgets stay.
        exact = (share.sum((0, 2)) == step.budget.sum((0, 2)))[None, :, None]
        yield SetBudget(torch.where(exact, share, step.budget))
        yield Evict(drop)


def average(tokens: Tensor) -> Tensor:
    """Tokens of a lane on average over all lanes of its row, rounded up: int32 [L, B, Hkv]."""
    layers, _, heads = tokens.shape
    each = -(-tokens.sum((0, 2)) // (layers * heads))  # int64: budgets of idle rows are 2^30
    return each.int()[None, :, None].expand(tokens.shape)
