"""Figures are drawn with matplotlib, which is an extra."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minithink.errors import MinithinkError, unwritable
from minithink.results.files import replace

PLACES = re.compile(r' (?:d|x|y|points)="[^"]*"')  # attributes that say where something is
NUMBER = re.compile(r"-?\d+\.\d+")
RC: dict[str, Any] = {
    "svg.hashsalt": "minithink",  # ids in the file are drawn from it
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "text.parse_math": False,  # a $ is a $
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def need_matplotlib() -> Any:
    """The module. MinithinkError: it is not installed."""
    try:
        import matplotlib  # here: an extra, and slow to import
    except ImportError:
        raise MinithinkError(
            "A plot needs matplotlib, which is not installed: run `pip install 'matplotlib>=3.8'`."
        ) from None
    return matplotlib


@contextmanager
def drawing(path: Path, width: float, height: float, **settings: Any) -> Iterator[Any]:
    """A figure to draw into, which is then written as SVG: the same values give the same bytes, whatever the user's
    matplotlib is set to. settings: of matplotlib, beside RC. MinithinkError as of the two below and above."""
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC | settings)
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        write_svg(figure, path)


def write_svg(figure: Any, path: Path, option: str = "--plot") -> None:
    """A figure as SVG, undated. MinithinkError: it cannot be written; the message says to give another `option`."""
    whole = io.StringIO()
    figure.savefig(whole, format="svg", metadata={"Date": None})
    try:
        replace(path, shortened(whole.getvalue()))
    except OSError as error:
        raise unwritable("The picture", path, error, option) from None


def shortened(svg: str) -> str:
    """The same picture in fewer bytes: places to a hundredth of a point, and no indentation."""
    flush = re.sub(r"\n\s+", "\n", svg)
    return PLACES.sub(lambda found: NUMBER.sub(_rounded, found[0]), flush)


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
