"""Random: evict tokens by lot. A control: a method is better than it only if the method chooses well.

The newest token stays, and every other token has the same chance:

    s_j = hash(seed, clock, layer, head, j)      j: the token's position; clock: the tokens generated so far

No generator has a state that advances. So a sequence loses the same tokens whatever the other sequences of the batch
do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.kv.contract import Scope, Step
from minithink.policies.scored import Choice, Scored

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: keeps zeros from hashing to zeros


@dataclass
class Random(Scored):
    """Keep the newest token and random others."""

    budget: int | None = None  # tokens
    seed: int = 0
    scope: Scope = "head"  # lanes that share a lot
    schedule: str = "every"
    protect_prompt: bool = False

    name = "random"
    summary = "evict tokens by lot (a control)"
    capturable = True
    traced = ""

    def window_size(self, room: Tensor) -> Tensor:
        return torch.ones_like(room)

    def scores(self, step: Step, choice: Choice) -> Tensor:
        # s_j = hash(seed, clock, layer, head, j)
        return lots(self.seed, step.clock, step.pos()).double()


def lots(seed: int, clock: Tensor, pos: Tensor) -> Tensor:
    """One number for every token. clock: int [B], pos: int [Lt, B, Ht, S] → int64 [Lt, B, Ht, S], 32 bits each."""
    layers, _, heads, _ = pos.shape
    words = (
        torch.full((1,), seed >> 32 & WORD, device=pos.device),
        torch.arange(layers, device=pos.device)[:, None, None, None],
        clock[None, :, None, None],
        torch.arange(heads, device=pos.device)[None, None, :, None],
        pos,
    )
    lot = torch.full((1,), seed & WORD, device=pos.device)
    for word in words:
        lot = _mix(lot ^ (_mix(word) + GOLDEN))
    return lot


def _mix(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (Appleby), a bijection of 32 bits. Products that wrap keep their low words."""
    x = x.long() & WORD
    x = (x ^ (x >> 16)) * 0x85EBCA6B & WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & WORD
    return x ^ (x >> 16)


# Choices
#
# - Sequences of equal lengths lose the same positions; another seed gives other lots.
# - Every eviction draws anew, so a token that has stayed once may go the next time.
# - The newest token stays even where a protected prompt leaves no room for it.
