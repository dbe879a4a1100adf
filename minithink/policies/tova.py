"""TOVA: keep the tokens that the newest query attends to most (Oren et al. 2024, arXiv 2401.06104).

When a layer holds more than its budget, it keeps the tokens with the largest

    s_j = mean over all heads of softmax_j q·k_j/√D

where q is the newest query. All heads of a layer keep the same tokens, and nothing is remembered between steps. The
newest token competes as any other, so it may go at once; newest=true keeps it, as NVIDIA/kvpress does. At the end of
a prompt that is longer than the budget, the prompt's last query decides.

The formula follows the authors' code, schwartz-lab-NLP/TOVA `src/tova_cache.py`. Deviations: kept tokens stay in
their order, of equal scores the older is kept, and the softmax stays in float32. In a stack whose heads keep
different tokens, each KV head goes by its own query heads. In a stack whose layers all keep the same tokens, the mean
is over all layers, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from minithink.kv.contract import Demand, Evict, Policy, See, Step


@dataclass
class Tova(Policy):
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

    def decide(self, step: Step) -> Iterable[Evict]:
        due, _ = self.due(step)  # bool [Lt, B, Ht]
        if not step.any(due):
            return
        pos, held = step.pos(), step.held()[..., None]  # pos: [Lt, B, Ht, S]
        score = torch.stack([step.rows(layer)[:, :, -1] for layer in range(step.shape.layers)])  # [L, B, Hkv, S]
        layers, _, heads = step.shape.tables
        if heads == 1:
            score = score.mean(2, keepdim=True)
        if layers == 1:
            score = score.mean(0, keepdim=True)
        last = (torch.arange(pos.shape[-1], device=pos.device) == held - 1) & self.newest
        score = score.masked_fill(last, torch.inf)
        free = (pos >= 0) & ~step.protected()
        step.note(score, free)
        kept = step.ops.keep_best(score, free, self.room(step))
        yield Evict(due[..., None] & free & ~kept)
