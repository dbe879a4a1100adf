"""What surrounds a command: signals that end it, and standard streams, which may be closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 130  # what shells report for a program that SIGINT ended: 128 and the signal's number
STREAMS = ("stdin", "stdout", "stderr")  # in the order of their numbers


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP came. A command answers them as it answers Ctrl-C, so nothing is lost."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.code = 128 + number  # the exit code
        self.said = False  # whether the user has been told
        super().__init__(signal.Signals(number).name)


class Signals:
    """Makes SIGTERM and SIGHUP raise `Stopped` while a command runs.

    Signals that are ignored, as under `nohup`, or that have another handler keep it. Processes of torchrun keep all
    their signals: they may wait for each other where nothing can be raised, and torchrun itself says what has ended.
    """

    def __init__(self) -> None:
        self.stopped: Stopped | None = None  # by what
        self._ours = list[int]()

    def __enter__(self) -> Signals:
        main = threading.current_thread() is threading.main_thread()
        if not main or "TORCHELASTIC_RUN_ID" in os.environ:
            return self
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._stop)
                self._ours.append(number)
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._ours:
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Raise `Stopped`, once: a second signal must not keep the first from being answered."""
        if self.stopped is None:
            self.stopped = Stopped(number)
            raise self.stopped


def open_streams() -> list[str]:
    """Put the null device in the place of standard streams that are closed → their names.

    Otherwise the next file that is opened would get their number, and what is printed would go into it.
    """
    closed = [name for name in STREAMS if getattr(sys, name) is None]
    for name in closed:  # the numbers first: the files below must not take them
        number = STREAMS.index(name)
        if not _is_open(number):
            _open_null(number)
    for name in closed:
        null = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115 (it stays open)
        setattr(sys, name, null)
    return closed


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _open_null(number: int) -> None:
    """Open the null device under this number. Child processes inherit it, as they inherit other standard streams."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)
