"""A policy of a user's own in a file, for tests, and a process that has loaded none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from minithink.policies import POLICIES, own

MINE = '''
from dataclasses import dataclass
from typing import ClassVar, Literal

from minithink.kv.contract import Policy
from minithink.policies.scored import Scored


@dataclass
class Mine(Scored):
    """Keep the newest, or the oldest."""

    budget: int | None = None
    sign: float = 1.0  # 1: the newest stay; -1: the oldest
    which: Literal["new", "old"] = "new"
    schedule: str = "every"

    traced = ""
    scope = "sequence"

    def scores(self, step, choice):
        return self.sign * step.pos().double()


@dataclass
class Needs(Policy):
    size: int
    shape: tuple[int, ...] = (1, 2)

    def __post_init__(self):
        if self.size == 7:
            raise KeyError("seven")


class Bare(Policy):
    budget: int = 3


class Half(Mine):
    more: int = 3


class Typed(Mine):
    traced: ClassVar[str] = "older"


def no_policy():
    return 3
'''


@contextmanager
def unloaded() -> Iterator[None]:
    """What is loaded and registered within is forgotten."""
    known = dict(POLICIES)
    path = list(sys.path)
    files = dict(own._FILES)
    modules = set(sys.modules)
    try:
        yield
    finally:
        POLICIES.clear()
        POLICIES.update(known)
        own._FILES.clear()
        own._FILES.update(files)
        added = [folder for folder in sys.path if folder not in path]
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if any(file.startswith(folder) for folder in added):
                del sys.modules[name]
