"""Pictures of losses above the full cache: by tokens held, by bytes held, by position in the text, and by distance
behind the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minithink.evaluate.loss_summary import Above, Band, LossRow
from minithink.evaluate.plots import add_legend, figure_of, label_of, own_settings, styles_of
from minithink.evaluate.summary import budget_text, size
from minithink.results.figures import write_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOVE = "loss above the full cache, nats (95 % interval)"
LINES = ("-", "--", ":", "-.")  # of a policy's first budget, of its second, …


def draw(rows: Sequence[LossRow], folder: Path, title: str = "") -> list[Path]:
    """Draw loss-by-tokens.svg, loss-by-bytes.svg, loss-by-position.svg and loss-by-distance.svg → the files.

    Without a policy beside the full cache nothing is drawn. The picture by distance is left out if no policy has
    losses behind a budget.

    Raises:
        MinithinkError: matplotlib is missing, or a file cannot be written.
    """
    others = [row for row in rows if row.above is not None]
    if not others:
        return []
    paths = []
    with own_settings():
        figures = {
            "loss-by-tokens": _by_memory(others, lambda row: row.tokens_mean, "tokens kept a lane, mean"),
            "loss-by-bytes": _by_memory(others, lambda row: row.kv_bytes_mean, "KV cache, bytes a text, mean"),
            "loss-by-position": _by_band(others, lambda row: row.by_position, "position in the text, tokens"),
        }
        if any(row.by_distance for row in others):
            figures["loss-by-distance"] = _by_band(
                others, lambda row: row.by_distance, "distance behind the budget, tokens"
            )
        figures["loss-by-bytes"].axes[0].xaxis.set_major_formatter(lambda x, _: size(x).replace(".0 ", " "))
        for name, figure in figures.items():
            figure.axes[0].set_title(title, loc="left", fontsize=10)
            path = folder / f"{name}.svg"
            write_svg(figure, path, "--output-dir")
            paths.append(path)
    return paths


def _by_memory(rows: Sequence[LossRow], memory: Callable[[LossRow], float], name: str) -> Figure:
    """A point for every policy and budget; one line for each policy. name: of the memory, on the x axis."""
    policies = [row.policy for row in rows]
    figure, axis = figure_of(policies)
    for policy, style in styles_of(policies).items():
        own = sorted((row for row in rows if row.policy == policy), key=memory)
        found = [row.above for row in own if row.above is not None]
        axis.errorbar(
            [memory(row) for row in own],
            [one.mean for one in found],
            yerr=_errors(found),
            label=label_of(policy),
            capsize=3,
            markersize=6,
            linewidth=1.5,
            **style,
        )
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axis.minorticks_off()
    axis.margins(x=0.1)
    axis.set_xlabel(name)
    axis.set_ylabel(ABOVE)
    add_legend(figure)
    return figure


def _by_band(rows: Sequence[LossRow], bands: Callable[[LossRow], Sequence[Band]], name: str) -> Figure:
    """One line for every policy and budget that has bands. A policy looks alike in all pictures.

    Args:
        rows: all that are drawn in some picture.
        bands: those of a row; empty: it is left out.
        name: of what the bands divide, on the x axis.
    """
    styles = styles_of([row.policy for row in rows])
    drawn = [row for row in rows if bands(row)]
    figure, axis = figure_of([f"{row.policy} {row.budget}" for row in drawn])
    before: list[str] = []  # policies of the lines so far
    for row in drawn:
        label = label_of(row.policy)
        if row.budget is not None:
            label += f" at {budget_text(row.budget)}"
        axis.plot(
            [(band.first + band.last + 1) / 2 for band in bands(row)],
            [band.above.mean for band in bands(row)],
            label=label,
            linestyle=LINES[before.count(row.policy) % len(LINES)],
            linewidth=1.5,
            markersize=4,
            **styles[row.policy],
        )
        before.append(row.policy)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel(name)
    axis.set_ylabel("loss above the full cache, nats")
    add_legend(figure)
    return figure


def _errors(found: Sequence[Above]) -> list[list[float]]:
    """How far the intervals reach below and above the means."""
    below = [one.mean - (one.mean if one.low is None else one.low) for one in found]
    above = [(one.mean if one.high is None else one.high) - one.mean for one in found]
    return [below, above]
