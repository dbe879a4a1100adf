"""Figures are drawn with matplotlib, which is an extra."""

from __future__ import annotations

from typing import Any

from minithink.errors import MinithinkError


def need_matplotlib() -> Any:
    """The module. MinithinkError: it is not installed."""
    try:
        import matplotlib  # here: an extra, and slow to import
    except ImportError:
        raise MinithinkError(
            "A plot needs matplotlib, which is not installed: run `pip install minithink[plots]`."
        ) from None
    return matplotlib
