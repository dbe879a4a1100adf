"""Tables of the documents, made from the result files; --check fails where a document and its results differ.

The documents are README.md, docs/*.md and docs/appendix/*.md: an appendix has the long tables of a page. A document
says where a table belongs, and everything between the two lines is replaced:

    <!-- table:decode-cpu -->
    <!-- end -->

`bench/methods` lists the tables. A sweep has the table sweep-NAME; if it measures needs, also the table
needed-NAME; if it names a policy to compare with, overall-NAME, of all families together. A comparison on several
models has more (`answers/transfer.py`, `answers/front.py`). A column is a heading, a
field and a format. The field is a dotted path in a measurement. The format is one of `str.format`, or us, pct, mib,
share (`tables/markdown.py`). A heading that ends in ? is left out where all of its cells are empty. The tables of
docs/fidelity.md are lines that `fidelity/lines.py` writes, and show no result; so is the README's table of policies,
which `tables/policies.py` writes.

A row is marked with † if the code or the defaults of its policy have changed since it was measured. Marks are of the
day on which `bench tables` ran. --check leaves them out on both sides: whoever changes a policy would otherwise have
to write all tables anew, and a result is a record, not a gate.
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

from minithink.bench.answers import front, overall, pool, sweep, transfer
from minithink.bench.fidelity import lines as fidelity
from minithink.bench.methods import Column, Result, Row, Table, collected
from minithink.bench.speed import compare
from minithink.bench.tables import policies
from minithink.bench.tables.markdown import CHANGED, FORMAT, LEGEND, cell, markdown, source_of_rows, values_of
from minithink.bench.tables.markdown import source as source_of
from minithink.cli.commands import location
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.journal import INSTRUMENT
from minithink.results import origin, record

BEGIN = re.compile(r"<!-- table:(\S+) -->\s*")
OF_SWEEP = re.compile(r"(?:sweep|needed|overall)-(.+)")
END = "<!-- end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench tables`."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a document would change")
    either.add_argument(
        "--results",
        type=location,
        metavar="DIR",
        help="print the tables of another folder's results, such as a quick look's; the documents stay as they are",
    )
    parser.add_argument("--root", type=Path, default=origin.ROOT, metavar="FOLDER", help="default: this checkout")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Bring the documents up to date, or check them; or print the tables of another folder."""
    if args.results is not None:
        return show(args.results)
    if not args.root.is_dir():
        raise UsageError(f"--root {args.root} is no folder: give that of the checkout.")
    paths = documents(args.root)
    source = Source(args.root / origin.RESULTS, marked=not args.check)
    other = []  # documents that differ from their results
    for number, path in enumerate(paths, start=1):
        name = path.relative_to(args.root).as_posix()
        print(f"{number} of {len(paths)}: {name}", file=sys.stderr, flush=True)
        before = path.read_text(encoding="utf-8")
        after = fill(before, name, source, path.parent)
        if args.check and unmarked(after) != unmarked(before):
            other.append(name)
        if not args.check and after != before:
            other.append(name)
            path.write_text(after, encoding="utf-8")
    names = ", ".join(other)
    if other and args.check:
        raise MinithinkError(f"Tables are out of date in {names}: run `python -m minithink.bench tables`.")
    print(f"updated {names}" if other else "all tables are up to date", file=sys.stderr)
    return 0


def documents(root: Path) -> list[Path]:
    """Every page of a checkout that may have tables: README.md, docs/*.md and the appendices, docs/appendix/*.md."""
    paths = [root / "README.md"]
    for folder in (root / "docs", root / "docs" / "appendix"):
        paths += sorted(folder.glob("*.md"))
    return [path for path in paths if path.is_file()]


def unmarked(text: str) -> str:
    """A document without the marks of its rows."""
    return text.replace(f"{LEGEND}\n\n", "").replace(CHANGED, "")


class Source:
    """The results in a folder, each of which is read once.

    Args:
        folder: of the result files.
        marked: mark rows of policies whose code has changed.
    """

    def __init__(self, folder: Path, marked: bool = True) -> None:
        self.folder = folder
        self.marked = marked
        self._runs: list[pool.Run] | None = None
        self._sweeps: dict[str, Result] = {}
        # By the comparison and the function that makes its result, which several tables may share
        self._transfers: dict[tuple[int, Any], Result] = {}

    def of_table(self, name: str) -> list[tuple[Path, Result]]:
        """The file of a table's result, and the result; several if the table shows several."""
        entry = transfer.ENTRIES.get(name) or front.ENTRIES.get(name)
        if entry is not None:
            return [(self.folder / pool.FILE, self.of_transfer(entry))]
        comparison = OF_SWEEP.fullmatch(name)
        if comparison is not None:
            return [(self.folder / pool.FILE, self.of_sweep(comparison[1]))]
        table = TABLES[name]
        if table.shipped:
            paths = [*table.shipped]
        else:
            paths = [self.folder / f"{file}.json" for file in table.files or (table.file or name,)]
        return [(path, record.read(path)) for path in paths]

    def of_sweep(self, name: str) -> Result:
        """A comparison's runs in the pool."""
        if name not in self._sweeps:
            self._sweeps[name] = sweep.result_of(name, self.folder, runs=self.runs(), marked=self.marked)
        return self._sweeps[name]

    def of_transfer(self, entry: transfer.Entry) -> Result:
        """A comparison's runs on several models."""
        made_by = (id(entry.one), entry.result)
        if made_by not in self._transfers:
            one = transfer.Source(entry.one, self.folder, runs=self.runs(), marked=self.marked)
            self._transfers[made_by] = entry.result(one)
        return self._transfers[made_by]

    def runs(self) -> list[pool.Run]:
        """The pool, which is read once."""
        if self._runs is None:
            self._runs = pool.read(self.folder)
        return self._runs


def show(where: Path) -> int:
    """Print every table that a folder holds results of → 0. MinithinkError: it holds none."""
    made = dict[str, Result]()
    for name, keys in sweep.looks(where).items():
        look = sweep.result_of(name, where, keys)
        for kind in ("sweep", "overall", "needed"):
            if f"{kind}-{name}" in TABLES:
                made[f"{kind}-{name}"] = look
    for name, table in TABLES.items():
        path = where / f"{table.file or name}.json"
        if not table.shipped and not OF_SWEEP.fullmatch(name) and path.is_file():
            made[name] = record.read(path)
    if not made and any(INSTRUMENT in run.key for run in pool.read(where)):
        raise MinithinkError(
            f"{where} holds losses of texts alone, and tables of a folder are of answers: `bench sweep NAME "
            f"--limit 8 --results {where}` adds some."
        )
    if not made:
        raise MinithinkError(f"{where} holds no results: `bench sweep NAME --limit 8 --results {where}` writes some.")
    for name, result in made.items():
        print(f"{name}:", "", *lines_of(TABLES[name], result), "", sep="\n")
    return 0


def fill(text: str, name: str, where: Path | Source, folder: Path | None = None) -> str:
    """A document with its tables made anew, each with a link to its result.

    Args:
        text: of the document.
        name: of the document, for errors.
        where: the result files, or their folder.
        folder: of the document; None: the one that holds the folder of the results.
    """
    source = Source(where) if isinstance(where, Path) else where
    out: list[str] = []
    lines = iter(enumerate(text.split("\n"), start=1))
    for number, line in lines:
        out.append(line)
        begin = BEGIN.fullmatch(line)
        if begin is None:
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
        written = TABLES[table].written
        if written is not None:
            out += [*written(), END]
            continue
        found = source.of_table(table)
        made = lines_of(TABLES[table], together(found))
        out += made[: -len(found)]
        for (path, _), line in zip(found, made[-len(found) :], strict=True):
            link = Path(os.path.relpath(path, folder or source.folder.parent)).as_posix()
            out.append(f"{line} [{path.name}]({link})")
        out.append(END)
    return "\n".join(out)


def together(found: Sequence[tuple[Path, Result]]) -> Result:
    """What a table shows, of its files: the one result, or a result that has several in "each"."""
    results = [result for _, result in found]
    return results[0] if len(results) == 1 else {"each": results}


def lines_of(table: Table, result: Result) -> list[str]:
    """A table in Markdown, the sentences below it, and its source; a line for each result if it shows several."""
    rows = list(table.rows(result))
    lines = [*markdown(cells(table, rows)), ""] if table.columns else []
    lines += table.said(result)
    if table.columns and any(row.get("changed") for row in rows):
        lines += [LEGEND, ""]
    if table.goals:
        _, field, fmt = table.columns[0]
        title = partial(cell, field=field, fmt=fmt)
        lines += compare.lines(table.goals, result["measurements"], table.kind, title)
    if "each" in result:
        return lines + [source_of(one) for one in result["each"]]
    lines.append(source_of_rows(result, rows, table.kind) if table.kind else source_of(result))
    return lines


def cells(table: Table, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The headings, and a line for every row, or for all rows that differ only in the values of `across`."""
    groups = grouped(table, rows)
    columns: list[tuple[Column, Any]] = [(column, None) for column in table.columns]
    if table.across:
        values = dict[Any, None]()  # each once, in the order in which they come
        for group in groups:
            values |= dict.fromkeys(group)
        in_order = sorted(values) if table.across == "budget" else values
        for value in in_order:
            columns += [(column, value) for column in table.cells]
    columns += [(column, None) for column in table.last]
    lines = []
    for group in groups:
        first = next(iter(group.values()))
        line = []
        for (_, field, fmt), value in columns:
            own = first if value is None else group.get(value)
            line.append("–" if own is None else cell(own, field, fmt))
        if any(row.get("changed") for row in group.values()):
            line[0] += CHANGED
        lines.append(line)
    headings = [heading(title, value, table) for (title, _, _), value in columns]
    kept = []
    for place, title in enumerate(headings):
        if not title.endswith("?") or any(line[place] != "–" for line in lines):
            kept.append(place)
    lines.insert(0, [title.rstrip("?") for title in headings])
    return [tuple(line[place] for place in kept) for line in lines]


def grouped(table: Table, rows: Sequence[Row]) -> list[dict[Any, Row]]:
    """The rows that one line of a table shows: by their values of `across`, or a row alone (by None)."""
    if not table.across:
        return [{None: row} for row in rows]
    groups: dict[tuple[str, ...], dict[Any, Row]] = {}
    for row in rows:
        first_cells = tuple(cell(row, field, fmt) for _, field, fmt in table.columns)
        value = tuple(values_of(row, table.across))
        groups.setdefault(first_cells, {})[value] = row
    return list(groups.values())


def heading(title: str, value: Any, table: Table) -> str:
    """The heading of a column. A value of `across` (or its title) takes the place of {}."""
    if value is None:
        return title
    known = table.titles.get(value[0] if len(value) == 1 else value)
    return title.replace("{}", known) if known else FORMAT.format(title, *value)


TABLES: dict[str, Table] = (
    {f"sweep-{name}": sweep.TABLE for name, one in sweep.SWEEPS.items() if not one.losses}
    | {f"needed-{name}": sweep.NEEDED for name, one in sweep.SWEEPS.items() if one.needed}
    | {f"overall-{name}": overall.TABLE for name, one in sweep.SWEEPS.items() if one.beside}
    | {name: entry.table for name, entry in (transfer.ENTRIES | front.ENTRIES).items()}
    | fidelity.TABLES
    | policies.TABLES
    | collected("TABLES")  # a method may show its sweep in its own way
)
