"""Crystal-KV Lite: keep the tokens that attention came back to often and not long ago (LRFU).

Every KV head scores its tokens by combined recency and frequency (§5.2, algorithm 1):

    CRF_i(t) = λ^(t − τ_i)·CRF_i(τ_i) + [i is hit at t]

A hit is a token of the smallest set that holds the share p of the newest query's attention. While the model thinks
and a head holds more than its budget, the tokens with the smallest CRF go; the prompt stays, and the answer is
appended beside the budget (§4). Lite (§6.1): every head has the same budget for good; §5.3 is left to Crystal-KV.

Chosen where the paper is silent:
- the attention of a group of query heads: the largest probability of each token, renormalised;
- t counts the sequence's generated tokens, and hits count from the first one on (§5.2 speaks of the whole history;
  track="full" is algorithm 1 to the letter, which returns before it looks at hits while the head is not full);
- a token enters with CRF 1 and τ = t, and the attention it pays to itself then is no second hit (LRFU counts
  insertion, and a PotentialKV must not die at birth, §5.1); birth=0 enters it with 0, and its own hit counts;
- of equal CRF the token hit less recently goes, then the older one. So λ = 0 is LRU and λ = 1 is LFU, as §5.2 has it;
- hits of answer tokens are not recorded: nothing is evicted any more.
For λ ≤ ½ a token hit more recently always outlives another, for all older hits together weigh less than one newer
hit: LRFU decides as LRU, and frequency counts only among tokens with the same last hit (see figure 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Evict, Policy, See, Shape, Step

NOWHERE = 2**31 - 1  # the position of columns without a token: behind all others


@dataclass
class CrystalKVLite(Policy):
    """LRFU with the same budget for every head."""

    budget: int | None = None  # tokens that a KV head holds while the model thinks, the prompt's included
    lam: float = 0.6  # λ, the share of a hit's worth that is left one step later: 0 is LRU, 1 is LFU
    p: float = 0.9  # share of the attention that the hit set holds
    birth: int = 1  # CRF of a new token: 1 or 0
    track: Literal["always", "full"] = "always"  # count hits always, or only in heads that are full
    schedule: str = "every"
    protect_prompt: bool = True
    exempt_answer: bool = True

    name = "crystal_kv_lite"
    summary = "keep tokens that attention hits often and recently, LRFU (Crystal-KV with equal budgets)"
    scope = "head"
    demands = (Demand(See.MASS, group="max", prompt=False),)

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1 or not 0 < self.p <= 1:
            raise UsageError(
                f"{self.name}: lam is {self.lam:g} and p {self.p:g}; lam must be from 0 to 1, and p above 0 and at "
                "most 1."
            )
        if self.birth not in (0, 1):
            raise UsageError(f"{self.name}: birth is {self.birth}; it must be 0 or 1.")

    def setup(self, shape: Shape) -> None:
        # Of the tokens held when the policy last looked, oldest first: position, CRF at the last hit, time of that.
        size = (*shape.tables, 0)
        self._pos = torch.empty(size, dtype=torch.int32, device=shape.device)
        self._crf = torch.empty(size, dtype=torch.float32, device=shape.device)
        self._last = torch.empty(size, dtype=torch.int32, device=shape.device)

    def reset(self, row: int) -> None:
        self._pos[:, row] = NOWHERE

    def state(self) -> Iterable[Tensor]:
        return self._pos, self._crf, self._last

    def decide(self, step: Step) -> Iterator[Evict]:
        tracked = step.active & step.thinking if self.exempt_answer else step.active  # [B]
        if not step.any(tracked):
            return
        pos = step.pos()  # [L, B, Hkv, S]
        born = (pos - step.prompt[:, None, None] + 1).clamp(min=0)  # the time at which each token came, 0: the prompt
        clock = step.clock[:, None, None]
        crf, last = self._find(pos, born)

        counted = (tracked[:, None, None] & (clock > 0)).expand(pos.shape)
        if self.birth:
            counted = counted & (born < clock)
        if self.track == "full":
            counted = counted & (step.held() >= step.budget)[..., None]
        mass = torch.stack([step.mass(layer) for layer in range(step.shape.layers)])
        crf, last, score = step.ops.lrfu(mass, pos >= 0, counted, crf, last, clock, self.lam, self.p)
        self._keep(torch.where(pos >= 0, pos, NOWHERE), crf, last)
        step.note(score)

        due, _ = self.due(step)
        if step.any(due):
            free = (pos >= 0) & ~step.protected()
            kept = step.ops.keep_best(survival(score, last), free, self.room(step))
            yield Evict(free & ~kept & due[..., None])

    def _find(self, pos: Tensor, born: Tensor) -> tuple[Tensor, Tensor]:
        """CRF and τ of the tokens at hand: those known are found by position, the others are new.

        Whatever has happened to the columns since (tokens appended, dropped by this policy or another, a sequence
        that joined) needs no bookkeeping: positions ascend.
        """
        if self._pos.shape[-1] == 0:
            return torch.full_like(pos, self.birth, dtype=torch.float32), born
        at = torch.searchsorted(self._pos, pos.contiguous()).clamp(max=self._pos.shape[-1] - 1)
        known = self._pos.gather(-1, at) == pos
        return (
            torch.where(known, self._crf.gather(-1, at), float(self.birth)),
            torch.where(known, self._last.gather(-1, at), born),
        )

    def _keep(self, *state: Tensor) -> None:
        """Remember, in place as long as the width is the same: addresses stay."""
        if self._pos.shape == state[0].shape:
            for old, new in zip(self.state(), state, strict=True):
                old.copy_(new)
        else:
            self._pos, self._crf, self._last = state


def survival(score: Tensor, last: Tensor) -> Tensor:
    """Ranks by CRF, among equals by the last hit, among equals by age: 0 goes first. float32 [..., S]."""
    by_last = last.sort(dim=-1, stable=True).indices  # columns are oldest first already
    order = by_last.gather(-1, score.gather(-1, by_last).sort(dim=-1, stable=True).indices)
    return order.argsort(dim=-1).float()
