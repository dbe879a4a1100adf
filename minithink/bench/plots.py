"""Pictures of steps (`bench/cases.py`): their parts by batch, and throughput beside latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minithink.experiments import Cases
from minithink.figures import drawing

COLORS = {
    "attention": "#0072B2", "refresh": "#E69F00", "eviction": "#D55E00", "gather": "#CC79A7", "flush": "#009E73",
    "rest": "#bbbbbb",
}  # fmt: skip


def draw(name: str, entry: Cases, result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Both pictures, of the steps with the first share of types → their files; none where there are no steps.

    Raises:
        MinithinkError: matplotlib is missing, or a file cannot be written.
    """
    steps = usual(entry, result)
    paths = []
    for what, picture in (("parts", parts), ("latency", latency)):
        if not steps:
            break
        paths.append(folder / f"{name}-{what}.svg")
        with drawing(paths[-1], 7.5, 3, **{"text.parse_math": True}) as figure:  # for powers of ten
            picture(figure, entry, steps)
    return paths


def usual(entry: Cases, result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Steps with the share of types that most cases have, by batch and then by method."""
    shares = (None, result["settings"]["transition_share"][0])
    found = [m for m in result["measurements"] if m["kind"] == "step" and m["drawn"] in shares]
    order = [method for method in entry.methods if method not in entry.unplotted]
    found = [m for m in found if m["method"] in order]
    return sorted(found, key=lambda m: (m["batch"], order.index(m["method"])))


def parts(figure: Any, entry: Cases, steps: Sequence[Mapping[str, Any]]) -> None:
    """Stacked bars in a panel for each batch."""
    batches = sorted({m["batch"] for m in steps})
    for axis, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        own = [m for m in steps if m["batch"] == batch]
        below = [0.0] * len(own)
        for part in reversed(entry.parts):
            heights = [m["parts_milliseconds"][part] for m in own]
            axis.bar([m["method"] for m in own], heights, bottom=below, color=COLORS[part], label=part)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axis.set_title(f"{batch} sequence{'s' if batch > 1 else ''}", fontsize=8)
        axis.tick_params(axis="x", labelrotation=90)
    figure.axes[0].set_ylabel("milliseconds of a step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")


def latency(figure: Any, entry: Cases, steps: Sequence[Mapping[str, Any]]) -> None:
    """A line a method; along it the batch grows, as the numbers beside the leftmost say."""
    axis = figure.subplots()
    leftmost = min((m for m in steps if m["method"] in entry.lines), key=lambda m: m["step_milliseconds"])["method"]
    for method, color in entry.lines.items():
        if not (own := [m for m in steps if m["method"] == method]):
            continue
        x, y = ([m[name] for m in own] for name in ("step_milliseconds", "tokens_per_second"))
        axis.plot(x, y, marker="o", markersize=3, color=color, label=method)
        for m in own if method == leftmost else ():
            at = (m["step_milliseconds"], m["tokens_per_second"])
            axis.annotate(str(m["batch"]), at, xytext=(-4, 4), textcoords="offset points", fontsize=7, ha="right")
    axis.set(
        xlabel="milliseconds until a sequence's next token", ylabel="tokens a second, all sequences", yscale="log"
    )
    axis.legend()
