"""Annealing, against the rules one segment after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.anneal import anneal


@dataclass
class Row:
    """A sequence: sizes, types and levels of its segments, how many tokens too many there are."""

    size: list[int]
    kind: list[int]
    level: list[int]
    excess: int
    running: int
    ended: bool
    turn: bool
    active: bool = True
    cases: list[int] = field(default_factory=lambda: [0, 0])

    def shrink(self, i: int, to: int, case: int) -> None:
        less = self.size[i] - to
        if less > 0:
            self.size[i], self.excess = to, self.excess - less
            self.cases[case] += 1

    def down(self, i: int, retention: Sequence[int], case: int) -> None:
        self.level[i] += 1
        self.shrink(i, retention[self.level[i] - 1], case)

    def first(self, which: Sequence[int], above: int) -> int | None:
        """The oldest of the least important type, of those that hold more than so many."""
        if self.excess <= 0:
            return None
        return min((i for i in which if self.size[i] > above), key=lambda i: (self.kind[i], i), default=None)

    def anneal(self, retention: Sequence[int], hard: bool) -> None:
        if not self.active:
            return
        past = range(self.running + self.ended)
        if self.turn:
            for i in range(self.running):
                if self.size[i] and self.level[i] < len(retention):
                    self.down(i, retention, 0)
        while (i := self.first(past, retention[-1])) is not None:
            self.down(i, retention, 1)
        if not hard:
            return
        for kept in retention:
            if (i := self.first([self.running], kept)) is not None:
                self.shrink(i, kept, 1)
        for kept in (2, 1, 0):
            while (i := self.first(range(self.running + 1), kept)) is not None:
                self.shrink(i, kept, 1)


@st.composite
def rows(draw: st.DrawFn, retention: Sequence[int], segments: int, transitions: bool) -> Row:
    """Any that annealing may find: at level n there are at most R_n tokens, behind the running segment none."""
    running = draw(st.integers(0, segments - 1))
    ended = draw(st.booleans())
    size, level = [], []
    for i in range(segments):
        n = draw(st.integers(0, len(retention))) if i < running else 0
        most = (retention[n - 1] if n else retention[0] + 9) if i <= running else 0
        size.append(draw(st.integers(0, most)))
        level.append(n)
    kind = draw(st.lists(st.integers(0, 2), min_size=segments, max_size=segments))
    excess = draw(st.integers(-3, sum(size) + 2))
    turn = transitions and ended and kind[running] == 0
    return Row(size, kind, level, excess, running, ended, turn, draw(st.sampled_from([True, True, True, False])))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], tuple[int, ...], bool, bool]:
    """Rows, R, whether the budget is hard, whether there is a case 1."""
    retention = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True).map(lambda r: sorted(r)[::-1]))
    segments, transitions = draw(st.integers(1, 7)), draw(st.sampled_from([True, True, False]))
    batch = draw(st.lists(rows(retention, segments, transitions), min_size=1, max_size=4))
    return batch, tuple(retention), draw(st.booleans()), transitions


TAU = 5


def tensors(batch: Sequence[Row]) -> tuple[torch.Tensor, ...]:
    """The arguments of `anneal` in front of τ: the rows in another order, others between them; two lanes, of which
    each is the fullest for some segments."""
    n, segments = len(batch), len(batch[0].size)
    most = torch.tensor([row.size for row in batch], dtype=torch.int32)
    odd = torch.arange(segments) % 2 == 1
    size = torch.stack((torch.where(odd, most, most // 2), torch.where(odd, most // 3, most)))[:, :, None]
    many = torch.tensor([row.excess for row in batch], dtype=torch.int32)
    excess = torch.stack((many - 2, many))[:, :, None]
    at = 2 * n - 1 - 2 * torch.arange(n)
    kind, level = (torch.full((2 * n + 1, segments), 3, dtype=torch.uint8) for _ in range(2))
    for name, x in (("kind", kind), ("level", level)):
        x[at] = torch.tensor([getattr(row, name) for row in batch], dtype=torch.uint8)
    cases = torch.arange(2 * (2 * n + 1), dtype=torch.int32).view(2, -1)
    clocks = [TAU * (r.running + r.ended) + (2 if r.running and not r.ended else 0) for r in batch]
    clock = torch.tensor(clocks, dtype=torch.int32)
    return size, excess, kind, level, cases, at, clock, torch.tensor([row.active for row in batch])


def annealed(batch: Sequence[Row], *options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `anneal` says of the rows: goal, level, and how many times segments lost tokens. Nothing else changes."""
    arguments = tensors(batch)
    goal = anneal(*arguments, TAU, *options)
    size, excess, kind, level, cases, at, clock, active = tensors(batch)
    for name, x, before in zip(
        "abcdef", (*arguments[:3], *arguments[5:]), (size, excess, kind, at, clock, active), strict=True
    ):
        assert torch.equal(x, before), name
    more = arguments[4] - cases
    others = torch.ones(len(kind), dtype=torch.bool).index_fill_(0, at, False)
    assert torch.equal(arguments[3][others], level[others])
    assert not more[:, others].any()
    assert (goal.dtype, arguments[3].dtype, arguments[4].dtype) == (torch.int32, torch.uint8, torch.int32)
    return goal, arguments[3][at], more[:, at]


@given(batches())
def test_it_is_the_rules_one_after_the_other(case: tuple[list[Row], tuple[int, ...], bool, bool]) -> None:
    batch, *options = case
    goal, level, cases = annealed(batch, *options)
    for row in batch:
        row.anneal(*options[:2])
    assert goal.tolist() == [row.size for row in batch]
    assert level.tolist() == [row.level for row in batch]
    assert cases.t().tolist() == [row.cases for row in batch]


@pytest.mark.parametrize(
    ("excess", "turn", "hard", "goal", "cases"),
    [
        (0, False, True, [9, 20, 64, 30, 7], (0, 0)),
        (0, True, True, [8, 20, 32, 30, 7], (2, 0)),  # all before the one that has just ended
        (1, False, True, [9, 16, 64, 30, 7], (0, 1)),  # a transition, the oldest
        (20, False, True, [9, 4, 32, 30, 7], (0, 4)),  # it gives 16, then comes an execution, 64 to 32
        (108, False, False, [4, 4, 4, 4, 7], (0, 12)),  # 107 is all that they have
        (107 + 3, False, True, [4, 4, 4, 4, 4], (0, 13)),
        (107 + 3 + 3, False, True, [4, 2, 4, 4, 2], (0, 15)),  # the transitions first, the running one too
        (10**4, False, True, [0] * 5, (0, 28)),
    ],
)
def test_by_hand(excess: int, turn: bool, hard: bool, goal: list[int], cases: tuple[int, int]) -> None:
    """R = 64, 32, 16, 8, 4; reasoning, transition, execution, reasoning have ended, a transition runs."""
    kind = [2, 0, 1, 0 if turn else 2, 0]  # … unless it is a transition that has ended last
    row = Row([9, 20, 64, 30, 7], kind, [3, 1, 1, 1, 0], excess, 4 if not turn else 3, turn, turn)
    got, _, counted = annealed([row], (64, 32, 16, 8, 4), hard, True)
    assert got.tolist() == [goal]
    assert tuple(counted[:, 0].tolist()) == cases


def test_a_hard_budget_decides_most_where_its_room_is_a_number_of_r() -> None:
    """One sequence: 1,024 tokens, 128 of them a prompt, all ended segments at 4.

    docs/appendix/thinkv.md says this of the eighth of a generation around 26,624 tokens, segment 208.
    """
    tau, retention, budget, begin, end = 128, (64, 32, 16, 8, 4), 1024, 192, 224
    kind, level = torch.full((1, end), 2, dtype=torch.uint8), torch.full((1, end), 5, dtype=torch.uint8)
    level[:, begin:] = 0
    size, cases = torch.zeros(end, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    size[:begin] = 4
    at, active, decisions = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool), [0] * end
    for clock in range(begin * tau + 1, end * tau + 1):
        running = (clock - 1) // tau
        size[running] += 1
        excess = int(size.sum()) + tau - budget
        if excess <= 0:
            continue
        goal = anneal(
            size.view(1, 1, 1, end),
            torch.full((1, 1, 1), excess),
            kind,
            level,
            cases,
            at,
            torch.tensor([clock], dtype=torch.int32),
            active,
            tau,
            retention,
            True,
            True,
        )[0]
        decisions[running] += bool((goal < size).any())
        size = torch.minimum(size, goal).int()
    assert decisions[207:210] == [17, 69, 7]
    assert sum(decisions) / ((end - begin) * tau) == pytest.approx(0.196, abs=5e-4)
