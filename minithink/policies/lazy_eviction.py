"""LazyEviction: keep tokens that attention comes back to, and wait until it may have come back (arXiv 2506.15969).

Attention often returns to a token after a pause. A token *recurs* when its attention is at least α. Each KV head
remembers two numbers of every token. TS is the step at which the token last recurred. MRI, its maximum recurrence
interval, is the longest time between two such steps. Every W steps a head that holds more than its budget keeps the
last W tokens, and of the older ones those with the largest

    I = H1 + H2      H1 = 2σ(−1 − (t − TS)/(MRI + 10⁻⁵))      H2 = 2σ(1 − MRI), if MRI > 0

So a token stays while its present pause is short beside its longest one. A token that never recurred goes first,
unless it is new.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Shape, Step
from minithink.policies.scored import Choice, Scored

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others


@dataclass
class LazyEviction(Scored):
    """Recurring attention, in every KV head for itself."""

    budget: int | None = None  # tokens that a KV head keeps, the last W included
    window: int = 32  # W, tokens: the newest, which always stay, and the steps from one eviction to the next
    alpha: float = 1e-4  # α, attention from which on a token recurs
    group: Literal["mean", "max"] = "mean"  # how the probabilities of a KV head's query heads become one
    schedule: str = "every"
    protect_prompt: bool = False

    name = "lazy_eviction"
    summary = "keep tokens that attention comes back to, and evict late (LazyEviction)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.alpha <= 1:
            raise UsageError(
                f"{self.name}: window is {self.window} tokens and alpha {self.alpha:g}; window must be at least 1, "
                "and alpha above 0 and at most 1."
            )
        self.slack = self.window
        self.demands = (Demand(See.MASS, group=self.group, prompt=False),)

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which lanes must evict now, and how many tokens each may keep: bool and int32, [L, B, Hkv]."""
        due, keep = super().due(step)
        if self.schedule == "every":
            now = step.active & (step.clock % self.window == 0)
            due = now[None, :, None] & (step.held() > step.budget)
        return due, keep

    def watch(self, step: Step) -> None:
        """TS and MRI of the tokens that recur."""
        step.ops.stamp(
            hit=step.mass() >= self.alpha,
            pos=step.pos(),
            held=step.held(),
            known=self._known,
            at=step.row,
            prompt=step.prompt,
            t=step.clock,
            active=step.active,
        )

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.window)

    def scores(self, step: Step, choice: Choice) -> Tensor:
        ts = self._of_columns(step, self._ts)
        mri = self._of_columns(step, self._mri)
        # I = H1 + H2
        return importance(step.clock[:, None, None] - ts, mri)

    def _of_columns(self, step: Step, known: Tensor) -> Tensor:
        """What is known of each token: int32 [L, B, Hkv, S]; 0 in a prompt that was just read."""
        out = torch.zeros_like(step.pos())
        entries = known[:, step.row, :, : out.shape[-1]]  # they stand in the order of columns
        out[..., : entries.shape[-1]] = entries
        return out

    # -- state: positions, TS and MRI of the tokens held

    def setup(self, shape: Shape) -> None:
        size = (*shape.tables, self.room_for(shape, 1))
        self._pos = torch.full(size, NOWHERE, dtype=torch.int32, device=shape.device)
        self._ts = torch.zeros(size, dtype=torch.int32, device=shape.device)
        self._mri = torch.zeros(size, dtype=torch.int32, device=shape.device)

    def reset(self, row: int) -> None:
        self._pos[:, row] = NOWHERE
        self._ts[:, row] = 0
        self._mri[:, row] = 0

    def state(self) -> Iterable[Tensor]:
        return self._known

    @property
    def _known(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._pos, self._ts, self._mri


def importance(pause: Tensor, mri: Tensor) -> Tensor:
    """I = H1 + H2, float32. pause: t − TS, steps; mri: MRI, steps."""
    # H1 = 2σ(−1 − (t − TS)/(MRI + 10⁻⁵))
    h1 = 2 * (-1 - pause / (mri + 1e-5)).sigmoid()
    # H2 = 2σ(1 − MRI), if MRI > 0
    h2 = torch.where(mri > 0, 2 * (1 - mri.float()).sigmoid(), 0.0)
    return h1 + h2


# Choices
#
# The formulas follow the authors' code, a copy of Halo-949/LazyEviction `model/temp_cacheobs.py`. The paper's
# formulas differ and are left out: its H1 has no "1 +", and sources quote two forms of its H2. Where this differs
# from the code:
#
# - The code has a cache for every query head. Here the query heads of a KV head share TS and MRI, by the mean (or the
#   largest) of their probabilities.
# - Probabilities stay in float32 and stamps are whole numbers; the code has both in 16 bits, which round stamps above
#   2,048.
# - Of equal scores the older token is kept.
# - A prompt above the budget is cut when it is read, so that no lane is above budget + W between steps. Its tokens
#   all have the same score then, and the oldest stay beside the last W. The code waits for the W-th token, and so
#   chooses by the attention of W steps.
# - If there is no room for W tokens beside a protected prompt (not the default), the newest that fit are kept.
# - W is 32, because texts of small models are short. The authors take the 80th percentile of MRI on some samples, 27
#   to 363 tokens by model and task.
# - If the user gives a `schedule`, it says when heads evict. W then is the size of the window only.
