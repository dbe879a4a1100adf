"""Needs that are met: by hand, against a plain loop, and at the ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.evaluate.needed import HELD, needed_kept
from minithink.tasks.needs import Need, Reading, Statement

# Prompt: tokens 0 to 3; statements of the text: 4 to 6, 7 to 9.
READING = Reading(
    [Statement(4, 7, "plan"), Statement(7, 10, "compute")],
    [Need(0, ("left", "zot"), (1,)), Need(1, ("left", "zot"), (1, 5)), Need(1, ("value", "zot"), (5, 6))],
)


def lanes(*held: dict[int, int]) -> torch.Tensor:
    """A lane from {token: when it left}."""
    return torch.tensor([[lane.get(token, HELD) for token in range(10)] for lane in held], dtype=torch.int32)


def test_by_hand() -> None:
    assert needed_kept(READING, lanes({}, {}), 4) == (3, 1.0, 1.0)
    # The second statement begins with generated token 3.
    assert needed_kept(READING, lanes({5: 4}), 4) == (3, 1.0, 1.0)
    assert needed_kept(READING, lanes({5: 3}), 4) == (3, 1.0, 1.0), "another place would do"
    assert needed_kept(READING, lanes({5: 3, 6: 3}), 4) == (3, 2 / 3, 2 / 3)
    assert needed_kept(READING, lanes({5: 3, 6: 4}), 4) == (3, 1.0, 1.0), "it leaves behind the statement's beginning"
    assert needed_kept(READING, lanes({1: 0}), 4) == (3, 2 / 3, 2 / 3)
    # Lanes help each other out in the last figure only.
    kept = needed_kept(READING, lanes({5: 2, 6: 2}, {1: 0}), 4)
    assert kept.kept == pytest.approx(4 / 6)
    assert kept.somewhere == 1.0


def test_what_the_prompt_meets_may_be_left_out() -> None:
    assert needed_kept(READING, lanes({5: 2, 6: 2}), 4, beyond_prompt=True) == (1, 0.0, 0.0)
    assert needed_kept(READING, lanes({1: 0}), 4, beyond_prompt=True) == (1, 1.0, 1.0)


def test_a_text_that_needs_nothing() -> None:
    pairs, *shares = needed_kept(Reading(), lanes({}), 4)
    assert pairs == 0
    assert all(map(math.isnan, shares))


@given(st.data())
def test_as_a_plain_loop_counts(data: st.DataObject) -> None:
    prompt, count, rows = 3, data.draw(st.integers(5, 30)), data.draw(st.integers(1, 4))
    starts = sorted(data.draw(st.sets(st.integers(prompt, count - 1), min_size=1)))
    statements = [Statement(a, b, "") for a, b in zip(starts, [*starts[1:], count], strict=True)]
    needs = [
        Need(i, ("value", "zot"), tuple(data.draw(st.sets(st.integers(0, s.start - 1), min_size=1))))
        for i, s in enumerate(statements)
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    when = st.one_of(st.integers(0, count), st.just(HELD))
    left = [[data.draw(when) for _ in range(count)] for _ in range(rows)]
    met = [
        [any(lane[p] > statements[n.statement].start - prompt for p in n.places) for n in needs] for lane in left
    ]
    found = needed_kept(Reading(statements, needs), torch.tensor(left, dtype=torch.int32), prompt)
    assert found.pairs == len(needs)
    assert found.kept == pytest.approx(sum(map(sum, met)) / (rows * len(needs)))
    assert found.somewhere == pytest.approx(sum(map(any, zip(*met, strict=True))) / len(needs))
