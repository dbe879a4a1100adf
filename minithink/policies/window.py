"""Window: the last `budget` tokens.

The simplest eviction: StreamingLLM with no sinks (Xiao et al. 2023, figure 1b). All lanes keep the same tokens. Kept
tokens keep their original positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minithink.kv.contract import Step
from minithink.policies.scored import Choice, Scored


@dataclass
class Window(Scored):
    """Keep the newest tokens."""

    budget: int | None = None  # tokens
    schedule: str = "every"
    protect_prompt: bool = False

    name = "window"
    summary = "keep the last tokens"
    capturable = True
    traced = ""
    scope = "sequence"

    def scores(self, step: Step, choice: Choice) -> Tensor:
        # s_j = j, the token's position
        return step.pos().double()


# Choices
#
# - Positions stay the original ones. StreamingLLM counts them inside the cache (`streaming_llm.py`).
# - The newest token attends to all others before one of them is evicted.
