"""The table of policies: what the command line writes becomes the policy that was meant, or is refused in words."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink import policies
from minithink.errors import UsageError
from minithink.kv.contract import Policy
from minithink.kv.stack import Stack
from minithink.policies import POLICIES, lookup, parse, read, split, takes_budget
from minithink.policies.kivi import Kivi
from minithink.policies.window import Window
from tests.policies.drive import follow, held


@dataclass
class Foreign(Policy):
    """One field of every type."""

    budget: int | None = None
    share: float = 0.5
    flag: bool = False
    word: str = ""
    choice: Literal["a", "b"] = "a"
    schedule: str = "every"

    name = "foreign"
    summary = "for tests"


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies.POLICIES, "foreign", Foreign)


ORACLES = ("answer_oracle", "hindsight_oracle", "needs_oracle")
SAWTOOTH = ("dynts", "sepllm", *ORACLES)  # evict many tokens at once


def written(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", POLICIES)
def test_the_table_is_in_order(name: str) -> None:
    cls = lookup(name)
    assert cls.name == name
    assert is_dataclass(cls)
    assert issubclass(cls, Policy)
    of = {"crystal_kv_lite": "crystal_kv", "tbq": "thinkv", "tbe": "thinkv"}
    of |= dict.fromkeys(ORACLES, "dynts_oracles")  # parts of a policy stand beside it
    home = of.get(name, name)
    assert getattr(importlib.import_module(f"minithink.policies.{home}"), cls.__name__) is cls
    assert 0 < len(cls.summary) < 100
    assert "\n" not in cls.summary
    hints = get_type_hints(cls)
    for field in fields(cls):  # type: ignore[arg-type]
        types = get_args(hints[field.name]) or (hints[field.name],)
        assert all(isinstance(t, str) for t in types) or set(types) <= {int, float, bool, str, type(None)}, field.name


@given(st.data())
def test_every_value_is_read_as_it_is_written(data: st.DataObject) -> None:
    drawn = {
        "budget": st.none() | st.integers(-9, 10**6),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "word": st.text("abc:=/. 1", max_size=5),
        "choice": st.sampled_from("ab"),
        "schedule": st.sampled_from(["every", "interval:128"]),
    }
    values = {key: data.draw(drawn[key]) for key in data.draw(st.permutations(sorted(drawn)))[:5]}
    values["budget"] = values.get("budget") or 7  # none is refused
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(policies.POLICIES, "foreign", Foreign)
        text = "foreign:" + ",".join(f"{key}={written(value)}" for key, value in values.items())
        assert parse(text) == Foreign(**values)


def test_the_example_of_each_notation() -> None:
    assert parse("window:budget=256,protect_prompt=true") == Window(256, protect_prompt=True)
    assert parse("window:schedule=sawtooth:40/30") == Window(40, "sawtooth:40/30")
    assert parse("kivi:v_bits=none") == Kivi(v_bits=None)
    stack = parse("window:budget=8+kivi:bits=4")
    assert isinstance(stack, Stack)
    assert stack.members == (Window(8), Kivi(4))
    assert stack.storage == Kivi(4).storage


def test_policies_with_several_budgets_are_made_of_one_text() -> None:
    both = read("window+quant:fmt=fp8")
    assert both.leaves_open("budget")
    assert [both.make(budget=budget).budget for budget in (64, 32)] == [64, 32]
    assert not read("window:budget=9").leaves_open("budget")
    assert not read("kivi").leaves_open("budget")


def test_a_plus_of_a_number_is_no_stack(foreign: None) -> None:
    assert parse("foreign:share=1e+5,budget=3") == Foreign(3, 1e5)


def test_budget_and_schedule_from_outside() -> None:
    assert parse("window", budget=9) == parse("window:budget=9", budget=9) == Window(9)
    assert parse("window", budget=9, schedule="interval:4") == Window(9, "interval:4")
    stack = parse("window+full+random:seed=1", budget=9)
    assert isinstance(stack, Stack)
    assert [m.budget for m in stack.members] == [9, None, 9]
    without = [name for name in POLICIES if not takes_budget(lookup(name))]
    assert without == ["full", "snapkv", "seal", "tbq", "quant", "kivi", "pm_kvq"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("rvk", {}, "'rvk' is unknown; did you mean rkv? There are: full, window"),
        ("nope", {}, "'nope' is unknown; there are: full, window, streaming_llm"),
        ("window,nope:a=1", {}, "The policy 'nope' is unknown; there"),
        ("full,rvk", {}, "The policy 'rvk' is unknown; did you mean rkv? There"),
        ("rvk, full", {}, "The policy 'rvk' is unknown; did you mean rkv? There"),
        ("rkv:buffer=0,kivy", {}, "rkv has no hyperparameter 'kivy' (did you mean the policy kivi?); it takes"),
        ("rkv:buffer=0,kivy:bits=4", {}, "no hyperparameter 'kivy:bits' (did you mean the policy kivi?); it takes"),
        ("rkv:windows=3", {}, "no hyperparameter 'windows'; it takes"),
        ("full,", {}, "The policy '' is unknown"),
        ("full, kivi", {}, "full, kivi are 2 policies: give one, or a stack, full+kivi."),
        ("window:budget=3+nope", {}, "'nope' is unknown"),
        ("", {}, "'' is unknown"),
        ("window+", {"budget": 3}, "'' is unknown"),
        ("foreign:size=3", {}, "no hyperparameter 'size'; it takes budget, share, flag, word, choice, schedule."),
        ("foreign:wort=x", {}, "no hyperparameter 'wort' (did you mean word?); it takes budget"),
        ("rkv,budget=512", {}, "'budget=512' is unknown: what a policy is told follows a colon, rkv:budget=512."),
        ("foreign:", {}, "no hyperparameter ''"),
        ("full:budget=3", {}, "full has no hyperparameter 'budget'; it takes none"),
        ("foreign:budget=2.5", {}, "cannot have budget=2.5: budget is a whole number or none."),
        ("foreign:budget", {}, "cannot have budget=: budget is"),
        ("foreign:share=half", {}, "cannot have share=half: share is a number."),
        ("foreign:share=none", {}, "cannot have share=none"),
        ("foreign:flag=1", {}, "cannot have flag=1: flag is true or false."),
        ("foreign:flag=True", {}, "cannot have flag=True"),
        ("foreign:choice=c", {}, "cannot have choice=c: choice is a or b."),
        ("foreign:share=1,share=1", {}, "given share twice"),
        ("window:budget=5+full+window:budget=9", {}, "names window 2 times: give it once"),
        ("full", {"budget": 64}, "A budget of 64 tokens was given, and the policy full takes none: drop it"),
        ("full+kivi", {"budget": 64}, "the policy full.kivi takes none"),
        ("full", {"schedule": "every"}, "The schedule 'every' was given, and the policy full takes none"),
        ("window:budget=5", {"budget": 64}, "A budget of 64 tokens was given, and window says budget=5"),
        ("window:budget=5,schedule=every", {"schedule": "interval:2"}, "window says schedule=every"),
        ("window:budget=5", {"schedule": "often"}, "The schedule 'often' is unknown"),
        ("window:budget=5,schedule=sawtooth:9/4", {}, "grow to 9 tokens, and the budget is 5"),
        ("window", {}, "window needs a budget in tokens: give --budget, or window:budget="),
        ("window:budget=none", {}, "window needs a budget"),
        ("window:budget=5+random", {}, "random needs a budget"),
        ("kivi+quant", {}, "kivi and quant store tokens in different ways"),
    ],
)
def test_what_makes_no_sense_is_refused(foreign: None, text: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text, **arguments)
    assert message.replace("full.kivi", "full+kivi") in str(refused.value)


PIECES = st.sampled_from(
    [
        "full",
        "window:budget=3",
        "window:budget=3,protect_prompt=true",
        "window:schedule=sawtooth:9/3,budget=3",
        "kivi:bits=4+window",
        "random:scope=head,seed=1+full",
        "quant:fmt=int4,by=token,group=32",
        "nope:full=full",
    ]
)


@given(st.lists(PIECES, min_size=1, max_size=5), st.sampled_from([",", ", "]))
def test_lists_are_split_before_names(pieces: list[str], comma: str) -> None:
    pieces = [p for i, p in enumerate(pieces) if i == 0 or not p.startswith("nope")]
    assert split(comma.join(pieces)) == pieces


def test_lists_are_not_split_elsewhere() -> None:
    assert split("window:x=1,fullness=2,full") == ["window:x=1,fullness=2", "full"]
    assert split("full,nope") == ["full,nope"]


SMALL = {  # hyperparameters that make something happen within a few tokens
    "quant": "fmt=int4,by=token",
    "kivi": "group=16,residual=16",
    "pm_kvq": "bits=3,max_len=48,window=8,group=16",
    "rkv": "alpha=2,buffer=5",
    "snapkv_decode": "alpha=2,buffer=5",
    "ada_snapkv": "alpha=2,buffer=5",
    "sepllm": "window=0.6,fill=true",
    "random_attention": "buffer=5",
    "triattention": "buffer=5",
    "pyramidkv": "alpha=2,buffer=5",
    "crystal_kv": "min_budget=4,realloc_every=5",
    "thinkv": "tau=4,g=4,retention=2/1,precision=R8E8T8,layers=0,thresholds=0.05/0.1",
    "tbe": "tau=4,retention=2/1,layers=0,thresholds=0.05/0.1",
    "tbq": "tau=4,g=4,precision=R8E8T8,layers=0,thresholds=0.05/0.1",
}


@pytest.mark.parametrize("name", POLICIES)
def test_limits_and_batches(name: str) -> None:
    """Lanes hold about as many tokens as they may in the end, and a sequence keeps what it keeps alone."""
    options = f"{name}:{SMALL[name]}" if name in SMALL else name

    def policy() -> Policy:
        return parse(options, budget=32 if takes_budget(lookup(name)) else None)

    prompts, steps = [5, 25, 12], 40
    together = [[held(m, seq) for seq in range(3)] for m in follow(policy(), prompts, steps, rows=4)]
    limit = policy().limit
    if limit is not None:
        assert all(len(lane) <= limit for step in together for seq in step for lane in seq)
        # the former drop half of a segment, the others all that a trigger drops, of at least 27 beside their prompt
        least = 30 if name in ("thinkv", "tbe") else 16 if name in SAWTOOTH else 32
        assert all(len(lane) >= least for seq in together[-1] for lane in seq)
    for seq, prompt in enumerate(prompts):
        alone = [held(m, seq) for m in follow(policy(), [prompt], steps, seqs=[seq], rows=4)]
        assert [step[seq] for step in together] == alone, name


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_message_names_no_option_that_the_policy_lacks(name: str) -> None:
    """Some policies fix an option of the policy that they extend."""
    cls = POLICIES[name]
    fixed = {f.name for f in fields(cls) if not f.init}  # type: ignore[arg-type]
    for field in (f for f in fields(cls) if f.init):  # type: ignore[arg-type]
        for value in (-1, 10**6, -0.5, 1e18):
            given = {"budget": 64, field.name: value} if takes_budget(cls) else {field.name: value}
            said = ""
            try:
                cls(**given)
            except UsageError as error:
                said = str(error)
            except (ValueError, TypeError, AttributeError):  # the value is of another type
                continue
            assert not fixed & set(re.findall(r"\w+", said)), said
