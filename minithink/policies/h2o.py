"""H2O: keep heavy hitters, the tokens with the most attention so far, and recent tokens (arXiv 2306.14048).

Every KV head adds up the attention that each of its tokens has received since it came:

    S_i ← S_i + Σ over the group's query heads of A_i      at every step; first the sum over the prompt's queries

When a head holds more than its budget, it keeps the last `recent` tokens (half of the budget), and of the older ones
those with the largest S. Nothing is divided by a token's age, so old tokens have an advantage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Shape, Step
from minithink.kv.schedule import share_of
from minithink.policies.scored import Choice, Scored

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others


@dataclass
class H2O(Scored):
    """Cumulative attention and recency, in every KV head for itself."""

    budget: int | None = None  # tokens that a KV head keeps, the recent ones included
    recent: float = 0.5  # share of the budget for the newest tokens, which always stay, 0 to 1
    schedule: str = "every"
    protect_prompt: bool = False

    name = "h2o"
    summary = "keep tokens with the most attention so far, and recent ones (H2O)"
    capturable = True
    scope = "head"
    demands = (Demand(See.MASS, group="sum"),)

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= 1:
            raise UsageError(f"{self.name}: recent is {self.recent:g}; it must be from 0 to 1.")

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        over, keep = super().due(step)
        return over | step.active[None, :, None], keep  # attention is added up at every step

    def window_size(self, room: Tensor) -> Tensor:
        recent: Tensor = share_of(room, self.recent)
        return recent

    def scores(self, step: Step, choice: Choice) -> Tensor:
        # S_i ← S_i + A_i
        score: Tensor = step.ops.accumulate(
            mass=step.mass(),
            pos=step.pos(),
            held=step.held(),
            known=self._known,
            at=step.row,
        )
        return score

    def drop(self, step: Step, choice: Choice, scores: Tensor) -> Tensor:
        """The tokens that go, in heads above their budget. Remember S of the others, in all heads."""
        over, _ = super().due(step)
        gone = super().drop(step, choice, scores) & over[..., None]
        stays = (step.pos() >= 0) & ~gone
        step.ops.carry(
            score=scores,
            pos=step.pos(),
            stay=stays,
            known=self._known,
            at=step.row,
            active=step.active,
        )
        return gone

    # -- state: positions and S of the tokens that stay

    def setup(self, shape: Shape) -> None:
        size = (*shape.tables, self.room_for(shape))
        self._pos = torch.full(size, NOWHERE, dtype=torch.int32, device=shape.device)
        self._score = torch.zeros(size, dtype=torch.float32, device=shape.device)

    def reset(self, row: int) -> None:
        self._pos[:, row] = NOWHERE
        self._score[:, row] = 0

    def state(self) -> Iterable[Tensor]:
        return self._known

    @property
    def _known(self) -> tuple[Tensor, Tensor]:
        return self._pos, self._score


# Choices
#
# The formulas follow the authors' code, FMInference/H2O `h2o_hf/utils_real_drop/modify_llama.py`. Where this differs:
#
# - The code scores query heads, which does not work where they share keys. Here the query heads of a KV head add up.
# - Scores stay in float32; in 16 bits they stop growing when a step's attention is below their last digit.
# - Kept tokens stay in their order, and of equal scores the older is kept. Each sequence has its own scores; the code
#   adds up the scores of a batch.
# - `recent` is rounded to nine decimals before it is multiplied by a number of tokens (`share_of`); the code takes
#   two whole numbers, heavy hitters and recent tokens.
# - Where the prompt is protected (not the default), `recent` is a share of what is left beside it.
# - The code's streaming form moves positions; here they stay as they were.
#
# Released code has other methods under this name: KVCache-Factory chooses once, by the prompt's queries;
# NVIDIA/kvpress divides by the number of queries that could see a token; "H2O" in R-KV and SkipKV goes by the last
# query alone, and in DynTS it does so by mistake. The forms in R-KV, SkipKV and DynTS are close to TOVA (`tova.py`).
