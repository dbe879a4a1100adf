"""Figures are drawn with matplotlib, which is an extra."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from minithink.errors import MinithinkError, unwritable
from minithink.files import replace


def need_matplotlib() -> Any:
    """The module. MinithinkError: it is not installed."""
    try:
        import matplotlib  # here: an extra, and slow to import
    except ImportError:
        raise MinithinkError(
            "A plot needs matplotlib, which is not installed: run `pip install minithink[plots]`."
        ) from None
    return matplotlib


def write_svg(figure: Any, path: Path, option: str = "--plot") -> None:
    """A figure as SVG, undated. MinithinkError: it cannot be written; the message says to give another `option`."""
    whole = io.BytesIO()
    figure.savefig(whole, format="svg", metadata={"Date": None})
    try:
        replace(path, whole.getvalue())
    except OSError as error:
        raise unwritable("The picture", path, error, option) from None
