"""Pictures of losses above the full cache: by tokens held, by bytes held, and by position in the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minithink.evaluate.loss_summary import Above, LossRow
from minithink.evaluate.plots import add_legend, figure_of, label_of, own_settings, styles_of
from minithink.evaluate.summary import budget_text, size
from minithink.results.figures import write_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOVE = "loss above the full cache, nats (95 % interval)"
LINES = ("-", "--", ":", "-.")  # of a policy's first budget, of its second, …


def draw(rows: Sequence[LossRow], folder: Path, title: str = "") -> list[Path]:
    """Draw loss-by-tokens.svg, loss-by-bytes.svg and loss-by-position.svg → the files. Without a policy beside the
    full cache there is nothing to draw.

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
            "loss-by-position": _by_position(others),
        }
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


def _by_position(rows: Sequence[LossRow]) -> Figure:
    """One line for every policy and budget."""
    policies = [row.policy for row in rows]
    figure, axis = figure_of([f"{row.policy} {row.budget}" for row in rows])
    styles = styles_of(policies)
    drawn: list[str] = []
    for row in rows:
        name = label_of(row.policy)
        if row.budget is not None:
            name += f" at {budget_text(row.budget)}"
        axis.plot(
            [(band.first + band.last + 1) / 2 for band in row.by_position],
            [band.above.mean for band in row.by_position],
            label=name,
            linestyle=LINES[drawn.count(row.policy) % len(LINES)],
            linewidth=1.5,
            markersize=4,
            **styles[row.policy],
        )
        drawn.append(row.policy)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("position in the text, tokens")
    axis.set_ylabel("loss above the full cache, nats")
    add_legend(figure)
    return figure


def _errors(found: Sequence[Above]) -> list[list[float]]:
    """How far the intervals reach below and above the means."""
    below = [one.mean - (one.mean if one.low is None else one.low) for one in found]
    above = [(one.mean if one.high is None else one.high) - one.mean for one in found]
    return [below, above]
