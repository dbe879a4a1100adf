"""Random: evict tokens by lot. A control: a method is better than it only if the method chooses well.

Every token but the newest has the same chance. No generator has a state that advances: a token's lot is a hash of
(seed, the sequence's clock, layer, head, original position). So a sequence loses the same tokens whatever the other
sequences of the batch do. Sequences of equal lengths lose the same positions; another seed gives other lots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.kv.contract import Edit, Evict, Policy, Scope, Step

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: keeps zeros from hashing to zeros


@dataclass
class Random(Policy):
    """Keep the newest token and random others."""

    budget: int | None = None  # tokens
    seed: int = 0
    scope: Scope = "head"  # lanes that share a lot
    schedule: str = "every"
    protect_prompt: bool = False

    name = "random"
    summary = "evict tokens by lot (a control)"
    capturable = True

    def decide(self, step: Step) -> Iterable[Edit]:
        due, _ = self.due(step)  # bool [Lt, B, Ht]
        if not step.any(due):
            return
        pos = step.pos()  # [Lt, B, Ht, S]
        candidate = (pos >= 0) & ~step.protected()
        lot = lots(self.seed, step.clock, pos).double()
        newest = pos == pos.amax(-1, keepdim=True)
        kept = step.ops.keep_best(lot.masked_fill(newest, torch.inf), candidate, self.room(step).clamp(min=1))
        yield Evict(due[..., None] & candidate & ~kept)


def lots(seed: int, clock: Tensor, pos: Tensor) -> Tensor:
    """One number for every token. clock: int [B], pos: int [Lt, B, Ht, S] → int64 [Lt, B, Ht, S], 32 bits each."""
    layers, _, heads, _ = pos.shape
    layer, head = (torch.arange(n, device=pos.device) for n in (layers, heads))
    lot = torch.full((1,), seed & WORD, device=pos.device)
    for word in (
        torch.full((1,), seed >> 32 & WORD, device=pos.device), layer[:, None, None, None],
        clock[None, :, None, None], head[None, None, :, None], pos,
    ):  # fmt: skip
        lot = _mix(lot ^ (_mix(word) + GOLDEN))
    return lot


def _mix(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (Appleby), a bijection of 32 bits. Products that wrap keep their low words."""
    x = x.long() & WORD
    x = (x ^ (x >> 16)) * 0x85EBCA6B & WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & WORD
    return x ^ (x >> 16)
