"""Run a table of a paper: its policies, budgets, datasets, samples and sampling settings.

What differs here is said first, before anything is generated. Each dataset is an evaluation of its own (`runner.py`)
in a folder of its own. The tables are in `papers/`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minithink.cli.commands import INTERRUPTED
from minithink.engine import Engine
from minithink.errors import MinithinkError, UsageError, alternatives, escaped, quoted, unwritable
from minithink.evaluate import runner, summary
from minithink.evaluate.datasets import Example, check_fields, check_name, takes_fields
from minithink.evaluate.grading import NONE
from minithink.evaluate.job import Job
from minithink.evaluate.papers import TABLES
from minithink.evaluate.papers.table import CODE, Column, Row, Table
from minithink.evaluate.plan import Cell, Spec, budgets
from minithink.evaluate.ranks import Ranks
from minithink.evaluate.summary import Budget, budget_text
from minithink.kv.byte_size import ByteSize
from minithink.kv.sizes import check_budget
from minithink.kv.stack import members
from minithink.results import origin
from minithink.results.files import replace as write

NOTE = "paper.md"  # in the folder of the results: what was said first
HELP = (
    "What differs here from the paper is said first, and written to DIR/paper.md. Each dataset has a folder in DIR. "
    "Without a table, or with --list, it lists the tables."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate paper`."""
    add = parser.add_argument
    add("table", nargs="?", metavar="TABLE", help="as in thinkv-table1; --list shows all")
    add("--list", action="store_true", help="list the tables, and run nothing")
    add("--rows", metavar="NAME,…", help="only these methods of the table, named as in the paper")
    add(
        "--budgets",
        type=budgets,
        metavar="N,N,…",
        help="in place of the table's, tokens, shares or bytes as in a run; suits models whose texts are short",
    )
    runner.add_run_arguments(parser, of_table=True)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """List the tables, or run one: say what differs, then evaluate each dataset."""
    if args.list or args.table is None:
        print(listed())
        return 0
    table = table_of(args.table)
    if args.output_dir is None:
        raise UsageError("The results need a folder: give --output-dir DIR.")
    parts = parts_of(table, args)
    if args.trace is not None and len(parts) > 1:
        raise UsageError(
            f"--trace records one dataset, and this would run {len(parts)}: name one with --dataset, as in "
            f"--dataset {parts[0].job.dataset}."
        )
    with Ranks() as ranks:
        return _run(table, parts, args, argv, ranks)


def _run(table: Table, parts: list[Part], args: argparse.Namespace, argv: list[str], ranks: Ranks) -> int:
    command = origin.command("minithink.evaluate", argv)
    examples = [problems_of(part) for part in parts]  # first: a dataset may be missing
    engine = runner.engine_of(parts[0].job, ranks)
    fitting = []
    notes = []
    for part, problems in zip(parts, examples, strict=True):
        prompts = [len(engine.prompt_ids(example.question)) for example in problems]
        fits, too_small = without_small(part, max(prompts))
        fitting.append(fits)
        notes += too_small
    check_calibrations(engine, fitting)
    lines = [*said(table, fitting, args, engine, examples), *notes]
    note = f"# {args.table}\n\n" + "".join(f"- {line}\n" for line in lines)
    if not ranks.rank:
        for line in lines:
            _say(line)
        _write(args.output_dir, note)
    ranks.wait()
    for part in fitting:
        folder = args.output_dir / part.name
        rows = runner.evaluate(part.job, folder, ranks, command=command, resume=args.resume, engine=engine)
        if rows is None:
            return INTERRUPTED
        if not ranks.rank:
            runner.finish(folder, rows)
            text = compared(part, rows)
            print(text)
            note += f"\n{text}"
            _write(args.output_dir, note)
    return 0


# --- which table


def listed() -> str:
    """All tables, one a line."""
    widest = max(map(len, TABLES))
    lines = []
    for name, table in TABLES.items():
        code = "; only code, which is not graded: needs --dataset" if table.is_of_code else ""
        lines.append(f"{name.ljust(widest)}  {table.paper}, {table.place}: {table.shows}{code}")
    return "\n".join(lines)


def table_of(name: str) -> Table:
    """The table of a name. UsageError: there is none."""
    found = TABLES.get(name.lower())
    if found is None:
        raise UsageError(f"There is no table {quoted(name)}; {alternatives(name, TABLES)}.")
    return found


# --- its evaluations


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
    if args.budgets is not None:
        rows = [replace(row, budgets=()) for row in rows]
    tokens = args.budgets if args.budgets is not None else column.budgets
    chosen = list[int | float | ByteSize](tokens if any(not row.budgets for row in rows) else [])
    for row in rows:
        chosen += [budget for budget in row.budgets if budget not in chosen]
    specs = [Spec(row.policy) for row in rows]
    without = list[tuple[str, Budget]]()
    for row, spec in zip(rows, specs, strict=True):
        if spec.takes_budget:
            own = row.budgets or tokens
            without += [(row.policy, budget) for budget in chosen if budget not in own]
    grader = args.grader or (NONE if wanted.stands and column.dataset in CODE else "exact")
    of_options = {name: value for name, value in vars(args).items() if value is not None and name != "budgets"}
    given = Job.of(argparse.Namespace(**of_options))
    return replace(
        given,
        policies=specs,
        budgets=chosen if any(spec.takes_budget for spec in specs) else [],
        without=without,
        dataset=wanted.dataset,
        fields=args.fields if takes_fields(wanted.dataset) else None,
        grader=grader,
        num_samples=args.num_samples or table.samples or 1,
        temperature=table.temperature if args.temperature is None else args.temperature,
        top_p=table.top_p if args.top_p is None else args.top_p,
        top_k=table.top_k if args.top_k is None else args.top_k,
        max_new_tokens=args.max_new_tokens or column.max_new_tokens,
        padded_budget=args.padded_budget or column.padded_budget,
        group=args.group or column.group,
    )


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


# --- what is said first


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


def said(
    table: Table,
    parts: Sequence[Part],
    args: argparse.Namespace,
    engine: Engine,
    examples: Sequence[Sequence[Example]],
) -> list[str]:
    """What is run, then what is not as in the paper, in sentences."""
    lines = [f"{table.paper}, {table.place}: {table.shows}"]
    for part, problems in zip(parts, examples, strict=True):
        lines += _said_of(part, len(problems))
    lines.append(_said_of_draws(table, parts[0].job, engine))
    lines += [f"differs: {sentence.rstrip('.')}" for sentence in differences(table, parts, args, engine)]
    return lines


def _said_of(part: Part, problems: int) -> list[str]:
    """The rows of a part with their budgets."""
    job = part.job
    samples = "sample" if job.num_samples == 1 else "samples"
    each = f"{job.num_samples} {samples} each, at most {job.max_new_tokens:,} new tokens"
    lines = [f"{part.name}: {problems:,} {'problem' if problems == 1 else 'problems'}, {each}"]
    cells = runner.cells_of(job)
    for row in part.rows:
        own = [cell.budget for cell in cells if cell.policy == row.policy]
        at = ", ".join(budget_text(budget) for budget in own if budget is not None)
        lines.append(f"{part.name}: {row.name} is {row.policy}" + (f" at {at}" if at else ""))
    return lines


def _said_of_draws(table: Table, job: Job, engine: Engine) -> str:
    """How tokens are drawn."""
    own = engine.generation_config
    numbers = {
        "temperature": own.temperature if job.temperature is None else job.temperature,
        "top-p": own.top_p if job.top_p is None else job.top_p,
        "top-k": own.top_k if job.top_k is None else job.top_k,
    }
    said = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    return f"tokens are drawn with {said}"


def differences(table: Table, parts: Sequence[Part], args: argparse.Namespace, engine: Engine) -> list[str]:
    """What is not as in the paper, in full sentences."""
    found = []
    model = Path(str(args.model)).name
    if model.casefold() not in [name.casefold() for name in table.models]:
        found.append(f"The paper's models are {', '.join(table.models)}; this is {args.model}.")
    job = parts[0].job
    silent = [
        name
        for name in ("temperature", "top_p", "top_k")
        if getattr(table, name) is None and getattr(args, name) is None
    ]
    if silent:
        names = ", ".join(name.replace("_", "-") for name in silent)
        found.append(f"The paper does not say {names}: here the model's own generation_config.json decides.")
    if table.samples is not None and job.num_samples != table.samples:
        found.append(f"The paper has {table.samples} samples of each problem, and this run {job.num_samples}.")
    for name in ("temperature", "top_p", "top_k"):
        asked = getattr(args, name)
        of_paper = getattr(table, name)
        if asked is not None and of_paper is not None and asked != of_paper:
            found.append(f"The paper's {name.replace('_', '-')} is {of_paper:g}; here it is {asked:g}.")
    if args.limit is not None:
        found.append(f"Of each dataset only the first problems are run: --limit {args.limit:,}.")
    if args.budgets is not None:
        found.append("The budgets are those of --budgets, not the table's.")
        if any(part.column.scaled for part in parts):
            found.append("Local windows in tokens have become shares of these budgets, as they are of the paper's.")
    if args.rows is not None:
        found.append("Of the table's rows only those of --rows are run.")
    found += _of_datasets(table, parts, args)
    for part in parts:
        limit = part.column.max_new_tokens
        if args.max_new_tokens is not None and args.max_new_tokens != limit:
            found.append(f"{part.name}: the table allows {limit:,} new tokens, and this run {args.max_new_tokens:,}.")
        elif engine.config.max_position < limit:
            found.append(
                f"{part.name}: the table allows {limit:,} new tokens; the context of this model has "
                f"{engine.config.max_position:,}."
            )
    found.append(
        "Prompts and graders are minithink's: questions of datasets of the hub end with the instruction to reason "
        r"step by step and to put the answer within \boxed{}."
    )
    return [*found, *table.differs]


def _of_datasets(table: Table, parts: Sequence[Part], args: argparse.Namespace) -> list[str]:
    """What is not as in the paper about the datasets."""
    found = []
    run_here = {part.column.dataset for part in parts}
    code = [column.dataset for column in table.columns if column.dataset in CODE]
    if args.dataset is None and code:
        found.append(f"{' and '.join(dict.fromkeys(code))} is code, which is not graded here, and is not run.")
    elif args.dataset is not None:
        others = [c.dataset for c in table.columns if c.dataset not in run_here and c.dataset not in CODE]
        if others:
            found.append(f"The table's other datasets are not run: {', '.join(dict.fromkeys(others))}.")
    for part in parts:
        if part.stands and part.job.dataset != part.column.dataset:
            file = part.job.dataset.partition("=")[2] or part.job.dataset
            found.append(f"In place of {part.column.dataset}, {escaped(file)} is read.")
        if not part.stands:
            found.append(
                f"{escaped(part.job.dataset)} is none of the table's datasets: it has the settings of "
                f"{part.column.dataset}."
            )
    return found


def _write(folder: Path, text: str) -> None:
    """Write what was said, and found, beside the results. MinithinkError: that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / NOTE, text)
    except OSError as error:
        raise unwritable("The note", folder, error, "folder") from None


# --- what was found


def compared(part: Part, rows: Sequence[summary.Row]) -> str:
    """The Markdown table of a part: its rows as the paper calls them, what the paper reports, and what was found."""
    reported = part.column.reported if part.stands else {}
    found = {(row.policy, row.budget): row for row in rows if row.group is None}
    short = [model.replace("DeepSeek-R1-Distill-", "R1-") for model in reported]
    header = ["method", "budget", *(f"paper, {model}" for model in short), "here", "95 % interval"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for method in part.rows:
        for cell in runner.cells_of(part.job):
            row = found.get(cell.name)
            if cell.policy != method.policy or row is None:
                continue
            right, interval = summary.accuracy_of(row)
            percents = []
            for numbers in reported.values():
                tokens = cell.budget if isinstance(cell.budget, int) else None
                percent = numbers.get((method.name, tokens))
                percents.append("–" if percent is None else f"{percent:g}%")
            lines.append([method.name, summary.budget_of(row), *percents, right, interval])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"## {escaped(part.name)}\n\n{table}\n"


def _say(text: str) -> None:
    print(f"minithink.evaluate: {escaped(text)}", file=sys.stderr, flush=True)
