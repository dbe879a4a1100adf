"""Sides that run in turns. To run it alone: pytest tests/bench/speed/test_clock.py"""

from __future__ import annotations

from collections.abc import Callable

from minithink.bench.speed.clock import Deadline, in_turns


class Noting:
    """Sides that note in which order they run, and return the number of their turn."""

    def __init__(self, names: str) -> None:
        self.order = list[tuple[str, int]]()
        self.sides = {name: self.side(name) for name in names}

    def side(self, name: str) -> Callable[[int], list[int]]:
        def run(number: int) -> list[int]:
            self.order.append((name, number))
            return [number]

        return run


def test_the_side_that_begins_alternates() -> None:
    noting = Noting("ab")
    assert in_turns(noting.sides, [3, 2, 1], Deadline(60)) == {"a": [3, 2, 1], "b": [3, 2, 1]}
    assert noting.order == [("a", 3), ("b", 3), ("b", 2), ("a", 2), ("a", 1), ("b", 1)]


def test_every_second_turn_of_several_sides_is_in_reverse_order() -> None:
    noting = Noting("abc")
    assert list(in_turns(noting.sides, [1, 2, 3], Deadline(None))) == ["a", "b", "c"]
    assert "".join(name for name, _ in noting.order) == "abccbaabc"


def test_a_deadline_leaves_out_turns_but_the_first() -> None:
    assert in_turns(Noting("ab").sides, [3, 3, 1], Deadline(0)) == {"a": [3], "b": [3]}
