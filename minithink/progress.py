"""How far a run of graded sequences got: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET = 30.0  # seconds between lines, where there is no terminal

Advance = Callable[[bool], None]  # called with every sequence that ends: is it right?


@contextmanager
def progress(total: int, done: int, label: str = "", silent: bool = False) -> Iterator[Advance]:
    """Show on standard error how many sequences are done, how many of those of this run are right, and when the rest
    will be done if they are as fast.

    Args:
        total: sequences.
        done: of these, before.
        label: what runs, in front of all that.
        silent: show nothing; another process does.
    """
    if silent:
        yield lambda is_right: None
        return
    right = seen = 0
    begin = last = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total, completed=done)
            if label:
                bar.console.print(label, markup=False, highlight=False)

            def advance(is_right: bool) -> None:
                nonlocal right, seen
                right, seen = right + is_right, seen + 1
                bar.update(task, advance=1, description=f"{right} of {seen} right ({right / seen:.1%})")

            yield advance
        return

    def line(is_right: bool) -> None:
        nonlocal right, seen, last
        right, seen, now = right + is_right, seen + 1, time.monotonic()
        if now - last > QUIET or done + seen == total:
            last = now
            left = (now - begin) / seen * (total - done - seen)
            print(
                f"{label and label + ': '}{done + seen} of {total} sequences; {right} of {seen} right "
                f"({right / seen:.1%})" + (f"; {duration(left)} left" if left else ""),
                file=sys.stderr,
                flush=True,
            )

    yield line


def duration(seconds: float) -> str:
    """95 → "1:35", 3700 → "1:01:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
