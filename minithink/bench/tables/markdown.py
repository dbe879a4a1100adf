"""Tables of documents: cells from formats, and the line below a table that says where its figures come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from minithink.bench.methods import Field
from minithink.errors import counted
from minithink.evaluate.summary import budget_text

ABOUT = ("commit", "date", "command")  # what a row says of its run, if it is not the file's


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first row is the heading; every column but the first is aligned right."""
    rule = ("---", *["---:"] * (len(rows[0]) - 1))
    return ["| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:])]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The same for a terminal: columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def microseconds(value: float) -> str:
    """A time in microseconds, to three digits or more."""
    digits = next(d for d, least in ((0, 100), (1, 10), (2, 0)) if value >= least)
    return f"{value:,.{digits}f} µs"


def percent(share: float) -> str:
    """With one decimal below 10 %, where whole percents would hide what is gained."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


KINDS = {
    "us": microseconds,
    "pct": percent,
    "mib": lambda size: f"{size / 2**20:,.2f}",
    "share": lambda share: budget_text(share or None),
}


class _Format(Formatter):
    """`str.format` with the kinds above as further specifications."""

    def format_field(self, value: Any, spec: str) -> str:
        kind = KINDS.get(spec)
        return kind(value) if kind else str(super().format_field(value, spec))


FORMAT = _Format()
CHANGED = " †"  # behind a policy whose code or defaults have changed
LEGEND = "† The code or the defaults of this policy have changed since it was measured."


def values_of(row: Mapping[str, Any], field: Field) -> list[Any]:
    """The values that a field has in a row; None for what is not there. A function may return several in a tuple."""
    if callable(field):
        found = field(row)
        return list(found) if isinstance(found, tuple) else [found]
    out = []
    for path in (field,) if isinstance(field, str) else field:
        value: Any = row
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        out.append(value)
    return out


def cell(row: Mapping[str, Any], field: Field, fmt: str) -> str:
    """One cell. A part of the format in square brackets is dropped where its value is missing; elsewhere a missing
    value makes the cell a dash."""
    values = iter(values_of(row, field))
    out = ""
    for i, part in enumerate(re.split(r"[\[\]]", fmt)):
        own = [next(values) for _, name, _, _ in Formatter().parse(part) if name is not None]
        if any(value is None for value in own):
            if i % 2:
                continue
            return "–"
        out += FORMAT.format(part, *own)
    return out


def source(result: Mapping[str, Any]) -> str:
    """Where the figures come from, in one line."""
    versions = result["versions"]
    settings = result.get("settings", {})
    where = _place(result)
    if "gpu" not in result["machine"] and "threads" in settings:
        where += f", {counted(settings['threads'], 'thread')}"
    what = [f"torch {versions['torch']}"]
    if result["benchmark"] == "decode" and versions.get("transformers"):
        what.append(f"transformers {versions['transformers']}")
    note = "" if result.get("complete") else " The run was not complete."
    measured = f"measured at commit {short(result['commit'])} ({result['date'][:10]})"
    return f"*{where}; {', '.join(what)}; {measured}: `{result['command']}`.{note}*"


def source_of_rows(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    """The same of rows that name their own runs, and what of the kind was not measured. kind: of cases, before the
    slash in their names."""
    own = sorted(rows, key=lambda m: m["date"])
    about = {name: own[-1][name] for name in ABOUT} if own else {}
    several = len({m["command"] for m in own}) > 1
    if several:
        kinds = " ".join(f"'{name}/*'" for name in sorted({m["kind"] for m in own}))
        device = own[-1]["settings"]["device"]
        about["command"] = f"python -m minithink.bench {result['benchmark']} --device {device} --cases {kinds}"
    line = source({**result, **about, "complete": True})
    commits = sorted({short(m["commit"]) for m in own} - {short(own[-1]["commit"])}) if own else []
    if commits or several:
        others = f"; commits: {', '.join(commits)}, too" if commits else ""
        line += f" In several runs, the command of each beside its cases{others}."
    left = sum(name.startswith(f"{kind}/") for name in result["missing"])
    return line + (f" Of such cases {left} were not measured (`missing`)." if left else "")


def _place(result: Mapping[str, Any]) -> str:
    return str(result["machine"].get("gpu") or result["machine"]["cpu"])


def short(commit: str) -> str:
    """A commit in ten digits; what was changed since is said."""
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")
