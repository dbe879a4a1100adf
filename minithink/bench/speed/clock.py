"""Time: how long a call takes, sides that run in turns, and how much of a time budget is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

Found = TypeVar("Found")


class Deadline:
    """How much time is left."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.end = None if seconds is None else time.monotonic() + seconds

    def over(self, needed: float = 0.0) -> bool:
        """Whether less than `needed` seconds are left."""
        return self.end is not None and time.monotonic() + needed > self.end


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes, which returns when all of it is done."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Until the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    sides: Mapping[str, Callable[[int], list[Found]]], turns: Sequence[int], deadline: Deadline
) -> dict[str, list[Found]]:
    """Run several sides one after the other, turn by turn, so that a machine that slows down slows all of them.

    The side that begins a turn ends the next one, so that none of two sides is always behind the other.

    Args:
        sides: each takes the number of its turn, such as the steps to take.
        turns: these numbers; fewer turns if the deadline comes, at least one.
        deadline: begin no turn that would end after it, if it takes as long as the one before.

    Returns:
        What each side returned in all of its turns.
    """
    found: dict[str, list[Found]] = {name: [] for name in sides}
    names = list(sides)
    for i, number in enumerate(turns, start=1):
        began = time.monotonic()
        for name in names:
            found[name] += sides[name](number)
        names.reverse()
        if i < len(turns) and deadline.over(time.monotonic() - began):
            break
    return found
