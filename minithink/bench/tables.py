"""Tables of the documents, made from the result files; --check fails where a document is out of date.

A document says where a table belongs, and everything between the two lines is replaced:

    <!-- table:decode-cpu -->
    <!-- end -->

`minithink/experiments` lists the tables. A sweep has the table sweep-NAME; if it measures needs, also the table
needed-NAME; if it names a policy to compare with, overall-NAME, of all families together. A column is a heading, a
field and a format. The field is a dotted path in a measurement. The format is one of `str.format`, or us, pct, mib,
share (`bench/markdown.py`). A heading that ends in ? is left out where all of its cells are empty.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minithink import results
from minithink.bench import compare, overall, pool, sweep
from minithink.bench.markdown import FORMAT, cell, markdown, source, source_of_rows, values_of
from minithink.commands import location
from minithink.errors import MinithinkError, UsageError
from minithink.experiments import Column, Result, Row, Table, collected

BEGIN = re.compile(r"<!-- table:(\S+) -->\s*")
OF_SWEEP = re.compile(r"(?:sweep|needed|overall)-(.+)")
BEGIN_ANY = re.compile(rf"^<!-- table:{OF_SWEEP.pattern} -->\s*$", re.M)
END = "<!-- end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench tables`."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a document would change")
    either.add_argument(
        "--results", type=location, metavar="DIR", help="print the tables of another folder's results, such as a "
        "quick look's; the documents stay as they are",
    )  # fmt: skip
    parser.add_argument("--root", type=Path, default=results.ROOT, metavar="FOLDER", help="default: this checkout")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Bring README.md and docs/*.md up to date, or check them; or print the tables of another folder."""
    if args.results is not None:
        return show(args.results)
    if not args.root.is_dir():
        raise UsageError(f"--root {args.root} is no folder: give that of the checkout.")
    stale, states = [], dict[str, dict[str, str]]()
    for path in [args.root / "README.md", *sorted((args.root / "docs").glob("*.md"))]:
        if not path.is_file():
            continue
        before = path.read_text(encoding="utf-8")
        after = fill(before, path.name, args.root / results.RESULTS, path.parent)
        if after != before:
            stale.append(path)
            if not args.check:
                path.write_text(after, encoding="utf-8")
        for table in BEGIN_ANY.findall(before):
            if table in sweep.SWEEPS and not sweep.SWEEPS[table].checkpoint:
                states[table] = sweep.result_of(table, args.root / results.RESULTS)["states"]
    old = [f"{table} ({cell})" for table, of in states.items() for cell, state in of.items() if state == "stale"]
    if any("unchecked" in of.values() for of in states.values()):
        print("kernels have changed since some runs: `bench sweep NAME --recheck` compares answers", file=sys.stderr)
    if old and args.check:
        raise MinithinkError(f"The code of {len(old)} runs has changed, the first of {old[0]}: run `bench sweep`.")
    names = ", ".join(p.relative_to(args.root).as_posix() for p in stale)
    if stale and args.check:
        raise MinithinkError(f"Tables are out of date in {names}: run `python -m minithink.bench tables`.")
    print(f"updated {names}" if stale else "all tables are up to date", file=sys.stderr)
    return 0


def show(where: Path) -> int:
    """Print every table that a folder holds results of → 0. MinithinkError: it holds none."""
    looks = {name: sweep.result_of(name, where, keys) for name, keys in sweep.looks(where).items()}
    made = {f"{kind}-{name}": look for name, look in looks.items() for kind in ("sweep", "overall", "needed")}
    made = {name: look for name, look in made.items() if name in TABLES}
    for name, table in TABLES.items():
        path = where / f"{table.file or name}.json"
        if not table.shipped and not OF_SWEEP.fullmatch(name) and path.is_file():
            made[name] = results.read(path)
    if not made:
        raise MinithinkError(f"{where} holds no results: `bench sweep NAME --limit 8 --results {where}` writes some.")
    for name, result in made.items():
        print(f"{name}:", "", *lines_of(TABLES[name], result), "", sep="\n")
    return 0


def fill(text: str, name: str, where: Path, folder: Path | None = None) -> str:
    """A document with its tables made anew, each with a link to its result.

    Args:
        text: of the document.
        name: of the document, for errors.
        where: the folder of the result files.
        folder: of the document; None: the one that holds `where`.
    """
    out: list[str] = []
    lines = iter(enumerate(text.split("\n"), start=1))
    for number, line in lines:
        out.append(line)
        if not (begin := BEGIN.fullmatch(line)):
            continue
        table = begin[1]
        if table not in TABLES:
            raise MinithinkError(f"{name}:{number} wants the table {table!r}; there are {', '.join(TABLES)}.")
        for _, inner in lines:
            if inner.strip() == END:
                break
            if BEGIN.fullmatch(inner):
                raise MinithinkError(f"{name}:{number} begins a table, and the next begins before a line {END}.")
        else:
            raise MinithinkError(f"{name}:{number} begins a table, and no line {END} follows.")
        if of := OF_SWEEP.fullmatch(table):
            path, result = where / pool.FILE, sweep.result_of(of[1], where)
        else:
            path = TABLES[table].shipped or where / f"{TABLES[table].file or table}.json"
            result = results.read(path)
        made = lines_of(TABLES[table], result)
        link = Path(os.path.relpath(path, folder or where.parent)).as_posix()
        out += [*made[:-1], f"{made[-1]} [{path.name}]({link})", END]
    return "\n".join(out)


def lines_of(table: Table, result: Result) -> list[str]:
    """A table in Markdown, the sentences below it, and its source."""
    rows = list(table.rows(result))
    shown = [*markdown(cells(table, rows)), ""] if table.columns else []
    last = source_of_rows(result, rows, table.kind) if table.kind else source(result)
    title = partial(cell, field=table.columns[0][1], fmt=table.columns[0][2]) if table.columns else str
    compared = compare.lines(table.goals, result["measurements"], table.kind, title) if table.goals else []
    return [*shown, *table.said(result), *compared, last]


def cells(table: Table, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The headings, and a line for every row, or for all rows that differ only in the values of `across`."""
    columns: list[tuple[Column, Any]] = [(column, None) for column in table.columns]
    by_line: dict[tuple[str, ...], dict[Any, Row]] = {}
    for row in rows:
        value = tuple(values_of(row, table.across)) if table.across else None
        key = tuple(cell(row, of, fmt) for _, of, fmt in table.columns)
        by_line.setdefault(key if table.across else (*key, str(len(by_line))), {})[value] = row
    if table.across:
        values = dict.fromkeys(value for found in by_line.values() for value in found)
        columns += [(column, value) for value in values for column in table.cells]
    columns += [(column, None) for column in table.last]
    lines = []
    for found in by_line.values():
        first = next(iter(found.values()))
        lines.append([
            "–" if (own := first if value is None else found.get(value)) is None else cell(own, of, fmt)
            for (_, of, fmt), value in columns
        ])  # fmt: skip
    headings = [heading(title, value, table) for (title, _, _), value in columns]
    kept = [i for i, title in enumerate(headings) if not title.endswith("?") or any(x[i] != "–" for x in lines)]
    lines.insert(0, [title.rstrip("?") for title in headings])
    return [tuple(line[i] for i in kept) for line in lines]


def heading(title: str, value: Any, table: Table) -> str:
    """The heading of a column. A value of `across` (or its title) takes the place of {}."""
    if value is None:
        return title
    known = table.titles.get(value[0] if len(value) == 1 else value)
    return title.replace("{}", known) if known else FORMAT.format(title, *value)


TABLES: dict[str, Table] = (
    {f"sweep-{name}": sweep.TABLE for name in sweep.SWEEPS}
    | {f"needed-{name}": sweep.NEEDED for name, one in sweep.SWEEPS.items() if one.needed}
    | {f"overall-{name}": overall.TABLE for name, one in sweep.SWEEPS.items() if one.beside}
    | collected("TABLES")  # a method may show its sweep in its own way
)
