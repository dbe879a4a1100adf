"""A process that compares expressions in LaTeX (`mathematics.py`), bounded in time and memory.

An expression that a model writes, such as 9^{9^{9^9}}, may take forever or all memory to evaluate. A limit by signals
works in the main thread only, and not while one long operation of C runs. So one child process compares for this one.
It starts with the first comparison and lives until the program ends. If it needs too long, it is killed, and the next
comparison starts another. The limit counts the child's own processor time, so a busy machine does not change which
answers are right.

Each request has a number, and so has the verdict on it. A line is [number, expression, expression] one way, and
[number, verdict] the other way. All other lines are skipped: what sympy, or a package that it imports, may print
decides nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from typing import Any, TextIO

from minithink.errors import MinithinkError

SECONDS = 5  # of processor time, for one comparison
PATIENCE = 120  # seconds of the clock after which a comparison is given up, however little of them the child got
START = 300  # seconds of the clock in which the child must be ready: it imports sympy
READY = "ready\n"  # the child says this line first
MEMORY = 3 * 2**30  # bytes of address space that the child may have
LONGEST = 2000  # characters of an expression that is evaluated at all
# What the child runs. It imports nothing before it has this process's paths, because `python -c` looks in the current
# folder first.
_CHILD = """
import sys
seconds, *sys.path = sys.argv[1:]
from minithink.evaluate import judge
judge.serve(int(seconds))
"""


def equal(found: str, answer: str) -> bool:
    """Whether two expressions are equal; False: they differ, are too long, or take too much time or memory.

    Raises:
        MinithinkError: math-verify is not installed, or does not work.
    """
    if max(len(found), len(answer)) > LONGEST:
        return False
    return _judge.ask(found, answer)


class Judge:
    """The child process, and the conversation with it. Threads take turns."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._turn = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._foreign: subprocess.Popen[str] | None = None  # of the process that this one was forked from
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked = 0  # requests so far; the number of the newest

    def ask(self, found: str, answer: str) -> bool:
        """Whether two expressions are equal."""
        with self._turn:
            if self._child is None or self._child.poll() is not None:
                self._start()
            child = self._child
            assert child is not None
            assert child.stdin is not None
            self._asked += 1
            right = _verdict(self._asked, True)
            wrong = _verdict(self._asked, False)
            try:
                child.stdin.write(json.dumps([self._asked, found, answer]) + "\n")
                child.stdin.flush()
                reply = self._wait_for({right, wrong}, PATIENCE)
            except OSError:
                reply = ""
            except BaseException:  # Ctrl-C: the child may still be at work, and the next question would wait for it
                self._stop()
                raise
            if not reply:  # it took too long and was killed, or is killed now
                self._stop()
            return reply == right

    def _start(self) -> None:
        """Start a child and wait until it is ready."""
        if importlib.util.find_spec("math_verify") is None:
            raise MinithinkError(
                "The grader math needs math-verify, which is not installed: pip install 'math-verify>=0.9'."
            )
        self._stop()
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(self._seconds), *map(str, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._child = child
        self._replies = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(child, self._replies), daemon=True).start()
        try:
            ready = self._wait_for({READY}, START)
        except BaseException:  # Ctrl-C: a child that is not ready must not be asked
            self._stop()
            raise
        if not ready:
            self._stop()
            raise MinithinkError(
                "The grader math does not work: math-verify, or something that it needs, cannot be imported; pip "
                "install --force-reinstall 'math-verify>=0.9'."
            )

    def _wait_for(self, lines: Collection[str], seconds: float) -> str:
        """The child's next line that is one of these; "": it has ended, or this took too long."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._replies.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return ""
            if line == "" or line in lines:
                return line

    def _stop(self) -> None:
        """End the child, if there is one."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._child = None

    def forget(self) -> None:
        """In a process that was forked: the child is the other process's, and two must not write into one pipe. The
        thread that listens to it is not in this process."""
        self._turn = threading.Lock()
        if self._child is not None:
            self._child.returncode = 0  # it is not ours to wait for
            self._foreign = self._child  # to free its pipes would wait for that thread
            self._child = None


def _listen(child: subprocess.Popen[str], replies: queue.SimpleQueue[str]) -> None:
    """Pass on the child's lines; the last one is empty, when it has ended."""
    assert child.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # the pipe is closed while it is read
        for line in child.stdout:
            replies.put(line)
    replies.put("")


def _verdict(number: int, right: bool) -> str:
    """The line that answers a request. number: of the request."""
    return json.dumps([number, right]) + "\n"


_judge = Judge()
atexit.register(_judge._stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_judge.forget)


# --- in the child


class OutOfTime(BaseException):
    """A comparison has used up its time. No Exception, since sympy catches those."""


def serve(seconds: int) -> None:
    """Compare pairs of expressions from standard input, a JSON line each, until it ends. The child runs this.

    Only this function writes to standard output. What else is printed goes to standard error.
    """
    import signal

    from minithink.evaluate import mathematics

    def out_of_time(*_: object) -> None:
        raise OutOfTime

    output = _output_of_its_own()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, out_of_time)
    _bound_memory()
    mathematics.equal("x", "y")  # imports everything
    output.write(READY)
    output.flush()
    for line in sys.stdin:
        number, found, answer = json.loads(line)
        try:
            _bound_time(seconds)
            right = mathematics.equal(found, answer)
        except (Exception, OutOfTime):  # sympy's errors are of every kind
            right = False
        finally:
            _bound_time(0)
        output.write(_verdict(number, right))
        output.flush()


def _output_of_its_own() -> TextIO:
    """Standard output, which from now on nothing else in this process writes to, C code included."""
    sys.stdout.flush()
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output


def _bound_memory() -> None:
    """Bound the address space of this process, where the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time(seconds: int) -> None:
    """Let OutOfTime be raised after so much processor time; after three times as much the system ends this process,
    which a long operation of C does not see otherwise. 0: there is no limit."""
    with contextlib.suppress(ImportError, AttributeError):
        import resource
        import signal

        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        most: Any = resource.getrlimit(resource.RLIMIT_CPU)[1]
        limit = spent + 3 * seconds if seconds else most
        resource.setrlimit(resource.RLIMIT_CPU, (limit, most))
        signal.setitimer(signal.ITIMER_PROF, seconds)
