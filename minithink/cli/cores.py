"""Busy cores: how long the threads of a command wait in a loop before they leave their core to others.

torch computes an operation with several threads, and each waits for the others at its end: first in a loop, because
that is quickest, and then asleep. GNU's OpenMP, which torch's wheels for Linux bring, loops for some milliseconds;
Intel's and LLVM's loop for 200. As long as another program wants a core, a thread that loops keeps a thread that has
work to do from running, and a step takes many times as long. So commands make the loop short, and shorter still where
others run already. On an idle machine it still covers the time between two operations of a step, so that decoding
stays about as fast (`bench busy` measures both).

The length of the loop changes no token. The number of threads may, because it decides how a sum is split: in 59 of 60
steps of one sequence, two threads gave other last bits than one. So the number is the user's to choose (`--threads`),
and nothing here changes it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

# Turns of GNU's loop, and milliseconds of Intel's and LLVM's.
IDLE = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
BUSY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
OF_USERS = ("OMP_WAIT_POLICY", "KMP_LIBRARY", *IDLE)  # a user who sets one of these decides how threads wait
LOADAVG = Path("/proc/loadavg")  # Linux: its fourth field begins with the number of threads that want a core now
LOOKS = 5  # how often that number is read; its median ignores a thread that runs for a moment
PAUSE = 0.002  # seconds between two reads
MANY = 50  # the cores are called busy if other programs take one away at least so many times a second


def wait_briefly() -> None:
    """Make the loop short, for this process and those that it starts.

    Only commands call this, because a library must leave the environment as it is. OpenMP reads the environment when
    torch is imported, so nothing changes after that. A user's own setting stays.
    """
    if "torch" in sys.modules or any(name in os.environ for name in OF_USERS):
        return
    os.environ.update(settings())


def settings() -> dict[str, str]:
    """The environment that makes the loop short."""
    return BUSY if others_run() else IDLE


def others_run() -> bool:
    """Whether other programs want a core now; False where the system does not say it."""
    counts = []
    for _ in range(LOOKS):
        try:
            counts.append(int(LOADAVG.read_text().split()[3].partition("/")[0]))
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(PAUSE)
    return statistics.median(counts) > 1  # this process is one


class Interruptions:
    """Counts how often other programs took a core from this process."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._before = self._count()

    def a_second(self) -> float:
        """How often in a second, since this object was made; 0 where the system does not count it."""
        return (self._count() - self._before) / max(time.perf_counter() - self._begin, 1.0)

    @staticmethod
    def _count() -> int:
        try:
            import resource
        except ImportError:  # Windows
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
