"""The file of a page: it replaces nothing but another page, and a browser opens it."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

from minithink.errors import escaped, unwritable
from minithink.results import files
from minithink.trace.format import PAGE, refuse_others

BEGINNING = 4096  # bytes of a file in which a page has its title


def check_place(path: Path) -> None:
    """Refuse a place where no page can be written, before the work that makes the page.

    Raises:
        MinithinkError: the path is a folder, a file that is no page of a trace and would be lost, or lies where
            nothing can be written.
    """
    refuse_others(path, BEGINNING, lambda begins: PAGE in begins, "page of a trace", "--output")
    try:
        files.check_place(path)
    except OSError as error:
        raise unwritable("The page of a trace", path, error, "--output") from None


def write(path: Path, content: str) -> None:
    """Write a page, whole or not at all. MinithinkError: it cannot be written, or something else is there."""
    check_place(path)
    try:
        files.replace(path, content)
    except OSError as error:
        raise unwritable("The page of a trace", path, error, "--output") from None


def show(path: Path, instead: str = "") -> None:
    """Open a page in a browser, or say where it is if there is no browser. instead: what else to do then."""
    if not webbrowser.open(path.resolve().as_uri()):
        said = f"no browser was found: open {path.resolve()} in one yourself{instead}"
        print(f"minithink.trace: {escaped(said)}", file=sys.stderr)
