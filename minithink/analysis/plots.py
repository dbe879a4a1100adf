"""Pictures of what became of thoughts: importance by type, association as triangular maps, tokens held. SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minithink import counts
from minithink.figures import drawing
from minithink.policies.thinkv import NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]
COLORS = {"reasoning": "#0072B2", "execution": "#009E73", "transition": "#D55E00"}  # of Okabe and Ito's palette
LINES = ("#444444", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SOURCES = ("sparsity", "keywords")  # of types
MAPS = 4  # texts whose associations are drawn,
LEAST = 4  # of so many segments, if there are such


def write(path: Path, draw: Draw) -> None:
    """Draw into a file; the same values give the same bytes.

    Raises:
        MinithinkError: matplotlib is missing, or the file cannot be written.
    """
    with drawing(path, 7, 3) as figure:
        draw(figure)


def importance(texts: Sequence[Mapping[str, Any]]) -> Draw:
    """A box of every type, one panel for each source of types. texts: of the result."""
    measures = [name for name in ("suppressed", "resampled") if name in texts[0]]

    def draw(figure: Figure) -> None:
        figure.set_size_inches(7, 3 * len(measures))
        panels = figure.subplots(len(measures), len(SOURCES), squeeze=False)
        for row, measure in zip(panels, measures, strict=True):
            for axis, source in zip(row, SOURCES, strict=True):
                names, values = list[str](), list[list[float]]()
                for name in reversed(NAMES):
                    own = [x for t in texts for kind, x in zip(t[source], t[measure], strict=True) if kind == name]
                    if own:
                        names.append(name)
                        values.append(own)
                boxes = axis.boxplot(values, patch_artist=True, medianprops={"color": "black"}, flierprops={"ms": 3})
                for box, name in zip(boxes["boxes"], names, strict=True):
                    box.set_facecolor(COLORS[name])
                ticks = [f"{name}\n{len(own):,} segments" for name, own in zip(names, values, strict=True)]
                axis.set_xticks(range(1, len(names) + 1), ticks)
                axis.set_title(f"{measure}, types by {source}", fontsize=8)
            row[0].set_ylabel("KL of the answer, nats")

    return draw


def association(texts: Sequence[Mapping[str, Any]]) -> Draw:
    """The first texts' associations: x the earlier segment, y the later one, named by their types by sparsity and by
    keywords. texts: of the result."""

    def draw(figure: Figure) -> None:
        shown = [text for text in texts if len(text["association"]) >= LEAST][:MAPS] or texts[:MAPS]
        across = min(2, len(shown))
        down = -(-len(shown) // across)
        figure.set_size_inches(3.6 * across, 3.4 * down)
        for i, text in enumerate(shown):
            axis = figure.add_subplot(down, across, i + 1)
            rows = text["association"]
            grid = [[*row, *[float("nan")] * (len(rows) - len(row))] for row in rows]
            image = axis.imshow(grid, cmap="viridis", vmin=0)
            figure.colorbar(image, ax=axis, shrink=0.8).set_label("KL at the later segment, nats", fontsize=7)
            labels = [
                f"{a[0].upper()}/{b[0].upper()}{n}"
                for n, (a, b) in enumerate(zip(text["sparsity"], text["keywords"], strict=True))
            ]
            axis.set_xticks(range(len(rows)), labels, rotation=90, fontsize=7)
            axis.set_yticks(range(len(rows)), labels, fontsize=7)
            axis.set_title(text["id"], fontsize=8)
        figure.supxlabel("suppressed segment: type by sparsity / by keywords, number", fontsize=8)
        figure.supylabel("later segment", fontsize=8)

    return draw


def curves(measurements: Sequence[Mapping[str, Any]]) -> Draw:
    """Tokens held over tokens generated; beside it, where types are known, the shares of thoughts."""
    typed = [m for m in measurements if sum(m.get("thoughts", {}).values())]

    def draw(figure: Figure) -> None:
        figure.set_size_inches(7, 3 + 0.2 * len(measurements))  # the legend stands below
        panels = figure.subplots(1, 2 if typed else 1, squeeze=False, width_ratios=(3, 1) if typed else None)[0]
        for i, m in enumerate(measurements):
            x = [n * m["every"] for n in range(len(m["held"]))]
            counted = f" ({counts.said(m['counts'])})" if "counts" in m else ""
            panels[0].plot(x, m["held"], color=LINES[i % len(LINES)], linewidth=1.2, label=m["policy"] + counted)
        panels[0].set_xlabel("tokens generated")
        panels[0].set_ylabel("tokens held, mean")
        panels[0].set_ylim(bottom=0)
        figure.legend(loc="outside lower left")
        if not typed:
            return
        bottom = [0.0] * len(typed)
        for name in NAMES:
            shares = [100 * m["thoughts"][name] / sum(m["thoughts"].values()) for m in typed]
            panels[1].bar([m["policy"] for m in typed], shares, bottom=bottom, color=COLORS[name], label=name)
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        panels[1].set_ylabel("segments, %")
        panels[1].legend(loc="upper left", bbox_to_anchor=(0, -0.1), fontsize=7)

    return draw
