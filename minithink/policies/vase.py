"""VaSE: keep tokens whose values have a large range, and draw the others by their attention (arXiv 2606.03928).

When a KV head holds B + b tokens, its budget and its buffer, it evicts down to the budget B: one round. The last b
tokens stay. The older tokens are the candidates, of which B − b stay. Sinks are the tokens at the first n_sink
positions. With variant=attnv (AttnV) these candidates stay:

    L         the n_large with the largest range of their value, m_j = max_c v_j[c] − min_c v_j[c]; of a sink m_j = ∞
    a sample  of the other candidates, drawn without replacement with the weights w_j

The weight w is the attention of the last b queries to the candidates, softmax(q·k_j/(√D·temperature)): the mean over
these queries, pooled over `smooth` neighbouring keys, and then the mean over the query heads. With variant=dkv (DKV)
the sinks stay, and the candidates with the largest

    s_j = ‖k_j·G‖²·‖v_j·G‖²,   G ~ N(0, 1/r), [D, r]

G is drawn anew in every round and layer; the KV heads of a layer share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Step
from minithink.policies.random_attention import keys
from minithink.policies.scored import Choice, Scored

COLDEST = 0.01  # the least temperature: queries are divided by it, and must not overflow in any number type
LEAST = 2.0**-53  # the least uniform number whose quantile is taken


@dataclass
class VaSE(Scored):
    """Large values, and a sample by attention; or the largest sketched products of key and value."""

    budget: int | None = None  # B, tokens that a KV head keeps, the prompt's and the last b included
    variant: Literal["attnv", "dkv"] = "attnv"  # which of the method's two scores is used
    buffer: int = 64  # b, tokens: newest ones that always stay, and those gathered beyond B before an eviction
    n_large: int | None = None  # tokens of L; none: a quarter of the budget, and at least n_sink
    n_sink: int = 4  # sinks: tokens at the first positions, which stay
    temperature: float = 1.0  # of the softmax
    smooth: int = 5  # k, keys: width of the pooling along the sequence, odd; 1: none
    rank: int = 20  # r, columns of G
    seed: int = 0
    schedule: str = "every"
    protect_prompt: bool = False

    name = "vase"
    summary = "keep values of a large range, and draw others by attention (VaSE)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        large = self.n_sink if self.n_large is None else self.n_large
        if min(self.buffer, self.rank) < 1 or not 0 <= self.n_sink <= large:
            raise UsageError(
                f"{self.name}: buffer is {self.buffer}, rank {self.rank}, n_sink {self.n_sink} and n_large "
                f"{self.n_large}; buffer and rank must be at least 1, n_sink at least 0, and n_large at least n_sink."
            )
        if not COLDEST <= self.temperature < torch.inf:
            raise UsageError(
                f"{self.name}: temperature is {self.temperature:g}; it must be finite and at least {COLDEST:g}, "
                "where nearly all attention goes to one token."
            )
        if self.smooth < 1 or self.smooth % 2 == 0:
            raise UsageError(f"{self.name}: smooth is {self.smooth} keys; it must be odd.")
        self.slack = self.buffer
        if self.variant == "attnv":
            self.demands = (Demand(See.QUERY, rows=self.buffer),)

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.buffer)

    def scores(self, step: Step, choice: Choice) -> Tensor:
        layers = range(step.shape.layers)
        pos = step.pos()  # [L, B, Hkv, S]
        key = keys(self.seed, step)  # [L, B, Hkv]
        if self.variant == "dkv":
            # s_j = ‖k_j·G‖²·‖v_j·G‖²; the sinks stay
            s = torch.stack([self.sketched(step, layer, key[layer], choice.rows) for layer in layers])
            return s.masked_fill(pos < self.n_sink, torch.inf)
        # The tokens with the largest ln(u_j)/w_j, u_j uniform, are a sample by the weights w_j; L stays beside it.
        w = torch.stack([self.weight(step, layer, choice.older[layer], choice.rows) for layer in layers])
        race: Tensor = step.ops.draw(key, pos, w)
        return race.masked_fill(self.large(step, choice), torch.inf)

    def large(self, step: Step, choice: Choice) -> Tensor:
        """L: bool [L, B, Hkv, S]."""
        # m_j = max_c v_j[c] − min_c v_j[c]; of a sink m_j = ∞
        m = torch.stack([spread(step.values(layer, choice.rows)) for layer in range(step.shape.layers)])
        m = m.masked_fill(step.pos() < self.n_sink, torch.inf)
        n = step.budget // 4 if self.n_large is None else torch.full_like(step.budget, self.n_large)
        n = torch.minimum(n.clamp(min=self.n_sink), choice.places)
        found: Tensor = step.ops.keep_best(m, choice.candidates, n)
        return found

    def weight(self, step: Step, layer: int, older: Tensor, rows: Tensor) -> Tensor:
        """w of the `older` tokens, float32 [B, Hkv, S]. older: bool [B, Hkv, S]; rows: bool [B], rows to score."""
        q = step.queries(layer)  # [B, Hq, b, D]
        k = step.keys(layer, rows)  # [B, Hkv, S, D]
        group = q.shape[1] // k.shape[1]
        # Each query head is pooled for itself, before the mean over the group.
        k = k.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)
        valid = older.unsqueeze(2).expand(-1, -1, group, -1).flatten(1, 2)
        q = q / self.temperature
        each = step.ops.window_importance(q, k, valid, kernel_size=self.smooth, pooling="avg")  # [B, Hq, S]
        return each.unflatten(1, (-1, group)).mean(2)

    def sketched(self, step: Step, layer: int, key: Tensor, rows: Tensor) -> Tensor:
        """s of all tokens, float32 [B, Hkv, S]. key: int64 [B, Hkv], of the draw; rows: bool [B], rows to score."""
        k = step.keys(layer, rows).float()  # [B, Hkv, S, D]
        v = step.values(layer, rows).float()
        g = self.projection(step, key[:, 0], k.shape[-1])  # [B, D, r]
        return product(k, v, g[:, None])

    def projection(self, step: Step, key: Tensor, width: int) -> Tensor:
        """G by the quantiles of uniform numbers: float32 [B, D, r]. key: int64 [B]."""
        number = torch.arange(width * self.rank, dtype=torch.int32, device=key.device).expand(len(key), -1)
        u = step.ops.draw(key, number).clamp(LEAST, 1 - LEAST)
        return (torch.special.ndtri(u) / self.rank**0.5).float().view(-1, width, self.rank)


def spread(v: Tensor) -> Tensor:
    """m, the range of each value: [..., D] → float32 [...]."""
    return v.amax(-1).float() - v.amin(-1).float()


def product(k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """‖k·G‖²·‖v·G‖²: [..., S, D] and [..., D, r] → [..., S]."""
    return (k @ g).square().sum(-1) * (v @ g).square().sum(-1)


# Choices
#
# The formulas follow the authors' code, terarachang/VaSE `eval/reasoning_tasks/modified/transformers/cache_utils.py`;
# of the paper only the abstract was at hand. Where this differs:
#
# - Random numbers, G included, are pure functions of seed, round, layer, KV head and position, as in
#   `random_attention`. The sample is the tokens with the largest ln(u_j)/w_j, u_j uniform. It has the same
#   distribution as a sample drawn token after token.
# - Scores are float32. Tokens of weight 0 are drawn last; in the code they may make the sample too small. Of tokens
#   with equal scores the older one stays.
# - Pooling is over neighbours in the text. The code's newer version pools over the order of the last draw.
# - Sinks are positions in the text; in the code they are slots of the cache. Each row evicts when it holds B + b
#   tokens.
# - Where the code is silent: a protected prompt (not the default) takes part in the softmax. It stays beside L and
#   the sample, and n_large is at most the room beside it. If there is no room for b tokens, the newest that fit stay.
