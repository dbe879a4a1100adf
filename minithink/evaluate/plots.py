"""Redraw the pictures of evaluation runs: accuracy, length, recall and what is needed by budget, accuracy by bytes.

A policy has one colour and one marker in all pictures, and the markers alone tell policies apart in print without
colours. The same records give the same bytes, whatever the user's matplotlib is set to.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minithink.cli.commands import location
from minithink.errors import UsageError, counted, escaped
from minithink.evaluate.datasets import is_file
from minithink.evaluate.journal import INSTRUMENT, MOST, Run, brief, join, read
from minithink.evaluate.summary import FULL, Row, budget_text, size, summarize
from minithink.results.figures import need_matplotlib, write_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, without yellow, which is faint on white, and black, which is for the full cache.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvPX*<>h"  # as many as are prime to COLORS: 66 policies before a pair occurs again
GREY = "#444444"
LONGEST_LABEL = 400  # characters of a policy in the legend
LABELS = {  # of the y axis by budget
    "length": "tokens generated, mean",
    "recall": "recall of the 10 tokens most looked at, %",
    "needed": "of what statements need, kept when they begin, %",
}
RC: dict[Any, Any] = {
    "svg.hashsalt": "minithink",  # ids in the file are drawn from it
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "text.parse_math": False,  # a $ is a $
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate plot`."""
    add = parser.add_argument
    add("folders", type=location, nargs="+", metavar="DIR", help="what runs wrote; several go into one picture")
    add(
        "--output-dir",
        type=location,
        metavar="FOLDER",
        help="default: DIR, or the current folder if there are several",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Draw what the folders hold now."""
    runs = [read(folder) for folder in args.folders]
    for one in runs:
        if INSTRUMENT in one.settings:
            raise UsageError(
                f"{one.folder} holds losses of texts, which `evaluate loss` draws itself: give its command with "
                "--resume to draw them again."
            )
    for note in chain.from_iterable(one.notes for one in runs):
        print(f"minithink.evaluate: {escaped(note)}", file=sys.stderr)
    policies = list[str]()
    budgets = list[Any]()
    for one in runs:
        policies += one.settings.get("policies") or []
        budgets += one.settings.get("budgets") or []
    rows = summarize(join(runs), policies=policies, budgets=budgets)
    if not rows:
        folders = ", ".join(map(str, args.folders))
        raise UsageError(f"No sequence is finished in {folders}: wait for the first, or continue with --resume.")
    for note in filter(None, map(unfinished, runs)):
        print(f"minithink.evaluate: {escaped(note)}", file=sys.stderr)
    output = args.output_dir or (args.folders[0] if len(args.folders) == 1 else Path())
    for path in draw(rows, output, title_of(runs[0].settings, rows)):
        print(f"drawn to {escaped(path)}", file=sys.stderr)
    return 0


def unfinished(run: Run) -> str:
    """A sentence if a run lacks some of its sequences; "": it has all, or it is not known how many it has."""
    there = len(run.records)
    counts = Counter((r.policy, r.budget) for r in run.records)
    totals = [start.get("sequences_total") for start in run.runs if isinstance(start, dict)]
    total = totals[-1] if totals else None
    if type(total) is int and total < MOST:
        return (
            f"{run.folder}: {there:,} of {counted(total, 'sequence')}; the run is unfinished" if there < total else ""
        )
    # a run of an older version has no total: it should have equally many of each policy and budget
    budgets = run.settings.get("budgets") or []
    for policy in run.settings.get("policies") or []:
        own = {budget for name, budget in counts if name == policy}
        for budget in budgets if own & set(budgets) else own or [None]:
            counts.setdefault((policy, budget), 0)
    if len(set(counts.values())) < 2:
        return ""
    each = (f"{brief(p)}{'' if b is None else f' at {budget_text(b)}'}: {n:,}" for (p, b), n in counts.items())
    return (
        f"{run.folder}: policies differ in the number of their sequences ({', '.join(each)}); the run is unfinished"
    )


def title_of(settings: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The dataset, split and number of problems, as far as they are known: "facts, test, 700 problems"."""
    counts = sorted({row.problems for row in rows if row.group is None})
    problems = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1])))
    dataset = settings.get("dataset")
    split = settings.get("split")
    if isinstance(dataset, str):
        parts = [Path(dataset).name] if is_file(dataset) else [dataset, str(split or "test")]
        parts = [_drawable(brief(part)) for part in parts]
    else:
        parts = []
    return ", ".join([*parts, f"{problems} problem{'s' if problems != '1' else ''}"])


def draw(rows: Sequence[Row], folder: Path, title: str = "") -> list[Path]:
    """Draw all pictures that the rows allow, over all problems → the SVG files.

    accuracy-by-bytes.svg always; accuracy-by-budget.svg and length-by-budget.svg if a budget is in tokens;
    accuracy-by-share.svg and length-by-share.svg if a budget is a share. If nothing was graded, there are none of
    accuracy. If recall was measured, recall-by-budget.svg and recall-by-share.svg likewise; if needs were measured,
    needed-by-budget.svg and needed-by-share.svg. Budgets in bytes are in accuracy-by-bytes.svg alone. title: stands
    above each picture.

    Raises:
        MinithinkError: matplotlib is missing, or a file cannot be written.
    """
    rows = [row for row in rows if row.group is None]
    paths = []
    with own_settings():
        figures: dict[str, Figure] = {}
        graded = [row for row in rows if row.pass_at_1 is not None]
        if graded:
            figures["accuracy-by-bytes"] = _by_bytes(graded)
        for kind, name in ((int, "budget"), (float, "share")):
            if any(isinstance(row.budget, kind) for row in rows):
                chosen = [row for row in rows if row.budget is None or isinstance(row.budget, kind)]
                for what in ("accuracy", *LABELS):
                    if any(_value(row, what) is not None for row in chosen):
                        figures[f"{what}-by-{name}"] = _by_budget(chosen, what)
        for name, figure in figures.items():
            figure.axes[0].set_title(title, loc="left", fontsize=10)
            paths.append(path := folder / f"{name}.svg")
            write_svg(figure, path, "--output-dir")
    return paths


def draw_one(rows: Sequence[Row], what: str, path: Path) -> None:
    """Draw one picture to an SVG file.

    Args:
        what: "bytes" (accuracy by bytes), or "accuracy", "length", "recall" or "needed" (by budget).

    Raises:
        MinithinkError: as in `draw`.
    """
    rows = [row for row in rows if row.group is None]
    with own_settings():
        write_svg(_by_bytes(rows) if what == "bytes" else _by_budget(rows, what), path, "--plot")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the points that no other point dominates, the cheapest first.

    A point dominates another one that costs as much or more and has as much value or less, unless both are equal.

    Args:
        points: cost (less is better) and value (more is better).
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    best = [float("-inf"), *accumulate((points[i][1] for i in order), max)]
    front: list[int] = []
    for i, before in zip(order, best, strict=False):
        if points[i][1] > before or (front and points[i] == points[front[-1]]):
            front.append(i)
    return front


@contextmanager
def own_settings() -> Iterator[None]:
    """matplotlib's defaults with RC, for a block; the user's own settings return afterwards."""
    matplotlib = need_matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def figure_of(policies: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with room for a legend below the axes, where it covers nothing."""
    from matplotlib.figure import Figure

    lines = len(styles_of(policies)) + 1
    figure = Figure(figsize=(7, 4 + 0.2 * lines), layout="constrained")
    return figure, figure.add_subplot()


def styles_of(policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each policy is drawn, in their order. The full cache is grey. If several comparisons share the
    picture (`window, card`), a policy looks alike in each, but in the second one its markers are hollow."""
    parts = {policy: policy.partition(", ") for policy in dict.fromkeys(policies)}
    comparisons = list(dict.fromkeys(comparison for _, _, comparison in parts.values()))
    others = [name for name in dict.fromkeys(name for name, _, _ in parts.values()) if name != FULL]
    looks = {FULL: {"color": GREY, "marker": "|" if len(comparisons) == 1 else "p"}}
    for i, name in enumerate(others):
        looks[name] = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
    order = sorted(parts, key=lambda policy: policy != FULL)
    filled = ("full", "none", "left", "right")
    out = {}
    for policy in order:
        method, _, comparison = parts[policy]
        fill = filled[comparisons.index(comparison) % len(filled)]
        out[policy] = looks[method] | {"fillstyle": fill}
    return out


def _by_budget(rows: Sequence[Row], what: str) -> Figure:
    """One line for each policy. A policy without a budget is a line across the picture, `full` with its interval as a
    band. what: the value that is drawn (`_value`); rows without it are left out."""
    accuracy = what == "accuracy"
    figure, axis = figure_of([row.policy for row in rows])
    budgets = sorted({row.budget for row in rows if isinstance(row.budget, (int, float))})
    apart = _apart([row.policy for row in rows if row.budget is not None], budgets)
    for policy, style in styles_of([row.policy for row in rows]).items():
        found = [(row, at) for row in rows if row.policy == policy and (at := _value(row, what)) is not None]
        if not found:
            continue
        own = [row for row, _ in found]
        y = [at for _, at in found]
        errors = _errors(own) if accuracy else None
        if own[0].budget is not None:
            aside = apart.get(policy, 1.0) if accuracy else 1.0
            x: list[Any] = [row.budget * aside for row in own if isinstance(row.budget, (int, float))]
            axis.errorbar(x, y, yerr=errors, label=label_of(policy), capsize=3, markersize=6, linewidth=1.5, **style)
            continue
        axis.axhline(
            y[0],
            label=label_of(policy),
            linestyle="-" if policy == FULL else "--",
            linewidth=1.5,
            markevery=[0, 1],
            **style,
        )
        if policy == FULL and accuracy:
            _, low, high = own[0].accuracy
            axis.axhspan(100 * low, 100 * high, color=GREY, alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [budget_text(budget) for budget in budgets])
    axis.minorticks_off()
    axis.margins(x=0.08)
    if all(isinstance(budget, int) for budget in budgets):
        axis.set_xlabel("budget, tokens kept a lane")
    else:
        axis.set_xlabel("budget, share of what the full cache generates")
    if accuracy:
        axis.set_ylabel("pass@1, % (95 % interval)")
    else:
        axis.set_ylabel(LABELS[what])
        axis.set_ylim(bottom=0)
    add_legend(figure)
    return figure


def _apart(policies: Sequence[str], budgets: Sequence[float]) -> dict[str, float]:
    """Policy → the factor of its budgets in the picture, so that error bars stand side by side. On the logarithmic
    axis two policies are at most 4 % apart, and all together take at most half of the way between two budgets."""
    names = list(dict.fromkeys(policies))
    gap = min((log2(b / a) for a, b in pairwise(budgets)), default=1.0)
    step = min(log2(1.04), gap / 2 / len(names)) if names else 0.0
    return {name: 2 ** (step * (i - (len(names) - 1) / 2)) for i, name in enumerate(names)}


def _value(row: Row, what: str) -> float | None:
    """A row's mean length in tokens, or its accuracy, recall or share of needs in %; None: it was not measured."""
    if what == "length":
        return row.generated_mean
    share = {"accuracy": row.pass_at_1, "recall": row.recall, "needed": row.needed_kept}[what]
    return None if share is None else 100 * share


def _by_bytes(rows: Sequence[Row]) -> Figure:
    """A point for every policy and budget. Points of the Pareto front are ringed and joined by steps. A policy that
    held no bytes is left out: a logarithmic axis has no place for it."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    rows = [row for row in rows if row.kv_bytes_peak > 0]
    figure, axis = figure_of([row.policy for row in rows])
    for policy, style in styles_of([row.policy for row in rows]).items():
        own = sorted((row for row in rows if row.policy == policy), key=lambda row: row.kv_bytes_peak)
        style = style | ({"marker": "p"} if policy == FULL else {})
        axis.errorbar(
            [row.kv_bytes_peak for row in own],
            [100 * row.accuracy[0] for row in own],
            yerr=_errors(own),
            label=label_of(policy),
            capsize=3,
            markersize=6,
            linewidth=1,
            linestyle=":",
            elinewidth=1,
            **style,
        )
    points = [(row.kv_bytes_peak, 100 * row.accuracy[0]) for row in rows]
    front = [points[i] for i in pareto_front(points)]
    axis.plot(
        [x for x, _ in front],
        [y for _, y in front],
        drawstyle="steps-post",
        color="black",
        linewidth=0.8,
        marker="o",
        markersize=13,
        markerfacecolor="none",
        label="Pareto front",
        gid="pareto-front",
    )
    axis.set_xscale("log", base=2)
    axis.margins(x=0.1)
    # About six ticks, however many powers of two there are: 256 KiB, 1 MiB, …
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x).replace(".0 ", " ")))
    axis.minorticks_off()
    axis.set_xlabel("peak of the KV cache, bytes a sequence")
    axis.set_ylabel("pass@1, % (95 % interval)")
    add_legend(figure)
    return figure


def _errors(rows: Sequence[Row]) -> list[list[float]]:
    """How far the intervals reach below and above pass@1, in percentage points."""
    below = list[float]()
    above = list[float]()
    for row in rows:
        share, low, high = row.accuracy
        below.append(max(0.0, 100 * (share - low)))
        above.append(max(0.0, 100 * (high - share)))
    return [below, above]


def label_of(policy: str) -> str:
    """A policy in a legend: without characters that no SVG may hold, and of bounded length."""
    return _drawable(brief(policy) if len(policy) > LONGEST_LABEL else escaped(policy))


def _drawable(text: str) -> str:
    """The text without the two characters that XML forbids and terminals do not mind."""
    return text.replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")


def add_legend(figure: Figure) -> None:
    """Put a legend below the axes, in one column, because a policy's text can be long."""
    figure.legend(loc="outside lower left")
