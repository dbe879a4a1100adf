"""Some rows shown alone, as a batch of their own: a policy sees of them what it sees among all rows.

So it decides the same, whatever the other rows hold: `tests/kv/test_plain.py` shows this of every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import minithink.kv.manager as manager_module
from minithink.kv.batch import Batch
from minithink.kv.contract import Demand, Edit, Policy, See, Step
from tests.compare import assert_same
from tests.kv.run import Cut, feed, manager_for, text_of
from tests.kv.test_batches import ONE_BY_ONE, feed_batch, with_backend
from tests.policies.test_laws import CLOSE, OPEN, WIDTH, decoder_of

torch.set_num_threads(1)

ROWS = 5
PROMPTS = {0: 14, 1: 5, 2: 9}  # the sequence of row 3 reads its prompt, row 4 is empty
STEPS = 20


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that follow such short lanes."""
    monkeypatch.setattr(manager_module, "NARROWEST", 4)


@dataclass
class Curious(Policy):
    """Sees all that there is to see, and evicts the oldest tokens."""

    budget: int = 7
    name = "curious"
    demands = (
        Demand(See.MASS, group="max"),
        Demand(See.ROWS, rows=3, layers=frozenset({0})),
        Demand(See.QUERY, rows=2, layers=frozenset({1})),
        Demand(See.HIDDEN, layers=frozenset({0})),
    )

    def decide(self, step: Step) -> Iterable[Edit]:
        return Cut(self.budget).decide(step)


# what is seen, and which of its axes is that of the rows
SEEN: dict[str, tuple[Callable[[Any], Tensor], int]] = {
    "budget": (lambda step: step.budget, 1),
    "active": (lambda step: step.active, 0),
    "clock": (lambda step: step.clock, 0),
    "prompt": (lambda step: step.prompt, 0),
    "thinking": (lambda step: step.thinking, 0),
    "tokens": (lambda step: step.tokens, 0),
    "thought": (lambda step: step.thought, 0),
    "pos": (lambda step: step.pos(), 1),
    "pos of a layer": (lambda step: step.pos(1), 0),
    "held": (lambda step: step.held(), 1),
    "format": (lambda step: step.format() * (step.pos() >= 0), 1),
    "protected": (lambda step: step.protected(), 1),
    "keys": (lambda step: step.keys(1), 0),
    "values": (lambda step: step.values(0), 0),
}
DEMANDED: dict[str, tuple[Callable[[Any], Tensor], int]] = {
    "mass": (lambda step: step.mass(1), 0),
    "rows": (lambda step: step.rows(0), 0),
    "queries": (lambda step: step.queries(1), 0),
    "hidden": (lambda step: step.hidden(0), 0),
}


class Life:
    """Three sequences that generate beside one whose prompt is half read and an empty row."""

    def __init__(self, seed: int) -> None:
        self.decoder = with_backend(decoder_of(0), ONE_BY_ONE)
        self.manager = manager_for(
            self.decoder,
            Curious(),
            backend=ONE_BY_ONE,
            rows=ROWS,
            tokens=WIDTH,
            columns="fit",
            poison=False,
            think_ids=(OPEN, CLOSE),
        )
        self.draw = torch.Generator().manual_seed(seed)
        for seq, n in PROMPTS.items():
            budget = 11 if seq == 1 else None  # one of its own
            self.manager.join(seq, WIDTH, n, thinking=seq != 2, budget=budget)
            feed(self.decoder, self.manager, {seq: text_of(self.decoder.config, n, seq)})
        self.manager.join(3, WIDTH, 13)
        feed(self.decoder, self.manager, {3: text_of(self.decoder.config, 9, 3)})

    def some(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.draw))

    def everybody(self, seqs: Sequence[int], tokens: dict[int, int]) -> Batch:
        """All rows after a step of some, which is counted already."""
        batch = self.manager.batch(seqs, [tokens[seq] for seq in seqs])
        batch.values[2] -= 1
        return self.manager.sequences.everybody(batch)

    def subset(self) -> list[int]:
        """Rows in any order, each once, at least one."""
        return torch.randperm(ROWS, generator=self.draw)[: 1 + self.some(ROWS)].tolist()

    def steps(self, decide: Callable[[Batch], object]) -> None:
        """Decides by what is given: of the states of all rows, as they are after the step."""
        for i in range(STEPS):
            seqs = [seq for seq in PROMPTS if i % 3 != 1 or seq == i % 2 or seq == 2]
            tokens = {seq: CLOSE if (seq, i) == (0, 8) else self.some(OPEN) for seq in seqs}

            def now(seqs: Sequence[int] = seqs, tokens: dict[int, int] = tokens) -> None:
                decide(self.everybody(seqs, tokens))

            feed_batch(self.decoder, self.manager, tokens, decide=now)


def test_seen_alone_as_among_all() -> None:
    """Every reading, of any rows in any order."""
    life = Life(1)
    manager = life.manager

    def look(state: Batch) -> None:
        rows = life.subset()
        every, few = manager.view(state), manager.view(state[rows])
        for name, (read, axis) in (SEEN | DEMANDED).items():
            assert_same(f"{name} of rows {rows}", read(few), read(every).index_select(axis, torch.tensor(rows)))
        assert few.shape.rows == len(rows)
        manager.decide(state)

    life.steps(look)
    assert manager.held(0) <= Curious.budget < manager.length(0)
