"""Schedules: when a policy looks at its lanes and evicts, the same choice for every policy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from minithink.errors import UsageError


@dataclass(frozen=True)
class Schedule:
    """When a policy looks at its lanes.

    every          after every token: evict down to the budget as soon as budget + slack tokens are held
    interval:n     after every n-th generated token: evict whatever exceeds the budget; the slack is n
    sawtooth:B/k   let a lane grow to B tokens, then keep k of them; the budget is B, the slack 0
    """

    interval: int | None = None  # n; None: no interval, look at every token
    grow: int | None = None  # sawtooth's B
    keep: int | None = None  # sawtooth's k

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From the command line. UsageError: it is none of the three."""
        if text == "every":
            return cls()
        if (found := re.fullmatch(r"interval:(\d+)", text)) and int(found[1]) >= 1:
            return cls(int(found[1]))
        if (found := re.fullmatch(r"sawtooth:(\d+)/(\d+)", text)) and 1 <= int(found[2]) < int(found[1]):
            return cls(None, int(found[1]), int(found[2]))
        raise UsageError(
            f"The schedule {text!r} is unknown; write every, interval:n (n at least 1) or sawtooth:B/k (grow to B "
            "tokens, then keep k, fewer than B)."
        )
