"""The evaluations of a table: one for each dataset that is run, with the table's settings or those of the user."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minithink.engine import Engine
from minithink.errors import MinithinkError, UsageError, alternatives, escaped, quoted
from minithink.evaluate import runner
from minithink.evaluate.datasets import Example, check_fields, check_name, takes_fields
from minithink.evaluate.grading import NONE
from minithink.evaluate.job import Job
from minithink.evaluate.papers.table import CODE, Column, Row, Table
from minithink.evaluate.plan import Cell, Spec
from minithink.evaluate.summary import Budget
from minithink.kv.byte_size import ByteSize
from minithink.kv.sizes import check_budget
from minithink.kv.stack import members


@dataclass(frozen=True)
class Chosen:
    """A dataset that is run with the settings of a column."""

    column: Column
    dataset: str  # as a run's --dataset takes it
    stands: bool  # whether it is the column's own, or a file in its place

    @property
    def folder(self) -> str:
        """The name of the folder of its results."""
        if self.stands:
            return self.column.name
        own = self.dataset.removeprefix("hub:")
        stem = Path(own).stem if own == self.dataset else own
        plain = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "problems"
        return self.column.name.replace(self.column.dataset, plain, 1)


@dataclass(frozen=True)
class Part:
    """A dataset of a table, and the evaluation that runs it."""

    name: str  # of its folder
    column: Column  # whose settings it has
    stands: bool  # as of `Chosen`
    rows: tuple[Row, ...]
    job: Job


def parts_of(table: Table, args: argparse.Namespace) -> list[Part]:
    """The evaluations that the options ask for, in the order of the table.

    Raises:
        UsageError: a dataset or a row does not exist, is named twice, or is not graded.
    """
    parts = []
    for chosen in _datasets(table, args.dataset):
        rows = tuple(_rows(chosen.column, args.rows, scaled=args.budgets is not None))
        job = _job(table, chosen, rows, args)
        parts.append(Part(chosen.folder, chosen.column, chosen.stands, rows, job))
    if not any(takes_fields(part.job.dataset) for part in parts):
        check_fields(parts[0].job.dataset, args.fields)
    names = [part.name for part in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--dataset names {escaped(twice)} twice: leave one of the two out.")
    return parts


def _datasets(table: Table, wanted: str | None) -> Iterator[Chosen]:
    """The datasets that are run. wanted: of --dataset; None: those of the table that are graded."""
    if wanted is None:
        if table.is_of_code:
            raise UsageError(
                f"The only dataset of {table.paper}'s {table.place}, {table.columns[0].dataset}, is code, which is "
                "not graded here: name another one, as in --dataset MATH-500; it gets the same settings."
            )
        for column in table.columns:
            if column.dataset not in CODE:
                yield Chosen(column, column.dataset, stands=True)
        return
    for text in [wanted] if Path(wanted).exists() else wanted.split(","):
        yield from _named(table, text)


def _named(table: Table, text: str) -> Iterator[Chosen]:
    """The datasets that a name of --dataset means: more than one where a table has several columns of it."""
    name, equals, file = text.partition("=")
    own = [column for column in table.columns if column.dataset.casefold() == name.casefold()]
    if own and own[0].dataset in CODE:
        if not equals:
            raise UsageError(
                f"{own[0].dataset} is code, which is not graded here. To see lengths and bytes, give its questions "
                f"as a file: --dataset {own[0].dataset}=FILE."
            )
        check_name(file)
        for column in own:
            yield Chosen(column, file, stands=True)
        return
    if equals and not own and name.casefold() in [code.casefold() for code in CODE]:
        datasets = dict.fromkeys(column.dataset for column in table.columns)
        raise UsageError(f"{name} is no dataset of {table.paper}'s {table.place}, which has {', '.join(datasets)}.")
    check_name(text)
    if own:
        for column in own:
            yield Chosen(column, text if equals else column.dataset, stands=True)
        return
    first = table.columns[0].dataset
    for column in table.columns:
        if column.dataset == first:
            yield Chosen(column, text, stands=False)


def _rows(column: Column, wanted: str | None, scaled: bool) -> Iterator[Row]:
    """The rows of a column that are run. wanted: of --rows; None: all. scaled: budgets are not the table's."""
    rows = column.scaled if scaled and column.scaled else column.rows
    if wanted is None:
        yield from rows
        return
    by_name = {row.name.casefold(): row for row in rows}
    for name in wanted.split(","):
        found = by_name.get(name.strip().casefold())
        if found is None:
            raise UsageError(f"The table has no row {quoted(name)}; {alternatives(name, [r.name for r in rows])}.")
        yield found


def _job(table: Table, wanted: Chosen, rows: Sequence[Row], args: argparse.Namespace) -> Job:
    """The evaluation of a dataset. Options that the user gave replace what the table says."""
    column = wanted.column
    budgets, without = _budgets(column, rows, args.budgets)
    of_options = {name: value for name, value in vars(args).items() if value is not None and name != "budgets"}
    given = Job.of(argparse.Namespace(**of_options))
    ungraded = wanted.stands and column.dataset in CODE
    return replace(
        given,
        policies=[Spec(row.policy) for row in rows],
        budgets=budgets,
        without=without,
        dataset=wanted.dataset,
        fields=args.fields if takes_fields(wanted.dataset) else None,
        grader=args.grader or (NONE if ungraded else "exact"),
        num_samples=args.num_samples or table.samples or 1,
        temperature=table.temperature if args.temperature is None else args.temperature,
        top_p=table.top_p if args.top_p is None else args.top_p,
        top_k=table.top_k if args.top_k is None else args.top_k,
        max_new_tokens=args.max_new_tokens or column.max_new_tokens,
        padded_budget=args.padded_budget or column.padded_budget,
        group=args.group or column.group,
    )


def _budgets(
    column: Column, rows: Sequence[Row], given: Sequence[int | float | ByteSize] | None
) -> tuple[list[int | float | ByteSize], list[tuple[str, Budget]]]:
    """The budgets of all rows together, and the policies with those of these budgets that they do not have.

    given: of --budgets, for all rows; None: those of the table.
    """
    budgets = list[int | float | ByteSize]()
    own = dict[str, Sequence[int | float | ByteSize]]()
    for row in rows:
        if not Spec(row.policy).takes_budget:
            continue
        own[row.policy] = given if given is not None else row.budgets or column.budgets
        budgets += [budget for budget in own[row.policy] if budget not in budgets]
    without = list[tuple[str, Budget]]()
    for policy, chosen in own.items():
        without += [(policy, budget) for budget in budgets if budget not in chosen]
    return budgets, without


def problems_of(part: Part) -> list[Example]:
    """The problems of a part. Errors: as in `load_dataset`; the message says how to do without the hub."""
    try:
        return runner.examples_of(part.job)
    except UsageError:
        raise
    except MinithinkError as error:
        if part.job.dataset != part.column.dataset:
            raise
        dataset = part.column.dataset
        raise MinithinkError(
            f"{str(error).rstrip('.')}. If you have the problems of {dataset} as a file: --dataset {dataset}=FILE."
        ) from None


def without_small(part: Part, longest: int) -> tuple[Part, list[str]]:
    """The part without the budgets that cannot hold the longest prompt, and a sentence for each of them.

    longest: tokens of the longest prompt.

    Raises:
        UsageError: no budget of a row is large enough.
    """
    left_out = []
    notes = []
    whys = dict[str, UsageError]()
    staying = set[str]()
    for cell in runner.cells_of(part.job):
        try:
            if isinstance(cell.budget, int):
                check_budget(cell.make(), longest)
        except UsageError as error:
            left_out.append(cell.name)
            whys[cell.policy] = error
            notes.append(
                f"{part.name}: {_name_of(part, cell)} at {cell.budget:,} tokens is left out, for a budget counts the "
                f"prompt here, and the longest has {longest:,} tokens ({str(error).rstrip('.')})"
            )
        else:
            staying.add(cell.policy)
    for policy, why in whys.items():
        if policy not in staying:
            raise UsageError(
                f"{part.name}: {str(why).rstrip('.')}. Give larger --budgets, or leave the method out with --rows."
            )
    job = replace(part.job, without=[*part.job.without, *left_out])
    return replace(part, job=job), notes


def _name_of(part: Part, cell: Cell) -> str:
    """What the paper calls the method of a cell."""
    return next((row.name for row in part.rows if row.policy == cell.policy), cell.policy)


def check_calibrations(engine: Engine, parts: Sequence[Part]) -> None:
    """MinithinkError: a policy reads a calibration that the model lacks. The sentence has the command that makes it,
    and how to do without."""
    lacking = set[str]()
    first: MinithinkError | None = None
    for part in parts:
        for cell in runner.cells_of(part.job):
            for member in members(cell.make()):
                try:
                    if member.calibration:
                        engine.calibration(member.calibration)
                except MinithinkError as error:
                    first = first or error
                    lacking.add(_name_of(part, cell))
    if first is None:
        return
    others = [name for name in _names(parts) if name not in lacking]
    said = str(first).rstrip(".")
    if others:
        said += f". Without it, run the other rows: --rows {quoted(','.join(others))}"
    raise MinithinkError(f"{said}.")


def _names(parts: Sequence[Part]) -> list[str]:
    """The rows of all parts, as the paper calls them, each once."""
    names = []
    for part in parts:
        names += [row.name for row in part.rows]
    return list(dict.fromkeys(names))
