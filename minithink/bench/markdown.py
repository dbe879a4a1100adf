"""Tables of documents, and the line below them that says where their figures come from."""

from __future__ import annotations

from typing import Any


def markdown(rows: list[tuple[str, ...]]) -> list[str]:
    """A table whose first row is the heading; every column but the first is aligned right."""
    rule = ("---", *["---:"] * (len(rows[0]) - 1))
    return ["| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:])]


def source(result: dict[str, Any]) -> str:
    """Where the figures come from, in one line."""
    versions, settings = result["versions"], result.get("settings", {})
    where = _place(result)
    if "gpu" not in result["machine"] and "threads" in settings:
        where += f", {settings['threads']} threads"
    what = [f"torch {versions['torch']}"]
    if result["benchmark"] == "decode" and versions.get("transformers"):
        what.append(f"transformers {versions['transformers']}")
    if result["benchmark"] == "accuracy":
        sampling = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
        what.append(f"{settings['split']} split, {sampling}, {settings['dtype']}")
    note = "" if result.get("complete") else " The run was not complete."
    if parts := result.get("sources"):
        counts: dict[str, int] = {}
        for part in parts:
            known = "commit" in part
            place = f"{_place(part)}, commit {short(part['commit'])}" if known else "a machine not recorded"
            counts[place] = counts.get(place, 0) + part["sequences"]
        note += " Generated: " + "; ".join(f"{n:,} of the sequences on {place}" for place, n in counts.items()) + "."
        where = f"Counted on {where}"
    commit = short(result["commit"])
    return f"*{where}; {', '.join(what)}; {result['date'][:10]}, commit {commit}: `{result['command']}`.{note}*"


def _place(result: dict[str, Any]) -> str:
    return str(result["machine"].get("gpu") or result["machine"]["cpu"])


def short(commit: str) -> str:
    """A commit in ten digits; what was changed since is said."""
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")
