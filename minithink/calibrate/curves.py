"""The picture of a predictor's training (DynTS, figures 7 and 15)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minithink.calibrate.quality import FOUND_IN
from minithink.results.figures import drawing


def draw(path: Path, target: str, curve: Sequence[dict[str, Any]]) -> None:
    """MSE and Kendall's τ by training step; below, the share of the true top 20 % in the predicted top p %.

    curve: a row for every epoch. MinithinkError: the picture cannot be drawn or written.
    """
    steps = [row["step"] for row in curve]
    with drawing(path, 5.0, 4.2) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot(steps, [row["train_mse"] for row in curve], color="#999999", label="MSE, trained on")
        above.plot(steps, [row["mse"] for row in curve], color="#0072B2", label="MSE, held out")
        above.set_ylabel(f"MSE of {target}")
        right = above.twinx()
        right.plot(steps, [row["tau"] for row in curve], color="#D55E00", label="Kendall's τ, held out")
        right.set_ylabel("Kendall's τ")
        lines = [*above.get_lines(), *right.get_lines()]
        above.legend(lines, [x.get_label() for x in lines], loc="center right")
        for i, p in enumerate(FOUND_IN):
            shade = str(0.75 * i / (len(FOUND_IN) - 1))
            below.plot(steps, [row[f"top_{p}"] for row in curve], color=shade, label=f"{p} %")
        below.set_ylim(0, 1)
        below.set_ylabel("of the true top 20 %")
        below.set_xlabel("step")
        below.legend(title="in the predicted top", ncols=2, loc="lower right")
