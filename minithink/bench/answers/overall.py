"""A comparison over all families together: which policies differ from one of them (`Sweep.beside`).

A difference is paired: both policies answered the same problems. Its interval is the bootstrap's over problems. Of a
run that does not say which sequences were right only the share is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from minithink.bench.answers.pool import Run
from minithink.bench.methods import Result, Row, Table
from minithink.evaluate.intervals import wilson
from minithink.evaluate.paired import difference, holm, mcnemar
from minithink.evaluate.summary import budget_text
from minithink.results.figures import drawing

DIFFERENCE = "{:+.1f} ({:+.1f} to {:+.1f})"
LEVEL = 0.05  # a difference is significant if its corrected probability is at most this
UNSURE = " °"  # the mark of a difference whose interval leaves out 0, and which its corrected test does not confirm
BETTER = "#0072B2"
WORSE = "#D55E00"
ALIKE = "#888888"


def compared(runs: Sequence[Run], beside: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Compare each run with the run of another policy at the same budget, problem by problem; by cell, and by policy
    and budget over all families ("" stands for the family). Cells are left out if a run does not say which sequences
    were right.

    right, low, high: share of right answers and its interval, of all families only. less, less_low, less_high: this
    share minus the other policy's, and the bootstrap interval of the difference. p: the probability of McNemar's
    exact test, of all families only, and not of several samples a problem.
    """
    if not beside:
        return {}
    by_cell = {run.cell: run.shares for run in runs if run.right}
    datasets = sorted({run.cell[0] for run in runs})
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for policy, budget in dict.fromkeys(run.cell[1:] for run in runs):
        own_of_all = list[float]()
        other_of_all = list[float]()
        pairs = 0
        for dataset in datasets:
            own = by_cell.get((dataset, policy, budget))
            other = by_cell.get((dataset, beside, budget))
            if own and other:
                pairs += 1
                own_of_all += own
                other_of_all += other
                if policy != beside:
                    found[dataset, policy, budget] = difference(own, other)
        if pairs == len(datasets) > 1:
            right = fmean(own_of_all)
            low, high = wilson(right, len(own_of_all))
            found["", policy, budget] = {"right": right, "low": low, "high": high}
            if policy != beside:
                found["", policy, budget] |= difference(own_of_all, other_of_all)
                if {*own_of_all, *other_of_all} <= {0.0, 1.0}:
                    p = mcnemar([x == 1 for x in own_of_all], [x == 1 for x in other_of_all])
                    found["", policy, budget]["p"] = p
    return found


def points(row: Mapping[str, Any], of: str = "less") -> tuple[float | None, ...]:
    """A difference of right answers and its interval, in points."""
    found = row[of] or {}
    return tuple(100 * found[name] if name in found else None for name in ("less", "less_low", "less_high"))


def by_cell(measurements: Iterable[Row]) -> dict[tuple[str, Any], list[Row]]:
    """Policy and budget → its rows, one a family, in the order of the measurements."""
    found = dict[tuple[str, Any], list[Row]]()
    for m in measurements:
        found.setdefault((m["policy"], m["budget"]), []).append(m)
    return found


def rows(result: Result) -> list[Row]:
    """A row for each policy and budget, of all families that it ran on: those with the most right answers over all
    budgets first. Policies without a budget, such as the full cache, are left out."""
    with_budget = [m for m in result["measurements"] if m["budget"] is not None]
    out = [together(policy, budget, own) for (policy, budget), own in by_cell(with_budget).items()]
    if any(row["looped"] is None for row in out):  # a column with gaps would compare what it does not know
        out = [{**row, "looped": None} for row in out]
    tested = [row for row in out if "p" in (row["all"] or {})]
    for row, p in zip(tested, holm([row["all"]["p"] for row in tested]), strict=True):
        row["unsure"] = leaves_out_zero(row) and p > LEVEL
    rights = dict[str, list[float]]()
    for row in out:
        rights.setdefault(row["policy"], []).append(row["right"])
    return sorted(out, key=lambda row: (-fmean(rights[row["policy"]]), row["policy"]))


def leaves_out_zero(row: Row) -> bool:
    """Whether the interval of a difference over all families does."""
    _, low, high = points(row, "all")
    return low is not None and high is not None and (low > 0 or high < 0)


def _difference(row: Row) -> tuple[Any, ...]:
    """A difference over all families in points, its interval, and its mark."""
    return *points(row, "all"), UNSURE if row.get("unsure") else ""


def together(policy: str, budget: float | None, own: Sequence[Row]) -> dict[str, Any]:
    """One policy at one budget. own: its rows, one a family."""
    right = fmean(m["pass_at_1"] for m in own)
    low, high = wilson(right, sum(m["samples"] for m in own))
    shares_of_full = [m["of_full"] for m in own]  # None: the full cache has not run
    return {
        "policy": policy,
        "budget": budget,
        "families": len(own),
        "all": own[0]["all"],
        "of_full": None if None in shares_of_full else fmean(shares_of_full),
        "generated_mean": fmean(m["generated_mean"] for m in own),
        "cut_off": fmean(m["cut_off"] for m in own),
        "right": right,
        "low": low,
        "high": high,
        "looped": _looped(own),
        "changed": any(m.get("changed") for m in own),
    }


def _looped(own: Sequence[Row]) -> float | None:
    """The share of texts that were cut off in a loop. None: some run is from an older version, which did not look."""
    known = []
    for m in own:
        share = m.get("looped") if m["cut_off"] else 0.0
        if share is None:
            return None
        known.append(share)
    return fmean(known)


def said(result: Result) -> Iterable[str]:
    """What the columns mean."""
    settings = result["settings"]
    found = rows(result)
    families = {row["families"] for row in found}
    parts = [f"{settings['limit']} {settings['split']} problems of each of {max(families)} families."]
    if len(families) > 1:
        parts.append("Where a policy lacks runs, of fewer.")
    if any(points(row, "all")[0] is not None for row in found):
        parts.append(f"Difference: points to `{settings['beside']}` at the same budget, problem by problem.")
    if unsure := sum(row.get("unsure", False) for row in found):
        tests = sum("p" in (row["all"] or {}) for row in found)
        parts.append(
            f"{UNSURE.strip()}: the interval leaves out 0, but the difference is not significant by McNemar's exact "
            f"test with Holm's correction for the {tests} tests of this table (p > {LEVEL:g}; {unsure} of them)."
        )
    parts.append("Cut off: texts that did not end by themselves. The most right answers first.")
    return [" ".join(parts), ""]


TABLE = Table(
    (("policy", "policy", "`{}`"),),
    rows=rows,
    across="budget",
    cells=(
        ("{:share}: right", ("right", "low", "high"), "**{:.1%}** ({:.1%} to {:.1%})"),
        ("difference?", _difference, DIFFERENCE + "{}"),
        ("tokens", "generated_mean", "{:,.0f}"),
        ("cut off", "cut_off", "{:.1%}"),
        ("in a loop?", "looped", "{:.1%}"),
        ("bytes", "of_full", "{:.1%}"),
    ),
    said=said,
)


def draw(result: Result, path: Path) -> None:
    """Differences and their intervals, a panel a budget; nothing where none is known. MinithinkError: matplotlib is
    missing, or the file cannot be written."""
    found = [row for row in rows(result) if points(row, "all")[0] is not None]
    names = list(dict.fromkeys(row["policy"] for row in found))[::-1]
    budgets = sorted({row["budget"] for row in found})
    if not found:
        return
    words = max(map(len, names))
    with drawing(path, 0.075 * words + 2 * len(budgets), 1.2 + 0.18 * len(names)) as figure:
        panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
        for axis, budget in zip(panels, budgets, strict=True):
            axis.axvline(0, color=ALIKE, linewidth=0.8)
            for row in found:
                at, low, high = points(row, "all")
                if row["budget"] != budget or at is None or low is None or high is None:
                    continue
                color = BETTER if low > 0 else WORSE if high < 0 else ALIKE
                y = names.index(row["policy"])
                axis.plot([low, high], [y, y], color=color, linewidth=1.2)
                axis.plot([at], [y], color=color, marker="o", markersize=3.5)
            axis.set_title(budget_text(budget), fontsize=8)
            axis.set_yticks(range(len(names)), names)
            axis.grid(axis="x", color="#dddddd")
        beside = result["settings"]["beside"]
        figure.supxlabel(f"points more right answers than\n{beside}, with intervals of 95 %", fontsize="medium")
