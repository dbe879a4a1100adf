"""StreamingLLM: the first `sink` tokens and the last budget − sink (Xiao et al. 2023, arXiv 2309.17453, §3.2).

Attention gives much of its mass to the first tokens, the sinks, whatever they say. Without them the softmax spreads
this mass over other tokens, and the model breaks. So the sinks stay, and beside them the newest tokens. All lanes
keep the same tokens:

    s_j = ∞ if j < sink, else j      j: the token's position in the text
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Step
from minithink.policies.scored import Choice, Scored


@dataclass
class StreamingLLM(Scored):
    """Keep attention sinks and the newest tokens."""

    budget: int | None = None  # tokens, sinks included
    sink: int = 4  # tokens; DynTS's runs have 10
    rerotate: bool = False  # positions inside the cache, as in the paper
    schedule: str = "every"
    protect_prompt: bool = False

    name = "streaming_llm"
    summary = "keep the first and the last tokens (StreamingLLM)"
    capturable = True
    traced = ""
    scope = "sequence"

    def __post_init__(self) -> None:
        if self.sink < 0 or (self.budget is not None and self.budget <= self.sink):
            raise UsageError(
                f"streaming_llm: sink is {self.sink} and the budget {self.budget} tokens; sink must be at least 0, "
                "and the budget more than sink, for the newest token is in it too."
            )
        if self.rerotate and self.protect_prompt:
            raise UsageError(
                "streaming_llm: rerotate moves the sinks next to the window, and a protected prompt lies between "
                "them: drop one of the two."
            )
        self.pull = self.sink if self.rerotate else 0

    def scores(self, step: Step, choice: Choice) -> Tensor:
        pos = step.pos()  # [Lt, B, Ht, S]
        # s_j = ∞ if j < sink, else j
        return pos.double().masked_fill(pos < self.sink, torch.inf)


# Choices
#
# - Positions: the paper counts them inside the cache (§3.2), so that the sinks seem to stand directly before the
#   window. `rerotate` does the same: a second copy of the query, rotated to that distance, attends to the sinks. This
#   gives the logits of the paper's rotated keys. By default positions stay original, as in all comparisons of
#   reasoning models (R-KV, DynTS).
# - As in the official code, all lanes keep the same tokens, and the newest token attends before anything is evicted.
# - While the prompt is read, attention is over all of it, as with every policy here.
# - `sink` counts positions: if the prompt has fewer tokens, the first generated tokens are sinks too.
