"""The densities of sparsity, one panel a layer, as figures 3 and 14 of ThinKV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minithink.calibrate.density import grid
from minithink.figures import drawing

THIN = 4  # every fourth point of the grid is drawn
ACROSS = 4  # panels


def draw(lines: Sequence[Mapping[str, Any]], result: Mapping[str, Any], path: Path) -> None:
    """A thin line a prompt, their mean in black, thresholds dashed; L* is named in bold.

    Args:
        lines: of the journal, one a prompt.
        result: of the calibration.
        path: of the SVG file.

    Raises:
        MinithinkError: matplotlib is missing, or the file cannot be written.
    """
    looks = result["measurements"]["layers"]
    down = -(-len(looks) // ACROSS)
    with drawing(path, 2.3 * ACROSS, 1.7 * down + 0.4) as figure:
        x = grid().tolist()[::THIN]
        for i, look in enumerate(looks):
            axis = figure.add_subplot(down, ACROSS, i + 1)
            of = [line["layers"][i]["density"][::THIN] for line in lines]
            for f in of:
                axis.plot(x, f, color="#7f7f7f", linewidth=0.4, alpha=0.4)
            axis.plot(x, [sum(at) / len(of) for at in zip(*of, strict=True)], color="black", linewidth=1.2)
            for theta in result["thresholds"]:
                axis.axvline(theta, color="#d62728", linewidth=0.8, linestyle="--")
            bold = "bold" if i in result["layers"] else "normal"
            axis.set_title(f"layer {i}: {look['share']:.0%} have |T| modes", fontsize=8, fontweight=bold)
            axis.set_yticks([])
            axis.set_xlim(0, 1)
            axis.spines[["top", "right", "left"]].set_visible(False)
        figure.supxlabel("share of cached tokens below 1 % of the largest weight", fontsize=8)
