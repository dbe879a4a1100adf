"""The vocabulary of policies: schedules, demands, the choice of what stays, stacks, and a policy from outside."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import (
    GROUPS,
    SCOPES,
    Demand,
    Edit,
    Evict,
    Policy,
    Requantize,
    Scope,
    See,
    Shape,
    Step,
    Storage,
    keep_best,
)
from minithink.kv.schedule import Schedule
from minithink.kv.stack import Stack
from tests.compare import assert_close
from tests.kv.run import Cut, Full, feed, kept, manager_for, masked_logits, text_of
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)

# -- schedules and demands


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("every", Schedule()),
        ("interval:1", Schedule(1)),
        ("interval:128", Schedule(128)),
        ("sawtooth:9/8", Schedule(None, 9, 8)),
        ("sawtooth:512/128", Schedule(None, 512, 128)),
        ("share:0.3/0.4", Schedule(shares=(0.3, 0.4))),
        ("share:0/2000", Schedule(shares=(0.0, 2000.0))),
        ("share:.25/0", Schedule(shares=(0.25, 0.0))),
    ],
)
def test_schedules_are_read(text: str, schedule: Schedule) -> None:
    assert Schedule.parse(text) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Every",
        "every:1",
        "interval",
        "interval:",
        "interval:0",
        "interval:-1",
        "interval:1.5",
        "interval:3 ",
        "sawtooth:8",
        "sawtooth:8/8",
        "sawtooth:8/9",
        "sawtooth:8/0",
        "sawtooth:8/4/2",
        "sawtooth:-8/4",
        "daily",
        "share:1/0.4",
        "share:0.3",
        "share:0.3/1.5",
        "share:-0.3/0.4",
        "share:nan/0.4",
    ],
)
def test_other_schedules_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is unknown; write every, interval:n") as error:
        Schedule.parse(text)
    assert repr(text) in str(error.value)


def test_demands_are_checked() -> None:
    for group in GROUPS:
        Demand(See.MASS, group=group)
    with pytest.raises(UsageError, match="'median' is unknown; there are sum, mean"):
        Demand(See.MASS, group="median")
    for every, rows in ((0, 1), (1, 0), (-3, 2)):
        with pytest.raises(UsageError, match=f"every {every} tokens and {rows} rows"):
            Demand(See.ROWS, every=every, rows=rows)


def test_a_demand_is_for_one_query_of_all_layers_at_every_step() -> None:
    for what in (See.MASS, See.ROWS, See.QUERY, See.HIDDEN):
        assert Demand(what) == Demand(what, layers=None, every=1, rows=1, prompt=True, group="mean")


def a_step(held: list[int], clock: list[int], budget: int = 6, **fields: Any) -> Any:
    """A step of one layer and one head, with a lane per row."""
    rows = len(held)
    width = max(held)
    pos = torch.stack([torch.arange(width).where(torch.arange(width) < n, -1) for n in held])[None, :, None]
    known = {
        "active": torch.ones(rows, dtype=torch.bool),
        "thinking": torch.ones(rows, dtype=torch.bool),
        "clock": torch.tensor(clock),
        "prompt": torch.zeros(rows, dtype=torch.int32),
        "budget": torch.full((1, rows, 1), budget, dtype=torch.int32),
        "held": lambda: torch.tensor(held, dtype=torch.int32)[None, :, None],
        "pos": lambda: pos,
        "protected": lambda: torch.zeros_like(pos, dtype=torch.bool),
    }
    return SimpleNamespace(**(known | fields))


@pytest.mark.parametrize(
    ("fields", "due", "keep", "limit"),
    [
        # rows hold 5, 6, 7, 8, 9 tokens at clocks 0, 4, 3, 4, 8; the budget is 6
        ({}, [0, 0, 1, 1, 1], 6, 6),
        ({"slack": 1}, [0, 0, 1, 1, 1], 6, 7),
        ({"slack": 3}, [0, 0, 0, 0, 1], 6, 9),
        ({"schedule": "interval:4"}, [0, 0, 0, 1, 1], 6, 10),
        ({"schedule": "interval:8", "slack": 7}, [0, 0, 0, 0, 1], 6, 14),
        ({"schedule": "interval:1", "slack": 2}, [0, 0, 1, 1, 1], 6, 7),
        ({"schedule": "sawtooth:8/3"}, [0, 0, 0, 1, 1], 3, 8),
    ],
)
def test_due(fields: dict[str, Any], due: list[int], keep: int, limit: int) -> None:
    policy = Cut(6, **fields)
    step = a_step([5, 6, 7, 8, 9], [0, 4, 3, 4, 8])
    now, tokens = policy.due(step)
    assert now.shape == tokens.shape == (1, 5, 1)
    assert now.flatten().tolist() == [bool(x) for x in due]
    assert tokens.flatten().tolist() == [keep] * 5
    assert policy.limit == limit
    assert policy.room(step).flatten().tolist() == [keep] * 5


def test_due_of_those_who_run_and_think() -> None:
    flags = {"active": torch.tensor([True, True, False]), "thinking": torch.tensor([True, False, True])}
    step = a_step([9, 9, 9], [3, 3, 3], **flags)
    assert Cut(6).due(step)[0].flatten().tolist() == [True, True, False]
    assert Cut(6, exempt_answer=True).due(step)[0].flatten().tolist() == [True, False, False]


def test_room_is_what_protection_leaves() -> None:
    protected = torch.zeros(1, 3, 1, 9, dtype=torch.bool)
    protected[0, 1, 0, :4] = protected[0, 2, 0, :7] = True
    room = Cut(6).room(a_step([9, 9, 9], [3, 3, 3], protected=lambda: protected))
    assert room.flatten().tolist() == [6, 2, 0]


def test_a_policy_without_a_budget_has_no_limit() -> None:
    assert Full().limit is None
    assert Cut(None).limit is None
    assert not Policy().decide(a_step([3], [1]))


def test_tables_of_each_scope() -> None:
    sizes = {"head": (3, 2, 4), "layer": (3, 2, 1), "sequence": (1, 2, 1)}
    for scope in SCOPES:
        shape = Shape(3, 2, 4, 8, 16, 32, scope, torch.device("cpu"))
        assert shape.tables == sizes[scope]
        assert shape.sharing == {"head": 1, "layer": 4, "sequence": 12}[scope]


# -- what stays

scores = st.one_of(st.integers(-3, 3).map(float), st.just(-math.inf), st.just(math.inf), st.floats(-9, 9))


@given(data=st.data(), n=st.integers(1, 12), lanes=st.integers(1, 3))
def test_keep_best(data: st.DataObject, n: int, lanes: int) -> None:
    score = torch.tensor(
        data.draw(st.lists(st.lists(scores, min_size=n, max_size=n), min_size=lanes, max_size=lanes))
    )
    candidate = torch.tensor([data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in range(lanes)])
    count = torch.tensor(data.draw(st.lists(st.integers(0, n + 2), min_size=lanes, max_size=lanes)))
    poisoned = score.clone()
    poisoned[~candidate] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
    got = keep_best(poisoned, candidate, count)
    for lane in range(lanes):
        best = sorted((i for i in range(n) if candidate[lane, i]), key=lambda i: (-float(score[lane, i]), i))
        assert got[lane].nonzero().flatten().tolist() == sorted(best[: int(count[lane])]), (score, candidate, count)


@given(data=st.data(), n=st.integers(1, 9))
def test_keep_best_counts_candidates_that_are_nan(data: st.DataObject, n: int) -> None:
    """Which of them stay is open; how many do is not."""
    one = st.one_of(scores, st.just(math.nan))
    score = torch.tensor(data.draw(st.lists(one, min_size=n, max_size=n)))
    candidate = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    count = torch.tensor(data.draw(st.integers(0, n + 1)))
    got = keep_best(score, candidate, count)
    assert not (got & ~candidate).any()
    assert int(got.sum()) == min(int(count), int(candidate.sum()))


def test_keep_best_of_whole_batches() -> None:
    score = torch.randn(2, 3, 4, 11, generator=torch.Generator().manual_seed(0))
    candidate = score > -0.5
    count = torch.arange(24, dtype=torch.int32).view(2, 3, 4) % 7
    got = keep_best(score, candidate, count)
    assert torch.equal(got.sum(-1), torch.minimum(count, candidate.sum(-1)))
    worst = score.masked_fill(~got, math.inf).amin(-1, keepdim=True)
    assert (score.masked_fill(~candidate | got, -math.inf) <= worst).all()


# -- stacks


class Even(Policy):
    """Stores tokens of even position in 8 bits, at once and again and again."""

    name = "even"
    storage = Storage(thoughts=("fp32",), also=("int8",), block=4)

    def __init__(self, scope: Scope = "sequence") -> None:
        self.scope = scope

    def decide(self, step: Step) -> Iterable[Edit]:
        pos = step.pos()
        yield Requantize((pos >= 0) & (pos % 2 == 0) & step.active[None, :, None, None], "int8")


class Told(Cut):
    """Remembers the budget that it sees."""

    name = "told"

    def decide(self, step: Step) -> Iterable[Edit]:
        self.saw = step.budget.flatten().unique().tolist()
        return super().decide(step)


def test_a_stack_is_what_its_members_are() -> None:
    mass, rows = Demand(See.MASS), Demand(See.ROWS, rows=3)
    a = Cut(9, scope="layer", slack=3, demands=(mass,), pull=2)
    b = Cut(7, scope="sequence", slack=8, demands=(rows,), exempt_answer=True)
    stack = Stack([a, b, Even()])
    assert stack.name == "cut+cut+even"
    assert stack.scope == "layer"
    assert Stack([a, b, Even("head")]).scope == "head"
    assert stack.demands == (mass, rows)
    assert stack.storage == Even.storage
    assert (stack.budget, stack.limit, stack.pull) == (7, 12, 2)
    assert (stack.protect_prompt, stack.exempt_answer) == (False, True)
    assert Stack([Full(), Cut(None, protect_prompt=True)]).protect_prompt
    none = Stack([Full(), Full("layer")])
    assert (none.budget, none.limit, none.storage, none.demands) == (None, None, Storage(), ())


def test_two_storages_are_refused() -> None:
    with pytest.raises(UsageError, match=r"everything and even store tokens in different ways.*leave one out"):
        Stack([Full(storage=Storage(thoughts=("fp16",))), Cut(3), Even()])


def test_members_see_their_own_budgets() -> None:
    decoder = random_decoder(example_config())
    a, b = Told(9), Told(6)
    manager = manager_for(decoder, Stack([a, Full(), b]))
    manager.join(0, 30, 12)
    feed(decoder, manager, {0: [1] * 12})
    assert (a.saw, b.saw) == ([9, 2**30], [6, 2**30])  # rows that nobody uses have no limit
    assert manager.held(0) == 6
    manager.leave(0)
    manager.join(1, 30, 12, budget=4)  # for all of them
    feed(decoder, manager, {1: [1] * 12})
    assert a.saw == b.saw == [4, 2**30]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("turned", [False, True])
def test_eviction_wins_over_requantization(turned: bool, scope: Scope) -> None:
    """Whoever speaks first: what one member drops and another moves is gone, and its slots are free."""
    config = example_config(head_dim=16)
    decoder, text = random_decoder(config), text_of(config, 24, 0)
    members = [Even(), Cut(7, scope=scope)]
    manager = manager_for(decoder, Stack(members[::-1] if turned else members), rows=2)
    manager.join(0, 40, 11)
    manager.join(1, 40, 3)
    feed(decoder, manager, {0: text[:11], 1: text[:3]})
    for i in range(11, 24):
        feed(decoder, manager, {0: [text[i]], 1: [text[i]]} if i % 3 else {0: [text[i]]})
        assert kept(manager, 0) == [list(range(i - 6, i + 1))] * len(kept(manager, 0))
        pos, fmt = manager.store.lists.positions(), manager.store.format()
        names = [manager.policy.storage.formats[f] if f < 9 else "" for f in fmt[:, 0][pos[:, 0] >= 0].tolist()]
        assert names == ["int8" if p % 2 == 0 else "fp32" for p in pos[:, 0][pos[:, 0] >= 0].tolist()]
        live = manager.store.slots.table.live[:-1].sum()
        assert int(live) == int(manager.store.lists.count.sum())
    for s in (0, 1):
        manager.leave(s)
    assert manager.store.slots.table.free_pages.free == manager.store.slots.table.free_pages.count


# -- law 7: a policy that nobody here knows


class Foreign(Policy):
    """Evicts every third token, and looks at what it need not look at."""

    name = "foreign"
    demands = (Demand(See.MASS, frozenset({0}), group="sum"), Demand(See.HIDDEN, frozenset({-1, 1}), every=2))

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def setup(self, shape: Shape) -> None:
        self.shape = shape
        self.total = torch.zeros(shape.rows)

    def reset(self, row: int) -> None:
        self.total[row] = 0

    def state(self) -> Iterable[Tensor]:
        return (self.total,)

    def decide(self, step: Step) -> Iterable[Edit]:
        mass = step.mass(0)  # [B, Hkv, S]
        assert mass.shape == (self.shape.rows, self.shape.kv_heads, step.pos().shape[-1])
        self.total += torch.where(step.active, mass.sum((1, 2)), 0)
        assert step.hidden(-1).shape == step.hidden(1).shape == (self.shape.rows, self.shape.hidden)
        active = step.active[:, None, None]
        for layer in range(step.shape.tables[0]):
            yield Evict((step.pos(layer) % 3 == 2) & active, layer)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_foreign_policy_works_end_to_end(scope: Scope) -> None:
    config = example_config(num_layers=3, num_heads=6)
    decoder = random_decoder(config)
    policy = Foreign(scope)
    manager = manager_for(decoder, policy, rows=2)
    prompts = {3: 10, 4: 5}
    texts = {s: text_of(config, n + 12, s) for s, n in prompts.items()}
    logits: dict[int, list[Tensor]] = {}
    for s, n in prompts.items():
        manager.join(s, 40, n)
        logits[s] = [feed(decoder, manager, {s: texts[s][:4]})[s], feed(decoder, manager, {s: texts[s][4:n]})[s]]
    for i in range(12):
        for s, rows in feed(decoder, manager, {s: [texts[s][prompts[s] + i]] for s in (4, 3)}).items():
            logits[s].append(rows)
    for row, (s, n) in enumerate(prompts.items()):
        length = n + 12
        assert kept(manager, s) == [[p for p in range(length) if p % 3 != 2]] * len(kept(manager, s))
        own, at = torch.arange(length)[:, None], torch.arange(length)
        visible = (at <= own) & ((own < n) | (at % 3 != 2) | (at == own))
        assert_close("logits", torch.cat(logits[s]), masked_logits(decoder, texts[s], visible), atol=1e-5, rtol=1e-5)
        # every query gives each of its group's heads a probability mass of 1
        assert_close("mass", policy.total[row], torch.tensor(6.0 * length), atol=1e-3)
    ledger = manager.ledger()
    assert ledger.state == policy.total.nbytes + next(iter(manager.budgets.values())).nbytes
    assert ledger.observations > 0
    for s in prompts:
        manager.leave(s)
    assert manager.ledger().payload == 0


def test_a_foreign_policy_stacks() -> None:
    config = example_config(num_layers=3, num_heads=6)
    decoder = random_decoder(config)
    manager = manager_for(decoder, Stack([Foreign("layer"), Cut(6, scope="sequence")]), rows=1)
    manager.join(0, 40, 12)
    feed(decoder, manager, {0: [1] * 12})
    feed(decoder, manager, {0: [2]})
    assert kept(manager, 0) == [[6, 7, 9, 10, 12]] * 3


def test_a_prompt_is_left_alone_while_it_is_read() -> None:
    """And whoever does not run keeps what it has: `due` is of active rows."""
    decoder = random_decoder(example_config())
    manager = manager_for(decoder, Cut(3), rows=2)
    manager.join(0, 40, 9)
    manager.join(1, 40, 9)
    feed(decoder, manager, {0: [1] * 5})  # still reading
    feed(decoder, manager, {1: [1] * 9})
    for token in range(3):
        feed(decoder, manager, {1: [token]})
    assert (manager.held(0), manager.held(1)) == (5, 3)
