"""Random changes of files: values of wrong types, huge and odd values, and single bytes."""

from __future__ import annotations

import copy
import random
from typing import Any

# Python's json reads NaN, and writes it: a file may hold it.
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1.5,
    0.5,
    2**63,
    10**400,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "full",
    "\x1b[31m\u202e",
    "\ud800",
    "\ufffe",
    "x" * 10_000,
    [],
    {},
    [1],
    ["a", 1],
    [10**400],
    [float("nan")],
    {"a": {}},
]
DEPTH = 700  # of lists: Python's json still reads and writes them


def nested() -> list[Any]:
    """Empty lists, nested DEPTH deep."""
    value: list[Any] = []
    for _ in range(DEPTH):
        value = [value]
    return value


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of a value of JSON in which one or two places are changed, added or missing."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 2)):
        place = value
        while place:
            key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
            inside = place[key]
            if isinstance(inside, (dict, list)) and inside and chance.random() < 0.7:
                place = inside
                continue
            _change(place, key, chance)
            break
    return value


def _change(place: Any, key: Any, chance: random.Random) -> None:
    """Change, remove or add one value."""
    what = chance.random()
    new = nested() if chance.random() < 0.05 else copy.deepcopy(chance.choice(HOSTILE))
    if what < 0.15:
        del place[key]
    elif what < 0.25 and isinstance(place, dict):
        place["new\x1b"] = new
    else:
        place[key] = new


def flipped(data: bytes, chance: random.Random) -> bytes:
    """A copy of the bytes in which one byte is changed."""
    changed = bytearray(data)
    changed[chance.randrange(len(changed))] ^= chance.randint(1, 255)
    return bytes(changed)
