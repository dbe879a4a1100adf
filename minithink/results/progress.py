"""How far a run of graded sequences got: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minithink.errors import counted

QUIET = 30.0  # seconds between lines, where there is no terminal
SEEN = 0.1  # between changes of a bar: a step may take less, and none is to wait for the terminal


class Advance:
    """Counts the sequences that are done. Call it with every sequence that ends: True if it is right, None if it was
    not graded."""

    def __init__(self, total: int, done: int, right: int, tokens: int, graded: int) -> None:
        self.total, self.done, self.right, self.tokens = total, done, right, tokens
        self.graded = graded
        self.show: Callable[[], object] = lambda: None  # called when something has changed
        self._before, self._begin = (done, tokens), time.monotonic()

    def __call__(self, is_right: bool | None) -> None:
        self.done += 1
        self.right += is_right is True
        self.graded += is_right is not None
        self.show()

    def step(self, tokens: int) -> None:
        """Somewhere so many tokens were generated."""
        self.tokens += tokens
        self.show()

    def __str__(self) -> str:
        """What is right so far, tokens, and how fast they come; "": nothing is known."""
        tokens = self.tokens - self._before[1]
        parts = []
        if self.graded:
            parts.append(f"{self.right} of {self.graded} right ({self.right / self.graded:.1%})")
        if tokens and (seconds := time.monotonic() - self._begin):
            parts.append(f"{counted(self.tokens, 'token')}, {tokens / seconds:,.1f} tokens/s")
        return "; ".join(parts)

    def left(self) -> float:
        """Seconds until the rest is done, if it is as fast as what was done since the start; 0: nobody knows."""
        seen = self.done - self._before[0]
        return (time.monotonic() - self._begin) / seen * (self.total - self.done) if seen else 0.0


@contextmanager
def progress(
    total: int,
    done: int,
    label: str = "",
    silent: bool = False,
    *,
    right: int = 0,
    tokens: int = 0,
    graded: int | None = None,
) -> Iterator[Advance]:
    """Show on standard error how many sequences are done, how many of them are right, what was generated, and when
    the rest will be done if it is as fast.

    Args:
        total: sequences.
        done: of these, before.
        label: what runs, in front of all that.
        silent: show nothing; another process does.
        right: of those done before.
        tokens: that those have.
        graded: of those done before; None: all.
    """
    advance = Advance(
        total=total,
        done=done,
        right=right,
        tokens=tokens,
        graded=done if graded is None else graded,
    )
    if silent:
        yield advance
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total, completed=done)
            if label:
                bar.console.print(label, markup=False, highlight=False)
            shown, last = -1, 0.0

            def update() -> None:
                nonlocal shown, last
                if advance.done > shown or time.monotonic() - last > SEEN:
                    shown, last = advance.done, time.monotonic()
                    bar.update(task, completed=advance.done, description=str(advance))

            advance.show = update
            yield advance
        return
    last, shown = time.monotonic(), done

    def line() -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - last < QUIET and not shown < advance.done == total:
            return
        last, shown = now, advance.done
        parts = [f"{label and label + ': '}{advance.done:,} of {counted(total, 'sequence')}", str(advance)]
        left = advance.left()
        parts += [f"{duration(left)} left"] if left else []
        print("; ".join(filter(None, parts)), file=sys.stderr, flush=True)

    advance.show = line
    yield advance


def duration(seconds: float) -> str:
    """95 → "1:35", 3700 → "1:01:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
