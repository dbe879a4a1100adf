"""Pictures of `speed/cases.py`: parts of a step by batch, throughput beside latency, whole generations by length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from minithink.bench.methods import Cases, Row
from minithink.results.figures import drawing

COLORS = {
    "attention": "#0072B2",
    "refresh": "#E69F00",
    "eviction": "#D55E00",
    "gather": "#CC79A7",
    "flush": "#009E73",
    "rest": "#bbbbbb",
}
ALONG: dict[str, Callable[[Row], float]] = {  # panel → its value at a measured length
    "tokens a second, all sequences": lambda m: m["tokens_per_second"],
    "GiB of the KV cache, all sequences": lambda m: m["cache_bytes"] / 2**30,
    "GFLOP of a step, all sequences": lambda m: m["flops_in_all"] / 1e9,
}
STYLES = ("-", "--", ":", "-.")  # of batches, the smallest first


def draw(name: str, entry: Cases, result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Pictures of steps with the first share of types, and of generations → their files; none where there are none.

    Raises:
        MinithinkError: matplotlib is missing, or a file cannot be written.
    """
    steps = usual(entry, result)
    lengths = entry.by_level(result) if entry.by_level is not None else []
    paths = []
    for what, picture, height, rows in (
        ("parts", parts, 3, steps),
        ("latency", latency, 3, steps),
        ("levels", levels, 4.5, lengths),
    ):
        if not rows:
            continue
        paths.append(folder / f"{name}-{what}.svg")
        with drawing(paths[-1], 7.5, height, **{"text.parse_math": True}) as figure:  # for powers of ten
            picture(figure, entry, rows)
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
        own = [m for m in steps if m["method"] == method]
        if not own:
            continue
        x = [m["step_milliseconds"] for m in own]
        y = [m["tokens_per_second"] for m in own]
        axis.plot(x, y, marker="o", markersize=3, color=color, label=method)
        for m in own if method == leftmost else ():
            at = (m["step_milliseconds"], m["tokens_per_second"])
            axis.annotate(str(m["batch"]), at, xytext=(-4, 4), textcoords="offset points", fontsize=7, ha="right")
    axis.set(
        xlabel="milliseconds until a sequence's next token", ylabel="tokens a second, all sequences", yscale="log"
    )
    axis.legend()


def levels(figure: Any, entry: Cases, rows: Sequence[Row]) -> None:
    """Panels along a generation: the tokens of one sequence, calculated, and ALONG as measured. A colour is a method,
    a style a batch."""
    first, *others = axes = figure.subplots(2, 2, sharex=True).flatten()
    styles = dict(zip(sorted({m["batch"] for m in rows}), cycle(STYLES), strict=False))
    for method, color in entry.lines.items():
        for batch, style in styles.items():
            own = [m for m in rows if (m["method"], m["batch"]) == (method, batch)]
            if not own:
                continue
            label = f"{method}, {batch} sequence{'s' if batch > 1 else ''}"
            for axis, value in zip(others, ALONG.values(), strict=True):
                y = [value(m) for m in own]
                axis.plot([m["level"] for m in own], y, style, marker="o", markersize=3, color=color, label=label)
        own = [m for m in rows if m["method"] == method]
        if own:
            first.plot(entry.held(method, own[0]["settings"]), color=color)
    for axis, title in zip(axes, ("cached tokens of one sequence, calculated", *ALONG), strict=True):
        axis.set_title(title, fontsize=8)
        axis.set_ylim(bottom=0)
    for axis in axes[2:]:
        axis.set_xlabel("generated tokens")
    figure.legend(*others[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(styles))
