"""Some rows shown alone, as a batch of their own: a policy sees of them what it sees among all rows, and decides the
same; what the other rows hold has no part in it, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import minithink.kv.manager as manager_module
from minithink.kv.batch import ACTIVE, Batch
from minithink.kv.contract import Demand, Evict, Policy, See, Step
from minithink.kv.manager import KVManager, dropped
from minithink.kv.stack import members
from minithink.kv.view import View
from minithink.policies import parse
from tests.compare import assert_same
from tests.kv.run import feed, kept, manager_for, text_of
from tests.kv.test_batches import ONE_BY_ONE, assert_same_content, content, feed_batch, with_backend
from tests.kv.test_decisions import TEXTS as CAPTURED
from tests.policies.test_laws import CLOSE, OPEN, WIDTH, decoder_of

torch.set_num_threads(1)

# Those that keep no state; the others: `test_decisions_apart_are_decisions`.
TEXTS = [text for text in CAPTURED if all(type(m).state is Policy.state for m in members(parse(text)))]
ROWS = 5
PROMPTS = {0: 14, 1: 5, 2: 9}  # the sequence of row 3 reads its prompt, row 4 is empty
STEPS = 20


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that follow such short lanes."""
    monkeypatch.setattr(manager_module, "NARROWEST", 4)


@dataclass
class Curious(Policy):
    """Sees all that there is to see, and does nothing."""

    budget: int = 7
    name = "curious"
    demands = (
        Demand(See.MASS, group="max"),
        Demand(See.ROWS, rows=3, layers=frozenset({0})),
        Demand(See.QUERY, rows=2, layers=frozenset({1})),
        Demand(See.HIDDEN, layers=frozenset({0})),
    )

    def decide(self, step: Step) -> tuple[()]:
        return ()


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

    def __init__(self, policy: Policy | str, seed: int) -> None:
        self.decoder = with_backend(decoder_of(0), ONE_BY_ONE)
        policy = parse(policy) if isinstance(policy, str) else policy
        self.manager = manager_for(
            self.decoder, policy, backend=ONE_BY_ONE, rows=ROWS, tokens=WIDTH, columns="fit", poison=False,
            think_ids=(OPEN, CLOSE),
        )  # fmt: skip
        self.draw = torch.Generator().manual_seed(seed)
        for seq, n in PROMPTS.items():
            budget = 11 if seq == 1 and "budget" in str(policy) else None  # one of its own
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


def drops(manager: KVManager, view: View) -> Tensor:
    """What the policy evicts of the rows of a view: bool [Lt, R, Ht, S]; nothing where there is no token."""
    edits = [edit for p in manager.deciding for edit in p.decide(view.seen_by(p))]
    return dropped([edit for edit in edits if isinstance(edit, Evict)], view) & (view.pos() >= 0)


def of_row(manager: KVManager, row: int) -> dict[str, Tensor]:
    """All that the manager keeps for a row, used or not."""
    store = manager.store
    out = content(manager, row) | {
        "queries": manager.observations.queries[:, row],
        "ring": store.ring[:, row],
        "most, length, waiting": torch.tensor([store.most[row], store.lengths[row], store.waiting[row]]),
        "page": store.table.page[:, row],
    }
    out |= {f"mass {key}": x[row] for key, x in manager.observations.mass.items()}
    out |= {f"hidden {key}": x[row] for key, x in manager.observations.hidden.items()}
    out |= {f"budget {i}": x[:, row] for i, x in enumerate(manager.budgets.values())}
    return {name: x.clone() for name, x in out.items()}


@contextmanager
def ruined(manager: KVManager, rows: Sequence[int]) -> Iterator[None]:
    """These rows hold no numbers, budgets and segments that make sense, until this is left."""
    store = manager.store
    seen = manager.observations
    kinds = (*seen.mass.values(), *seen.hidden.values(), *manager.budgets.values(), store.thought)
    tensors = (store.pool, store.side, store.ring, manager.observations.queries, *kinds)
    before = [x.clone() for x in tensors]
    pages = store.table.page[:, rows].unique()
    pages = pages[pages != store.table.pages.count].long()
    store.pool[pages] = 255
    store.side[pages] = 255
    store.ring[:, rows] = torch.nan
    manager.observations.queries[:, rows] = torch.nan
    for x in (*manager.observations.mass.values(), *manager.observations.hidden.values()):
        x[rows] = torch.nan
    for x in manager.budgets.values():
        x[:, rows] = 1
    store.thought[rows] = 0
    try:
        yield
    finally:
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)


@pytest.mark.parametrize("text", ["curious", *TEXTS])
def test_seen_alone_as_among_all(text: str) -> None:
    """Every reading, of any rows in any order."""
    life = Life(Curious() if text == "curious" else text, 1)
    manager, readings = life.manager, SEEN | (DEMANDED if text == "curious" else {})

    def look(state: Batch) -> None:
        rows = life.subset()
        whole, alone = manager.view(state), manager.view(state[rows])
        for policy in members(manager.policy):
            every, few = whole.seen_by(policy), alone.seen_by(policy)
            for name, (read, axis) in readings.items():
                assert_same(f"{name} of rows {rows}", read(few), read(every).index_select(axis, torch.tensor(rows)))
        assert alone.shape.rows == len(rows)
        everywhere = torch.zeros(manager.store.positions().shape, dtype=torch.bool)
        manager.store.evict(everywhere.index_copy_(1, whole.row, drops(manager, whole)))

    life.steps(look)


@pytest.mark.parametrize("text", TEXTS)
def test_decided_alone_as_among_all(text: str) -> None:
    """In parts, one after the other, whatever the rows hold that are not shown; these stay as they are. Then there is
    nothing left to decide."""
    life = Life(text, 2)
    manager, decided = life.manager, 0

    def decide(state: Batch) -> None:
        nonlocal decided
        whole = manager.view(state)
        due, drop = [p.due(whole.seen_by(p))[0] for p in manager.deciding], drops(manager, whole)
        want = {row: [set(lane) for lane in lanes_of(manager, row, ~drop)] for row in range(ROWS)}
        order = torch.randperm(ROWS, generator=life.draw).tolist()
        cut = 1 + life.some(ROWS - 1)
        for rows in (order[:cut], order[cut:]):
            others = [row for row in range(ROWS) if row not in rows]
            # Parts are padded with rows that take no part, as graphs are.
            padded = [*rows, *others[: life.some(len(others) + 1)]]
            alone = Batch(state.values[:, padded].clone())
            alone.values[ACTIVE, len(rows) :] = 0
            view = manager.view(alone)
            for policy, is_due in zip(manager.deciding, due, strict=True):
                assert_same("due", policy.due(view.seen_by(policy))[0][:, : len(rows)], is_due[:, rows])
            got = drops(manager, view)
            assert_same(f"rows {rows} of {padded}", got[:, : len(rows)], drop[:, rows][..., : got.shape[-1]])
            assert not got[:, len(rows) :].any()
            assert manager.due(alone).tolist()[: len(rows)] == drop[:, rows].any(3).any(2).any(0).tolist()
            with ruined(manager, others):
                again = drops(manager, manager.view(state[rows]))
            assert_same(f"rows {rows} beside nonsense", again, got[:, : len(rows)])
            before = {row: of_row(manager, row) for row in others}
            states = [x.clone() for x in manager.policy.state()]
            manager.decide(alone)
            for row, held in before.items():
                assert_same_content(f"row {row}, not shown to decide", of_row(manager, row), held)
            for x, old in zip(manager.policy.state(), states, strict=True):
                assert_same("state", x, old)
            drop = drop.clone()
            drop[:, rows] = False
        assert {row: [set(lane) for lane in lanes_of(manager, row)] for row in range(ROWS)} == want
        decided += any(bool(x.any()) for x in due)
        assert not manager.due(state).any(), "what is decided is decided"
        assert not drops(manager, manager.view(state)).any()

    life.steps(decide)
    assert decided > 1


def lanes_of(manager: KVManager, row: int, keep: Tensor | None = None) -> list[list[int]]:
    """Positions that each table of a row holds, or would with those of `keep` only."""
    pos = manager.store.positions()
    pos = pos if keep is None else torch.where(keep, pos, -1)
    return [[p for p in lane if p >= 0] for lane in pos[:, row].flatten(0, 1).tolist()]


@pytest.mark.parametrize("text", TEXTS)
def test_limits_hold_where_rows_are_shown_alone(text: str) -> None:
    """Lanes of rows that are shown hold no more than they may, lanes of others grow; nobody forgets a protected
    prompt, or a token that it does not hold."""
    life = Life(text, 3)
    manager, policy = life.manager, life.manager.policy
    seen, paused = list[int](), 0

    def decide(state: Batch) -> None:
        nonlocal paused
        shown = [row for row in range(3) if life.some(3)]  # a third of the rows must wait
        paused += 3 - len(shown)
        before = {row: lanes_of(manager, row) for row in range(3)}
        manager.decide(state[[*shown, 4]])
        for row in range(3):
            lanes = lanes_of(manager, row)
            assert row in shown or lanes == before[row]
            for lane, old in zip(lanes, before[row], strict=True):
                assert lane == sorted(set(lane) & set(old))
                if policy.protect_prompt and policy.cap is None:
                    assert lane[: PROMPTS[row]] == list(range(PROMPTS[row]))
            for author in manager.deciding:  # those that look at every token
                every = author.schedule == "every" and not author.exempt_answer
                if row in shown and state.active[row] and every:
                    budget = manager.budgets[id(author)][:, row]
                    if author.limit is None:  # lanes share one budget
                        assert sum(map(len, lanes)) <= int(budget.sum()) + author.slack * len(lanes)
                    else:
                        assert max(map(len, lanes)) <= int(budget.max()) + author.slack
            seen.append(max(map(len, lanes)))

    life.steps(decide)
    assert paused > 5
    assert len(set(seen)) > 2


@pytest.mark.parametrize("text", TEXTS)
def test_prompts_that_are_read_together_are_decided_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose prompts end are shown alone, beside those that pause."""
    managers = []
    for alone in (True, False):
        acting = KVManager.acting if alone else lambda self, batch, due=None: self.sequences.everybody(batch)
        monkeypatch.setattr(KVManager, "acting", acting)
        life = Life(text, 4)
        manager = life.manager
        for seq, n in ((8, 14), (9, 11)):
            if seq == 9:
                manager.leave(3)
            manager.join(seq, WIDTH, n)
        words = {seq: text_of(life.decoder.config, n, seq) for seq, n in ((8, 14), (9, 11))}
        feed(life.decoder, manager, {seq: text[:4] for seq, text in words.items()})
        feed(life.decoder, manager, {seq: text[4:] for seq, text in reversed(words.items())})
        managers.append(manager)
    one, other = managers
    for seq in (0, 1, 2, 8, 9):
        row = one.row_of(seq)
        assert kept(one, seq) == kept(other, seq)
        assert_same_content(f"sequence {seq}", of_row(one, row), of_row(other, row))
