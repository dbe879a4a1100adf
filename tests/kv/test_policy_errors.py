"""Sentences for errors in a user's own policy. To run it alone: pytest tests/kv/test_policy_errors.py"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minithink.engine import Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.kv.contract import Demand, Edit, Evict, Model, Policy, See, Shape, Step
from minithink.kv.policy_errors import explained
from minithink.kv.stack import Stack
from minithink.policies.raas import RaaS
from minithink.policies.rkv import Rkv
from minithink.policies.scored import Choice, Scored
from minithink.policies.window import Window

torch.set_num_threads(1)


@dataclass
class Loud(Policy):
    """A policy as a user writes one. `wrong` says what is wrong with its scores."""

    budget: int | None = 8
    schedule: str = "every"
    wrong: str = ""

    name = "loud"
    demands = (Demand(See.MASS, group="mean"),)

    def decide(self, step: Step) -> Iterable[Edit]:
        due, _ = self.due(step)
        if not step.any(due):
            return
        pos = step.pos()
        score = torch.stack([self.score(step, layer) for layer in range(step.shape.layers)])
        score = score.masked_fill(pos < 2, torch.inf)
        may = (pos >= 0) & ~step.protected()
        yield Evict(due[..., None] & may & ~step.ops.keep_best(score, may, self.room(step)))

    def score(self, step: Step, layer: int) -> Tensor:
        mass = step.mass(layer)
        if self.wrong == "shape":
            return mass[..., :-1]
        if self.wrong == "heads":
            return mass.repeat_interleave(3, 1)
        if self.wrong == "dtype":
            return mass.long()
        if self.wrong == "type":
            return mass + "x"  # type: ignore[operator]
        if self.wrong == "attribute":
            return step.no_such_method(layer)
        if self.wrong == "key":
            return {}[layer]
        if self.wrong == "value":
            raise ValueError("it is too loud.")
        if self.wrong == "exit":
            sys.exit(0)
        if self.wrong == "own sentence":
            raise MinithinkError("The policy loud needs a quieter model.")
        return mass[9] if self.wrong == "index" else mass


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    from tests.fixtures_checkpoint import write_checkpoint

    return load(write_checkpoint(tmp_path_factory.mktemp("model")), device="cpu")


def generate(engine: Engine, policy: Any) -> Any:
    return engine.generate([list(range(10, 20))], max_new_tokens=3, policy=policy)


@pytest.mark.parametrize(
    ("wrong", "method", "said"),
    [
        ("shape", "decide", r"size of tensor .* Its tensors there are .*score \[\d+, 1, \d+, \d+\] float32"),
        ("heads", "decide", r"size of tensor .* Its tensors there are .*pos \[\d+, 1, \d+, \d+\] int32, score \["),
        ("dtype", "decide", r"Its tensors there are .*score \[.*\] int64"),
        ("type", "score", r"unsupported operand.* Its tensors there are mass \[1, \d+, \d+\] float32\.$"),
        ("index", "score", r"index 9 is out of bounds"),
        ("attribute", "score", r".*no_such_method"),
        ("key", "score", r""),
        ("value", "score", r"it is too loud\. Its tensors there are"),
        ("exit", "score", r"it ends the program \(SystemExit\)\."),
    ],
)
def test_a_wrong_score_is_one_sentence_with_method_line_and_shapes(
    engine: Engine, wrong: str, method: str, said: str
) -> None:
    with pytest.raises(MinithinkError) as caught:
        generate(engine, Loud(wrong=wrong))
    sentence = str(caught.value)
    here = rf"The policy loud fails in `{method}` \({Path(__file__).name}, line \d+\): .*{said}"
    assert re.match(here, sentence), sentence
    assert caught.value.__cause__ is not None, "the traceback is there for whoever wants it"


@pytest.mark.parametrize("cache", ["plain", "paged"])
@pytest.mark.parametrize("method", ["bind", "setup", "caution"])
def test_what_a_policy_does_before_the_first_token_fails_alike(engine: Engine, method: str, cache: str) -> None:
    broken = type("Broken", (Loud,), {method: lambda self, shape: shape.no_such_field})
    said = rf"^The policy loud fails in `<lambda>` \({Path(__file__).name}, line \d+\): .*no_such_field"
    with pytest.raises(MinithinkError, match=said):
        engine.generate([[10, 11]], max_new_tokens=3, policy=broken(), cache=cache)
    with pytest.raises(MinithinkError, match=r"^The policy loud fails in"):
        engine.try_out(engine.bind(broken()))


def test_a_sentence_of_the_policy_stays_as_it_is(engine: Engine) -> None:
    with pytest.raises(MinithinkError, match=r"^The policy loud needs a quieter model\.$"):
        generate(engine, Loud(wrong="own sentence"))


def test_a_right_policy_runs(engine: Engine) -> None:
    assert len(generate(engine, Loud())[0].token_ids) == 3


def test_errors_of_this_project_stay_what_they_are(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = eval("lambda self, step: 1 / []", {"__name__": "minithink.policies.window"})
    monkeypatch.setattr(Window, "decide", decide)
    with pytest.raises(TypeError, match="unsupported operand"):
        generate(engine, "window:budget=8")
    assert explained(RuntimeError("nothing was raised")) is None


def test_the_class_of_a_policy_is_no_policy(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"^Loud is the class of a policy: give .* as in policy=Loud\(…\)\.$"):
        generate(engine, Loud)
    with pytest.raises(UsageError, match=r"^The policy is 256: give a text, as in rkv:budget=256, or an object\.$"):
        generate(engine, 256)


@pytest.mark.parametrize(
    ("field", "value"), [("budget", "8"), ("budget", [8]), ("slack", "3"), ("schedule", 3), ("storage", "fp8")]
)
def test_what_an_object_declares_is_checked_before_it_is_used(engine: Engine, field: str, value: Any) -> None:
    """Sizes are computed before there is a cache, and would fail on a text."""
    policy = Window(budget=8)
    setattr(policy, field, value)
    with pytest.raises(UsageError, match=rf"^The policy window: {field} is .*, and it must be an? "):
        generate(engine, policy)


@dataclass
class Newest(Scored):
    """Is `Scored`, whose `decide` asks which lanes are due."""

    budget: int | None = None
    schedule: str = "every"
    learns: bool = False

    def bind(self, model: Model) -> None:
        if self.learns:
            self.budget = 9

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        return step.pos(layer).float()


@dataclass
class Alternate(Policy):
    """Evicts every second token once, and uses no budget."""

    budget: int | None = None

    def decide(self, step: Step) -> Iterable[Edit]:
        even = (step.pos() >= 0) & (step.pos() % 2 == 0)
        yield Evict(even & (step.clock == 1)[None, :, None, None])


@dataclass
class Sometimes(Newest):
    """Is `Scored`, with a `due` of its own."""

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        held = step.held()
        return step.active[None, :, None] & (held > 9), torch.full_like(held, 6)


@dataclass
class Keeping(Alternate):
    """Has state for as many tokens as a lane may hold."""

    def setup(self, shape: Shape) -> None:
        self.kept = torch.zeros(self.room_for(shape))


def test_an_object_that_evicts_by_its_budget_needs_one(engine: Engine) -> None:
    """As the text does, and before a prompt is read."""
    for policy in (Newest(), Window(), RaaS()):
        cls = type(policy).__name__
        with pytest.raises(UsageError, match=rf"needs a budget in tokens: give one, as in {cls}\(budget=256\)\.$"):
            engine.bind(policy)
    engine.bind(Newest(schedule="sawtooth:9/5"))  # which says what lanes may grow to


@pytest.mark.parametrize("number", [2**31, np.int64(2**31)])
def test_a_number_of_an_object_that_is_too_large_is_refused(engine: Engine, number: Any) -> None:
    with pytest.raises(UsageError, match=r"^rkv: buffer is .*2147483648.*; it must be at most "):
        engine.bind(Rkv(budget=20, buffer=number))


def test_a_decide_of_ones_own_is_refused_when_it_asks_what_is_due(engine: Engine) -> None:
    said = r"^The policy loud asks `due` which lanes exceed their budget, and its `budget` is None: give it one"
    with pytest.raises(UsageError, match=said):
        generate(engine, Loud(budget=None))
    generate(engine, Loud(budget=None, schedule="sawtooth:9/5"))


def test_state_for_a_limit_that_is_not_there_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"^The policy Keeping asks `room_for` .* `limit` is None: give it a bud"):
        generate(engine, Keeping())


@pytest.mark.parametrize("policy", [Newest(learns=True), Alternate(), Sometimes()])
def test_an_object_that_can_do_without_a_budget_option_runs(engine: Engine, policy: Policy) -> None:
    [result] = generate(engine, policy)
    assert len(result.token_ids) == 3
    assert result.kv_evicted > 0


# What a subclass of `Scored` may have of a wrong type, the inherited method that it breaks, and the error there.
WRONG = {
    "a text": ("window_size", lambda policy, room: "4", "choice", "string indices must be integers"),
    "None": ("window_size", lambda policy, room: None, "choice", "'NoneType' object is not subscriptable"),
    "a number": ("window_size", lambda policy, room: 4, "choice", "'int' object is not subscriptable"),
    "no method": ("window_size", 4, "choice", "'int' object is not callable"),
    "no argument": ("window_size", lambda policy: 4, "choice", "takes 1 positional argument but 2 were given"),
    "no room": ("room", lambda policy, step: None, "window_size", "must be Tensor, not NoneType"),
    "no pair": ("due", lambda policy, step: None, "decide", "cannot unpack non-iterable NoneType"),
    "no choice": ("choice", lambda policy, step, due: None, "scores", "'NoneType' object has no attribute"),
    "no mask": ("traced", "best", "decide", "'Choice' object has no attribute 'best'"),
}


@pytest.mark.parametrize("cache", ["plain", "paged"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_type_that_an_inherited_method_stumbles_over_is_one_sentence(
    engine: Engine, case: str, cache: str
) -> None:
    name, value, method, error = WRONG[case]
    wrong = type("Wrong", (Newest,), {name: value})
    with pytest.raises(MinithinkError) as caught:
        engine.generate([list(range(10, 20))], max_new_tokens=3, policy=wrong(budget=8), cache=cache)
    sentence = str(caught.value)
    place = r"\(minithink\.policies\.scored, line \d+: `[^`#]+`\)"
    said = rf"The policy Wrong fails in `{method}`, which it inherits {place}: .*{error}"
    assert re.match(said, sentence), sentence
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [ValueError("it is too loud"), SystemExit(0)])
def test_the_first_argument_of_a_method_may_have_any_name(engine: Engine, error: BaseException) -> None:
    def decide(this: Newest, step: Step) -> Iterable[Edit]:
        raise error

    said = rf"^The policy Wrong fails in `decide` \({Path(__file__).name}, line \d+\): it "
    with pytest.raises(MinithinkError, match=said):
        generate(engine, type("Wrong", (Newest,), {"decide": decide})(budget=8))


def test_an_error_made_of_another_is_where_it_was_raised(engine: Engine) -> None:
    def first(self: Newest) -> int:
        return next(iter(()))

    def decide(self: Newest, step: Step) -> Iterable[Edit]:
        try:
            yield first(self)
        except StopIteration as error:
            raise ValueError("no token is left") from error

    with pytest.raises(MinithinkError, match=r"^The policy Wrong fails in `decide` \(.*\): no token is left\."):
        generate(engine, type("Wrong", (Newest,), {"decide": decide})(budget=8))


def test_a_method_of_the_policys_own_is_named_before_one_that_it_inherits(engine: Engine) -> None:
    def decide(self: Newest, step: Step) -> Iterable[Edit]:
        yield from Newest.decide(self, step)

    wrong = type("Wrong", (Newest,), {"window_size": lambda policy, room: 4, "decide": decide})
    said = rf"^The policy Wrong fails in `decide` \({Path(__file__).name}, line \d+\): 'int' object is not subscr"
    with pytest.raises(MinithinkError, match=said):
        generate(engine, wrong(budget=8))


# What a method of a policy may return that is wrong, and the end of the sentence.
RETURNED = {
    "no state": (
        "state",
        lambda policy: None,
        "returned None from `state`, which must return an iterable of tensors",
    ),
    "a number of state": ("state", lambda policy: [3], "returned 3 from `state`, which must return"),
    "a number of notes": ("notes", lambda policy, row: 3, "returned 3 from `notes`, which must return a text"),
    "one tensor of state": (
        "state",
        lambda policy: torch.zeros(2, 3),
        "from `state`, which must return an iterable of tensors",
    ),
    "no counts": ("counts", lambda policy, row: None, "returned None from `counts`, which must return whole numbers"),
    "half a count": (
        "counts",
        lambda policy, row: {"a": 2.5},
        "from `counts`, which must return whole numbers of at least 0 by their names",
    ),
    "a count of a number": ("counts", lambda policy, row: {3: 1}, "from `counts`, which must return whole numbers"),
    "a text of counts": ("counts", lambda policy, row: "ab", "returned 'ab' from `counts`, which must return"),
    "a number to caution": (
        "caution",
        lambda policy, shape: 3,
        "returned 3 from `caution`, which must return a text",
    ),
}


@pytest.mark.parametrize("cache", ["plain", "paged"])
@pytest.mark.parametrize("case", RETURNED)
def test_what_methods_return_is_checked(engine: Engine, case: str, cache: str) -> None:
    name, value, said = RETURNED[case]
    wrong = type("Wrong", (Newest,), {name: value})
    with pytest.raises(MinithinkError, match=rf"^The policy Wrong.* {re.escape(said)}"):
        engine.generate([list(range(10, 20))], max_new_tokens=3, policy=wrong(budget=8), cache=cache)


@pytest.mark.parametrize("name", ["limit", "average_limit"])
def test_a_limit_is_a_whole_number(engine: Engine, name: str) -> None:
    wrong = type("Wrong", (Newest,), {name: "8"})
    said = r"^The policy Wrong: limit is '8', and it must be a whole number of tokens,"
    for cache in ("plain", "paged"):
        for policy in (wrong(budget=8), Stack([Window(budget=9), wrong(budget=8)])):
            with pytest.raises(UsageError, match=said):
                engine.generate([[10, 11]], max_new_tokens=3, policy=policy, cache=cache)


@pytest.mark.parametrize("cache", ["plain", "paged"])
@pytest.mark.parametrize(("field", "value"), [("budget", "8"), ("storage", "fp8")])
def test_what_bind_sets_is_checked(engine: Engine, field: str, value: Any, cache: str) -> None:
    wrong = type("Wrong", (Newest,), {"bind": lambda policy, model: setattr(policy, field, value)})
    with pytest.raises(UsageError, match=rf"^The policy Wrong: {field} is '{value}', and it must be"):
        engine.generate([[10, 11]], max_new_tokens=3, policy=wrong(budget=8), cache=cache)


def test_a_next_that_finds_nothing_is_an_error_of_the_policy(engine: Engine) -> None:
    """Python makes it a RuntimeError, which has lost the frames of the generator."""

    def decide(self: Newest, step: Step) -> Iterable[Edit]:
        yield next(iter(()))

    here = rf"\({Path(__file__).name}, line \d+\)"
    said = rf"^The policy Wrong fails in `decide` {here}: generator raised StopIteration\."
    with pytest.raises(MinithinkError, match=said):
        generate(engine, type("Wrong", (Newest,), {"decide": decide})(budget=8))


def test_a_method_may_be_decorated_or_written_in_c(engine: Engine) -> None:
    """A decorator may call the method that it wraps with more arguments. What is written in C has no signature."""

    def decorated(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def inner(self: Newest, step: Step) -> Any:
            return method(self, step, step.held())

        return inner

    def decide(self: Newest, step: Step, held: Tensor) -> Iterable[Edit]:
        return Newest.decide(self, step)

    plain = generate(engine, Newest(budget=8))[0]
    policy = type("Decorated", (Newest,), {"decide": decorated(decide)})(budget=8)
    policy.state = {}.values  # type: ignore[method-assign]
    assert generate(engine, policy)[0].token_ids == plain.token_ids


def test_notes_may_be_none(engine: Engine) -> None:
    silent = type("Silent", (Newest,), {"notes": lambda policy, row: None, "caution": lambda policy, shape: None})
    assert generate(engine, silent(budget=8))[0].kv_notes == ""
