"""Copies of sequences: whose numbers they get. What they hold is tested with `test_thinkv.py`."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.bench.speed import copies
from minithink.kv.table import FreeList

CPU = torch.device("cpu")


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), more=st.integers(0, 9), before=st.integers(0, 9))
def test_numbers_are_drawn_once(counts: list[int], more: int, before: int) -> None:
    """Whatever was drawn before: all numbers are free again, then each is drawn or in the list."""
    free = FreeList(sum(counts) + more, "pages", CPU)
    free.draw(torch.ones(min(before, free.count), dtype=torch.bool), before)
    copies._shuffle(free)
    assert free.free == free.count
    drawn = [free.draw(torch.ones(n, dtype=torch.bool), n) for n in counts]
    assert free.free == more
    left = free.stack[:more].tolist()
    assert sorted([*torch.cat(drawn).tolist(), *left]) == list(range(free.count))


def test_numbers_lie_anywhere() -> None:
    """As pages do where sequences came and went."""
    free = FreeList(1000, "pages", CPU)
    copies._shuffle(free)
    drawn = free.draw(torch.ones(500, dtype=torch.bool), 500)
    apart = (drawn.diff() != 1).float().mean()
    assert apart > 0.9
    assert drawn.max() > 900


def test_what_is_not_copied_is_nowhere() -> None:
    """Behind the last number lies what masked-out writes hit, and behind that what such reads find."""
    there, here = FreeList(4, "pages", CPU), FreeList(9, "pages", CPU)
    numbers = copies._map(there, here, torch.tensor([2, 0]), torch.tensor([8, 5]))
    assert numbers.tolist() == [5, 9, 8, 9, 9, 10]
