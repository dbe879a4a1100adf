"""Schedules: when a policy looks at its lanes and evicts, the same choice for every policy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from minithink.errors import UsageError, quoted

MOST = 2**30 - 1  # tokens or steps: with a budget they stay within 32 bits
NUMBER = r"0*(\d{1,10})"  # few enough digits to be read


@dataclass(frozen=True)
class Schedule:
    """When a policy looks at its lanes.

    every          after every token: evict down to the budget as soon as budget + slack tokens are held
    interval:n     after every n-th generated token: evict whatever exceeds the budget; the slack is n
    sawtooth:B/k   let a lane grow to B tokens, then keep k of them; the budget is B, the slack 0
    share:r/l      let a lane grow to its budget, then keep as many tokens as DynTS's windows do (`divided`)
    """

    interval: int | None = None  # n; None: no interval, look at every token
    grow: int | None = None  # sawtooth's B
    keep: int | None = None  # sawtooth's k
    shares: tuple[float, float] | None = None  # r and l

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From the command line. UsageError: it is none of these."""
        if text == "every":
            return cls()
        if found := re.fullmatch(rf"interval:{NUMBER}", text, re.ASCII):
            every = int(found[1])
            if 1 <= every <= MOST:
                return cls(every)
        if found := re.fullmatch(rf"sawtooth:{NUMBER}/{NUMBER}", text, re.ASCII):
            grow = int(found[1])
            keep = int(found[2])
            if 1 <= keep < grow <= MOST:
                return cls(None, grow, keep)
        if found := re.fullmatch(r"share:(0|0?\.\d{1,9})/(0?\.\d{1,9}|\d{1,9})", text, re.ASCII):
            return cls(shares=(float(found[1]), float(found[2])))
        raise UsageError(
            f"The schedule {quoted(text)} is unknown; write every, interval:n (n at least 1), sawtooth:B/k (grow to "
            "B tokens, then keep k, fewer than B), both with numbers below 2^30, or share:r/l (grow to the budget, "
            "then keep the prompt, l tokens or this share of the rest, and the share r below 1 of what is left)."
        )


PLACES = 9  # decimals of a share


def share_of(x: Any, share: float) -> Any:
    """int(share · x) with the share as a decimal number, for in floats int(0.7 · 90) is 62. x: a whole number of at
    least 0, or an int32 tensor of them."""
    n = int(round(Decimal(repr(share)), PLACES) * 10**PLACES)
    return x * n // 10**PLACES if isinstance(x, int) else (x.long() * n // 10**PLACES).int()


def divided(budget: Any, question: Any, ratio: float, local: float) -> tuple[Any, Any, Any]:
    """Divide a budget into DynTS's three windows, in tokens, for whole numbers or tensors of them.

    Args:
        budget: B.
        question: W_q.
        ratio: r.
        local: W_l; below 1 a share of B − W_q.

    Returns:
        W_s = B − W_q − W_l, k = int(r·W_s), and W_l.
    """
    beside = budget - question
    last = beside * 0 + int(local) if local >= 1 else share_of(beside, local)
    middle = max(0, beside - last) if isinstance(beside, int) else (beside - last).clamp(min=0)
    return middle, share_of(middle, ratio), last
