"""Commands in processes of their own, forked from one that has imported torch: a start takes seconds, a fork none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 300  # seconds until a command that hangs is ended

# A child leaves the loop and ends as every command ends: by the end of this program.
CODE = f"""
import json
import os
import runpy
import signal
import sys
import torch
import minithink
import minithink.trace.recorder

torch.set_num_threads(1)
minithink.load().generate("a", max_new_tokens=1)  # torch imports much of itself when it first runs
asked = None
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        asked = json.loads(line)
        break
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
if asked is not None:
    signal.alarm({LONGEST})
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (2, asked["stderr"], os.O_WRONLY | os.O_CREAT),
        (1, asked["stdout"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags), number)
    exec(asked["before"])
    sys.argv = asked["words"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Forks:
    """Runs `python -m MODULE …`, one command at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # A child cannot use CUDA, which the parent has started. Without a GPU, commands run on the CPU.
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            # Shells start what runs in their background with Ctrl-C ignored, and children inherit that: not this one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def start(self, *words: object, stdout: str | Path, stderr: Path, before: str = "") -> int:
        """Start a command, whose number is given back.

        Args:
            words: the module and its arguments.
            stdout: a file, a named pipe or a device.
            stderr: a file.
            before: code that runs first.
        """
        asked = {"words": [*map(str, words)], "stdout": str(stdout), "stderr": str(stderr), "before": before}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """The exit code of the command; −n if the signal n ended it."""
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout
        return int(self.process.stdout.readline())


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    it = Forks()
    yield it
    it.process.communicate()
