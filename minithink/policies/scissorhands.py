"""Scissorhands: keep the tokens that the last queries found important (Liu et al. 2023, arXiv 2305.17118).

What was important stays important: so a KV head counts how often each token mattered to the last queries. A token
matters to a query if its attention is at least the mean: 1/n if the query sees n of the tokens that are held now.
Once a head holds budget + buffer tokens, it evicts down to the budget. It keeps the last r tokens, and of the older
ones those with the largest

    I_j = Σ_w [A_wj ≥ 1/n_w] / #w      w: the last `history` queries that see token j

by="mean" takes the attention A_wj itself instead of the bracket. A is the mean over the query heads of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Step
from minithink.policies.scored import Choice, Scored


@dataclass
class Scissorhands(Scored):
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

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.recent)

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        """I of a layer's tokens: float32 [B, Hkv, S]."""
        q = step.queries(layer)  # [B, Hq, n, D]
        k = step.keys(layer, choice.rows)  # [B, Hkv, S, D]
        newest = step.prompt + step.clock - 1
        age = torch.arange(q.shape[2] - 1, -1, -1, device=q.device)
        at = newest[:, None] - age  # [B, n], the queries' positions
        # I_j = Σ_w [A_wj ≥ 1/n_w] / #w
        return importance(q, k, step.pos(layer), at, by=self.by)


def importance(q: Tensor, k: Tensor, pos: Tensor, at: Tensor, by: str) -> Tensor:
    """I of every token, float32 [B, Hkv, S].

    Args:
        q: [B, Hq, n, D], queries.
        k: [B, Hkv, S, D], keys.
        pos: int32 [B, Hkv, S], positions of the tokens, −1: none.
        at: int [B, n], positions of the queries, below 0: none.
        by: count or mean.
    """
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, g, n, D]
    place = pos[:, :, None]  # [B, Hkv, 1, S]
    own = at[:, None, :, None]  # [B, 1, n, 1]
    sees = (place >= 0) & (place <= own) & (own >= 0)  # [B, Hkv, n, S]
    # A_wj = softmax_j q_w·k_j/√D, over the tokens that query w sees; the mean over the group
    logits = grouped @ k.float().mT.unsqueeze(2) / k.shape[-1] ** 0.5
    a = logits.masked_fill(~sees.unsqueeze(2), -torch.inf).softmax(-1).mean(2)  # [B, Hkv, n, S]
    if by == "count":
        # [A_wj ≥ 1/n_w]
        n = sees.sum(-1, keepdim=True)
        a = (a * n >= 1).float()
    # Σ_w / #w
    asked = sees.sum(2).clamp(min=1)
    return a.masked_fill(~sees, 0.0).sum(2) / asked


# Choices
#
# No code of the authors was found. The paper's history is 400 queries and r is 10. AnswerDotAI/cold-compress has the
# share of mattering steps as `attn_thresholding`, and the mean attention without it. Where this differs from that
# code:
#
# - It stores what each query attended to when it came, among the tokens held then. Here the last queries are kept,
#   and their attention to the tokens that are held now is computed when tokens go. That takes `history` queries of
#   memory instead of `history` numbers for each token.
# - Its four first tokens always stay. Here protect_prompt=true keeps the whole prompt.
# - It evicts a token in every step; buffer=0 does the same.
