"""Pictures of `answer_attention.py`: what the answer attends to (Crystal-KV, figure 2), and the hits of one token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minithink.results.figures import drawing

PIXELS = 240  # of a map, each way; larger ones are pooled, so that a picture stays small
LEVELS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)  # of weights
NEED, END = "#D55E00", "#0072B2"


class Milestone(NamedTuple):
    """A token that is needed."""

    token: int
    line: str  # in which it stands
    hits: Tensor  # bool [L, Hkv, T], by query
    needed: list[int]  # where statements begin that need it


class Shown(NamedTuple):
    """One text as the pictures show it. Positions are counted from the first generated token."""

    layer: int
    head: int
    thinking: Tensor  # weights in this head, float32 [n, n]: queries of the thinking, its tokens
    answer: Tensor  # the same of the answer's queries, [rows, n]
    sets: dict[str, Tensor]  # top and bottom: bool [n]
    milestone: Milestone


def draw(folder: Path, name: str, shown: Shown, concentration: Tensor) -> list[Path]:
    """Both pictures → their files, NAME-map.svg and NAME-milestone.svg. concentration: [L, Hkv].

    Raises:
        MinithinkError: matplotlib is missing, or a file cannot be written.
    """
    paths = [folder / f"{name}-{what}.svg" for what in ("map", "milestone")]
    with drawing(paths[0], 7.5, 3.8) as figure:
        maps(figure, shown, concentration)
    with drawing(paths[1], 7.5, 3.4) as figure:
        milestone(figure, shown.milestone, len(shown.thinking))
    return paths


def pooled(x: Tensor, height: int, width: int) -> Tensor:
    """The largest concentration of a map's parts, at most height × width of them. x: float32 [h, w]."""
    size = min(height, x.shape[0]), min(width, x.shape[1])
    return F.adaptive_max_pool2d(x[None], size)[0]


def maps(figure: Any, shown: Shown, concentration: Tensor) -> None:
    """The columns of each set: queries of the thinking above, of the answer below; then concentration by head."""
    from matplotlib import colormaps  # here: an extra
    from matplotlib.colors import BoundaryNorm

    colors = colormaps["magma_r"].with_extremes(under="white")
    style = {"cmap": colors, "norm": BoundaryNorm(LEVELS, 256), "aspect": "auto", "interpolation": "none"}
    grid = figure.add_gridspec(2, 3, height_ratios=(5, 1), width_ratios=(4, 4, 1.5))
    n = len(shown.thinking)
    rows = len(shown.answer)
    image = None
    for column, (which, chosen) in enumerate(shown.sets.items()):
        count = int(chosen.sum())
        for row, (weights, height) in enumerate(((shown.thinking, n), (shown.answer, rows))):
            axis = figure.add_subplot(grid[row, column])
            found = pooled(weights[:, chosen], PIXELS, PIXELS).numpy()
            image = axis.imshow(found, extent=(0, count, height, 0), **style)
            axis.set_ylabel(("thinking query", "answer's")[row] if column == 0 else "")
            axis.tick_params(labelleft=column == 0, labelbottom=row == 1)
        axis.set_xlabel(f"{which} {count} of {n:,} tokens, oldest first")
        figure.axes[-2].set_title(f"{which} 30 % by the answer's attention", fontsize=8)
    place = {"location": "bottom", "shrink": 0.5, "aspect": 40}
    bar = figure.colorbar(image, ax=figure.axes, **place, ticks=LEVELS[::2], format="{x:g}")
    bar.set_label(f"attention weight, layer {shown.layer}, head {shown.head}")
    axis = figure.add_subplot(grid[:, 2])
    axis.imshow(concentration.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="none")
    for layer, head in torch.cartesian_prod(*(torch.arange(x) for x in concentration.shape)).tolist():
        value = float(concentration[layer, head])
        color = "w" if value > 0.6 else "k"
        axis.text(head, layer, f"{value:.0%}", ha="center", va="center", fontsize=6, color=color)
    layers, heads = map(range, concentration.shape)
    axis.set(xlabel="KV head", ylabel="layer", xticks=heads, yticks=layers)
    axis.set_title("on the top tenth", fontsize=8)


def milestone(figure: Any, shown: Milestone, thinking: int) -> None:
    """The queries that hit one token, a row for every head, from the token's birth on. thinking: tokens of it."""
    axis = figure.subplots()
    layers, heads, end = shown.hits.shape
    own = shown.hits[..., shown.token :].flatten(0, 1).float()
    extent = (shown.token, end, layers * heads, 0)
    axis.imshow(
        pooled(own, layers * heads, 3 * PIXELS).numpy(),
        cmap="Greys",
        vmin=0,
        vmax=1.3,
        aspect="auto",
        interpolation="none",
        extent=extent,
    )
    for at in shown.needed:
        axis.axvline(at, color=NEED, lw=0.8)
    for layer in range(1, layers):
        axis.axhline(layer * heads, color="#56B4E9", lw=0.5)
    axis.plot([], [], color=NEED, lw=0.8, label="a statement that needs it begins")
    axis.axvline(thinking, color=END, lw=1.2, ls="--", label="the answer begins")
    axis.set(xlabel="generated token", ylabel=f"layer ({heads} KV heads each)")
    axis.set_yticks([heads * (layer + 0.5) for layer in range(layers)], map(str, range(layers)))
    axis.set_title(f"Queries that hit token {shown.token:,}, from “{shown.line}”", fontsize=8)
    figure.legend(loc="outside lower right", ncols=2)
