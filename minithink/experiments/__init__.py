"""What is measured, as data: comparisons of policies, cases of the decode loop, and tables; a module a method.

A module may hold

    SWEEPS    name → Sweep: policies, budgets and problems that are compared (`bench/sweep.py` runs them)
    OPERATIONS  kernels that are timed beside their twins (`bench/ops.py`)
    STAND_INS policy → what takes its place where keys are noise
    CASES     name → Cases: methods whose steps are timed on synthetic caches (`bench/cases.py` runs them)
    TABLES    name → Table: columns of a table in a document (`bench/tables.py` fills it in)

The engines know no method: whatever is particular to one stands in its module here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from minithink.kv.contract import Policy

LAYERS, MEASURED = 32, 4  # layers of the shape in which operations are timed; of these, measured ones
Result = Mapping[str, Any]  # a file of docs/results
Row = Mapping[str, Any]  # one of its measurements
Field = str | tuple[str, ...] | Callable[[Row], Any]  # a dotted path in a row, several of them, or what computes it
Column = tuple[str, Field, str]  # heading, field, format (see `bench/tables.py`)


def _measurements(result: Result) -> Iterable[Row]:
    rows: Iterable[Row] = result["measurements"]
    return rows


def _nothing(result: Result) -> list[str]:
    return []


@dataclass(frozen=True)
class Goal:
    """How fast a case should be beside another: a ratio of tokens per second."""

    ours: str
    theirs: str
    ratio: float
    of_bound: bool = False  # the ratio counts the share that is reached of the ratio that the two bounds have


@dataclass(frozen=True)
class Table:
    """A table of a document."""

    columns: tuple[Column, ...]
    rows: Callable[[Result], Iterable[Row]] = _measurements
    across: Field = ()  # each of its values has the columns `cells`; rows with equal `columns` are one line
    cells: tuple[Column, ...] = ()  # {} in a heading: the value
    last: tuple[Column, ...] = ()  # columns behind those
    titles: Mapping[Any, str] = field(default_factory=dict)  # of values, where they are not their own
    said: Callable[[Result], Iterable[str]] = _nothing  # lines below
    file: str = ""  # the result that it shows; "": the one of the table's name
    kind: str = ""  # of cases: the rows name their own runs (`bench/markdown.py`)
    goals: tuple[Goal, ...] = ()  # comparisons of cases of this kind stand below
    shipped: Path | None = None  # the result lies beside the model


@dataclass(frozen=True)
class Sweep:
    """A comparison of policies."""

    what: str  # is compared
    policies: tuple[str, ...]  # beside full
    budgets: tuple[float, ...] = (0.25, 0.5, 0.75)  # shares of what the full cache generates, beside the prompt; ():
    # of policies that have none
    split: str = "validation"
    problems: int = 200
    samples: int = 1
    recall: bool = False  # is measured, too
    needed: bool = False  # likewise: how much of what statements need is kept
    checkpoint: str = ""  # hash of the weights that the table shows; "": the embedded model's


@dataclass(frozen=True)
class Case:
    """One line of the result of `bench/cases.py`."""

    kind: str  # step, bytes, request or throughput
    method: str
    batch: int = 0  # of steps and requests; 0: the largest that fits, or a few
    drawn: float | None = None  # the share that the method's stand-in draws types with; None: it draws none
    pool: float = 1.0  # pages, as a share of what the worst case needs

    @property
    def name(self) -> str:
        """As `--cases` has it: throughput/thinkv/T30/P55."""
        types = [] if self.drawn is None else [f"T{self.drawn * 100:g}"]
        types += [f"P{self.pool * 100:g}"] if self.pool != 1 and types else []
        return "/".join([self.kind, self.method, *([str(self.batch)] if self.batch else []), *types])


Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """A kernel that is timed beside its twin (`bench/ops.py`); its name is that of both."""

    exact: Callable[[str, int], Inputs]  # device, tokens → whole numbers, on which both are equal
    # lengths, sequences that are due, bytes that inputs hold together → case, bytes that must be moved, inputs
    cases: Callable[[Sequence[int], Sequence[int], int], Iterator[tuple[str, int, list[Inputs]]]]


@dataclass(frozen=True)
class Cases:
    """Methods side by side at their steady state."""

    what: str  # is measured: the help of the command
    methods: Mapping[str, str]  # name → policy, whose {budget}, … are filled in from the command line
    numbers: Mapping[str, tuple[int, str]]  # what stands in braces there: default, help
    cases: Callable[[Sequence[int], Sequence[float], float], list[Case]]  # by batches, shares and pool
    goals: tuple[Goal, ...] = ()
    parts: tuple[str, ...] = ("attention", "gather", "flush", "rest")  # of a step, in the order of tables
    lines: Mapping[str, str] = field(default_factory=dict)  # method → colour, in the picture of latency
    unplotted: tuple[str, ...] = ()  # methods whose steps are too long to be drawn beside others


class StandIn:
    """Mixed into a policy whose decisions noise cannot make: what synthetic caches (`bench/steady.py`) ask of it."""

    filling = False  # a cache is filled: no attention runs, and what attention decides is drawn
    typed = False  # thoughts have types; sequences may be copies of a few, and a pool may be below its worst case
    slack: int

    @property
    def period(self) -> int:
        """Tokens after which the policy does again what it did."""
        return max(1, self.slack)

    @property
    def enough(self) -> int | None:
        """Tokens after which a lane does not change any more, on the whole; None: it goes on changing."""
        return None

    @property
    def watched(self) -> tuple[int, ...]:
        """Layers whose attention is told to the policy, where that is a part of a step with a time of its own."""
        return ()

    def counters(self) -> dict[str, Tensor]:
        """What it counts, by name: int [rows]."""
        return {}

    def alone(self) -> dict[str, Callable[[Any], object]]:
        """Parts of a decision that are timed alone, as calls that take a Step."""
        return {}


# policy → its stand-in, made of the policy, the share that types are drawn with, the seed and the number of layers
StandIns = dict[type[Policy], Callable[[Any, float, int, int], Policy]]


def modules() -> list[Any]:
    """Every module of this package."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return [import_module(f"{__name__}.{name}") for name in names]


def collected(kind: str) -> dict[Any, Any]:
    """All entries of SWEEPS, OPERATIONS, STAND_INS, CASES or TABLES. ValueError: a name is there twice."""
    out: dict[Any, Any] = {}
    for module in modules():
        for name, entry in getattr(module, kind, {}).items():
            if name in out:
                raise ValueError(f"{kind} has {name} twice")
            out[name] = entry
    return out
