"""ThinKV without one of its parts: controls, which only the comparison thinkv-controls names (`thinkv.py`).

A part is worth what is lost without it. Each control is ThinKV but for one thing:

    thinkv_counted            nothing: it decides as ThinKV does, and counts
    thinkv_random_types       φ: the type of a segment is drawn by lot
    thinkv_random_survivors   K-means: the tokens of a segment that stay are drawn by lot
    thinkv_no_case_1          case 1: segments shrink only where a lane is too full
    thinkv_head_rows          where heads are averaged: each KV head is counted, and the shares are averaged, against
                              §C.2 (`calibrate/averaging.py`, the rule `shares`). Earlier versions of ThinKV did this,
                              and the control was the other order, `thinkv_mean_rows`, of which the pool has runs
    thinkv_best_scale         the scale of 2 bits: that of least squared error (`quant/ternary_best.py`)

All of them count the segments of each type that they open. So the comparison says how many bits a generated token has
on average, which the paper gives in its tables 1, 4 and 13: under R4E4T2, 4 − 2 · (the share of transitions).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Evict, Shape, Step
from minithink.policies import register_unlisted
from minithink.policies.random import lots
from minithink.policies.thinkv import ThinKV
from minithink.text.thoughts import EXECUTION, NAMES, REASONING, TRANSITION

LOTS = 2**32  # so many different lots are there


class _Changed:
    """A step of which a subclass shows one thing in another way."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


@register_unlisted
@dataclass
class Counted(ThinKV):
    """ThinKV, and how many segments of each type it has opened."""

    name = "thinkv_counted"
    summary = "ThinKV that counts its segments by type (a control)"
    capturable = True

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        self.opened = torch.zeros(shape.rows, len(NAMES), dtype=torch.int32, device=shape.device)

    def reset(self, row: int) -> None:
        super().reset(row)
        self.opened[row] = 0

    def state(self) -> Iterable[Tensor]:
        return *super().state(), self.opened

    def counts(self, row: int) -> dict[str, int]:
        opened = dict(zip(NAMES, self.opened[row].tolist(), strict=True))
        return {**super().counts(row), **opened}

    def notes(self, row: int) -> str:
        return ", ".join(f"{n} of {name}" for name, n in self.counts(row).items())

    def classify(self, step: Step) -> Tensor:
        kind = self.told(step)
        number = torch.arange(len(NAMES), device=kind.device)
        begins = self._refresh(step)[:, None] & (kind[:, None] == number)  # [B, 3]
        self.opened[step.row] += begins.to(torch.int32)
        return kind

    def told(self, step: Step) -> Tensor:
        """The type of the thought that begins: uint8 [B]."""
        return super().classify(step)


@register_unlisted
@dataclass
class RandomTypes(Counted):
    """ThinKV whose types are drawn by lot, in given shares."""

    transition: float = (
        0.3  # share of the segments; the calibration's quantiles leave as many (`calibrate/choose.py`)
    )
    execution: float = 0.35  # likewise; the others are reasoning
    seed: int = 0

    name = "thinkv_random_types"
    summary = "ThinKV with types by lot (a control)"
    capturable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.transition >= 0 and self.execution >= 0 and self.transition + self.execution <= 1):
            raise UsageError(
                f"{self.name}: transition={self.transition:g} and execution={self.execution:g} are shares of the "
                "segments: give numbers from 0, which make at most 1 together."
            )

    @property
    def _measures(self) -> bool:
        return False  # it needs no attention, and no calibration

    def told(self, step: Step) -> Tensor:
        # u = hash(seed, tokens of the prompt, tokens generated so far), from 0 to below 1
        place = step.clock[None, :, None, None]  # [1, B, 1, 1]
        u = lots(self.seed, step.prompt, place).flatten().double() / LOTS
        kind = torch.where(u < self.transition + self.execution, EXECUTION, REASONING)
        kind = torch.where(u < self.transition, TRANSITION, kind)
        return kind.to(torch.uint8)


@register_unlisted
@dataclass
class RandomSurvivors(Counted):
    """ThinKV whose segments keep random tokens."""

    seed: int = 0

    name = "thinkv_random_survivors"
    summary = "ThinKV whose segments keep tokens by lot (a control)"
    capturable = True

    def evict(self, step: Step) -> Iterator[Evict]:
        yield from super().evict(cast(Step, _ByLot(step, self.seed)))


class _ByLot(_Changed):
    """A step in which lots say which tokens of a segment go. They are drawn anew at each eviction, for each layer."""

    def __init__(self, step: Step, seed: int) -> None:
        super().__init__(step)
        self._seed = seed

    def survivors(self, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
        """As `Step.survivors`, without a look at the keys."""
        lot = lots(self._seed, self._step.clock, self._step.pos())
        return leaving(lot, first, size, goal, longest)


def leaving(lot: Tensor, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
    """The tokens that go when every segment keeps those with the largest lots.

    Args:
        lot: int64 [Lt, B, Ht, S], not negative.
        first: integers [Lt, B, Ht, G], the column in which each segment begins.
        size: integers [Lt, B, Ht, G], tokens of each segment.
        goal: integers [B, G], tokens that each segment may keep.
        longest: tokens that a segment has at most.

    Returns:
        bool [Lt, B, Ht, S].
    """
    width = lot.shape[-1]
    member = torch.arange(longest, device=lot.device)
    there = member < size[..., None]  # [Lt, B, Ht, G, T]
    column = torch.where(there, first[..., None] + member, width)  # one more column for those that are no members
    column = column.long().flatten(-2)
    padded = torch.nn.functional.pad(lot, (0, 1), value=-1)
    own = padded.gather(-1, column).unflatten(-1, there.shape[-2:])
    order = own.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)  # the largest lot has rank 0
    goes = there & (rank >= goal[:, None, :, None])
    out = torch.zeros_like(padded, dtype=torch.bool)
    return out.scatter(-1, column, goes.flatten(-2))[..., :width]


@register_unlisted
@dataclass
class NoCase1(Counted):
    """ThinKV whose transitions shrink no earlier segments."""

    name = "thinkv_no_case_1"
    summary = "ThinKV without case 1 of its eviction (a control)"
    capturable = True

    def _goal(self, step: Step, size: Tensor, excess: Tensor) -> Tensor:
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
            transitions=False,
        )
        return goal


@register_unlisted
@dataclass
class BestScale(Counted):
    """ThinKV whose ternary numbers have the scale of least squared error."""

    two: Any = field(default="ternary_best", init=False)

    name = "thinkv_best_scale"
    summary = "ThinKV with the best scale of ternary numbers (a control)"
    capturable = True


@register_unlisted
@dataclass
class HeadRows(Counted):
    """ThinKV that counts each KV head of a layer, and averages their shares.

    The model's calibration has the thresholds of the other order, so the text gives layers and thresholds.
    """

    name = "thinkv_head_rows"
    summary = "ThinKV that applies the 1 % rule to each KV head, and then averages (a control)"
    capturable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._measures and not self.layers:
            raise UsageError(
                f"{self.name} cannot use the model's calibration, which averages before it counts: give layers=… and "
                "thresholds=…, of the rule `shares` of `python -m minithink.calibrate averaging`."
            )

    def _mean_row(self, weights: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of all KV heads, as they are: `sparsity` averages their shares."""
        return weights, pos


# Choices
#
# - Lots of types are the same for problems whose prompts have as many tokens. Another seed gives other lots.
# - Random types have the shares that are given. ThinKV's own drift as tokens are evicted, so compare the counts.
# - A stack may share a table among all layers (scope `sequence`). Then one lot decides for all of them.
# - The last segment of a text counts as a whole one.
