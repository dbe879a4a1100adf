"""Where policies stand by right answers and bytes: which are on the front, and how far the others are below it.

A point is a policy at a budget. It is on the *front* if no other point has as many right answers or more with as many
bytes or fewer; points that are equal in both are on it together. Every other point says how many points less it has
than the best one of at most its bytes. The table of docs/methods.md has the same columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from minithink.errors import counted
from minithink.evaluate import plots
from minithink.evaluate.intervals import wilson
from minithink.evaluate.summary import Budget, budget_text, code
from minithink.results.figures import write_svg
from minithink.results.files import rounded

MARK = "●"  # before points of the front
CHANGED = " †"
ALIKE = 9  # distances that agree to so many decimals are equal: rounding leaves less
OWN = "#D55E00"  # the colour of one's own points
OTHERS = "#888888"
HEADING = ["policy", "budget", "right", "bytes of full", "below the front"]


@dataclass(frozen=True)
class Point:
    """A policy at a budget. Shares are from 0 to 1."""

    policy: str
    budget: Budget
    own: bool  # of one's own run, not of the pool
    right: float
    right_low: float
    right_high: float
    samples: int
    of_full: float  # bytes at the peak, of the full cache's on the same machine
    changed: bool = False  # the code has changed since
    front: bool = False
    below: float = 0.0  # the share of right answers that the best point of at most these bytes has more


def placed(points: Iterable[Point]) -> list[Point]:
    """The same points with `front` and `below`, those with the fewest bytes first."""
    found = sorted(points, key=lambda point: (point.of_full, -point.right, point.policy))
    on_front = set(plots.pareto_front([(point.of_full, point.right) for point in found]))
    out = []
    best = 0.0
    for i, point in enumerate(found):
        best = max(best, point.right)
        out.append(replace(point, front=i in on_front, below=best - point.right))
    return out


def together(datasets: Sequence[Sequence[Point]]) -> list[Point]:
    """The points that all datasets have: means over them, with Wilson's interval of all answers together. Of a single
    dataset, its points."""
    if len(datasets) == 1:
        return list(datasets[0])
    by_cell = dict[tuple[object, ...], list[Point]]()
    for points in datasets:
        for point in points:
            by_cell.setdefault((point.own, point.policy, rounded(point.budget)), []).append(point)
    out = []
    for own in by_cell.values():
        if len(own) < len(datasets):
            continue
        right = fmean(point.right for point in own)
        samples = sum(point.samples for point in own)
        low, high = wilson(right, samples)
        out.append(
            Point(
                policy=own[0].policy,
                budget=own[0].budget,
                own=own[0].own,
                right=right,
                right_low=low,
                right_high=high,
                samples=samples,
                of_full=fmean(point.of_full for point in own),
                changed=any(point.changed for point in own),
            )
        )
    return out


def said(points: Sequence[Point]) -> list[str]:
    """A sentence about each of one's own points. points: as `placed` gives them."""
    sentences = []
    for point in points:
        if not point.own:
            continue
        figures = f"{point.right:.1%} right with {point.of_full:.1%} of the full cache's bytes"
        if point.front:
            why = ", because nothing else has so few bytes" if point.of_full == points[0].of_full else ""
            sentences.append(f"{_starting(point)} is **on the front**{why}: {figures}.{_displaced(points, point)}")
            continue
        best = _best_within(points, point)
        sentences.append(
            f"{_starting(point)} is **{100 * point.below:.1f} points below the front**: {figures}. {_starting(best)} "
            f"has {best.right:.1%} with {best.of_full:.1%}. By this distance it is {_place(points, point)}."
        )
    return sentences


def _place(points: Sequence[Point], point: Point) -> str:
    """The place of a point that is not on the front, by its distance to it. Equal distances share a place."""
    own = round(point.below, ALIKE)
    others = [other for other in points if other is not point]
    nearer = [other for other in others if other.front or round(other.below, ALIKE) < own]
    equal = [other for other in others if not other.front and round(other.below, ALIKE) == own]
    shared = f", together with {counted(len(equal), 'other')}" if equal else ""
    return f"number {len(nearer) + 1} of {len(points)}{shared}"


def _best_within(points: Iterable[Point], point: Point) -> Point:
    """The point of at most these bytes with the most right answers; among equals, the one with the fewest bytes."""
    within = [other for other in points if other.of_full <= point.of_full]
    return max(within, key=lambda other: (other.right, -other.of_full))


def _displaced(points: Sequence[Point], point: Point) -> str:
    """A sentence that names the points that would be on the front without this one; "": there are none."""
    others = [other for other in points if other is not point]
    without = {(other.own, other.policy, other.budget) for other in placed(others) if other.front}
    gone = [other for other in others if not other.front and (other.own, other.policy, other.budget) in without]
    if not gone:
        return ""
    return f" It takes {', '.join(map(_named, gone))} off it."


def _named(point: Point) -> str:
    """A policy and its budget, and whose it is: committed policies can be run again."""
    name = at_budget(code(point.policy), point.budget)
    return f"your {name}" if point.own else name


def _starting(point: Point) -> str:
    """The same at the beginning of a sentence."""
    name = _named(point)
    return name[0].upper() + name[1:]


def at_budget(name: str, budget: Budget) -> str:
    """A policy's name with its budget: "window at 25 %"."""
    return name if budget is None else f"{name} at {budget_text(budget)}"


def in_cell(policy: str, own: bool) -> str:
    """A policy in a table."""
    return f"**{code(policy)}** (yours)" if own else code(policy)


def front_table(points: Sequence[Point]) -> str:
    """The front and one's own points, those with the fewest bytes first. points: as `placed` gives them."""
    return _table([point for point in points if point.front or point.own])


def whole_table(points: Sequence[Point]) -> str:
    """All points: the front by bytes, then the others, those nearest to it first."""
    return _table(sorted(points, key=lambda point: (not point.front, 0.0 if point.front else point.below)))


def _table(points: Iterable[Point]) -> str:
    lines = [HEADING, ["---", *["---:"] * 4]]
    for point in points:
        mark = f"{MARK} " if point.front else ""
        lines.append(
            [
                f"{mark}{in_cell(point.policy, point.own)}{CHANGED if point.changed else ''}",
                budget_text(point.budget),
                f"{point.right:.1%} ({point.right_low:.1%} to {point.right_high:.1%})",
                f"{point.of_full:.1%}",
                f"{100 * point.below:.1f}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Right answers by bytes: the committed points, the front as steps, and one's own points with their names.

    Args:
        points: as `placed` gives them.
        path: of the SVG file.
        title: stands above the picture.

    Raises:
        MinithinkError: matplotlib is missing, or the file cannot be written.
    """
    with plots.own_settings():
        own = [point for point in points if point.own]
        figure, axis = plots.figure_of([point.policy for point in own])
        others = [point for point in points if not point.own]
        axis.plot(
            [100 * point.of_full for point in others],
            [100 * point.right for point in others],
            color=OTHERS,
            label="committed policies",
            linestyle="none",
            marker=".",
        )
        front = [point for point in points if point.front]
        axis.plot(
            [100 * point.of_full for point in front],
            [100 * point.right for point in front],
            color="black",
            drawstyle="steps-post",
            label="the front",
            linewidth=0.8,
        )
        for point, marker in zip(own, itertools.cycle(plots.MARKERS), strict=False):
            axis.plot(
                100 * point.of_full,
                100 * point.right,
                color=OWN,
                label=plots.label_of(at_budget(point.policy, point.budget)),
                linestyle="none",
                marker=marker,
                markersize=8,
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("bytes, % of the full cache's")
        axis.set_ylabel("right answers, %")
        axis.set_title(title, loc="left", fontsize=10)
        plots.add_legend(figure)
        write_svg(figure, path, "--output-dir")
