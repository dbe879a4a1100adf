"""ThinKV: a thought's type decides in how many bits its tokens are stored, and how many of them stay.

Every τ generated tokens the attention's sparsity says what kind of thought begins (§3.1, §4.1: transition ≥ θ2 >
reasoning ≥ θ1 > execution), and the τ tokens that follow are a segment of that type. TBQ (§4.2) quantizes g tokens at
a time in the type's format. TBE (§4.3) anneals segments along the retention schedule R = {64, 32, 16, 8, 4}:

    case 1   when a transition ends, every segment before it:                 |S_i| ← min(|S_i|, R_n), the n-th time
    case 2   while |S| > k: the oldest segment of the least important type (ρ: T < E < R) above the minimum, likewise

and keeps of a segment the tokens nearest to the centroids of a K-means over its keys (`ref/kmeans.py`), in place.
Pages hold one type (§5.2): a freed slot waits for the next token of that type (`kv/table.py`). No token is moved.
Options, formats and checks are in `thinkv_options.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Edit, Evict, OpenSegment, Shape, Step
from minithink.policies.thinkv_options import ThinKVOptions
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION


def type_of(sparsity: Tensor, theta: Sequence[float]) -> Tensor:
    """φ (§4.1): the type of a thought by its sparsity, uint8. theta: θ1 and θ2; θ1 alone where |T| = 2, which knows
    no transitions."""
    low, high = [*theta, float("inf")][:2]
    slow = torch.where(sparsity < high, REASONING, TRANSITION)
    kind = torch.where(sparsity < low, EXECUTION, slow)
    return kind.to(torch.uint8)


@dataclass
class ThinKV(ThinKVOptions):
    """Think before you quantize, think before you evict.

    The options give τ (`tau`), g, k (`budget`), |T| (`types`), R (`kept`), θ (`theta`) and L* (`measured`): the
    layers whose attention is seen every τ tokens. `_kind` tells the type that a text ends in, by its words.
    """

    name: ClassVar[str] = "thinkv"
    summary: ClassVar[str] = "quantize and evict by thought type, which attention sparsity tells (ThinKV)"
    capturable = True
    opens = True
    scope = "layer"

    # -- state: type of every segment, and how often it was annealed

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        segments = shape.tokens // self.tau + 2
        self.kind = torch.zeros(shape.rows, segments, dtype=torch.uint8, device=shape.device)
        self.level = torch.zeros(shape.rows, segments, dtype=torch.uint8, device=shape.device)
        self._heard: list[list[int]] = [[] for _ in range(shape.rows)]  # with thoughts=keyword: each row's text
        self.cases = torch.zeros(2, shape.rows, dtype=torch.int32, device=shape.device)  # segments annealed, by case

    def reset(self, row: int) -> None:
        self.kind[row] = 0
        self.level[row] = 0
        self.cases[:, row] = 0
        self._heard[row] = []

    def state(self) -> Iterable[Tensor]:
        return self.kind, self.level, self.cases

    def counts(self, row: int) -> dict[str, int]:
        if self.budget is None:
            return {}
        first, second = self.cases[:, row].tolist()
        return {"case_1": first, "case_2": second}

    def notes(self, row: int) -> str:
        if self.budget is None:
            return ""
        first, second = self.counts(row).values()
        return f"segments annealed {first} times as transitions ended (case 1), {second} times for room (case 2)"

    # -- a step

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        look = self._refresh(step)
        if self._drops:
            look = look | self._dropping(step)
        over = (step.held() > step.budget) & step.active[:, None]
        return over | look[:, None], step.budget

    def listen(self, row: int, ids: Sequence[int]) -> None:
        self._heard[row] += ids

    def decide(self, step: Step) -> Iterator[Edit]:
        if not step.any(lambda: self.due(step)[0]):
            return
        refresh = self._refresh(step)
        if self.budget is not None or self._drops:
            yield from self.evict(step)
        if not step.any(refresh):
            return
        kind = self.classify(step)
        segment = (step.clock // self.tau).long()  # the number of the one that begins
        old = self.kind[step.row, segment]
        self.kind[step.row, segment] = torch.where(refresh, kind, old)
        yield OpenSegment(refresh, kind)

    def _refresh(self, step: Step) -> Tensor:
        """Where the newest token is the last of its segment, or of the prompt: bool [B]."""
        return step.active & (step.clock % self.tau == 0)

    def _dropping(self, step: Step) -> Tensor:
        """Where a group of transition tokens is complete and will be dropped: bool [B]."""
        return step.active & (step.thought == TRANSITION) & (step.clock % self.g == 0)

    def classify(self, step: Step) -> Tensor:
        """The type of the thought that begins, φ: uint8 [B]."""
        if self.types == 1:
            return torch.full_like(step.thought, REASONING)
        if self.thoughts == "keyword":
            return self._by_words(step)
        return self._by_sparsity(step)

    def _by_sparsity(self, step: Step) -> Tensor:
        """φ of the sparsity, averaged over the layers L* and the newest queries: uint8 [B]."""
        p = torch.stack([step.rows(layer) for layer in self.measured])  # [L*, B, Hkv, rows, S]
        pos = torch.stack([step.pos(layer) for layer in self.measured])[:, :, None]  # [L*, B, 1, Ht, S]
        age = torch.arange(p.shape[3] - 1, -1, -1, device=p.device)  # of a row's query, 0: newest
        last = step.prompt + step.clock - 1
        asked = torch.where(step.clock % self.tau == 0, last, -1)  # rows that are not due see no token
        own = asked[:, None] - age  # [B, rows], the queries' positions
        valid = (pos >= 0) & (pos <= own[..., None, None])  # [L*, B, rows, Ht, S]
        share = step.ops.sparsity(p.transpose(2, 3), valid)  # [L*, B, rows]
        if self.sparsity_rows == 1:
            return type_of(share.mean((0, 2)), self.theta)
        there = last[:, None] >= age  # [B, rows]: short prompts have fewer queries
        mean = (share * there).sum(-1).mean(0) / there.sum(-1).clamp(min=1)
        return type_of(mean, self.theta)

    def _by_words(self, step: Step) -> Tensor:
        """The type that the words of each row's answer tell, where a thought begins: uint8 [B]."""
        assert self._kind is not None
        kind = torch.full_like(step.thought, REASONING)
        for i in self._refresh(step).nonzero().flatten().tolist():
            prompt = int(step.prompt[i])
            text = self._heard[int(step.row[i])]
            kind[i] = self._kind(text[prompt:])
        return kind

    def evict(self, step: Step) -> Iterator[Evict]:
        """The tokens that go: dropped groups of transitions, and those that segments may not keep."""
        drop = None
        first, size = step.segments(self.tau, total=self.kind.shape[1])  # [Lt, B, Ht, G]
        excess = step.held() - step.budget
        if self._drops:
            size = size.masked_fill(self._dropped_segment(step)[:, None], 0)
            drop = self._dropped_tokens(step)
            excess = excess - drop.sum(-1, dtype=excess.dtype)
        if self.budget is not None:
            goal = self._goal(step, size, excess)
            if step.any(lambda: size > goal[:, None]):
                gone = step.survivors(first, size, goal, self.tau)
                drop = gone if drop is None else drop | gone
        if drop is not None and step.any(drop):
            yield Evict(drop)

    def _goal(self, step: Step, size: Tensor, excess: Tensor) -> Tensor:
        """How many tokens each segment may keep, by cases 1 and 2: int32 [B, G]."""
        goal: Tensor = step.ops.anneal(
            size=size,
            excess=excess,
            kind=self.kind,
            level=self.level,
            cases=self.cases,
            at=step.row,
            clock=step.clock,
            active=step.active,
            tau=self.tau,
            retention=self.kept,
            hard=self.hard_budget,
            transitions=self.types == 3,
        )
        return goal

    def _running(self, step: Step) -> Tensor:
        """The number of the newest token's segment: int32 [B]."""
        return (step.clock - 1).clamp(min=0) // self.tau

    def _dropped_segment(self, step: Step) -> Tensor:
        """The running segments of rows whose transition tokens are dropped: bool [B, G]."""
        number = torch.arange(self.kind.shape[1], device=step.clock.device)
        return (number == self._running(step)[:, None]) & self._dropping(step)[:, None]

    def _dropped_tokens(self, step: Step) -> Tensor:
        """The tokens of these segments: bool [Lt, B, Ht, S]."""
        begin = step.prompt + self._running(step) * self.tau
        dropping = self._dropping(step)
        return (step.pos() >= begin[:, None, None]) & dropping[:, None, None]


@dataclass
class Tbq(ThinKV):
    """ThinKV's quantization alone: every token stays, in the format of its thought (table 4)."""

    budget: int | None = field(default=None, init=False)
    retention: str = field(default="", init=False)
    hard_budget: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self._drops:
            raise UsageError(
                f"{self.name} keeps every token, and precision={self.precision} drops transitions: use thinkv, or T2."
            )
        super().__post_init__()

    name: ClassVar[str] = "tbq"
    summary: ClassVar[str] = "quantize by thought type, evict nothing (ThinKV's TBQ)"
    capturable = True


@dataclass
class Tbe(ThinKV):
    """ThinKV's eviction alone: what stays is in the model's own number type (table 4)."""

    precision: str = field(default="R16E16T16", init=False)
    v_precision: str = field(default="", init=False)
    four: Literal["nvfp4", "int4s"] = field(default="nvfp4", init=False)
    two: Literal["ternary", "int2s"] = field(default="ternary", init=False)
    key_axis: Literal["channel", "token"] = field(default="token", init=False)
    g: int = field(default=1, init=False)

    name: ClassVar[str] = "tbe"
    summary: ClassVar[str] = "evict by thought type, in full precision (ThinKV's TBE)"
    capturable = True


# Choices
#
# No code of the authors was found. What the paper leaves open, or says in two ways:
#
# - One type a sequence for all layers (§4.1; listing 1 has one a layer); the type of the first segment is measured
#   with the prompt's last query; the prompt is reasoning (§6.1), is protected, and takes part in no segment.
# - The type is measured when the last token of the segment before is in the cache (listing 1: one token later).
# - The newest query's sparsity is counted from the weights that attention computes anyway; with sparsity_rows > 1 the
#   weights of all these queries are computed again, from the keys.
# - thoughts=keyword goes by the words of table 7 instead, of the answer so far (`thoughts.py`); the host reads every
#   token.
# - With |T| < 3 there are no transitions, and so no case 1 (§6.2, §E.10).
# - Case 2 follows case 1 in the same step where that was not enough; both leave the running segment alone.
# - hard_budget (a budget is a promise): when all ended segments are at the minimum and |S| > k, the running one is
#   annealed too, then all go to 2, to 1 and at last to 0 tokens; hard_budget=false is the paper's letter.
# - Case 1 comes when a transition has ended, as in listing 1 and in step c of §D.6 (§4.3: "at each c_t").
# - Of a cluster the token nearest to the centroid stays, with its own key and value, as in §4.3 (§D.4 also says that
#   the centroid takes the cluster's place; it is no token's key, and has no position).
# - K-means begins with the token nearest to the mean, goes on with the farthest ones, and has at most ten rounds; of
#   equals the older is taken, so that nothing is drawn.
# - K-means over all KV heads of a layer together, for they share a table; in a stack of finer scope, those that do.
# - A page all of whose slots were freed returns to the pool, and may become another type's.
# - T0, in `precision`, drops the tokens of transitions group by group.
# - The sparsity of a layer is the mean over its KV heads of the share of weights below 1 %. Appendix C.2 averages the
#   scores across groups first, and then counts.
# - Two tokens of 2 bits are not packed as one of 4 (§6.1): each format has pages of its own.
