"""SnapKV: of a prompt, keep what its last queries attend to (Li et al. 2024, arXiv 2404.14469).

When a prompt of more than `cap` tokens has been read, every KV head keeps the last W of them, and of the others the
cap − W with the largest

    s̃ = pool(Σ_w P[w, j])      P[w] = softmax_j q_w·k_j/√D,  j ≤ w

where w runs over the last W queries. SnapKV evicts once, and never evicts generated tokens. A policy that evicts them
can be stacked with it. `cap` then counts the prompt alone, and the other policy's budget also counts the remaining
prompt: `snapkv:cap=2048+thinkv:budget=2560` is ThinKV's "2048 / 512" (its §E.16, table 15). SnapKV evicts prompt
tokens even if the other policy protects the prompt; the remaining prompt tokens stay protected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Evict, Policy, See, Step, pool

ONCE = 2**31 - 1  # an interval in generated tokens that never ends: the demand is due after the prompt only


@dataclass
class SnapKV(Policy):
    """Keep what the prompt's last queries attend to; every KV head chooses for itself."""

    cap: int = 2048  # tokens of the prompt that a KV head keeps, the window's included
    window: int = 32  # W, tokens: the prompt's last queries, which score, and whose keys always stay
    kernel_size: int = 7  # k, keys: width of the pooling along the sequence, odd
    pooling: Literal["max", "avg"] = "max"
    group: Literal["mean", "max"] = "mean"  # how the probabilities of a KV head's query heads become one

    name = "snapkv"
    summary = "keep of the prompt what its end attends to, and all that is generated (SnapKV at prefill)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        if not 1 <= self.window < self.cap:
            raise UsageError(
                f"{self.name}: window is {self.window} and cap {self.cap} tokens; window must be at least 1, and cap "
                "more than that."
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise UsageError(f"{self.name}: kernel_size is {self.kernel_size} keys; it must be odd.")
        self.demands = (Demand(See.ROWS, every=ONCE, rows=self.window, group=self.group),)

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which lanes must evict now, and how many tokens each may keep: bool and int32, [L, B, Hkv]."""
        read = (step.active & (step.clock == 0))[None, :, None]
        return read & (step.held() > self.cap), torch.full_like(step.budget, self.cap)

    def decide(self, step: Step) -> Iterator[Evict]:
        due, keep = self.due(step)
        if not step.any(due):
            return
        pos = step.pos()  # [L, B, Hkv, S]
        window = step.prompt - self.window  # where it begins
        older = (pos >= 0) & (pos < window[:, None, None])
        score = torch.stack([self.score(step, layer, older[layer]) for layer in range(step.shape.layers)])
        step.note(score, older)
        kept = step.ops.keep_best(score, older, keep - self.window)
        yield Evict(due[..., None] & older & ~kept, even_protected=True)

    def score(self, step: Step, layer: int, older: Tensor) -> Tensor:
        """s̃ of the tokens before the window, float32 [B, Hkv, S]; 0 elsewhere. older: bool [B, Hkv, S]."""
        # s̃ = pool(Σ_w P[w, j])
        total = step.rows(layer).sum(2)
        return pool(total, older, self.kernel_size, self.pooling)


# Choices
#
# The formulas follow the authors' code, FasterDecoding/SnapKV `snapkv/monkeypatch/snapkv_utils.py`. W and cap are its
# defaults. The pooling is that of its runs on LongBench; its default is avg over 5 keys, and the paper says 5 to 7.
#
# Where this differs:
#
# - The code has a cache for every query head, and chooses for each. Here the query heads of a KV head share one
#   choice, by the mean (or the largest) of their probabilities before the pooling.
# - The softmax stays in float32; the code rounds to the model's type.
# - Kept tokens stay in their order, and of equal scores the older is kept.
