"""Crystal-KV: keep the tokens that attention hits often and recently, and move budgets to busy heads.

Every KV head scores its tokens by combined recency and frequency (LRFU, §5.2 and algorithm 1):

    CRF_i(t) = λ^(t − τ_i)·CRF_i(τ_i) + [i is hit at t]

A hit is a token of the smallest set that holds the share p of the newest query's attention. While the model thinks
and a head holds more than its budget, the tokens with the smallest CRF go; the prompt stays, and the answer is
appended beside the budget (§4). No token is labelled: evicted tokens were SlipKV, the remaining ones are CrystalKV.
Every `realloc_every` tokens, budgets move to the layers and heads that use theirs most (§5.3 and algorithm 2):

    η = ΣCRF / ΣBudget,   Budget' ∝ η

Crystal-KV Lite (§6.1) is the same with equal budgets for good.

Choices where the paper is silent:
- the attention of a group of query heads: the largest probability of each token, renormalised;
- t counts the sequence's generated tokens, and hits count from the first one on (§5.2 speaks of the whole history;
  track="full" is algorithm 1 to the letter, which returns before it looks at hits while the head is not full);
- a token enters with CRF 1 and τ = t, and the attention it pays to itself then is no second hit (LRFU counts
  insertion, and a PotentialKV must not die at birth, §5.1); with birth=0 it enters with 0, and its own hit counts;
- of equal CRF the token hit less recently goes, then the older one. So λ = 0 is LRU and λ = 1 is LFU, as §5.2 has it;
- hits of answer tokens are not recorded: during the answer no token is evicted;
- ΣCRF is over all tokens that a head holds, the prompt's included, decayed to the step at which budgets move;
- where CRF does not depend on the budget, Budget' ∝ η oscillates for ever. So the weight is Budget^(1−a)·η^a with the
  damping a = ½, which is √CRF whatever the budgets were; damping=1 is algorithm 2 to the letter;
- a head keeps room for the prompt and `min_budget` tokens, and gets no more than it can fill until budgets move
  again; budgets stay while all heads together cannot fill them by then.
For λ ≤ ½ all older hits together weigh less than one newer hit. So LRFU decides as LRU: a token hit more recently
always outlives another, and frequency counts only among tokens with the same last hit (see figure 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Edit, Evict, Policy, See, SetBudget, Shape, Step

NOWHERE = 2**31 - 1  # the position of a token that is not there: behind all others


@dataclass
class CrystalKVLite(Policy):
    """LRFU (algorithm 1) with the same budget for every head."""

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
    recordable = True
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

    # -- a step

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        over, keep = super().due(step)
        return over | self._tracked(step)[None, :, None], keep  # hits are counted at every step

    def _tracked(self, step: Step) -> Tensor:
        """Rows whose hits count: bool [B]."""
        return step.active & step.thinking if self.exempt_answer else step.active

    def decide(self, step: Step) -> Iterator[Edit]:
        """Algorithm 1 in every head, then algorithm 2."""
        tracked = self._tracked(step)
        if not step.any(tracked):
            return
        pos, clock = step.pos(), step.clock[:, None, None]  # [L, B, Hkv, S], t: [B, 1, 1]
        there = pos >= 0
        born = (pos - step.prompt[:, None, None] + 1).clamp(min=0)  # the time at which each token came, 0: the prompt
        crf, last = self._recall(step, pos, born)

        # lines 3 to 9: the hit set, CRF_i(t) and τ_i
        counted = (tracked[:, None, None] & (clock > 0)).expand(pos.shape)
        if self.birth:
            counted = counted & (born < clock)
        if self.track == "full":  # lines 1 and 2
            counted = counted & (step.held() >= step.budget)[..., None]
        mass = torch.stack([step.mass(layer) for layer in range(step.shape.layers)])
        crf, last, score = step.ops.lrfu(mass, there, counted, crf, last, clock, self.lam, self.p)
        step.note(score)

        # line 10: Retain ← TopK(CRF, B), of the tokens that may go
        free, rank = there & ~step.protected(), survival(score, last)
        over, _ = super().due(step)
        stay = there & (step.ops.keep_best(rank, free, self.room(step)) | ~free | ~over[..., None])

        budget = self.budgets(step, score, stay)
        if budget is not step.budget:  # heads that shrink evict at once, in the same order
            yield SetBudget(budget)
            room = (budget - step.protected().sum(-1, dtype=torch.int32)).clamp(min=0)
            stay = stay & (step.ops.keep_best(rank, free & stay, room) | ~free | ~tracked[:, None, None])
        yield Evict(there & ~stay)
        self._remember(step, tracked, budget, stay, pos, crf, last)  # lines 11 and 12

    def budgets(self, step: Step, score: Tensor, stay: Tensor) -> Tensor:
        """The budgets from now on: int32 [L, B, Hkv]; `step.budget` itself if none moves.

        score: float64 [L, B, Hkv, S], log2 of the decayed CRF; stay: bool, alike, the tokens that algorithm 1 keeps.
        """
        return step.budget

    # -- state: CRF_i(τ_i) and τ_i of the tokens that stay. A row has one list for all its heads, one head after the
    # other, each with as many entries as its budget. So the state does not grow when budgets move.

    def setup(self, shape: Shape) -> None:
        layers, rows, heads = shape.tables
        assert self.budget is not None
        most = self.limit or self.budget
        self._slack = most - self.budget  # tokens beyond its budget that a head may hold between steps
        size = rows, layers * heads * most + 1  # the last entry is for tokens that have no entry of their own
        self._pos = torch.full(size, NOWHERE, dtype=torch.int32, device=shape.device)
        self._crf = torch.zeros(size, dtype=torch.float32, device=shape.device)
        self._last = torch.zeros(size, dtype=torch.int32, device=shape.device)

    def reset(self, row: int) -> None:
        self._pos[row] = NOWHERE

    def state(self) -> Iterable[Tensor]:
        return self._pos, self._crf, self._last

    def _entry(self, budget: Tensor, number: Tensor) -> Tensor:
        """Which entry each token of a head has, by its number from the head's oldest token: int64 [B, L·Hkv·S].

        budget: [L, B, Hkv]; number: [L, B, Hkv, S]. A number beyond the head's entries gives the last entry of all.
        """
        room = (budget + self._slack).transpose(0, 1)
        first = room.flatten(1).cumsum(1).view(room.shape) - room  # where each head's entries begin: [B, L, Hkv]
        number, nowhere = number.transpose(0, 1), self._pos.shape[1] - 1
        entry = torch.where(number < room[..., None], first[..., None] + number, nowhere)
        return entry.clamp(max=nowhere).flatten(1)

    def _recall(self, step: Step, pos: Tensor, born: Tensor) -> tuple[Tensor, Tensor]:
        """CRF and τ of the tokens at hand: known tokens are found by position, the others are new.

        Positions ascend. So no bookkeeping is needed when the columns change because tokens are appended, this policy
        or another drops tokens, or a sequence joins.
        """
        column = torch.arange(pos.shape[-1], device=pos.device).expand(pos.shape)
        entry, shape = self._entry(step.budget, column), (pos.shape[1], pos.shape[0], *pos.shape[2:])
        known, crf, last = (x[step.row].gather(1, entry).view(shape).transpose(0, 1) for x in self._tokens)
        at = torch.searchsorted(known.contiguous(), pos.contiguous()).clamp(max=pos.shape[-1] - 1)
        same = known.gather(-1, at) == pos
        return (
            torch.where(same, crf.gather(-1, at), float(self.birth)),
            torch.where(same, last.gather(-1, at), born),
        )

    def _remember(
        self, step: Step, tracked: Tensor, budget: Tensor, stay: Tensor, pos: Tensor, crf: Tensor, last: Tensor
    ) -> None:
        """Keep the state of the tokens that stay, in place; that of rows that are not tracked stays as it is."""
        entry = self._entry(budget, torch.where(stay, stay.cumsum(-1) - 1, NOWHERE))
        for state, new, nothing in zip(self._tokens, (pos, crf, last), (NOWHERE, 0, 0), strict=True):
            old = state[step.row]
            kept = torch.full_like(old, nothing).scatter_(1, entry, new.transpose(0, 1).flatten(1))
            kept[:, -1].fill_(nothing)
            state[step.row] = torch.where(tracked[:, None], kept, old)

    @property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, CRF and τ."""
        return self._pos, self._crf, self._last


def survival(score: Tensor, last: Tensor) -> Tensor:
    """Ranks by CRF, then by the last hit, then by age; rank 0 is evicted first. float32 [..., S]."""
    by_last = last.sort(dim=-1, stable=True).indices  # columns are oldest first already
    order = by_last.gather(-1, score.gather(-1, by_last).sort(dim=-1, stable=True).indices)
    rank = torch.arange(order.shape[-1], dtype=torch.float32, device=order.device).expand(order.shape)
    return torch.zeros_like(rank).scatter(-1, order, rank)


@dataclass
class CrystalKV(CrystalKVLite):
    """LRFU, with budgets that move to the heads that use theirs most (algorithm 2)."""

    schedule: str = field(default="every", init=False)
    realloc_every: int = 128  # generated tokens from one reallocation to the next
    damping: float = 0.5  # a: 1 is algorithm 2 to the letter
    min_budget: int = 16  # tokens beside the prompt that every head has room for

    name = "crystal_kv"
    summary = "keep tokens that attention hits often and recently, LRFU; budgets move between heads (Crystal-KV)"
    recordable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.realloc_every < 1 or not 0 < self.damping <= 1 or self.min_budget < 1:
            raise UsageError(
                f"{self.name}: realloc_every is {self.realloc_every}, damping {self.damping:g} and min_budget "
                f"{self.min_budget}; damping must be above 0 and at most 1, the others at least 1."
            )
        self.beside = self.min_budget  # so the floors of all heads never add up to more than B_total

    @property
    def limit(self) -> int | None:
        return None  # no limit for one head: only the sum of all is bounded, by B_total = L·H·B

    def budgets(self, step: Step, score: Tensor, stay: Tensor) -> Tensor:
        now = self._tracked(step) & (step.clock > 0) & (step.clock % self.realloc_every == 0)
        if not step.any(now):
            return step.budget
        held, prompt = (x.sum(-1, dtype=torch.int32) for x in (stay, step.protected()))
        low = prompt + self.min_budget
        high = torch.maximum(held + self.realloc_every, low)  # what a head can fill by the next time
        crf = torch.where(stay, score.exp2(), 0.0).sum(-1)  # ΣCRF of every head: float64 [L, B, Hkv]
        budget: Tensor = step.ops.reallocate(crf, step.budget, low, high, now, self.damping)
        moved = (budget - step.budget).clamp(min=0).sum((0, 2))
        self._slots[:, step.row] += torch.stack((moved, torch.where(now, step.budget.sum((0, 2)), 0)))
        return budget

    # -- how many slots changed heads, of all slots that each reallocation could move

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        self._slots = torch.zeros(2, shape.rows, dtype=torch.int64, device=shape.device)

    def reset(self, row: int) -> None:
        super().reset(row)
        self._slots[:, row] = 0

    def state(self) -> Iterable[Tensor]:
        return *super().state(), self._slots

    def counts(self, row: int) -> dict[str, int]:
        return dict(zip(("slots_moved", "slots_reallocated"), self._slots[:, row].tolist(), strict=True))

    def notes(self, row: int) -> str:
        moved, slots = self.counts(row).values()
        return f"{moved:,} of {slots:,} slots changed heads ({moved / slots:.1%})" if slots else ""
