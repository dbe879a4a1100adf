"""Crystal-KV (Wang et al.): keep tokens that attention hits often and recently; move budgets to heads with many hits.

A token is *hit* if it is in the smallest set of tokens that holds the share p of the newest query's attention. Every
KV head scores its tokens by their hits: CRF, combined recency and frequency (LRFU, §5.2 and algorithm 1).

    CRF_i(t) = λ^(t − τ_i)·CRF_i(τ_i) + [i is hit at t]      τ_i: the step of token i's last hit before t

The paper calls a new token PotentialKV, a token that LRFU evicts SlipKV, and one that it keeps CrystalKV (§4). The
code needs no such labels. At each step, after attention, `decide` does this in every head:

    lines 3 to 9    CRF and τ of the tokens that are hit are updated. A token that is not hit keeps its stored CRF and
                    τ; line 9's decay of its CRF is only computed to compare tokens `ref/lrfu.py`
    lines 10 to 13  a head that holds more than its budget evicts the tokens with the smallest CRF, and CRF and τ of
                    the other tokens close up. A head with exactly its budget evicts none   `ref/retain.py`
    algorithm 2     every `realloc_every` tokens, budgets move to the layers, and within a layer to the heads, with
                    the most CRF for their budget (§5.3): η = ΣCRF / ΣBudget, Budget' ∝ η   `ref/reallocate.py`
    then            a head whose budget shrank evicts down to it at once                    `ref/repack.py`

All this happens only while the model thinks: from `<think>`, or from the end of a prompt that ends in it, to
`</think>`. A model without such tokens thinks all the time, and so does a text that never opens `<think>`. The prompt
stays, and counts in the budget. The answer is appended beside the budget. In Crystal-KV Lite (§6.1) budgets stay
equal. The authors released no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Edit, Evict, Policy, See, SetBudget, Shape, Step
from minithink.ref.lrfu import Decay

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others


@dataclass
class CrystalKVLite(Policy):
    """LRFU (algorithm 1) with the same budget for every head."""

    budget: int | None = None  # tokens that a KV head holds while the model thinks, the prompt's included
    lam: float = 0.6  # λ, the share of a hit's weight that is left one step later: 0 is LRU, 1 is LFU
    p: float = 0.9  # share of the attention that the hit set holds
    birth: int = 1  # CRF of a new token: 1 or 0
    track: Literal["always", "full"] = "always"  # count hits always, or only in heads that are full
    schedule: str = "every"
    protect_prompt: bool = True
    exempt_answer: bool = True

    name = "crystal_kv_lite"
    summary = "keep tokens that attention hits often and recently, LRFU (Crystal-KV with equal budgets)"
    capturable = True
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
        tracked = self._tracked(step)
        if not step.any(tracked):
            return
        nothing = torch.zeros_like(tracked)
        drop, *_ = self.algorithm_1(step, tracked, nothing)
        yield Evict(drop)

    def algorithm_1(self, step: Step, tracked: Tensor, summed: Tensor) -> tuple[Tensor, ...]:
        """Algorithm 1 in every head: update CRF and τ by the hits, select the tokens that go.

        `ops.retain` does all of it, in one kernel or by its readable twin `ref/retain.py`.

        tracked, summed: bool [B], rows whose hits count, and rows of which ΣCRF is wanted.

        Returns:
            drop: bool [L, B, Hkv, S], the tokens that go.
            kept, fixed: int32 [L, B, Hkv], tokens of each head that stay, and the protected ones among them.
            crf: float64 [L, B, Hkv], ΣCRF of the tokens that stay.
        """
        held = step.held()  # [L, B, Hkv]
        generates = tracked & (step.clock > 0)
        counted = generates[:, None].expand(step.budget.shape)
        if self.track == "full":  # lines 1 and 2
            counted = counted & (held >= step.budget)
        over, keep = super().due(step)  # heads above their budgets; with a schedule, only at its steps
        entries, slack = self._entries(step.budget)
        *result, score = step.ops.retain(
            mass=step.mass(),
            pos=step.pos(),
            held=held,
            known=self._known,
            at=step.row,
            budget=entries,
            slack=slack,
            keep=torch.where(over, keep, held),
            protected=step.protects,
            prompt=step.prompt,
            t=step.clock,
            tracked=tracked,
            counted=counted,
            summed=summed,
            decay=self._decay,
            p=self.p,
            birth=self.birth,
            scored=step.wants_scores,
        )
        if score is not None:
            step.note(score)
        return tuple(result)

    # -- state: CRF_i(τ_i) and τ_i of the tokens that stay. A row has one list for all its heads, one head after the
    # other. A head has budget + slack entries, so the state does not grow when budgets move. If that is more than a
    # head can ever fill, it has as many as it can fill.

    def setup(self, shape: Shape) -> None:
        layers, rows, heads = shape.tables
        assert self.budget is not None
        most = self.limit or self.budget
        self._slack = most - self.budget  # tokens beyond its budget that a head may hold between steps
        self._most: int | None = None  # entries of a head, if budget + slack are more
        fillable = shape.tokens + self._moves(shape)
        if shape.tokens and most > fillable:
            self._most = most = fillable
        size = (rows, layers * heads * most + 1)  # the last entry is for tokens without an entry of their own
        self._pos = torch.full(size, NOWHERE, dtype=torch.int32, device=shape.device)
        self._crf = torch.zeros(size, dtype=torch.float64, device=shape.device)
        self._last = torch.zeros(size, dtype=torch.int32, device=shape.device)
        self._decay = Decay(self.lam, shape.device)

    def _moves(self, shape: Shape) -> int:
        """Tokens by which a budget that moves may exceed the longest sequence."""
        return 0

    def _entries(self, budget: Tensor) -> tuple[Tensor, int]:
        """How many entries heads with these budgets have: int32 [L, B, Hkv], and a number to add to each."""
        if self._most is None:
            return budget, self._slack
        return (budget + self._slack).clamp(max=self._most), 0

    def reset(self, row: int) -> None:
        self._pos[row] = NOWHERE

    def state(self) -> Iterable[Tensor]:
        return *self._known, *self._decay.tables()

    @property
    def _known(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, CRF and τ."""
        return self._pos, self._crf, self._last


@dataclass
class CrystalKV(CrystalKVLite):
    """LRFU, with budgets that move to the heads that use theirs most (algorithm 2)."""

    schedule: str = field(default="every", init=False)
    realloc_every: int = 128  # generated tokens from one reallocation to the next
    damping: float = 0.5  # a: 1 is algorithm 2 to the letter
    min_budget: int = 16  # tokens beside the prompt that every head has room for

    name = "crystal_kv"
    summary = "keep tokens that attention hits often and recently, LRFU; budgets move between heads (Crystal-KV)"
    capturable = True

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

    def decide(self, step: Step) -> Iterator[Edit]:
        tracked = self._tracked(step)
        if not step.any(tracked):
            return
        in_time = (step.clock > 0) & (step.clock % self.realloc_every == 0)
        now = tracked & in_time
        drop, kept, fixed, crf = self.algorithm_1(step, tracked, now)
        if step.any(now):
            budget = self.algorithm_2(step, now, kept, fixed, crf)
            self._repack(step, now, drop, budget)
            yield SetBudget(budget)
        yield Evict(drop)

    def _repack(self, step: Step, now: Tensor, drop: Tensor, budget: Tensor) -> None:
        """Heads that shrink evict: their tokens are added to `drop`. CRF and τ move to the heads' new entries."""
        old, _ = self._entries(step.budget)
        new, slack = self._entries(budget)
        step.ops.repack(
            drop=drop,
            held=step.held(),
            known=self._known,
            at=step.row,
            old=old,
            new=new,
            slack=slack,
            protected=step.protects,
            t=step.clock,
            moves=now,
            decay=self._decay,
        )

    def algorithm_2(self, step: Step, now: Tensor, kept: Tensor, fixed: Tensor, crf: Tensor) -> Tensor:
        """Algorithm 2, whose four lines are in `ref/reallocate.py`: the new budgets, int32 [L, B, Hkv].

        now: bool [B], rows whose budgets move; kept, fixed, crf: what `algorithm_1` returns.
        """
        low = fixed + self.min_budget
        high = torch.maximum(kept + self.realloc_every, low)  # what a head can fill by the next time
        budget: Tensor = step.ops.reallocate(
            crf=crf,
            budget=step.budget,
            low=low,
            high=high,
            moves=now,
            damping=self.damping,
        )
        moved = (budget - step.budget).clamp(min=0).sum((0, 2))
        total = torch.where(now, step.budget.sum((0, 2)), 0)
        self._slots[:, step.row] += torch.stack((moved, total))
        return budget

    def _moves(self, shape: Shape) -> int:
        # `algorithm_2` gives a head at most what it holds and `realloc_every`, or the prompt and `min_budget`. A
        # budget that is larger from the beginning never moves.
        return min(max(self.realloc_every, self.min_budget), shape.tokens)

    # -- counted over all reallocations of a row: slots that changed heads, and all slots that could

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        self._slots = torch.zeros(2, shape.rows, dtype=torch.int64, device=shape.device)

    def reset(self, row: int) -> None:
        super().reset(row)
        self._slots[:, row] = 0

    def state(self) -> Iterable[Tensor]:
        return *super().state(), self._slots

    def counts(self, row: int) -> dict[str, int]:
        moved, total = self._slots[:, row].tolist()
        return {"slots_moved": moved, "slots_reallocated": total}

    def notes(self, row: int) -> str:
        moved, slots = self.counts(row).values()
        return f"{moved:,} of {slots:,} slots changed heads ({moved / slots:.1%})" if slots else ""


# Choices
#
# The authors have released no code. What the paper leaves open:
#
# - The query heads of a KV head count as one: the largest probability of each token, renormalised.
# - The prompt's tokens take part in the attention, and can be hit.
# - The token with which the sum reaches p is hit, too (the paper: "exceed"). Of equally probable tokens the older one
#   comes first.
# - t counts the sequence's generated tokens. Hits count from the first one on (§5.2: over the whole history). In
#   algorithm 1 (lines 1 and 2) hits do not count before the head is full: track=full does that.
# - A new token has CRF 1 and τ = t, because LRFU counts insertion, and a PotentialKV must not be evicted in the step
#   in which it comes (§5.1). Its attention to itself at t is no second hit. birth=0 starts with CRF 0 and counts it.
# - Of tokens with equal CRF the one whose last hit is older goes first, then the older token. So λ = 0 is LRU and
#   λ = 1 is LFU, as in §5.2.
# - CRF is a float64, and decayed CRFs are compared as numbers times powers of 2: 0.6^n is 0 in float64 from n ≈ 1,400
#   on. A hit that came more than 53·ln 2 / −ln λ steps before a token's last one is rounded away: 72 steps at
#   λ = 0.6, 16 at 0.1. Within 50·ln 2 / −ln λ steps every hit counts (`window` in `ref/lrfu.py`).
# - Queries of the answer count no hits, and during the answer no token is evicted.
# - ΣCRF is over all tokens that a head holds, the prompt's included, decayed to the step at which budgets move.
# - If CRF does not depend on the budget, Budget' ∝ η oscillates for ever. So the weight is Budget^(1−a)·η^a. With the
#   damping a = ½ it is √CRF, whatever the budgets were; damping=1 is algorithm 2 as it is written.
# - A budget is at least the prompt and `min_budget` tokens, and at most what the head can fill until budgets move
#   again. Budgets outside these bounds are cut to them, and all others are scaled by one factor, so that the sum
#   stays. Budgets do not move if all heads together cannot fill them by then.
#
# For λ ≤ ½ all older hits together weigh less than one newer hit. So LRFU decides as LRU: the token that was hit more
# recently stays, and frequency counts only among tokens with the same last hit (see figure 5). So all λ in (0, ½]
# decide alike, as far as hits lie within the window of their λ. In general a token that was hit k steps more recently
# than another can go first only if λ^k > 1 − λ: k ≤ 1 at λ = 0.6, and k ≤ 21 at 0.9.
