"""Experiments: the measurements of each method, as data. One method, one module.

A module may have these dictionaries. `collected` finds all modules of this folder.

    SWEEPS      name → Sweep: policies, budgets and problems that are compared (`answers/sweep.py` runs them); each
                has a table sweep-NAME, perhaps needed-NAME and overall-NAME (`tables/pages.py`)
    TRANSFERS   name → Transfer: a comparison on several models (`answers/transfer.py`); its tables are
                NAME-right-MODEL, NAME-bits-MODEL, NAME-losses-MODEL, NAME-settings-MODEL and NAME-ranks, and those of
                `answers/front.py`
    CASES       name → Cases: methods whose steps are timed on synthetic caches (`speed/cases.py` runs them)
    STAND_INS   policy → stand-in: the policy that takes its place on synthetic caches, whose keys are noise
    OPERATIONS  name → Operation: kernels that are timed beside their twins (`speed/ops.py` runs them)
    TABLES      name → Table: columns of a table in a document (`tables/pages.py` fills it in)

The engines in `bench` name no method. Everything particular to a method is in its module here.
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

LAYERS = 32  # of the shape in which operations are timed
MEASURED = 4  # layers whose sparsity is measured
Result = Mapping[str, Any]  # a file of docs/results
Row = Mapping[str, Any]  # one measurement of a Result
Field = str | tuple[str, ...] | Callable[[Row], Any]  # a dotted path in a row, several, or a function of the row
Column = tuple[str, Field, str]  # heading, field, format (see `tables/pages.py`)


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
    of_bound: bool = False  # `ratio` is a share of the ratio that the bounds of both cases allow


@dataclass(frozen=True)
class Table:
    """A table of a document."""

    columns: tuple[Column, ...]
    rows: Callable[[Result], Iterable[Row]] = _measurements
    across: Field = ()  # each value of this field has its own `cells`; rows with equal `columns` are one line
    cells: tuple[Column, ...] = ()  # {} in a heading: the value
    last: tuple[Column, ...] = ()  # columns behind `cells`
    titles: Mapping[Any, str] = field(default_factory=dict)  # value → heading, if it is not the value itself
    said: Callable[[Result], Iterable[str]] = _nothing  # lines below the table
    file: str = ""  # name of the result that the table shows; "": the table's name
    # Names of several results that it shows together: `rows` and `said` get a Result that has them in "each".
    files: tuple[str, ...] = ()
    kind: str = ""  # kind of cases; if given, the rows name their own runs (`tables/markdown.py`)
    goals: tuple[Goal, ...] = ()  # comparisons of cases of this kind, below the table
    shipped: tuple[Path, ...] = ()  # paths of the results, if they lie beside a model; several: as with `files`
    written: Callable[[], Iterable[str]] | None = None  # all lines of a table that shows no result


@dataclass(frozen=True)
class Sweep:
    """A comparison of policies."""

    what: str  # what is compared, in words
    policies: tuple[str, ...]  # the full cache is always added
    # Shares of the tokens that the full cache generates, to which the prompt is added; or tokens, with the prompt.
    # (): the policies take no budget.
    budgets: tuple[int | float, ...] = (0.25, 0.5, 0.75)
    split: str = "validation"
    problems: int = 200
    samples: int = 1
    recall: bool = False  # whether recall is measured
    padded: int = 0  # sequences of a batch whose padding budgets pay for (`minithink/evaluate/padding.py`); 0: none
    group: bool = False  # with `padded`: batches of prompts of similar length
    needed: bool = False  # whether the share of needs that the cache meets is measured (docs/appendix/evaluate.md)
    datasets: tuple[str, ...] = ()  # datasets of the problems; (): the embedded families
    # The loss of texts is taken in place of answers (`answers/losses.py`): `datasets` names texts, `problems` says
    # how many, and shares of a budget are of each text's length.
    losses: bool = False
    beside: str = ""  # the policy that all other policies are compared with, problem by problem, at equal budgets
    # Hash of the weights that the table shows; "": of the embedded model. Other weights do not ship, so such runs
    # cannot be repeated.
    checkpoint: str = ""


@dataclass(frozen=True)
class Transfer:
    """A comparison on several models (`answers/transfer.py`): does the order of the policies agree?"""

    answers: str  # name of the Sweep
    losses: str  # name of the Sweep of losses
    settings: str  # name of the Sweep that tries the settings on validation problems
    tuned: tuple[str, str]  # title and hash of the weights of the model on which they are tried
    tries: Mapping[str, Sequence[str]]  # name of a policy → its texts there, of which the best one is compared
    ranked: Mapping[str, str]  # name → text of the policies whose order is compared: one text of each
    beside: tuple[str, ...]  # policies that all others are tested against, at equal budgets
    # Title of a model → hash of its weights, "" for the embedded one. The others are compared with the last one.
    models: Mapping[str, str]
    steps: str = "baselines"  # name of the Cases whose step times stand beside the answers; "": none
    # Title of a model → name of a file of results of `bench model-steps`, with step times of this model itself.
    model_steps: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One line of the result of `speed/cases.py`."""

    kind: str  # step, bytes, request or throughput
    method: str
    batch: int = 0  # of steps and requests; 0: the largest that fits, or a few
    drawn: float | None = None  # share of transitions that the method's stand-in draws; None: it draws no types
    pool: float = 1.0  # pages, as a share of the worst case's

    @property
    def name(self) -> str:
        """The name that `--cases` takes, such as throughput/thinkv/T30/P55."""
        types = [] if self.drawn is None else [f"T{self.drawn * 100:g}"]
        types += [f"P{self.pool * 100:g}"] if self.pool != 1 and types else []
        return "/".join([self.kind, self.method, *([str(self.batch)] if self.batch else []), *types])


Inputs = tuple[Any, ...]  # of an operation: tensors, and tuples of them


@dataclass(frozen=True)
class Operation:
    """A kernel that is timed beside its twin (`speed/ops.py`). The entry's name is the name of both."""

    exact: Callable[[str, int], Inputs]  # device, tokens → inputs of whole numbers, for which both results are equal
    # lengths, sequences that are due, bytes of all inputs together → case, bytes that must be moved, inputs
    cases: Callable[[Sequence[int], Sequence[int], int], Iterator[tuple[str, int, list[Inputs]]]]
    capturable: bool = True  # by a CUDA graph: the twin does not wait for the device, no shape depends on data


Method = str | Callable[[Mapping[str, int]], Policy]


@dataclass(frozen=True)
class Cases:
    """Methods side by side at their steady state."""

    what: str  # what is measured, in words: the help of the command
    # Name → policy; the command line fills in names in braces, such as {budget}. Or a function that makes a stand-in
    # of these numbers.
    methods: Mapping[str, Method]
    numbers: Mapping[str, tuple[int, str]]  # name in braces → default, help
    cases: Callable[[Sequence[int], Sequence[float], float], list[Case]]  # of batches, shares and pool
    goals: tuple[Goal, ...] = ()
    # Methods that evict nothing: their steps are measured around {budget} held tokens, as many as the others hold.
    as_many: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("attention", "gather", "flush", "rest")  # of a step, in the order of tables
    lines: Mapping[str, str] = field(default_factory=dict)  # method → colour, in the picture of latency
    unplotted: tuple[str, ...] = ()  # methods whose steps are too long to be drawn beside others
    # A row for each measured length of whole generations, for a picture along them: fields of the request and of the
    # length, and `flops_in_all`. None: there is no such picture.
    by_level: Callable[[Result], Sequence[Row]] | None = None
    # For the same picture: a method, its settings → cached tokens of one sequence after 0, 1, 2 … steps, calculated
    held: Callable[[str, Row], Sequence[int]] = lambda method, settings: ()


class StandIn:
    """A mixin for stand-ins: policies on synthetic caches (`speed/steady.py`), whose keys and queries are noise."""

    filling = False  # True while a cache is filled: no attention runs, and its decisions are drawn
    typed = False  # thoughts have types, and sequences may be copies of a few
    pooled = False  # the pool may be below its worst case
    slack: int

    @property
    def period(self) -> int:
        """Tokens after which the policy's decisions repeat."""
        return max(1, self.slack)

    @property
    def enough(self) -> int | None:
        """Generated tokens after which a cache is in its steady state; None: it never is."""
        return None

    @property
    def watched(self) -> tuple[int, ...]:
        """Layers whose attention the policy reads, if that part of a step is timed alone."""
        return ()

    def counters(self) -> dict[str, Tensor]:
        """The policy's counts by name: int [rows]."""
        return {}

    def alone(self) -> dict[str, Callable[[Any], object]]:
        """Parts of a decision that are timed alone: name → a function of a Step."""
        return {}


# policy → a function that makes its stand-in, of the policy, the share of transitions, the seed, the layers
StandIns = dict[type[Policy], Callable[[Any, float, int, int], Policy]]


def modules() -> list[Any]:
    """Every module of this package."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return [import_module(f"{__name__}.{name}") for name in names]


def collected(kind: str) -> dict[Any, Any]:
    """All entries of SWEEPS, TRANSFERS, OPERATIONS, STAND_INS, CASES or TABLES. ValueError: a name is there twice."""
    out: dict[Any, Any] = {}
    for module in modules():
        for name, entry in getattr(module, kind, {}).items():
            if name in out:
                raise ValueError(f"{kind} has {name} twice")
            out[name] = entry
    return out
