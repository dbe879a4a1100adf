"""MorphKV: keep a window of recent tokens, and the older tokens that this window attends to (arXiv 2503.00979).

Every KV head holds at most C tokens: the last W, and of the older ones those with the largest

    s_j = max over w of A[w, j]      A[w] = max over the group of softmax_j q_w·k_j/√D,  j among the older tokens

where w runs over the newest W − 1 queries. With fuse=sum the sum over w takes the place of the maximum. So an older
token stays only as long as recent tokens attend to it. The score is computed in `ref/window_peak.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Step
from minithink.policies.scored import Choice, Scored


@dataclass
class MorphKV(Scored):
    """Recent tokens, and what they attend to; every KV head chooses for itself."""

    budget: int | None = None  # C, tokens that a KV head keeps, the last W included
    window: int = 3  # W, tokens that always stay
    queries: Literal["W-1", "W"] = "W-1"  # how many of the newest queries score
    fuse: Literal["max", "sum"] = "max"  # how the scores of these queries become one
    schedule: str = "every"
    protect_prompt: bool = False

    name = "morphkv"
    summary = "keep the newest tokens and what they attend to (MorphKV)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        rows = self.window - (self.queries == "W-1")
        if rows < 1:
            raise UsageError(f"{self.name}: window is {self.window}; with queries={self.queries} no query is left.")
        self.demands = (Demand(See.QUERY, rows=rows),)

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.window)

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        """s of the older tokens: float32 [B, Hkv, S]."""
        q = step.queries(layer)  # [B, Hq, W − 1, D]
        k = step.keys(layer, choice.rows)  # [B, Hkv, S, D]
        # s_j = max over w of A[w, j]
        score: Tensor = step.ops.window_peak(q, k, choice.older, self.fuse)
        return score


# Choices
#
# The formulas follow the authors' code, ghadiaravi13/MorphKV `morphkv/morph_cache.py`. Its command line has W = 3
# (the default here) and C = 100, its README W = 200 and C = 4,000.
#
# When tokens go: the code chooses within a step, before this step's attention, by the queries before the current one.
# Here policies evict when a step has ended. The choice is the same: the C tokens that stay after step t are those
# that the code attends to in step t + 1, beside the current token. So the budget is the code's C, and a head attends
# to C + 1 tokens in both.
#
# Where this differs:
#
# - The code masks this attention for each query head by its own scores, and only stores what the group has chosen.
#   Here all query heads of a KV head attend to what is stored.
# - The softmax stays in float32; the code's has the model's type.
# - Kept tokens stay in their order, and of equal scores the older is kept.
# - The code's W − 1 is an off-by-one: it cuts the W queries before the current one from a buffer of W that includes
#   the current one. With queries=W the last W queries score.
# - Where the code is silent: the tokens of a protected prompt (not the default) are among the older tokens of the
#   softmax, but are not evicted. If there is no room for W tokens beside the prompt, the newest that fit are kept.
