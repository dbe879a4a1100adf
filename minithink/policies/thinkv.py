"""ThinKV: a thought's type decides in how many bits its tokens are stored, and how many of them stay.

Every τ generated tokens the attention's sparsity says what kind of thought begins (§3.1, §4.1: transition ≥ θ2 >
reasoning ≥ θ1 > execution), and the τ tokens that follow are a segment of that type. TBQ (§4.2) quantizes g tokens at
a time in the type's format; TBE (§4.3) anneals segments along the retention schedule R = {64, 32, 16, 8, 4}:

    case 1   when a transition ends, every segment before it:                 |S_i| ← min(|S_i|, R_n), the n-th time
    case 2   while |S| > k: the oldest segment of the least important type (ρ: T < E < R) above the minimum, likewise

and keeps of a segment the tokens nearest to the centroids of a K-means over its keys (`ref/kmeans.py`), in place.
Pages hold one type (§5.2): a freed slot waits for the next token of that type (`kv/table.py`). No token is moved.

Chosen where the paper is silent or says two things:
- one type a sequence for all layers (§4.1; listing 1 has one a layer); the type of the first segment is measured with
  the prompt's last query; the prompt is reasoning (§6.1), is protected, and takes part in no segment;
- the type is measured when the last token of the segment before is in the cache (listing 1: one token later);
- the newest query's sparsity is counted from the weights that attention computes anyway; with sparsity_rows > 1
  those of all these queries are computed again, from the keys;
- where no layer has |T| modes, thresholds are quantiles of the sparsity (`calibrate/choose.py`), and users are told:
  keywords would have to be words that the model uses;
- thoughts=keyword goes by the words of table 7 instead, of the text so far (`thoughts.py`); the host reads them all;
- |T| = 2 knows execution and reasoning, |T| = 1 reasoning alone; then there is no case 1 (§6.2, §E.10); with
  |T| = 1 a segment goes to the next lower power of two, down to the last number of R;
- case 2 follows case 1 in the same step where that was not enough; the running segment is left alone by both;
- hard_budget (a budget is a promise): when all ended segments are at the minimum and |S| > k, the running one is
  annealed too, then all go to 2, to 1 and at last to 0 tokens; hard_budget=false is the paper's letter;
- case 1 comes when a transition has ended, as in listing 1 and in step c of §D.6 (§4.3: "at each c_t");
- of a cluster the token nearest to the centroid stays, with its own key and value, as in §4.3 (§D.4 also says that
  the centroid takes the cluster's place; it is no token's key, and has no position);
- K-means begins with the token nearest to the mean, goes on with the farthest ones, and has at most ten rounds; of
  equals the older is taken, so that nothing is drawn;
- K-means over all KV heads of a layer together, for they share a table; in a stack of finer scope, those that do;
- a page all of whose slots were freed returns to the pool, and may become another type's;
- FP8's scale, and a second one of NVFP4, are a layer's and sequence's, for keys and for values: of the whole prompt,
  with room for numbers twice as large;
- T0, in `precision`, drops the tokens of transitions group by group;
- a g below 16 makes short groups of keys, 16 channels of values;
- a scale belongs to one key and 16 of its channels, as it does with values. §4.2 has one for each channel of g keys,
  which is key_axis=channel: their slots are used again one by one, and a row of scales lives until the last key is
  gone, so that it takes more bytes (docs/thinkv.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Edit, Evict, OpenSegment, Policy, See, Shape, Step, Storage
from minithink.quant import parse, parse_pair

MOST = 2**30  # tokens, of whatever: positions are int32
ROWS = 1024  # queries whose sparsity is averaged, at most
TRANSITION, EXECUTION, REASONING = 0, 1, 2  # by importance ρ (§4.2), and as figure 6 numbers them
NAMES = ("transition", "execution", "reasoning")


def type_of(sparsity: Tensor, theta: Sequence[float]) -> Tensor:
    """φ (§4.1): the type of a thought by its sparsity, uint8. theta: θ1 and θ2; θ1 alone where |T| = 2, which knows
    no transitions."""
    low, high = [*theta, float("inf")][:2]
    kind = torch.where(sparsity < low, EXECUTION, torch.where(sparsity < high, REASONING, TRANSITION))
    return kind.to(torch.uint8)


@dataclass
class ThinKV(Policy):
    """Think before you quantize, think before you evict."""

    budget: int | None = None  # k, tokens that a lane holds, prompt and buffer included
    tau: int = 128  # τ, tokens of a segment
    retention: str = "64/32/16/8/4"  # R, tokens that a segment keeps, from one time to the next
    hard_budget: bool = True
    precision: str = "R4E4T2"  # bits of keys by type: 16, 8, 4 or 2, and T0
    v_precision: str = ""  # of values; "": the same
    four: Literal["nvfp4", "int4s"] = "nvfp4"  # the format of 4 bits
    two: Literal["ternary", "int2s"] = "ternary"  # of 2 bits
    key_axis: Literal["channel", "token"] = "token"  # what of keys has a scale of its own; of values: a token
    g: int = 16  # tokens that are quantized together, and elements that share a scale
    block: int = 8  # tokens of a page, a power of two
    types: int = 3  # |T|
    thoughts: Literal["sparsity", "keyword"] = "sparsity"  # what tells types: attention, or words (`thoughts.py`)
    layers: str = ""  # L*, as in 2/3/5/6; "": the model's calibration
    thresholds: str = ""  # θ1/θ2, ascending; "": the model's calibration
    sparsity_rows: int = 1  # last queries whose sparsity is averaged at a refresh

    name: ClassVar[str] = "thinkv"
    summary: ClassVar[str] = "quantize and evict by thought type, which attention sparsity tells (ThinKV)"
    recordable = True
    opens = True
    scope = "layer"

    def __post_init__(self) -> None:
        self.protect_prompt = True
        sizes = self.tau, self.g, self.sparsity_rows
        if self.types not in (1, 2, 3) or not 1 <= min(sizes) <= max(sizes) <= MOST:
            raise UsageError(
                f"{self.name}: types={self.types}, tau={self.tau}, g={self.g}, sparsity_rows={self.sparsity_rows}; "
                f"types must be 1, 2 or 3, the others from 1 to {MOST:,}."
            )
        if self.sparsity_rows > ROWS:
            raise UsageError(
                f"{self.name}: sparsity_rows={self.sparsity_rows}; the weights of so many queries would have to be "
                f"computed at once: choose at most {ROWS:,}."
            )
        if self._measures and bool(self.layers) != bool(self.thresholds):
            given, lacking = ("layers", "thresholds") if self.layers else ("thresholds", "layers")
            raise UsageError(
                f"{self.name}: {given}={getattr(self, given)} without {lacking}: they belong together, give both or "
                "neither."
            )
        if self.v_precision.endswith("T0") and not self._drops:
            raise UsageError(
                f"{self.name}: v_precision={self.v_precision} drops values of transitions and "
                f"precision={self.precision} keeps their keys: T0 is for both, in precision."
            )
        self.storage = self._storage()
        if self.storage.buffer and self.tau % self.storage.buffer:
            raise UsageError(
                f"{self.name}: a segment of tau={self.tau} tokens is no multiple of a group of g={self.g}: choose "
                f"tau={-(-self.tau // self.g) * self.g}."
            )
        self.kept = self._numbers("retention", self.retention, int) if self.budget is not None else ()
        down = sorted({n for n in self.kept if n >= 0}, reverse=True)
        if self.budget is not None and (not self.kept or list(self.kept) != down or down[0] > MOST):
            raise UsageError(
                f"{self.name}: retention={self.retention}; it must descend, as 64/32/16/8/4 does, from {MOST:,} or "
                "less."
            )
        if self.types == 1 and self.kept:  # half as many each time (§E.10)
            powers = (2**i for i in range((self.tau - 1).bit_length() - 1, -1, -1))
            self.kept = (*(n for n in powers if n > self.kept[-1]), self.kept[-1])
        self.beside = self.storage.buffer + (self.kept[-1] if self.kept else 0) + 1
        self._kind: Callable[[Sequence[int]], int] | None = None
        if self.thoughts == "keyword":
            if self.types != 3:
                raise UsageError(f"{self.name}: words tell three types, and types={self.types}: drop one of them.")
            self.recordable = False  # type: ignore[misc]  # the host reads every token
        self.calibrated({})

    def _storage(self) -> Storage:
        """The formats of the three types."""
        keys, values = (self._bits(text) for text in (self.precision, self.v_precision or self.precision))
        axes = ",by=token" if self.key_axis == "channel" else "", ""  # of a group of keys, and of values
        pairs = []
        for bits in zip(keys, values, strict=True):
            names = {16: "plain", 8: "fp8", 4: self.four, 2: self.two, 0: self.two}
            if (16 in bits) and bits != (16, 16):
                raise UsageError(f"{self.name}: a type's keys and values are both of 16 bits, or none: {bits}.")
            pair = [names[n] for n in bits]
            if pair[0] == "plain":
                pairs.append("plain")
                continue
            grouped = [bool(parse(name).group) for name in pair]
            options = [
                f":group={max(16, self.g)}{axis}" if has else "" for axis, has in zip(axes, grouped, strict=True)
            ]
            pairs.append("/".join(name + option for name, option in zip(pair, options, strict=True)))
            try:
                parse_pair(pairs[-1])
            except UsageError as error:
                raise UsageError(f"{self.name}: g={self.g}: {error}") from None
        buffer = 0 if set(pairs) == {"plain"} else self.g
        return Storage(tuple(pairs), names=NAMES, prompt=REASONING, block=self.block, buffer=buffer)

    def _bits(self, text: str) -> list[int]:
        """Of transitions, executions, reasoning."""
        found = re.fullmatch(r"R(16|8|4|2)E(16|8|4|2)T(16|8|4|2|0)", text)
        if not found:
            raise UsageError(f"{self.name}: the precision {text!r} is none; write as R4E4T2: 16, 8, 4 or 2, and T0.")
        return [int(n) for n in found.groups()][::-1]

    def _numbers(self, name: str, text: str, kind: type) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split("/")) if text else ()
        except ValueError:
            raise UsageError(f"{self.name}: {name}={text}; write numbers, as in {name}=3/5.") from None

    # -- what was calibrated

    @property
    def _measures(self) -> bool:
        """Whether attention sparsity tells types."""
        return self.types > 1 and self.thoughts == "sparsity"

    @property
    def calibration(self) -> str:
        if not self._measures or (self.layers and self.thresholds):
            return ""
        return "thoughts.json" if self.types == 3 else f"thoughts-{self.types}.json"

    def calibrated(self, values: Mapping[str, Any]) -> None:
        """values: `layers` and `thresholds`, of `python -m minithink.calibrate thoughts`."""
        layers = self._numbers("layers", self.layers, int) or tuple(values.get("layers", ()))
        theta = self._numbers("thresholds", self.thresholds, float) or tuple(values.get("thresholds", ()))
        if self.types == 1 and self.thresholds:
            raise UsageError(
                f"{self.name}: there is nothing to tell with types=1: drop thresholds={self.thresholds}."
            )
        if len(theta) == self.types - 1 and list(theta) != sorted(theta):
            raise UsageError(
                f"{self.name}: thresholds are ascending, and there are {', '.join(map(str, theta))}: give "
                f"thresholds={'/'.join(map(str, sorted(theta)))}."
            )
        if theta and (len(theta) != self.types - 1 or any(map(isnan, theta))):
            raise UsageError(
                f"{self.name}: {self.types} types need {self.types - 1} ascending thresholds, and there are "
                f"{', '.join(map(str, theta))}: calibrate with --thoughts {self.types}."
            )
        self.theta, self.measured = theta, tuple(sorted(set(layers)))
        if self._measures:
            watched = frozenset(self.measured)
            self.demands = (Demand(See.ROWS, watched, every=self.tau, rows=self.sparsity_rows, group="max_logit"),)

    # -- state: type of every segment, and how often it was annealed

    def setup(self, shape: Shape) -> None:
        if self.thoughts == "keyword" and self._kind is None:
            raise UsageError(f"{self.name} reads the text with thoughts=keyword, and there is no tokenizer here.")
        if self._measures and not (self.theta and self.measured):
            raise UsageError(
                f"{self.name} knows no thresholds: give layers=… and thresholds=…, or calibrate the model."
            )
        if outside := [layer for layer in self.measured if not 0 <= layer < shape.layers]:
            raise UsageError(f"{self.name}: layer {outside[0]} is measured, and the model has {shape.layers}.")
        segments = shape.tokens // self.tau + 2
        self.kind = torch.zeros(shape.rows, segments, dtype=torch.uint8, device=shape.device)
        self.level = torch.zeros(shape.rows, segments, dtype=torch.uint8, device=shape.device)
        self._said: list[list[int]] = [[] for _ in range(shape.rows)]  # with thoughts=keyword: what was generated
        self.cases = torch.zeros(2, shape.rows, dtype=torch.int32, device=shape.device)  # segments annealed, by case

    def reset(self, row: int) -> None:
        self.kind[row], self.level[row], self.cases[:, row] = 0, 0, 0
        self._said[row] = []

    def state(self) -> Iterable[Tensor]:
        return self.kind, self.level, self.cases

    def counts(self, row: int) -> dict[str, int]:
        if self.budget is None:
            return {}
        return dict(zip(("case_1", "case_2"), self.cases[:, row].tolist(), strict=True))

    def notes(self, row: int) -> str:
        if not (found := self.counts(row)):
            return ""
        first, second = found.values()
        return f"segments annealed {first} times as transitions ended (case 1), {second} times for room (case 2)"

    @property
    def limit(self) -> int | None:
        return self.budget if self.hard_budget else None

    def peaks(self, tokens: int, prompt: int) -> list[list[tuple[str, int]]]:
        if self.budget is None or self.hard_budget:
            return super().peaks(tokens, prompt)
        least = prompt + (tokens // self.tau + 1) * self.kept[-1] + self.tau  # when all ended segments are there
        most = min(tokens, max(self.budget, least) + 1)
        return [[(name, most) for name in self.storage.thoughts]]

    # -- a step

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        look = self._refresh(step) | self._dropping(step) if self._drops else self._refresh(step)
        over = (step.held() > step.budget) & step.active[:, None]
        return over | look[:, None], step.budget

    def decide(self, step: Step) -> Iterator[Edit]:
        if self.thoughts == "keyword":
            self._listen(step)
        if not step.any(lambda: self.due(step)[0]):
            return
        refresh = self._refresh(step)
        if self.budget is not None or self._drops:
            yield from self.evict(step)
        if not step.any(refresh):
            return
        kind = self.classify(step)
        column = (step.clock // self.tau).long()
        self.kind[step.row, column] = torch.where(refresh, kind, self.kind[step.row, column])
        yield OpenSegment(refresh, kind)

    def _listen(self, step: Step) -> None:
        """Remember what every row has said."""
        new = step.active & (step.clock > 0)
        for said, token, is_new in zip(self._said, step.tokens.tolist(), new.tolist(), strict=True):
            if is_new:
                said.append(token)

    def reads(self, kind: Callable[[Sequence[int]], int]) -> None:
        self._kind = kind

    def _refresh(self, step: Step) -> Tensor:
        """Where the newest token is the last of its segment, or of the prompt: bool [B]."""
        return step.active & (step.clock % self.tau == 0)

    @property
    def _drops(self) -> bool:
        """True if transition tokens are dropped (precision ends in T0)."""
        return self.precision.endswith("T0")

    def _dropping(self, step: Step) -> Tensor:
        """Where a group of transition tokens is complete and will be dropped: bool [B]."""
        return step.active & (step.thought == TRANSITION) & (step.clock % self.g == 0)

    def classify(self, step: Step) -> Tensor:
        """The type of the thought that begins, φ: uint8 [B]."""
        if self.types == 1:
            return torch.full_like(step.thought, REASONING)
        if self._kind is not None and self.thoughts == "keyword":
            begins = self._refresh(step).tolist()
            kinds = [self._kind(said) if new else REASONING for said, new in zip(self._said, begins, strict=True)]
            return torch.tensor(kinds, dtype=step.thought.dtype, device=step.thought.device)
        p = torch.stack([step.rows(layer) for layer in self.measured])  # [L*, B, Hkv, rows, S]
        pos = torch.stack([step.pos(layer) for layer in self.measured])[:, :, None]  # [L*, B, 1, Ht, S]
        age = torch.arange(self.sparsity_rows - 1, -1, -1, device=p.device)  # of a row's query, 0: newest
        last = step.prompt + step.clock - 1
        seen = torch.where(step.clock % self.tau == 0, last, -1)[:, None] - age  # what is not due is not looked at
        valid = (pos >= 0) & (pos <= seen[..., None, None])  # [L*, B, rows, Ht, S]
        share = step.ops.sparsity(p.transpose(2, 3), valid)  # [L*, B, rows]
        if self.sparsity_rows == 1:
            return type_of(share.mean((0, 2)), self.theta)
        there = last[:, None] >= age  # [B, rows]: short prompts have fewer queries
        return type_of((share * there).sum(-1).mean(0) / there.sum(-1).clamp(min=1), self.theta)

    def evict(self, step: Step) -> Iterator[Evict]:
        """The tokens that go: dropped groups of transitions, and those that segments may not keep."""
        total, drop = self.kind.shape[1], None
        first, size = step.segments(self.tau, total)  # [Lt, B, Ht, G]
        excess = step.held() - step.budget
        if self._drops:
            dropping = self._dropping(step)
            running = (step.clock - 1).clamp(min=0) // self.tau  # number of the newest token's segment
            current = (torch.arange(total, device=size.device) == running[:, None]) & dropping[:, None]
            size = size.masked_fill(current[:, None], 0)
            begin = step.prompt + running * self.tau
            drop = (step.pos() >= begin[:, None, None]) & dropping[:, None, None]
            excess = excess - drop.sum(-1, dtype=excess.dtype)
        if self.budget is not None:
            goal = step.ops.anneal(
                size, excess, self.kind, self.level, self.cases, step.row, step.clock, step.active,
                self.tau, self.kept, self.hard_budget, self.types == 3,
            )  # fmt: skip
            if step.any(lambda: size > goal[:, None]):
                gone = step.survivors(first, size, goal, self.tau)
                drop = gone if drop is None else drop | gone
        if drop is not None and step.any(drop):
            yield Evict(drop)


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
    recordable = True


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
    recordable = True
