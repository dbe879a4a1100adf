"""TOVA: keep the tokens that the newest query attends to most (Oren et al. 2024, arXiv 2401.06104).

When a layer holds more than its budget, it keeps the tokens with the largest

    s_j = mean over all heads of softmax_j q·k_j/√D

where q is the newest query. All heads of a layer keep the same tokens, and nothing is remembered between steps. The
newest token competes as any other, so it may go at once. At the end of a prompt that is longer than the budget, the
prompt's last query decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.kv.contract import Demand, See, Step
from minithink.policies.scored import Choice, Scored


@dataclass
class Tova(Scored):
    """Keep the tokens with the most attention from the newest query."""

    budget: int | None = None  # tokens that a layer keeps
    newest: bool = False  # always keep the newest token
    schedule: str = "every"
    protect_prompt: bool = False

    name = "tova"
    summary = "keep what the newest query attends to (TOVA)"
    capturable = True
    scope = "layer"
    demands = (Demand(See.ROWS),)

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=1) if self.newest else torch.zeros_like(room)

    def scores(self, step: Step, choice: Choice) -> Tensor:
        # softmax_j q·k_j/√D, the mean over the query heads of each KV head: [L, B, Hkv, S]
        attention = torch.stack([step.rows(layer)[:, :, -1] for layer in range(step.shape.layers)])
        layers, _, heads = step.shape.tables
        # s_j: the mean over all KV heads, too
        if heads == 1:
            attention = attention.mean(2, keepdim=True)
        if layers == 1:
            attention = attention.mean(0, keepdim=True)
        return attention


# Choices
#
# The formula follows the authors' code, schwartz-lab-NLP/TOVA `src/tova_cache.py`. Where this differs:
#
# - newest=true keeps the newest token, as NVIDIA/kvpress does.
# - Kept tokens stay in their order, of equal scores the older is kept, and the softmax stays in float32.
# - In a stack whose heads keep different tokens, each KV head goes by its own query heads. In a stack whose layers
#   all keep the same tokens, the mean is over all layers, too.
