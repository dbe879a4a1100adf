"""What is run: policies at budgets."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.errors import UsageError
from minithink.evaluate.plan import (
    AMPLE,
    Cell,
    Spec,
    budgets,
    check,
    check_share,
    known,
    plan,
    said_of_budgets,
    said_of_prompts,
    said_of_stages,
    tokens_by_bytes,
    tokens_of,
)
from minithink.kv.byte_size import ByteSize
from minithink.kv.sizes import check_budget
from minithink.kv.stack import Stack
from minithink.policies import POLICIES, Written, read, split, takes_budget
from minithink.text.tags import THINK
from tests.evaluate.draw import record


def specs(*texts: str, schedule: str | None = None) -> list[Spec]:
    return [Spec(text, schedule) for text in texts]


def cell(text: str, budget: int | float | None, schedule: str | None = None) -> Cell:
    return Cell(Spec(text, schedule), budget)


def names(cells: list[Cell]) -> list[tuple[str, int | float | None]]:
    return [one.name for one in cells]


def test_budgets_are_tokens_or_shares() -> None:
    assert budgets("256,512") == [256, 512]
    assert budgets("0.25, 0.5,1") == [0.25, 0.5, 1]
    assert [type(x) for x in budgets("1,0.5")] == [int, float]
    assert budgets("2MiB, 0.5KiB,7") == ["2MiB", "0.5KiB", 7]
    for text in ("0", "1.5", "-1", "x", "", "256,", "nan", "1.0", "inf", "2MB", "0B", "2M"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no budget"):
            budgets(text)


def test_every_policy_at_every_budget_that_it_takes() -> None:
    policies = ["full", "rkv:buffer=0", "kivi", "window:budget=99", "rkv+quant:fmt=fp8"]
    cells = plan(specs(*policies), [256, 512])
    assert names(cells) == [
        ("full", None),
        ("rkv:buffer=0", 256),
        ("rkv:buffer=0", 512),
        ("kivi", None),
        ("window:budget=99", 99),
        ("rkv+quant:fmt=fp8", 256),
        ("rkv+quant:fmt=fp8", 512),
    ]


def test_full_goes_first_where_a_share_needs_it() -> None:
    assert names(plan(specs("rkv", "kivi"), [0.25])) == [("full", None), ("rkv", 0.25), ("kivi", None)]
    assert names(plan(specs("rkv", "full"), [0.25])) == [("full", None), ("rkv", 0.25)]
    assert names(plan(None, [])) == [("full", None)]
    assert names(plan(specs("rkv", "full"), [256])) == [("rkv", 256), ("full", None)]


def test_bytes_are_tokens_when_the_model_is_known() -> None:
    size = ByteSize("1KiB")
    cells = plan(specs("window", "rkv:budget=2KiB,buffer=0", "kivi"), [size, 9])
    two = ByteSize("2KiB")
    assert names(cells) == [("window", size), ("window", 9), ("rkv:budget=2KiB,buffer=0", two), ("kivi", None)]
    assert [one.make().budget for one in cells] == [AMPLE, 9, AMPLE, None], "they stand for what is not known"
    cells = known(cells, lambda policy, size: size.number // 32)
    assert [one.make().budget for one in cells] == [32, 9, 64, None]
    assert [one.tokens for one in cells] == [32, None, 64, None]
    assert tokens_by_bytes(cells) == {"window": {"1KiB": 32}, "rkv:budget=2KiB,buffer=0": {"2KiB": 64}}
    assert [str(one) for one in cells[:2]] == ["window at 1KiB", "window at 9 tokens"]
    check([cell("window:protect_prompt=true", 33)], [31], 100)
    with pytest.raises(UsageError, match=r"the budget 1KiB comes to 32 tokens; give more bytes, .*prompt of 32"):
        check(known(plan(specs("window:protect_prompt=true"), [size]), cells[0].tokens_of), [32], 100)
    with pytest.raises(UsageError, match="lets lanes grow to 64 tokens, and the budget is '1KiB'"):
        plan(specs("window:schedule=sawtooth:64/32,budget=1KiB"), [])


@pytest.mark.parametrize("name", [name for name in POLICIES if takes_budget(POLICIES[name])])
def test_every_policy_that_takes_a_budget_takes_shares(name: str) -> None:
    """What a policy demands of its budget is no matter before anyone knows what the share comes to."""
    cells = plan(specs(name), [0.25, 0.5])
    assert names(cells) == [("full", None), (name, 0.25), (name, 0.5)]
    for one in cells[1:]:
        check_budget(one.make(), 10_000)
        assert one.make(longest=77).budget == 77


def test_a_schedule_may_say_the_budget() -> None:
    policies = specs("full", "rkv:schedule=every,budget=8", "window", schedule="sawtooth:64/32")
    cells = plan(policies, [], "sawtooth:64/32")
    assert names(cells) == [("full", None), ("rkv:schedule=every,budget=8", 8), ("window", 64)]
    assert cells[1].make().schedule == "every", "its own goes before"
    window = cells[2].make()
    assert (window.schedule, window.budget) == ("sawtooth:64/32", 64)


@pytest.mark.parametrize(
    ("policies", "numbers", "schedule", "said"),
    [
        (["nonsense"], [], None, "The policy 'nonsense' is unknown"),
        (split("full,rvk"), [], None, "The policy 'rvk' is unknown; did you mean rkv"),
        (["rkv:x=1"], [], None, "has no hyperparameter 'x'"),
        (["rkv"], [], None, "needs a budget in tokens: give --budgets, or rkv:budget="),
        (["full", "full"], [], None, "The policy full is named twice"),
        (["rkv"], [8, 8], None, "The budget 8 is named twice"),
        (["full", "kivi"], [256], None, "full, kivi leaves its budget open: drop --budgets, or name one that does"),
        (["full"], [], "every", "full leaves its schedule open: drop --schedule, or name one that does, such as rkv"),
        (None, [10], None, "--policies was not given, and full, .* takes no budget: name one .* or drop --budgets"),
        (None, [], "every", "takes no schedule: name one that does, as in --policies full,rkv, or drop --schedule"),
        (["rkv"], [8], "sometimes", "The schedule 'sometimes' is unknown"),
        (["rkv"], [8], "sawtooth:64/32", "drop the budget, or make them equal"),
        (["rkv"], [0.5], "sawtooth:64/32", "rkv lets lanes grow to 64 tokens, .* the share 0.5: drop one"),
        (["window:schedule=sawtooth:64/32"], [0.5], None, "grow to 64 tokens, .* the share 0.5: drop one"),
        (["streaming_llm:sink=9"], [9], None, "sink is 9 and the budget 9 tokens"),
        (["window:budget=8+rkv:budget=9", "rkv"], [], None, "needs a budget"),
        (["window:budget=7+rkv"], [8], None, "A budget of 8 tokens was given, and window says budget=7"),
        (["kivi:group=7"], [], None, "group"),
    ],
)
def test_what_makes_no_sense(policies: list[str] | None, numbers: list[Any], schedule: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(None if policies is None else specs(*policies, schedule=schedule), numbers, schedule)


@given(st.floats(0.001, 0.999), st.integers(1, 5000), st.floats(0, 10_000))
def test_shares(share: float, prompt: int, mean: float) -> None:
    got = tokens_of(share, prompt, mean)
    assert got is not None
    assert got > prompt, "a protected prompt fits"
    assert abs(got - prompt - share * mean) <= (0.5 if share * mean > 1 else 1)
    assert tokens_of(256, prompt, mean) is tokens_of(None, prompt, mean) is None


def test_shares_by_hand() -> None:
    assert [tokens_of(0.25, prompt, 1000.0) for prompt in (10, 300)] == [260, 550]


def test_policies() -> None:
    assert cell("rkv:buffer=0", 256).make().budget == 256
    assert cell("rkv:buffer=0", 0.5).make(longest=77).budget == 77
    assert cell("rkv:budget=9", 9).make().budget == 9
    stack = cell("window+rkv+quant:fmt=fp8", 256, "interval:9").make()
    assert isinstance(stack, Stack)
    assert [(m.budget, m.schedule) for m in stack.members] == [(256, "interval:9")] * 2 + [(None, "every")]


def test_a_text_is_read_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list[str]()

    def noted(text: str) -> Written:
        texts.append(text)
        return read(text)

    monkeypatch.setattr("minithink.evaluate.plan.read", noted)
    cells = plan(specs("rkv:buffer=0", "window+quant:fmt=fp8"), [64, 128, 0.5])
    assert [one.make(longest=77).budget for one in cells] == [None, 64, 128, 77, 64, 128, 77]
    assert sorted(texts) == ["full", "rkv:buffer=0", "window+quant:fmt=fp8"]


def test_every_policy_of_a_spec_is_a_new_one() -> None:
    """Engines write into policies, so two cells must not share one."""
    spec = Spec("window+quant:fmt=fp8")
    first, second = spec.policy(64), spec.policy(64)
    assert isinstance(first, Stack)
    assert isinstance(second, Stack)
    assert first is not second
    assert not {id(member) for member in first.members} & {id(member) for member in second.members}
    first.members[0].budget = 9
    assert spec.policy(64).budget == 64


def test_a_protected_prompt_must_fit() -> None:
    cells = plan(specs("rkv:protect_prompt=true", "window"), [100])
    check(cells, [3, 99], 1)
    with pytest.raises(UsageError, match="100 tokens cannot hold the protected prompt of 100"):
        check(cells, [100, 3], 1)
    check(plan(specs("rkv:protect_prompt=true"), [0.5]), [10_000], 1)


def test_a_share_must_come_to_enough() -> None:
    text = "thinkv:layers=0,thresholds=0.1/0.2"
    thinkv, llm = cell(text, 0.1), cell("streaming_llm", 0.1)
    check_share(thinkv, 7, 210)  # a buffer of 16, a segment's last 4, and a token
    with pytest.raises(UsageError) as refused:
        check_share(thinkv, 7, 204)
    assert str(refused.value).startswith(
        f"{text}: the share 0.1 comes to 27 tokens with a prompt of 7, for the full cache generates 204 on average; "
        "give a larger share, or tokens (thinkv: a budget of 27 tokens cannot hold the protected prompt of 7 and 21 "
    )
    check_share(llm, 2, 30)
    with pytest.raises(UsageError, match=r"0.1 comes to 4 tokens with a prompt of 2, .* \(streaming_llm: sink is 4"):
        check_share(llm, 2, 20)
    check_share(cell("streaming_llm", 4), 1, 1)  # tokens are none of its business


def test_a_share_that_can_never_be_enough_is_refused_at_once() -> None:
    cells = plan(specs("streaming_llm"), [0.1])
    check(cells, [99, 2], 30)
    with pytest.raises(
        UsageError, match="comes to 4 tokens with a prompt of 2, for the full cache generates 20 at most"
    ):
        check(cells, [99, 2], 20)


def test_prompts_that_are_longer_than_what_is_kept_are_said() -> None:
    def said(*texts: str, budgets: tuple[int | float, ...] = (), schedule: str | None = None) -> list[str]:
        return said_of_prompts(plan(specs(*texts, schedule=schedule), budgets, schedule), [1100, 7, 10])

    assert said("rkv", "full", "kivi", budgets=(10,)) == [
        "1 of 3 prompts, of up to 1,100 tokens, has more tokens than are kept with rkv at 10 tokens: parts of the "
        "question may be evicted"
    ]
    [note] = said("rkv", "window:budget=9", budgets=(2000, 1099))
    assert note.startswith("2 of 3 prompts, ")
    assert "kept with rkv at 1,099 tokens, window:budget=9 at 9 tokens: parts" in note
    assert said("rkv", budgets=(1100, 0.01)) == []
    assert said("window", "rkv:protect_prompt=true,budget=9", schedule="every", budgets=(1100,)) == []
    [note] = said("window", schedule="sawtooth:1200/8")
    assert note.startswith("2 of 3 prompts, ")
    assert said("full") == said("kivi") == []


def test_cells_are_named() -> None:
    assert [str(c) for c in (cell("full", None), cell("rkv", 1256), cell("rkv", 0.5))] == [
        "full",
        "rkv at 1,256 tokens",
        "rkv at 0.5",
    ]


def test_a_budget_that_never_applied_is_said_once() -> None:
    """Of all sequences no one has evicted: neither in a step, nor when its prompt was read."""
    text = {"prompt_tokens": 50, "generated_tokens": 100, "steps": 99, "tokens_peak": 149.0}
    cells = [cell(name, 512) for name in ("window", "h2o", "rkv")]
    cells += [cell("full", None), cell("quant:fmt=fp8", None)]
    records = []
    for one in cells:
        records += [record(policy=one.policy, budget=one.budget, id=id, **text) for id in "pq"]
    records += [
        record(policy="h2o", budget=512, id="r", **{**text, "evicting_steps": 1}),
        record(policy="rkv", budget=512, id="r", **{**text, "tokens_peak": 120.0}),  # a part of the prompt went
    ]
    [said] = said_of_budgets(cells, records)
    assert said.startswith("window at 512 tokens: the budget never applied")
    assert "the longest text has 150 tokens" in said


def test_a_budget_that_answers_are_exempt_from_says_why_it_never_applied() -> None:
    text = {"prompt_tokens": 50, "generated_tokens": 600, "steps": 599, "tokens_peak": 649.0}
    one = cell("crystal_kv_lite", 512)
    records = [record(policy=one.policy, budget=one.budget, id="p", thinking_tokens=100, **text)]
    [said] = said_of_budgets([one], records)
    assert "no prompt and thinking has more than 150, and answers stay beside the budget" in said
    of_all = cell("crystal_kv_lite:exempt_answer=false", 512)
    records = [record(policy=of_all.policy, budget=of_all.budget, id="p", thinking_tokens=100, **text)]
    [said] = said_of_budgets([of_all], records)
    assert "beside the budget" not in said


def test_texts_that_never_opened_the_thinking_are_said_of_policies_that_care() -> None:
    cells = [cell(name, 512) for name in ("crystal_kv_lite", "dynts", "window")]
    cells += [cell("crystal_kv_lite:exempt_answer=false", 512), cell("full", None)]
    records = []
    for one in cells:
        for id, thought in (("p", 0), ("q", 3)):
            records.append(record(policy=one.policy, budget=one.budget, id=id, thinking_tokens=thought))
    records = [r for r in records if not (r.policy == "dynts" and r.id == "p")]
    [said] = said_of_stages(cells, records, THINK)
    assert said.startswith("1 of 2 texts never opened <think>, so crystal_kv_lite at 512 tokens counts all of each")
