"""What the traces of all families have in common."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable
from typing import Any
from unittest import mock

from minithink.tasks.writing import MANNERS, Writer
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION

# What the functions that say a line are writing; others plan.
WRITERS = {
    "paragraph": TRANSITION,
    "compute": EXECUTION,
    "trial": EXECUTION,
    "recheck": TRANSITION,
    "review": TRANSITION,
    "remind": TRANSITION,
    "retry": TRANSITION,
    "turn": TRANSITION,
    "reread": TRANSITION,
}
OPENINGS = {"Still": REASONING, "None fits.": TRANSITION, "So": EXECUTION, "I know": REASONING}  # of search's lines


def written(family: Any, size: int, rng: random.Random) -> tuple[str, list[tuple[str, int]]]:
    """A trace, its lines, and their kinds by the functions of the generator that wrote them."""
    out: list[tuple[str, int]] = []

    def say(self: Writer, line: str) -> None:
        writer = sys._getframe(1).f_code.co_name
        kind = WRITERS.get(writer, REASONING)
        if writer in ("search", "trial"):
            kind = next((k for opening, k in OPENINGS.items() if line.startswith(f"{opening} ")), kind)
        if out and out[-1][1] == TRANSITION and not self.lines[-1].endswith("\n\n"):
            kind = TRANSITION  # until its paragraph ends
        out.append((line, kind))
        plain(self, line)

    plain = Writer.say
    with mock.patch.object(Writer, "say", say):
        thinking, _ = family.draw_trace(family.draw_problem(rng, size), rng)
    assert [line for line in thinking.split("\n") if line] == [line for line, _ in out]
    return thinking, out


def assert_three_kinds_and_manners(family: Any, size: int, words: Iterable[str]) -> None:
    """300 traces of problems of this size: thoughts of all kinds, with these words among them; manners differ."""
    rng = random.Random(5)
    waits: dict[int, list[int]] = {}
    texts = []
    for _ in range(300):
        problem = family.draw_problem(rng, size)
        thinking, _ = family.draw_trace(problem, rng)
        texts.append(thinking)
        opening = thinking.split("\n")[0]
        manner = next(i for i, m in enumerate(MANNERS) if opening in m.opening)
        waits.setdefault(manner, []).append(len(re.findall("Wait, let me|Alternatively", thinking)))
    mean = [sum(waits[i]) / len(waits[i]) for i in range(3)]
    assert mean[0] < mean[1] < mean[2]  # the inclination to re-check is a trait of the trace
    collected = sum("So the results are" in t for t in texts) / len(texts)
    assert 0.02 < collected < 0.3  # most traces do not collect their results
    everything = "".join(texts)
    for word in words:
        assert word in everything
