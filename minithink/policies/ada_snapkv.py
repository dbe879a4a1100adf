"""Ada-SnapKV while decoding: heads of a layer share a budget, and tokens compete across heads (arXiv 2407.11550).

Some heads attend to few tokens, others to many. So a layer chooses among the tokens of all its KV heads by SnapKV's
importance (`snapkv_decode.py`), and each head keeps those of its tokens that are chosen. With b tokens of each head
on average beside the window (and a protected prompt), a layer

    1. keeps the ⌊floor·b⌋ best tokens of each head, so that no head loses all;
    2. gives the remaining Hkv·(b − ⌊floor·b⌋) places to the best of its other tokens, whatever their head.

The method compresses prompts once. Here it runs whenever the lanes hold budget + buffer tokens on average
(`shared.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Step
from minithink.kv.schedule import share_of
from minithink.policies.scored import Choice
from minithink.policies.shared import Shared


@dataclass
class AdaSnapKV(Shared):
    """SnapKV's importance, for which the KV heads of a layer compete."""

    floor: float = 0.2  # share of b that every head keeps, 0 to 1
    normalize: bool = False  # weigh heads by how concentrated their scores are

    name = "ada_snapkv"
    summary = "keep tokens that the newest queries attend to; heads of a layer share a budget (Ada-SnapKV)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise UsageError(f"{self.name}: floor is {self.floor:g}; it must be from 0 to 1.")

    def scores(self, step: Step, choice: Choice) -> Tensor:
        score = super().scores(step, choice)
        if not self.normalize:
            return score
        best = step.ops.keep_best(score, choice.candidates, choice.places)
        return normalized(score, choice.candidates, best)

    def drop(self, step: Step, choice: Choice, scores: Tensor) -> Tensor:
        b = choice.places
        total = b.sum(-1, dtype=torch.int32)  # [L, B], Hkv·b
        # ⌊floor·b⌋ of each head, then the best of the layer
        kept = step.ops.keep_shared(scores, choice.candidates, total, share_of(b, self.floor))
        gone: Tensor = choice.candidates & ~kept
        return gone


def normalized(score: Tensor, candidate: Tensor, best: Tensor) -> Tensor:
    """Scores times the share of them that the best tokens of their head hold.

        s_(h,j) · Σ_(i ≤ b) s_(h,i) / Σ_i s_(h,i)

    Args:
        score: float32 [..., H, S].
        candidate, best: bool [..., H, S], all candidates of a head, and the b best of them.
    """
    top = (score * best).sum(-1, keepdim=True, dtype=torch.float64)
    total = (score * candidate).sum(-1, keepdim=True, dtype=torch.float64)
    return score * torch.where(total > 0, top / total, 1.0).float()


# Choices
#
# The formulas follow the authors' code, FFY0/AdaKV `adaptive_snapkv/monkeypatch/snapkv_utils.py`. Where this differs:
#
# - The code lets c_h, a head's number among the Hkv·b best, become round(c_h·(1 − floor) + ⌊floor·b⌋). These numbers
#   may add up to less or more than Hkv·b. The two steps above fill the budget exactly, as NVIDIA/kvpress does.
# - Of equal scores the older token is kept, and among different heads that of the lower head.
# - Scores are those of `snapkv_decode.py`: the maximum of the group's logits, the last α = 8 queries. The code has
#   the group's mean after the softmax, and a window of 32.
# - The code's `skip`, layers with equal budgets, is left out (its default is 0).
# - `normalize` (off in the code's runs, on in KVCache-Factory) multiplies the scores of a head by the share of them
#   that its b best tokens hold. floor=1 is equal budgets, `snapkv_decode`; floor=0 has no step 1.
# - Crystal-KV compares itself with Ada-SnapKV while decoding, and does not say when that evicts.
