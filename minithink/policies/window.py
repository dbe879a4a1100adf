"""Window: the last `budget` tokens.

The simplest eviction, StreamingLLM with no sinks (Xiao et al. 2023, figure 1b). All lanes keep the same tokens. Kept
tokens keep their original positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minithink.kv.contract import Edit, Evict, Policy, Step


@dataclass
class Window(Policy):
    """Keep the newest tokens."""

    budget: int | None = None  # tokens
    schedule: str = "every"
    protect_prompt: bool = False

    name = "window"
    summary = "keep the last tokens"
    capturable = True
    scope = "sequence"

    def decide(self, step: Step) -> Iterable[Edit]:
        due, _ = self.due(step)  # bool [Lt, B, Ht]
        if not step.any(due):
            return
        pos = step.pos()  # [Lt, B, Ht, S]
        candidate = (pos >= 0) & ~step.protected()
        kept = step.ops.keep_best(pos.double(), candidate, self.room(step))
        yield Evict(due[..., None] & candidate & ~kept)
