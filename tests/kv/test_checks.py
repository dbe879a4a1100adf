"""What policies declare and yield is checked: one sentence names the policy, what it gave, and what is expected.

python -m pytest tests/kv/test_checks.py
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from minithink.errors import MinithinkError, UsageError
from minithink.kv.checks import declared, yielded
from minithink.kv.contract import (
    UNLIMITED,
    Demand,
    Evict,
    OpenSegment,
    Policy,
    Requantize,
    See,
    SetBudget,
    Step,
    Storage,
    name_of,
)
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.kv.policy_errors import explaining
from minithink.kv.sizes import check_budget
from minithink.kv.stack import Stack
from minithink.model import Rope
from minithink.policies.scored import Scored
from minithink.policies.window import Window
from tests.kv.run import Cut, feed, kept, manager_for
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)

DECODER = random_decoder(example_config(num_heads=4, num_kv_heads=2, head_dim=16))  # 2 layers
ROWS = 3


class Mine(Policy):
    """Answers each step with whatever a test gives."""

    name = "mine"

    def __init__(self, answer: Callable[[Step], Any], **fields: Any) -> None:
        self.answer = answer
        for field, value in fields.items():
            setattr(self, field, value)

    def decide(self, step: Step) -> Any:
        return self.answer(step)


def mask(step: Step, *shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.zeros(shape or step.pos().shape, dtype=dtype)


def refused(policy: Policy) -> str:
    """The sentence with which a prompt or a token under this policy is refused."""
    with pytest.raises(UsageError) as error:
        run(policy)
    text = str(error.value)
    assert re.search(r"\bmine\b", text), text
    assert "\n" not in text
    assert len(text) < 400
    return text


def run(policy: Policy) -> KVManager:
    """A cache under this policy that has read a prompt of six tokens and one more token."""
    manager = manager_for(DECODER, policy, rows=ROWS)
    manager.join(0, 40, 6)
    feed(DECODER, manager, {0: [1] * 6})
    feed(DECODER, manager, {0: [1]})
    return manager


def one(edit: Callable[[Step], Any]) -> Callable[[Step], Iterator[Any]]:
    return lambda step: iter([edit(step)])


S = "[2, 3, 2, 6]"  # of a step: layers, rows, KV heads, tokens
ANSWERS: dict[str, tuple[Any, str]] = {
    "None": (lambda step: None, "returned None from `decide`, which must yield edits"),
    "a bare mask": (lambda step: mask(step), rf"returned a tensor, bool {re.escape(S)} on cpu from `decide`"),
    "an edit": (lambda step: Evict(mask(step)), "returned one Evict from `decide`"),
    "a text": (lambda step: "evict", "returned 'evict' from `decide`"),
    "bytes": (lambda step: b"evict", "returned b'evict' from `decide`"),
    "a number": (lambda step: 3, "returned 3 from `decide`"),
    "a dictionary": (lambda step: {"drop": 1}, "returned {'drop': 1} from `decide`"),
    "a mask yielded": (one(mask), r"yielded a tensor, bool .* which is no edit: yield one of Evict, Requantize"),
    "None yielded": (one(lambda step: None), "yielded None, which is no edit"),
    "a tuple yielded": (one(lambda step: (mask(step), 0)), "yielded a tuple of 2, which is no edit"),
    "a list of edits yielded": (one(lambda step: [Evict(mask(step))]), "yielded a list of 1, which is no edit"),
    "the class yielded": (
        one(lambda step: Evict),
        r"yielded <class .*Evict'>, which is no edit: .* as in Evict\(…\)",
    ),
    "a long text yielded": (one(lambda step: "x" * 9999), "yielded 'x{70,80}…, which is no edit"),
}
EVICTS: dict[str, tuple[dict[str, Any], str]] = {
    "tokens alone": ({"drop": mask(None, 6)}, r"Evict.drop is a tensor, bool \[6\] on cpu, and it must be a tensor"),
    "one layer of several": ({"drop": mask(None, 3, 2, 6)}, re.escape(f"must be a tensor, bool {S} on cpu.")),
    "all layers for one": ({"drop": mask(None, 2, 3, 2, 6), "layer": 1}, r"must be .* bool \[3, 2, 6\] on cpu"),
    "another number of tokens": ({"drop": mask(None, 2, 3, 2, 5)}, r"bool \[2, 3, 2, 5\]"),
    "heads that broadcast": ({"drop": mask(None, 2, 3, 1, 6)}, r"bool \[2, 3, 1, 6\]"),
    "rows that broadcast": ({"drop": mask(None, 2, 1, 2, 6)}, r"bool \[2, 1, 2, 6\]"),
    "numbers": ({"drop": mask(None, 2, 3, 2, 6, dtype=torch.int64)}, r"is a tensor, int64 \[2, 3, 2, 6\] on cpu"),
    "bytes": ({"drop": mask(None, 2, 3, 2, 6, dtype=torch.uint8)}, "is a tensor, uint8"),
    "scores": ({"drop": mask(None, 2, 3, 2, 6, dtype=torch.float32)}, "is a tensor, float32"),
    "no tensor": ({"drop": [[True]]}, "Evict.drop is a list of 1"),
    "nothing": ({"drop": None}, "Evict.drop is None"),
    "another device": ({"drop": torch.zeros(2, 3, 2, 6, dtype=torch.bool, device="meta")}, "on meta, and it must be"),
    "a layer too many": ({"drop": mask(None, 3, 2, 6), "layer": 2}, "Evict.layer is 2, and it must be from 0 to 1"),
    "a negative layer": ({"drop": mask(None, 3, 2, 6), "layer": -1}, "Evict.layer is -1"),
    "a layer that is true": ({"drop": mask(None, 3, 2, 6), "layer": True}, "Evict.layer is True"),
    "a layer's name": ({"drop": mask(None, 3, 2, 6), "layer": "0"}, "Evict.layer is '0'"),
    "a word for protected": (
        {"drop": mask(None, 2, 3, 2, 6), "even_protected": "yes"},
        "Evict.even_protected is 'yes', and it must be",
    ),
}
MOVES: dict[str, tuple[dict[str, Any], str]] = {
    "tokens alone": ({"where": mask(None, 6), "fmt": "fp8"}, r"Requantize.where is a tensor, bool \[6\]"),
    "an unknown format": (
        {"where": mask(None, 2, 3, 2, 6), "fmt": "fp4"},
        "Requantize.fmt is 'fp4', and the storage has plain, fp8",
    ),
    "no format": ({"where": mask(None, 2, 3, 2, 6), "fmt": None}, "Requantize.fmt is None"),
    "an unknown way": (
        {"where": mask(None, 2, 3, 2, 6), "fmt": "fp8", "how": "fast"},
        "Requantize.how is 'fast', and it must be values or shrink",
    ),
    "a wrong layer": ({"where": mask(None, 3, 2, 6), "fmt": "fp8", "layer": 9}, "Requantize.layer is 9"),
}
YES = torch.tensor([True, False, False])
TYPE = torch.zeros(ROWS, dtype=torch.uint8)
SEGMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a single truth": ({"open": True, "thought": TYPE}, "OpenSegment.open is True"),
    "fewer rows": ({"open": YES[:1], "thought": TYPE}, r"OpenSegment.open is a tensor, bool \[1\]"),
    "types of 64 bits": ({"open": YES, "thought": TYPE.long()}, "OpenSegment.thought is a tensor, int64"),
    "an unknown type": ({"open": YES, "thought": TYPE + 1}, "OpenSegment.thought .* the storage has 1 thought types"),
}
BUDGETS: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"tokens": 5}, "SetBudget.tokens is 5"),
    "64 bits": ({"tokens": torch.full((2, 3, 2), 5)}, "SetBudget.tokens is a tensor, int64"),
    "a layer's shape": ({"tokens": torch.full((3, 2), 5, dtype=torch.int32)}, r"int32 \[3, 2\]"),
    "a negative budget": (
        {"tokens": torch.full((2, 3, 2), -5, dtype=torch.int32)},
        "SetBudget.tokens is -5, and a budget must be",
    ),
    "a wrong layer": ({"tokens": torch.full((3, 2), 5, dtype=torch.int32), "layer": 2}, "SetBudget.layer is 2"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_is_no_edit_is_refused(case: str) -> None:
    answer, said = ANSWERS[case]
    assert re.search(said, refused(Mine(answer)))


EDITS: dict[Any, Any] = {Evict: EVICTS, Requantize: MOVES, OpenSegment: SEGMENTS, SetBudget: BUDGETS}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in EDITS.items() for case in cases])
def test_an_edit_that_holds_something_else_is_refused(kind: Any, case: str) -> None:
    fields, said = EDITS[kind][case]
    storage = Storage(also=("fp8",))
    assert re.search(said, refused(Mine(one(lambda step: kind(**fields)), storage=storage)))


async def waits(row: int) -> None:
    pass


def yields(shape: Any) -> Iterator[None]:
    yield


DECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "scope": ({"scope": "row"}, "scope is 'row', and it must be one of head, layer, sequence"),
    "no scope": ({"scope": None}, "scope is None"),
    "demands": ({"demands": See.MASS}, "demands is .*MASS.*, and it must be a tuple, as in"),
    "a demand": ({"demands": Demand(See.MASS)}, "and it must be a tuple, as in"),
    "what a demand is for": (
        {"demands": (Demand(See.MASS), See.MASS)},
        r"a demand is <See.MASS: 1>, and it must be an object such as Demand\(See.MASS\)",
    ),
    "a class of demands": ({"demands": (Demand,)}, "a demand is <class .*Demand'>, and it must be an object"),
    "a text for what a demand is for": (
        {"demands": (Demand(cast(Any, "mass")),)},
        r"Demand.what is 'mass', and it must be one of See, as in Demand\(See.MASS\)",
    ),
    "a demand for nothing": ({"demands": (Demand(See(0)),)}, "Demand.what is <See: 0>, and it must be one of See"),
    "a demand of all layers": (
        {"demands": (Demand(See.MASS, layers=cast(Any, "all")),)},
        r"Demand.layers is 'all', and it must be a frozenset of layers, or None \(all layers\)",
    ),
    "a demand of one layer": ({"demands": (Demand(See.MASS, layers=cast(Any, 1)),)}, "Demand.layers is 1, and"),
    "a demand of half a layer": (
        {"demands": (Demand(See.MASS, layers=frozenset({cast(Any, 0.5)})),)},
        "a layer of Demand.layers is 0.5, and it must be a whole number",
    ),
    "a word for the prompt": (
        {"demands": (Demand(See.MASS, prompt=cast(Any, "no")),)},
        "Demand.prompt is 'no', and it must be True or False",
    ),
    "a text of a budget": ({"budget": "8"}, "budget is '8', and it must be a whole number of tokens"),
    "no room beside": ({"beside": None}, "beside is None, and it must be a whole number of tokens"),
    "a word for protection": ({"protect_prompt": "yes"}, "protect_prompt is 'yes', and it must be True or False"),
    "storage": ({"storage": "fp8"}, r"storage is 'fp8', and it must be an object such as Storage\("),
    "a class of storage": ({"storage": Storage}, "storage is <class .*Storage'>, and it must be an object"),
    "budget": ({"budget": 0.5}, "budget is 0.5, and it must be a whole number of tokens"),
    "a true budget": ({"budget": True}, "budget is True"),
    "slack": ({"slack": None}, "slack is None, and it must be a whole number of tokens"),
    "negative slack": ({"slack": -1}, "slack is -1, and it must be at least 0"),
    "cap": ({"cap": "9"}, "cap is '9'"),
    "schedule": ({"schedule": None}, "schedule is None, and it must be a text"),
    "a number in place of a method": (
        {"state": 3},
        "state is 3, and it must be a method: give an option another name",
    ),
    "an argument too few": ({"reset": lambda: None}, r"`reset` takes \(\) beside self, and it must take \(row\)"),
    "an argument too many": (
        {"setup": lambda shape, rows: None},
        r"`setup` takes \(shape, rows\) beside self, and it must take \(shape\)",
    ),
    "an array of scopes": (
        {"scope": np.array(["head", "layer"])},
        "scope is array.*, and it must be one of head, layer, sequence",
    ),
    "a negative cap": ({"cap": -1}, "cap is -1, and it must be at least 0"),
    "a negative pull": ({"pull": -1}, "pull is -1, and it must be at least 0"),
    "a negative number beside": ({"beside": -1}, "beside is -1, and it must be at least 0"),
    "slack of more than 31 bits": ({"slack": 2**31}, "slack is 2147483648, and it must be at most 1,073,741,824"),
    "pull of more than 64 bits": ({"pull": 2**70}, "pull is 1180591620717411303424, and it must be at most"),
    "a word for capturing": ({"capturable": "no"}, "capturable is 'no', and it must be True or False"),
    "a tensor for telling": ({"tells_due": torch.zeros(2)}, "tells_due is a tensor, .*, and it must be True or"),
    "a list for segments": ({"opens": []}, "opens is a list of 0, and it must be True or False"),
    "a word for equal lanes": ({"alike": "no"}, "alike is 'no', and it must be True or False"),
    "a word for listening": ({"listens": "no"}, "listens is 'no', and it must be True or False"),
    "a method that is awaited": ({"reset": waits}, "`reset` is an `async def`, which nothing awaits: write `def`"),
    "a method that yields": ({"setup": yields}, "`setup` has a `yield`, so that a call of it runs nothing"),
    "an argument by name alone": ({"notes": lambda *, row: ""}, r"`notes` takes \(row\) beside self"),
}


STORED: dict[str, tuple[dict[str, Any], str]] = {
    "a number of a format": ({"thoughts": (3,)}, "an entry of Storage.thoughts is 3, and it must be a text"),
    "a format alone": ({"thoughts": "fp8"}, r"Storage.thoughts is 'fp8', and it must be a tuple of texts, as in"),
    "no format": ({"thoughts": ()}, "Storage.thoughts is a tuple of 0, and it must name at least one format"),
    "no further formats": ({"also": None}, "Storage.also is None, and it must be a tuple"),
    "a name alone": ({"names": "slow"}, "Storage.names is 'slow', and it must be a tuple"),
    "a name too many": (
        {"names": ("slow", "fast")},
        "is a tuple of 2, and it must name all 1 thought types, or none",
    ),
    "a type that is not there": ({"prompt": 1}, "Storage.prompt is 1, and the storage has 1 thought types, from 0"),
    "a negative type": ({"prompt": -1}, "Storage.prompt is -1, and it must be a whole number of at least 0"),
    "a text of a buffer": ({"buffer": "x"}, "Storage.buffer is 'x', and it must be a whole number of at least 0"),
    "half a buffer": ({"buffer": 0.5}, "Storage.buffer is 0.5"),
    "a negative sink": ({"sink": -2}, "Storage.sink is -2, and it must be a whole number of at least 0"),
    "a sink of more than 64 bits": (
        {"sink": 2**70},
        "Storage.sink is 1180591620717411303424, and it must be",
    ),
    "a buffer of more than 31 bits": ({"buffer": 2**31}, "Storage.buffer is 2147483648, and it must be at most"),
    "no block": ({"block": None}, "Storage.block is None"),
    "an unknown tail": ({"tail": "drop"}, "Storage.tail is 'drop', and it must be one of quantize, keep"),
    "an unknown compaction": (
        {"compaction": None},
        "Storage.compaction is None, and it must be one of none, gather, overlapped",
    ),
    "a word for lag": ({"lag": "no"}, "Storage.lag is 'no', and it must be True or False"),
    "a word for shrinking": ({"shrink": "no"}, "Storage.shrink is 'no', and it must be True or False"),
}


@pytest.mark.parametrize("case", STORED)
def test_every_field_of_a_storage_is_checked(case: str) -> None:
    fields, said = STORED[case]
    policy = Mine(lambda step: (), storage=Storage(**fields))
    assert re.search(said, refused(policy))
    with pytest.raises(UsageError, match=said):
        Stack([Cut(9), policy])


@pytest.mark.parametrize("cache", ["plain", "pages"])
@pytest.mark.parametrize("fields", [{"tail": "keep"}, {"buffer": 4}])
def test_values_lag_only_behind_a_buffer_that_keeps_its_tail(fields: dict[str, Any], cache: str) -> None:
    storage = Storage(thoughts=("fp8",), lag=True, **fields)
    with pytest.raises(
        UsageError, match=r"Storage\.lag is about values that wait in a buffer, with tail='keep', and"
    ):
        manager_of(Mine(lambda step: (), storage=storage), cache)


def test_a_block_may_be_a_number_of_numpy() -> None:
    run(Mine(lambda step: (), storage=Storage(thoughts=("fp8",), block=cast(Any, np.int64(8)))))


@pytest.mark.parametrize("name", [3, "mine\nyours", "\x1b[31mmine", torch.zeros(2)])
def test_a_name_is_a_text_of_one_line(name: Any) -> None:
    with pytest.raises(UsageError, match=r"^The policy Mine: name is .*, and it must be a text of one line"):
        run(Mine(lambda step: (), name=name))


# What `peaks` may return that is wrong.
PEAKS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "returned None from `peaks`, which must return a list of moments, as in"),
    "a text": ("plain", "returned 'plain' from `peaks`"),
    "a tensor": (torch.zeros(2), r"returned a tensor, float32 \[2\] on cpu from `peaks`"),
    "a dictionary": ({"plain": 9}, "returned {'plain': 9} from `peaks`"),
    "one moment": ([("plain", 9)], "an entry of a moment of `peaks` is 'plain', and it must be a format and its"),
    "a number": ([9], "a moment of `peaks` is 9, and it must be a list, as in"),
    "a moment too few": ([[("plain", 9)], None], "a moment of `peaks` is None, and it must be a list"),
    "a format alone": ([["plain"]], "an entry of a moment of `peaks` is 'plain', and it must be a format and"),
    "three of two": ([[("plain", 9, 9)]], "an entry of a moment of `peaks` is a tuple of 3, and it must be a format"),
    "an unknown format": ([[("fp4", 9)]], "a format of `peaks` is 'fp4', and it must be one of plain, fp8"),
    "a list for a format": ([[(["fp8"], 9)]], "a format of `peaks` is a list of 1, and it must be one of plain, fp8"),
    "a text of a number": ([[("plain", "9")]], "the number of plain tokens in `peaks` is '9', and it must be a"),
    "a negative number": ([[("plain", -3)]], "the number of plain tokens in `peaks` is -3, and it must be"),
    "NaN": ([[("plain", float("nan"))]], "the number of plain tokens in `peaks` is nan, and it must be"),
    "half a token": ([[("plain", 2.5)]], "the number of plain tokens in `peaks` is 2.5, and it must be"),
    "no moment": ([], "`peaks` must say how many tokens of every format .* no moment names plain"),
    "a format too few": ([[("plain", 9)]], "`peaks` must say how many tokens of every format .* no moment names fp8"),
}


@pytest.mark.parametrize("case", PEAKS)
def test_peaks_are_checked(case: str) -> None:
    found, said = PEAKS[case]
    policy = Mine(lambda step: (), storage=Storage(also=("fp8",)), peaks=lambda tokens, prompt: found)
    assert re.search(said, refused(policy))


def test_a_lane_has_no_more_pages_than_its_text_needs() -> None:
    """However many tokens `peaks` say."""
    usual = manager_for(DECODER, Mine(lambda step: ()), tokens=40)
    many = Mine(lambda step: (), peaks=lambda tokens, prompt: iter([[("plain", np.int64(10**9))]]))
    manager = manager_for(DECODER, many, tokens=40)
    assert manager.store.slots.table.free_pages.count == usual.store.slots.table.free_pages.count


@pytest.mark.parametrize("found", ["9", -1, 0, 2.5, float("nan"), True, [9], torch.tensor(9)])
def test_a_promise_is_a_number_of_tokens(found: Any) -> None:
    policy = Mine(lambda step: (), promise=lambda tokens, prompt: found)
    said = "^The policy mine returned .* from `promise`, which must return a whole number of tokens, at least 1, or"
    with pytest.raises(UsageError, match=said):
        manager_for(DECODER, policy, pages="promised")


@pytest.mark.parametrize("found", [9, 10**9, np.int64(9), None])
def test_a_promise_may_be_any_number_of_tokens(found: Any) -> None:
    manager_for(DECODER, Mine(lambda step: (), promise=lambda tokens, prompt: found), pages="promised")


@pytest.mark.parametrize("name", ["R\xa0KV", "多", None, ""])
def test_other_names(name: Any) -> None:
    run(Mine(lambda step: (), name=name))


def test_a_number_without_limit() -> None:
    """2³⁰ tokens, which no lane exceeds."""
    run(Mine(lambda step: (), slack=UNLIMITED))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", DECLARED)
def test_what_is_declared_is_checked(case: str, stacked: bool) -> None:
    fields, said = DECLARED[case]
    policy = Mine(lambda step: (), **fields)
    if stacked:
        with pytest.raises(UsageError, match=said):
            Stack([Cut(9), policy])
    else:
        assert re.search(said, refused(policy))


def test_methods_may_have_arguments_of_other_names_and_further_ones() -> None:
    run(Mine(lambda step: (), reset=lambda number, why="": None, notes=lambda *numbers: ""))


LAYERS: dict[str, tuple[Demand, str]] = {
    "far above": (Demand(See.MASS, layers=frozenset({1, 99})), "Demand.layers is 99, and it must be from 0 to 1"),
    "the number of layers": (Demand(See.HIDDEN, layers=frozenset({2})), "is 2, and it must be from -1 to 1"),
    "the final norm": (Demand(See.MASS, layers=frozenset({-1})), "is -1, and it must be from 0 to 1"),
}


@pytest.mark.parametrize("cache", ["plain", "pages"])
@pytest.mark.parametrize("case", LAYERS)
def test_a_demand_about_a_layer_that_the_model_does_not_have_is_refused(case: str, cache: str) -> None:
    """Also in a stack, and where the policy learns in its `setup` which layers it looks at."""
    demand, said = LAYERS[case]
    alone = Mine(lambda step: (), demands=(demand,))
    stacked = Stack([Cut(9), Mine(lambda step: (), demands=(demand,))])
    late = Mine(lambda step: ())
    late.setup = lambda shape: setattr(late, "demands", (demand,))  # type: ignore[method-assign]
    for policy in (alone, stacked, late):
        with pytest.raises(UsageError, match=f"The policy mine: .*{said}"):
            manager_of(policy, cache)
    assert until_refused(Mine(lambda step: (), demands=(Demand(See.HIDDEN, layers=frozenset({-1, 1})),)), cache) == ""


@pytest.mark.parametrize("number", ["2", 1.5, True, None, 0])
def test_numbers_of_a_demand_are_whole(number: Any) -> None:
    for fields in ({"every": number}, {"rows": number}):
        with pytest.raises(UsageError, match="both must be whole numbers of at least 1"):
            Demand(See.MASS, **fields)


class Layers(IntEnum):
    FIRST = 0
    LAST = 1


def evicts_first(step: Step) -> Iterator[Evict]:
    """The oldest token of the second layer, whose number is one of numpy's."""
    drop = torch.zeros(step.pos(1).shape, dtype=torch.bool)
    drop[..., 0] = True
    yield Evict(drop, layer=np.int64(1), even_protected=np.True_)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["plain", "pages"])
def test_whole_numbers_may_be_those_of_numpy_or_of_an_enumeration(cache: str) -> None:
    demands = (
        Demand(See.MASS, layers=frozenset(cast(Any, np.array([0, 1]))), every=cast(Any, np.int64(3))),
        Demand(See.ROWS, layers=frozenset(Layers), rows=cast(Any, np.int32(2))),
    )
    numbers = {name: np.int64(9) for name in ("budget", "cap", "slack", "beside")}
    policy = Mine(evicts_first, demands=demands, pull=np.int8(0), **numbers)
    assert "holds" in until_refused(policy, cache), "the first layer keeps everything"
    assert until_refused(Mine(evicts_first, demands=demands, slack=np.int64(3)), cache) == ""


@pytest.mark.parametrize("value", [0, 1, 0.0, None, np.True_, np.False_])
def test_a_switch_may_be_what_python_takes_for_one(value: Any) -> None:
    demands = (Demand(See.MASS, prompt=value),)
    policy = Mine(lambda step: (), demands=demands, protect_prompt=value, exempt_answer=value)
    run(policy)
    run(Stack([policy, Window(budget=9)]))


@pytest.mark.parametrize("value", ["no", "", b"1", [], (0,), torch.tensor(True)])
def test_a_switch_is_no_text_and_no_collection(value: Any) -> None:
    for fields in ({"protect_prompt": value}, {"demands": (Demand(See.MASS, prompt=value),)}):
        assert "it must be True or False" in refused(Mine(lambda step: (), **fields))


class Still(Policy):
    """Defines no `decide`."""

    name = "mine"

    def __init__(self, **fields: Any) -> None:
        for field, value in fields.items():
            setattr(self, field, value)


NO_DECIDE: dict[str, tuple[dict[str, Any], str]] = {
    "a budget": (
        {"budget": 8},
        "budget is 8, and without a `decide` nothing is evicted: write .*, or leave the budget out",
    ),
    "a budget of nothing": ({"budget": 0}, "budget is 0, and without a `decide`"),
    "a schedule that gives one": (
        {"schedule": "sawtooth:9/5"},
        "schedule is 'sawtooth:9/5', and .* or leave the schedule out",
    ),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", NO_DECIDE)
def test_a_policy_that_never_evicts_has_no_budget(case: str, stacked: bool) -> None:
    """It would run until the pool of pages ends."""
    fields, said = NO_DECIDE[case]
    policy = Still(**fields)
    if stacked:
        with pytest.raises(UsageError, match=said):
            Stack([Cut(9), policy])
    else:
        assert re.search(said, refused(policy))


def test_what_never_evicts_may_have_all_that_is_no_budget() -> None:
    run(Still(schedule="share:0.3/0.4", slack=3, protect_prompt=True))


class Lax(Cut):
    """Keeps to no limit: what it evicts of the oldest tokens is what a test gives."""

    name = "mine"

    def __init__(self, evicts: int, **fields: Any) -> None:
        super().__init__(5)
        self.evicts = evicts
        for field, value in fields.items():
            setattr(self, field, value)

    def decide(self, step: Step) -> Any:
        column = torch.arange(step.pos().shape[-1])
        yield Evict((column < self.evicts).expand(step.pos().shape))


def manager_of(policy: Policy, cache: str) -> Any:
    """A cache for three sequences of 40 tokens."""
    if cache == "plain":
        rope = Rope(DECODER.config)
        return PlainCache(DECODER.config, rope, policy, rows=ROWS, tokens=40, dtype=DECODER.embed.dtype)
    return manager_for(DECODER, policy, rows=ROWS, tokens=40, columns="fit" if cache == "graphs" else None)


def until_refused(policy: Policy, cache: str) -> str:
    """The sentence with which a run of 40 tokens under this policy ends; "": it does not."""
    manager = manager_of(policy, cache)
    try:
        for seq in range(ROWS):
            manager.join(seq, 40, 6)
            feed(DECODER, manager, {seq: [1] * 6})
        for _ in range(34):
            feed(DECODER, manager, {seq: [1] for seq in range(ROWS)})
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("cache", ["plain", "pages", "graphs"])
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            Lax(0),
            r"mine: .* holds \d+ tokens between two steps \(it has evicted none\), .* allow 5: its `decide`",
        ),
        (Lax(0, slack=3), r"mine: .* holds \d+ tokens between two steps \(it has evicted none\), .* allow 8:"),
        (Lax(0, schedule="interval:4"), "allow 9: its `decide` must yield an Evict"),
        (Stack([Cut(9), Lax(0, budget=7)]), "mine: .* holds .* allow 7:"),
        (Lax(0, budget=12, protect_prompt=True), "mine: .* holds .* allow 12:"),
    ],
)
def test_a_policy_that_never_evicts_is_told_so(policy: Policy, said: str, cache: str) -> None:
    """It was told that the pool is exhausted, or nothing at all."""
    assert re.search(said, until_refused(copy.deepcopy(policy), cache))


@pytest.mark.parametrize("cache", ["plain", "pages", "graphs"])
@pytest.mark.parametrize("policy", [Lax(1), Lax(0, exempt_answer=True, budget=40), Lax(0, budget=None), Cut(5)])
def test_a_policy_that_keeps_to_its_limit_is_told_nothing(policy: Policy, cache: str) -> None:
    if policy.budget == 5:
        policy = copy.deepcopy(policy)
        policy.slack = 1  # the prompt has a token more, of which it evicts one
    assert until_refused(policy, cache) == ""


def test_a_policy_that_evicts_too_late_is_told_when_a_graph_finds_no_page() -> None:
    manager = manager_for(DECODER, Lax(0), rows=ROWS, tokens=40)
    manager.join(0, 40, 4)
    feed(DECODER, manager, {0: [1] * 4})
    feed(DECODER, manager, {0: [1]})
    manager._check_limits()
    feed(DECODER, manager, {0: [1]})
    manager._check_limits(on_the_way=1)  # a captured step has appended it, and no policy could act yet
    with pytest.raises(UsageError, match=r"holds 6 tokens .* allow 5:"):
        manager._check_limits()


def test_limits_are_checked_without_the_device_where_the_hosts_counts_suffice() -> None:
    """The host has just read the counts where `fit_columns` checks; reading them again would wait twice."""
    manager = manager_for(DECODER, Cut(5), rows=ROWS, tokens=40)
    manager.join(0, 40, 4)
    feed(DECODER, manager, {0: [1] * 4})
    lists: Any = manager.store.lists
    lists.count = None
    manager._check_limits()
    lists.longest[0] = 6
    with pytest.raises(AttributeError):
        manager._check_limits()


def test_due_needs_a_budget() -> None:
    policy = Mine(lambda step: policy.due(step))
    assert "asks `due` which lanes exceed their budget, and its `budget` is None: give it one" in refused(policy)


class Due(Cut):
    """Tells in another form which lanes must evict."""

    name = "mine"
    capturable = True  # only then is `due` asked for, beside `decide`

    def __init__(self, found: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(6)
        self.found = found

    def due(self, step: Step) -> Any:
        return self.found(*super().due(step))

    def decide(self, step: Step) -> Any:
        return ()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda which, keep: which, r"returned a tensor, bool \[2, 1, 2\] on cpu from `due`, which must return a"),
        (lambda which, keep: (which, keep, 1), "returned a tuple of 3 from `due`"),
        (lambda which, keep: (which[0], keep), r"the first of the two, is a tensor, bool \[1, 2\]"),
        (lambda which, keep: (which.int(), keep), "the first of the two, is a tensor, int32"),
        (lambda which, keep: (which, keep.long()), "the second of the two, is a tensor, int64"),
        (lambda which, keep: (which, 5), "the second of the two, is 5"),
    ],
)
def test_due_is_checked(found: Any, said: str) -> None:
    assert re.search(said, refused(Due(found)))


class Steers(Policy):
    """Gives other hidden states back."""

    name = "mine"

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def steer(self, step: Step, layer: int, hidden: Tensor) -> Any:
        return self.change(hidden)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda hidden: None, r"returned None from `steer`, and it must return the hidden .* float32 \[1, 24\]"),
        (lambda hidden: hidden[0], r"returned a tensor, float32 \[24\]"),
        (lambda hidden: hidden.double(), "returned a tensor, float64"),
        (lambda hidden: hidden.to("meta"), r"returned a tensor, float32 \[1, 24\] on meta"),
    ],
)
def test_what_steering_gives_back_is_checked(change: Any, said: str) -> None:
    assert re.search(said, refused(Steers(change)))


def test_an_error_of_the_policy_comes_as_it_is() -> None:
    def raises(step: Step) -> Iterator[Any]:
        yield Evict(mask(step))
        raise KeyError("mine")

    manager = manager_for(DECODER, Mine(raises), rows=ROWS)
    manager.join(0, 40, 6)
    with pytest.raises(KeyError, match="mine"):
        feed(DECODER, manager, {0: [1] * 6})


def started(answer: Callable[[Step], Any], **fields: Any) -> KVManager:
    """A cache under such a policy, with one prompt of six tokens."""
    manager = manager_for(DECODER, Mine(answer, **fields), rows=ROWS)
    manager.join(0, 40, 6)
    feed(DECODER, manager, {0: [1] * 6})
    return manager


def test_a_mask_may_be_true_where_nothing_can_go() -> None:
    """Where there is no token, in rows without a sequence, and at protected tokens; also where protected tokens may
    go, there are no others."""
    everything = one(lambda step: Evict(torch.ones_like(step.pos(), dtype=torch.bool)))
    assert kept(started(everything, protect_prompt=True), 0) == [[*range(6)]] * 4
    assert kept(started(everything), 0) == [[]] * 4
    beyond = one(lambda step: Evict(step.pos() < 2, even_protected=True))
    assert kept(started(beyond, protect_prompt=True), 0) == [[2, 3, 4, 5]] * 4


def test_several_evictions_add_up() -> None:
    both = started(lambda step: iter([Evict(step.pos() == 1), Evict(step.pos(1) == 4, layer=1)]))
    assert kept(both, 0) == [[0, 2, 3, 4, 5]] * 2 + [[0, 2, 3, 5]] * 2


def test_eviction_wins_over_another_format() -> None:
    def answer(step: Step) -> Iterator[Any]:
        yield Requantize(step.pos() >= 3, "fp8")
        yield Evict(step.pos() == 4)

    both = started(answer, storage=Storage(also=("fp8",)))
    assert kept(both, 0) == [[0, 1, 2, 3, 5]] * 4
    assert both.store.format()[0, 0, 0].tolist() == [0, 0, 0, 1, 1]


def checked(edit: Callable[[Step], Any], storage: Storage | None = None, **fields: Any) -> Any:
    """What `yielded` makes of an edit; fields beside `captures` and `asks` are the policy's."""
    flags = {name: fields.pop(name, name == "asks") for name in ("captures", "asks")}
    found = []

    def answer(step: Step) -> tuple[()]:
        if not found:
            found.append(yielded(policy, [edit(step)], step, storage or Storage(), **flags))
        return ()

    policy = Mine(answer, **fields)
    run(policy)
    return found[0]


def test_a_capture_may_open_segments_if_the_policy_says_so() -> None:
    opened = lambda step: OpenSegment(YES, TYPE)  # noqa: E731
    assert checked(opened, captures=True, opens=True)
    assert checked(opened, captures=False)
    with pytest.raises(
        UsageError, match="mine is capturable and yields OpenSegment, and only Evict and SetBudget can"
    ):
        checked(opened, captures=True)
    for opens, allowed in ((False, "Evict and SetBudget"), (True, "Evict, SetBudget and OpenSegment")):
        with pytest.raises(UsageError, match=f"yields Requantize, and only {allowed} can be captured"):
            checked(lambda step: Requantize(mask(step), "plain"), captures=True, opens=opens)


@pytest.mark.parametrize(
    "edit",
    [
        lambda step: OpenSegment(YES, TYPE + 1),
        lambda step: SetBudget(torch.full((2, 3, 2), -5, dtype=torch.int32)),
    ],
)
def test_values_are_looked_at_only_where_the_host_may_read_them(edit: Callable[[Step], Any]) -> None:
    with pytest.raises(UsageError, match="mine"):
        checked(edit)
    assert checked(edit, asks=False)


@pytest.mark.parametrize(
    "edit",
    [
        lambda step: OpenSegment(YES, torch.tensor([0, 9, 9], dtype=torch.uint8)),  # no segment opens in the last two
        lambda step: SetBudget(torch.zeros(2, 3, 2, dtype=torch.int32)),
        lambda step: Requantize(mask(step), "fp8", how="shrink"),
    ],
)
def test_what_the_contract_allows_passes(edit: Callable[[Step], Any]) -> None:
    assert checked(edit, Storage(also=("fp8",)))


def test_values_on_a_gpu_are_not_looked_at() -> None:
    """It would have to wait for the GPU. Tensors without values stand for tensors there."""
    meta = torch.device("meta")
    step = SimpleNamespace(
        row=torch.zeros(ROWS, device=meta),
        budget=torch.zeros(2, ROWS, 2, device=meta),
        pos=lambda: torch.zeros(2, ROWS, 2, 6, device=meta),
        shape=SimpleNamespace(layers=2),
    )
    tokens = torch.zeros(2, ROWS, 2, dtype=torch.int32, device=meta)
    policy = Mine(lambda step: ())
    assert yielded(policy, [SetBudget(tokens)], cast(Any, step), Storage(), captures=False, asks=True)


def test_an_unknown_format_is_refused_when_it_is_declared() -> None:
    for storage in (Storage(also=("fp9",)), Storage(thoughts=("fp8", "fp8/fp9"))):
        with pytest.raises(UsageError, match=r"The format 'fp9' is unknown; choose one of"):
            declared(Mine(lambda step: (), storage=storage))


def test_a_policy_without_a_name_is_called_by_its_class() -> None:
    with pytest.raises(UsageError, match="The policy Mine: slack is -1"):
        declared(Mine(lambda step: (), name="", slack=-1))


class Nameless(Mine):
    """Its class gives itself no name, as one that is written in a notebook."""

    name = ""


class NamelessSteers(Nameless):
    def steer(self, step: Step, layer: int, hidden: Tensor) -> Any:
        return None


class NamelessScores(Scored):
    budget = 3

    def score(self, step: Step, layer: int, choice: Any) -> Any:
        return "best"


class NamelessScored(Scored):
    budget = 3


@dataclass(frozen=True)
class Frozen(Scored):
    """Cannot be written to."""

    budget: int | None = 6

    def score(self, step: Step, layer: int, choice: Any) -> Tensor:
        return step.pos(layer).float()


class ReadOnly(Mine):
    """Has an empty name that cannot be written to."""

    name = property(lambda self: "")  # type: ignore[assignment]


@pytest.mark.parametrize("policy", [Frozen(), ReadOnly(lambda step: ()), NamelessScores()])
def test_checks_leave_a_policy_as_it_is(policy: Policy) -> None:
    before = dict(vars(policy))
    declared(policy)
    Stack([policy])
    assert vars(policy) == before


@pytest.mark.parametrize("policy", [Frozen(), ReadOnly(lambda step: ())])
def test_a_policy_that_cannot_be_written_to_runs(policy: Policy) -> None:
    run(policy)
    run(Stack([policy, Window(budget=6)]))


def test_a_class_that_gives_itself_no_name_has_that_of_its_own() -> None:
    assert NamelessScores.name == NamelessScores().name == "NamelessScores"
    assert name_of(ReadOnly(lambda step: ())) == "ReadOnly"
    assert Stack([Frozen(), Window(budget=6)]).name == "Frozen+window"


def mass_of(step: Step) -> list[Evict]:
    step.mass(0)
    return []


def fail(step: Step) -> list[Evict]:
    raise KeyError("seven")


NAMELESS: dict[str, Policy] = {
    "a bare mask": Nameless(mask),
    "no edit": Nameless(one(mask)),
    "a mask of another shape": Nameless(one(lambda step: Evict(mask(step, 6)))),
    "what it has not demanded": Nameless(mass_of),
    "a number of tokens": Nameless(lambda step: (), budget=0),
    "a protected prompt": Nameless(lambda step: (), budget=3, protect_prompt=True),
    "steering": NamelessSteers(lambda step: ()),
    "an error of its own": Nameless(fail),
    "a score": NamelessScores(),
    "no score": NamelessScored(),
    "a stack": Stack([Window(budget=4, protect_prompt=True), Nameless(lambda step: (), budget=3)]),
}


@pytest.mark.parametrize("case", NAMELESS)
def test_messages_about_a_policy_without_a_name_say_its_class(case: str) -> None:
    policy = NAMELESS[case]

    @explaining()
    def tried() -> None:
        check_budget(policy, 6)
        run(policy)

    with pytest.raises(MinithinkError, match=r"\bNameless(Steers|Scores|Scored)?\b"):
        tried()
