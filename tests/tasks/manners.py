"""What the traces of all families have in common."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

from minithink.tasks.writing import MANNERS


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
