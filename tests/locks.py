"""Two processes at one file: interleavings that a test chooses, and many that chance chooses."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def before_the_lock(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something once, right before the next lock is asked for: what another process does between this process's
    steps. A lock belongs to one opening of a file, so one process can play both."""
    flock = fcntl.flock

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        action()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", interrupted)


def race(program: str, folder: Path, rounds: int) -> list[list[str]]:
    """Let two processes open a new journal at the same instant, again and again.

    Args:
        program: source that defines `start(path)`, which opens the journal of a round, appends to it and returns it.
            It raises MinithinkError where the other process is quicker.
        folder: round i gets the path folder / str(i).

    Returns:
        For each round what the two say: "won", or the error's type and sentence.
    """
    loop = """
import sys
from pathlib import Path
from minithink.errors import MinithinkError
held = None
print("ready", flush=True)
for line in sys.stdin:
    try:
        journal = start(Path(line.strip()))
        said = "won"
    except MinithinkError as error:
        journal, said = None, f"{type(error).__name__}: {error}"
    print(said, flush=True)
    sys.stdin.readline()  # until the other has tried, too
    if journal is not None:
        journal.close()
"""
    command = [sys.executable, "-c", program + loop]
    said = []
    with ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        both = [stack.enter_context(subprocess.Popen(command, cwd=ROOT, **pipes)) for _ in range(2)]
        stack.callback(lambda: [process.kill() for process in both])

        def hear() -> list[str]:
            return [process.stdout.readline().strip() for process in both if process.stdout]

        def tell(line: str) -> None:
            for process in both:
                assert process.stdin is not None
                process.stdin.write(line + "\n")
                process.stdin.flush()

        assert hear() == ["ready", "ready"]
        for i in range(rounds):
            tell(str(folder / str(i)))
            said.append(hear())
            tell("")
    return said
