"""Run a table of a paper: its policies, budgets, datasets, samples and sampling settings.

What differs here is said first, before anything is generated. Each dataset is an evaluation of its own (`runner.py`)
in a folder of its own. The tables are in `papers/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from minithink.cli.commands import INTERRUPTED
from minithink.errors import UsageError, alternatives, escaped, quoted, unwritable
from minithink.evaluate import runner
from minithink.evaluate.papers import TABLES
from minithink.evaluate.papers.notes import compared, said
from minithink.evaluate.papers.parts import Part, check_calibrations, parts_of, problems_of, without_small
from minithink.evaluate.papers.table import Table
from minithink.evaluate.plan import budgets
from minithink.evaluate.ranks import Ranks
from minithink.results import origin
from minithink.results.files import replace

NOTE = "paper.md"  # beside the results of a dataset: what was said first, and the paper's numbers
HELP = (
    "What differs here from the paper is said first. Each dataset has a folder in DIR, and paper.md there says it, "
    "too. Without a table, or with --list, it lists the tables."
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
    if not args.resume:
        _refuse_earlier([args.output_dir / part.name for part in parts[1:]])
    with Ranks() as ranks:
        return _run(table, parts, args, argv, ranks)


def _refuse_earlier(folders: Iterable[Path]) -> None:
    """UsageError: a folder holds sequences. It would be refused, too, but after the datasets before it had run."""
    for folder in folders:
        if any(path.stat().st_size for path in folder.glob("results*.jsonl")):
            raise UsageError(
                f"{folder} holds an earlier run: add --resume to continue it, or give another --output-dir."
            )


def _run(table: Table, parts: list[Part], args: argparse.Namespace, argv: list[str], ranks: Ranks) -> int:
    """Say what differs, then evaluate → exit code."""
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
    if not ranks.rank:
        for line in lines:
            _say(line)
    note = f"# {args.table}\n\n" + "".join(f"- {line}\n" for line in lines)
    for part in fitting:
        folder = args.output_dir / part.name
        rows = runner.evaluate(part.job, folder, ranks, command=command, resume=args.resume, engine=engine)
        if rows is None:
            return INTERRUPTED
        if not ranks.rank:
            runner.finish(folder, rows)
            table_of_part = compared(part, rows)
            print(table_of_part)
            _write(folder, f"{note}\n{table_of_part}")
    return 0


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


def _write(folder: Path, text: str) -> None:
    """Write the note of a dataset. MinithinkError: that is not possible."""
    try:
        replace(folder / NOTE, text)
    except OSError as error:
        raise unwritable("The note", folder, error, "folder") from None


def _say(text: str) -> None:
    print(f"minithink.evaluate: {escaped(text)}", file=sys.stderr, flush=True)
