"""Random Attention: keep the prompt and the newest tokens; draw the others by lot in every round (arXiv 2609.03430).

When a KV head holds B + b tokens, its budget and its buffer, it evicts down to the budget B: one round. It keeps the
prompt, n tokens, and the last b tokens. Of the other tokens it keeps B − b − n, drawn uniformly without replacement:
those with the largest lots

    s_j = u(seed, round, layer, head, j)      uniform between 0 and 1; j: the token's position

So an older token stays in one round with probability p = 1 − b/(B − n), and in r rounds with p^r, because each round
draws anew. At b = 1 only the newest token is safe, and a token stays with the same probability as under `random` with
a protected prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Scope, Step
from minithink.policies.random import lots
from minithink.policies.scored import Choice, Scored


@dataclass
class RandomAttention(Scored):
    """Keep the prompt, the newest tokens and random others, drawn anew in every round."""

    budget: int | None = None  # B, tokens that a KV head keeps, the prompt's and the last b included
    buffer: int = 64  # b, tokens: newest ones that always stay, and those gathered beyond B before an eviction
    seed: int = 0
    scope: Scope = "head"  # lanes that share a draw
    clip: bool = False  # without protect_prompt: keep the first tokens of the prompt, and leave one token to the draw
    schedule: str = "every"
    protect_prompt: bool = True

    name = "random_attention"
    summary = "keep the prompt and the newest tokens, and draw the others by lot (Random Attention)"
    capturable = True
    traced = ""

    def __post_init__(self) -> None:
        if self.buffer < 1 or (self.clip and self.protect_prompt):
            raise UsageError(
                f"{self.name}: buffer is {self.buffer} tokens, clip {self.clip} and protect_prompt "
                f"{self.protect_prompt}; buffer must be at least 1, and clip is for protect_prompt=false."
            )
        self.slack = self.buffer
        self.beside = self.buffer + 1

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.buffer)

    def scores(self, step: Step, choice: Choice) -> Tensor:
        pos = step.pos()  # [Lt, B, Ht, S]
        # s_j = u(seed, round, layer, head, j)
        score: Tensor = step.ops.draw(keys(self.seed, step), pos)
        if self.clip:
            _, keep = self.due(step)
            first = torch.minimum(step.prompt[None, :, None], keep - self.buffer - 1)
            score = score.masked_fill(pos < first[..., None], torch.inf)
        return score


def keys(seed: int, step: Step) -> Tensor:
    """The key of every lane's draw in this round, a hash of 32 bits: int64 [Lt, B, Ht]."""
    prompt = step.prompt[None, :, None, None].expand(*step.budget.shape, 1)
    return lots(seed, step.clock, prompt)[..., 0]


# Choices
#
# The rule follows the authors' code, SalesforceAIResearch/Random-Attention `kvcompress/engine/cache_utils.py`,
# because the paper was not at hand. Where this differs:
#
# - The code draws from the device's random generator, so the batch and the sampler change which tokens stay. Here
#   each token's random number, its lot, is a pure function of seed, sample, round, layer, KV head and original
#   position (`ref/draw.py`). A policy does not know the number of a sample. So the length of the prompt stands for
#   the sample, and the number of generated tokens for the round. Samples with prompts of equal length draw the same
#   lots.
# - Every row evicts when it holds B + b tokens. The code evicts at multiples of b, with one length for the whole
#   batch. B need not be a multiple of b. If a prompt has B + b tokens, its row evicts as soon as the prompt is read.
# - A budget without room for b + 1 tokens beside a protected prompt is refused. `protect_prompt=false,clip=true`
#   keeps the first B − b − 1 tokens of such a prompt, as the code does.
# - `protect_prompt=false` alone is the code's `random`; `scope=layer` is its `random_unified`.
