"""ThinKV: the type of a thought decides in how many bits its tokens are stored, and how many of them stay.

A segment is τ generated tokens in a row, and has one type: transition (T), execution (E) or reasoning (R). When a
segment ends, φ tells the type of the next one. The paper's parts:

    φ    (§3.1, §4.1)  s: the share of cached tokens whose attention weight is below 1 % of the row's largest, in the
                       mean over the layers L*.    E if s < θ1,    R if θ1 ≤ s < θ2,    T if s ≥ θ2
         (§C.2)        The row of a layer is the mean of the rows of its KV heads.
    TBQ  (§4.2)        g tokens at a time are quantized in the format of their type
    TBE  (§4.3)        segments shrink along R = {64, 32, 16, 8, 4}, beginning with R_1 (in the paper R_0).
                       The n-th time that a segment c is selected, |c| ← min(|c|, R_n). These are selected:
                         case 1   when a transition ends: every segment before it
                         case 2   while |S| > k: the oldest segment of the least important type (T, then E, then R),
                                  of those that are still above the last number of R; |S|: the tokens held
                         beyond   if |S| > k still, segments go on to 2, 1 and 0 tokens; this is ours (`hard_budget`)
                       K-means over the segment's keys says which tokens stay: the nearest to each centroid.
    CT   (§5.2)        a page holds tokens of one type; a freed slot waits for a new token of that type, none is moved

This file has φ and TBE. Their numbers are computed in `ref/sparsity.py` (s), `ref/anneal.py` (cases 1 and 2) and
`ref/survivors.py` with `ref/kmeans.py` (which tokens stay).

The class has no options of its own. Users choose those of `ThinKVOptions` (`thinkv_options.py`), from which it
inherits. That class also checks them, and makes the storage and the demands of them. This file reads

    here                what it is                   where it comes from
    tau, g, types       τ, g and |T|                 options
    budget              k                            an option; `step.budget` has it for each lane
    thoughts            what tells the type          an option: attention sparsity, or words
    sparsity_rows       queries that are measured    an option; the paper measures one
    hard_budget         whether `beyond` happens     an option
    kept                R, as numbers                from the option `retention`
    theta               θ1 and θ2                    the option `thresholds`, or the model's calibration
    measured            L*                           the option `layers`, or the model's calibration
    _drops              transitions are dropped      from the option `precision`: it ends in T0

You will not find TBQ and CT here, because the cache does both for every policy. `Storage`, made in
`thinkv_options.py`, gives each type its format. `OpenSegment` tells the cache the type of the next tokens. The cache
quantizes its buffer when it holds g tokens (`kv/store.py`), and its pages hold one type (`kv/table.py`).
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
from minithink.ref.sparsity import mean_row, mean_row_by_position
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION


def type_of(sparsity: Tensor, theta: Sequence[float]) -> Tensor:
    """φ (§4.1): the type of a thought by its sparsity, uint8.

    theta: θ1 and θ2. With |T| = 2 it is θ1 alone; then θ2 = ∞, and there are no transitions.
    """
    low, high = [*theta, float("inf")][:2]
    above_low = torch.where(sparsity < high, REASONING, TRANSITION)
    kind = torch.where(sparsity < low, EXECUTION, above_low)
    return kind.to(torch.uint8)


@dataclass
class ThinKV(ThinKVOptions):
    """Think before you quantize, think before you evict. The options are those of `ThinKVOptions`."""

    name: ClassVar[str] = "thinkv"
    summary: ClassVar[str] = "quantize and evict by thought type, which attention sparsity tells (ThinKV)"
    capturable = True
    opens = True
    scope = "layer"

    # -- state: type of every segment, and how often it was annealed

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        self.tokens = shape.tokens
        segments = self.tokens // self.tau + 2
        # Of every segment its type, and n: how many times it was annealed.
        self.kind = torch.zeros(shape.rows, segments, dtype=torch.uint8, device=shape.device)
        self.level = torch.zeros(shape.rows, segments, dtype=torch.uint8, device=shape.device)
        # How many times a segment lost tokens, in case 1 and in case 2.
        self.cases = torch.zeros(2, shape.rows, dtype=torch.int32, device=shape.device)
        # With thoughts=keyword the ids of each row's generated tokens, how many there were (some ids may not be
        # known), and the type that they tell where a segment begins.
        self._heard: list[list[int]] = [[] for _ in range(shape.rows)]
        self._generated = [0] * shape.rows
        words = shape.rows if self.thoughts == "keyword" else 0
        self._told = torch.full((words,), REASONING, dtype=torch.uint8, device=shape.device)

    def reset(self, row: int) -> None:
        self.kind[row] = 0
        self.level[row] = 0
        self.cases[:, row] = 0
        self._heard[row] = []
        self._generated[row] = 0
        if self.thoughts == "keyword":
            self._read_words(row)

    def state(self) -> Iterable[Tensor]:
        return self.kind, self.level, self.cases, self._told

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
        in_any_case = self._refresh(step)
        if self._drops:
            in_any_case = in_any_case | self._dropping(step)
        over = (step.held() > step.budget) & step.active[:, None]
        return over | in_any_case[:, None], step.budget

    def listen_prompt(self, row: int, ids: Sequence[int]) -> None:
        """Words of the prompt tell no type."""

    def listen(self, row: int, ids: Sequence[int]) -> None:
        self._heard[row] += ids
        self._generated[row] += 1
        if self._generated[row] % self.tau == 0:
            self._read_words(row)

    def _read_words(self, row: int) -> None:
        """Find the type that an answer's last words tell, on the host, and write it where `decide` reads it."""
        assert self._type_of_text is not None
        self._told[row] = self._type_of_text(self._heard[row])

    def decide(self, step: Step) -> Iterator[Edit]:
        if not step.any(lambda: self.due(step)[0]):
            return
        refresh = self._refresh(step)
        if self.budget is not None or self._drops:
            yield from self.evict(step)  # the segment that ends may be the transition of case 1
        if not step.any(refresh):
            return
        kind = self.classify(step)
        segment = (step.clock // self.tau).long()  # the number of the segment that begins
        old = self.kind[step.row, segment]
        self.kind[step.row, segment] = torch.where(refresh, kind, old)
        yield OpenSegment(refresh, kind)

    def _refresh(self, step: Step) -> Tensor:
        """The sequences whose newest token is the last of its segment, or of the prompt: bool [B]."""
        return step.active & (step.clock % self.tau == 0)

    def _dropping(self, step: Step) -> Tensor:
        """With T0, the sequences that have just completed a group of g transition tokens, to be dropped: bool [B]."""
        return step.active & (step.thought == TRANSITION) & (step.clock % self.g == 0)

    def classify(self, step: Step) -> Tensor:
        """The type of the thought that begins, φ: uint8 [B]."""
        if self.types == 1:
            return torch.full_like(step.thought, REASONING)
        if self.thoughts == "keyword":
            return self._told[step.row]
        return self._by_sparsity(step)

    def _by_sparsity(self, step: Step) -> Tensor:
        """φ of the sparsity, averaged over the layers L* and the last Q queries (`sparsity_rows`): uint8 [B]."""
        weights = torch.stack([step.rows(layer) for layer in self.measured])  # [L*, B, Hkv, Q, S]
        weights = weights.transpose(2, 3)  # [L*, B, Q, Hkv, S]
        pos = torch.stack([step.pos(layer) for layer in self.measured])[:, :, None]  # [L*, B, 1, Ht, S]
        row, pos = self._mean_row(weights, pos)  # [L*, B, Q, 1, S], [L*, B, 1, 1, S]
        age = torch.arange(row.shape[2] - 1, -1, -1, device=pos.device)  # [Q], of the queries; the newest has 0
        newest = step.prompt + step.clock - 1  # position of the newest token
        # Sequences without a refresh see no token; `decide` does not use their type.
        last = torch.where(step.clock % self.tau == 0, newest, -1)
        query_pos = last[:, None] - age  # [B, Q]
        valid = (pos >= 0) & (pos <= query_pos[..., None, None])  # [L*, B, Q, 1, S]
        sparsity = step.ops.sparsity(row, valid)  # [L*, B, Q]
        if self.sparsity_rows == 1:
            return type_of(sparsity.mean((0, 2)), self.theta)
        exists = newest[:, None] >= age  # [B, Q]: a short prompt has fewer queries than Q
        mean = (sparsity * exists).sum(-1).mean(0) / exists.sum(-1).clamp(min=1)
        return type_of(mean, self.theta)

    def _mean_row(self, weights: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over KV heads (§C.2), and the positions of its tokens: [L*, B, Q, 1, S], [L*, B, 1, 1, S].

        weights: [L*, B, Q, Hkv, S]; pos: [L*, B, 1, Ht, S]. Where heads hold different tokens, the columns become
        positions.
        """
        if pos.shape[-2] == 1:
            return mean_row(weights), pos
        return mean_row_by_position(weights, pos, self.tokens)

    def evict(self, step: Step) -> Iterator[Evict]:
        """TBE: evict the tokens that segments may not keep. With T0 also the group of transition tokens that has just
        become complete."""
        drop = None
        # Of every segment, G in all, the column of its first token, and how many of its tokens are held.
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
        """How many tokens each segment may keep, by cases 1 and 2 (`ref/anneal.py`): int32 [B, G].

        Updates `level` and `cases`.
        """
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
        """The running segment of each sequence that drops a group now: bool [B, G]. Its earlier groups are gone
        already, so it holds this group alone."""
        number = torch.arange(self.kind.shape[1], device=step.clock.device)
        return (number == self._running(step)[:, None]) & self._dropping(step)[:, None]

    def _dropped_tokens(self, step: Step) -> Tensor:
        """The tokens of these segments, which are evicted: bool [Lt, B, Ht, S]."""
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
# No code of the authors was found. Here is what the paper leaves open, or says in two ways.
#
# The type (φ):
#
# - A sequence has one type for all layers, as in §4.1. Listing 1 has one for each layer.
# - The type is measured when the last token of the segment before is in the cache, as in step b of §D.6. Listing 1
#   measures one token later. So the type of the first segment is measured with the prompt's last query.
# - The prompt is reasoning, as in §6.1. Here it is also protected, and is part of no segment.
# - The rows of a layer's KV heads are averaged, and then the mean row is counted, as §C.2 says. It calls what is
#   averaged "attention scores". Here these are the weights of equation 4, which footnote 2 calls "normalized
#   attention scores". docs/appendix/thinkv-sparsity.md compares other readings.
# - In the paper the KV heads of a layer hold the same tokens. In a stack of finer scope they may hold different ones:
#   then a head gives a token that it does not hold the weight 0, and a token counts if any head holds it.
# - One query is measured, the newest: a decode step has no other (figure 13). Its weights are those that attention
#   computes anyway. With sparsity_rows > 1 the weights of all these queries are computed again from the keys.
# - thoughts=keyword takes the type from the words of the answer so far (`text/thoughts.py`: the words of table 7, and
#   more). The paper does not use words during inference (§D.2). The host reads every token then,
#   and writes the type of the next segment where the captured decision finds it.
# - With |T| < 3 there are no transitions, and so there is no case 1 (§6.3; §E.10 for |T| = 1).
#
# Eviction (TBE):
#
# - Case 1 comes when a transition has ended, as in listing 1 and in step c of §D.6. §4.3 says "at each transition
#   thought", which can also be its beginning.
# - Case 2 follows case 1 in the same step if |S| > k still. By §4.3 it comes if there is no transition, or if all
#   segments before it are at their minimum.
# - Both cases leave a segment alone until it has ended. Case 1 also leaves the transition alone that has just ended.
# - All layers shrink a segment to the same number of tokens: the fullest lane decides.
# - hard_budget: a budget is a promise. If all ended segments are at the minimum and |S| > k still, the running
#   segment is annealed, too. Then all segments go to 2, to 1 and at last to 0 tokens. hard_budget=false stops at the
#   minimum, as the paper does: it found that models loop if whole segments go (§6.3, figure 11a).
# - Of a cluster one token stays, the nearest to the centroid, with its own key and value. In §4.3 the centroids
#   "correspond to keys that are retained". In §D.4 a cluster is also "replaced by its centroid key", but a mean of
#   keys is no token's key and has no position.
# - The paper does not say how K-means begins and ends. Here it begins with the token nearest to the mean, goes on
#   with the farthest ones, and has at most ten rounds. Of equals the older is taken. So nothing is random.
# - K-means sees the keys of all KV heads of a layer together, because these heads share a table (§5.2). In a stack of
#   finer scope it sees those heads that share one.
#
# Storage (TBQ, CT):
#
# - A page whose slots are all free returns to the pool, and may become another type's. The paper is silent.
# - T0 in `precision` drops transition tokens, as in §6.3 and figure 11b. Here they go group by group.
# - Two tokens of 2 bits are not packed as one of 4 bits, as they are in §6.1: each format has its own pages.
# - For scales, and the axis that shares one, see the choices in `thinkv_options.py`.
