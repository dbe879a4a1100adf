"""Scissorhands: keep the tokens that the last queries found important (Liu et al. 2023, arXiv 2305.17118).

What was important stays important: so a KV head counts how often each token mattered to the last queries. A token
matters to a query if its attention is at least the mean: 1/n if the query sees n of the tokens that are held now.
Once a head holds budget + buffer tokens, it evicts down to the budget. It keeps the last r tokens, and of the older
ones those with the largest

    I_j = Σ_w [A_wj ≥ 1/n_w] / #w      w: the last `history` queries that see token j

by="mean" takes the attention A_wj itself instead of the bracket. A is the mean over the query heads of a KV head.

No code of the authors was found. The paper's history is 400 queries and r is 10. AnswerDotAI/cold-compress has the
share of mattering steps as `attn_thresholding`, and the mean attention without it. Deviations from that code:

- It stores what each query attended to when it came, among the tokens held then. Here the last queries are kept, and
  their attention to the tokens that are held now is computed when tokens go. That takes `history` queries of memory
  instead of `history` numbers for each token.
- Its four first tokens always stay. Here protect_prompt=true keeps the whole prompt.
- It evicts a token in every step; buffer=0 does the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Evict, Policy, See, Step


@dataclass
class Scissorhands(Policy):
    """Count how often tokens mattered, in every KV head for itself."""

    budget: int | None = None  # tokens that a KV head keeps, the last r included
    recent: int = 10  # r, tokens that always stay
    history: int = 400  # the last queries, whose attention is counted
    by: Literal["count", "mean"] = "count"  # how often a token mattered, or its mean attention
    buffer: int = 128  # tokens beyond the budget that are gathered before an eviction
    schedule: str = "every"
    protect_prompt: bool = False

    name = "scissorhands"
    summary = "keep what the last queries found important (Scissorhands)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        if self.recent < 1 or self.history < 1 or self.buffer < 0:
            raise UsageError(
                f"{self.name}: recent is {self.recent}, history {self.history} and buffer {self.buffer}; buffer must "
                "be at least 0, the others at least 1."
            )
        self.slack = self.buffer
        self.demands = (Demand(See.QUERY, rows=self.history),)

    def decide(self, step: Step) -> Iterable[Evict]:
        due, _ = self.due(step)  # bool [L, B, Hkv]
        if not step.any(due):
            return
        room, pos, held = self.room(step), step.pos(), step.held()[..., None]  # pos: [L, B, Hkv, S]
        column = torch.arange(pos.shape[-1], device=pos.device)
        newest = (column < held) & (column >= held - room.clamp(max=self.recent)[..., None])
        free, rows = (pos >= 0) & ~step.protected(), due.any(-1).any(0)
        score = torch.stack([self.score(step, layer, pos[layer], rows) for layer in range(step.shape.layers)])
        step.note(score, free & ~newest)
        others = room - (free & newest).sum(-1, dtype=torch.int32)
        kept = newest | step.ops.keep_best(score, free & ~newest, others)
        yield Evict(due[..., None] & free & ~kept)

    def score(self, step: Step, layer: int, pos: Tensor, rows: Tensor) -> Tensor:
        """I of a layer's tokens, float32 [B, Hkv, S]. pos: int32 [B, Hkv, S]; rows: bool [B], the rows to score."""
        q, k = step.queries(layer), step.keys(layer, rows)  # [B, Hq, n, D], [B, Hkv, S, D]
        newest = step.prompt + step.clock - 1
        at = newest[:, None] - torch.arange(q.shape[2] - 1, -1, -1, device=q.device)  # [B, n], the queries' positions
        return importance(q, k, pos, at, self.by)


def importance(q: Tensor, k: Tensor, pos: Tensor, at: Tensor, by: str) -> Tensor:
    """I of every token, float32 [B, Hkv, S].

    Args:
        q: [B, Hq, n, D], queries. k: [B, Hkv, S, D], keys.
        pos: int32 [B, Hkv, S], positions of the tokens, −1: none.
        at: int [B, n], positions of the queries, below 0: none.
        by: count or mean.
    """
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, g, n, D]
    place = pos[:, :, None]
    sees = (place >= 0) & (place <= at[:, None, :, None]) & (at >= 0)[:, None, :, None]  # [B, Hkv, n, S]
    logits = grouped @ k.float().mT.unsqueeze(2) / k.shape[-1] ** 0.5
    a = logits.masked_fill(~sees.unsqueeze(2), -torch.inf).softmax(-1).mean(2)  # [B, Hkv, n, S]
    if by == "count":
        a = (a * sees.sum(-1, keepdim=True) >= 1).float()
    asked = sees.sum(2).clamp(min=1)
    return a.masked_fill(~sees, 0.0).sum(2) / asked
