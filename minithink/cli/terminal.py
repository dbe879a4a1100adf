"""Standard output and standard error of a command that generates: styled text, a line of progress, Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from minithink.cli.process import INTERRUPTED, Stopped
from minithink.errors import CONTROL

if TYPE_CHECKING:  # rich is imported late, so that --help is quick
    from rich.console import Console


def plain_console(soft_wrap: bool = False) -> Console:
    """Standard output for text that is shown as it is: no markup, no highlighting. An ASCII terminal shows ? for
    characters that it lacks. soft_wrap: leave it to the terminal to break long lines."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the program; `commands.exit_code` knows what to do

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Plain(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


class Screen:
    """Standard output: dimmed, coloured and normal text on a terminal, plain text elsewhere."""

    def __init__(self) -> None:
        self.console = plain_console(soft_wrap=True)
        # NO_COLOR takes every style here, not only colours.
        self.styled = self.console.is_terminal and not os.environ.get("NO_COLOR")
        self.begun = False  # a line has begun and not ended

    def write(self, text: str, style: str = "") -> None:
        """Show text as it is, at once. On a terminal, control characters become U+FFFD."""
        if text:
            self.begun = not text.endswith("\n")
        if not self.console.is_terminal:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        from rich.text import Text

        self.console.print(Text(CONTROL.sub("\ufffd", text), style=style if self.styled else ""), end="")

    def line(self, text: str = "", style: str = "") -> None:
        """Show text and end the line."""
        self.write(text + "\n", style)

    def end_line(self) -> None:
        """End the line, if one has begun."""
        if self.begun:
            self.line()


@contextmanager
def counter() -> Iterator[Callable[[int], None]]:
    """Count tokens in a line of standard error, if that is a terminal. Gives a function to call with new tokens."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.completed:,} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda count: progress.advance(task, count)


def until_interrupted(work: Callable[[], None]) -> int:
    """Do the work → the exit code, which says whether Ctrl-C or a signal ended it. What was done before stays."""
    try:
        work()
    except Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
