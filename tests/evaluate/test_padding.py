"""Batch grouping: the worked example, and what sorting promises. `pytest tests/evaluate/test_padding.py`"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.engine import Engine
from minithink.errors import UsageError
from minithink.evaluate.padding import charge, group_by_length, padded_budgets
from minithink.policies import parse
from minithink.sequence import Track

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def test_worked_example_6() -> None:
    lengths = [40, 310, 60, 300]
    batches, inverse = group_by_length(lengths, 2)
    assert [i for batch in batches for i in batch] == [0, 2, 3, 1]
    assert [len(batch) for batch in batches] == [2, 2]
    assert inverse == [0, 3, 1, 2]
    as_given, grouped = (padded_budgets(lengths, [512] * 4, 2, group) for group in (False, True))
    assert as_given == [242, 512, 272, 512]
    assert grouped == [492, 512, 512, 502]
    assert (sum(as_given) / 4, sum(grouped) / 4) == (384.5, 504.5)
    assert [512 - b for b in as_given] == [270, 0, 240, 0]
    assert [512 - grouped[i] for batch in batches for i in batch] == [20, 0, 10, 0], "of 40, 60, 300, 310"


@given(lengths=LENGTHS, size=st.integers(1, 12))
def test_the_inverse_brings_back_the_callers_order(lengths: list[int], size: int) -> None:
    batches, inverse = group_by_length(lengths, size)
    flat = [i for batch in batches for i in batch]
    assert [flat[place] for place in inverse] == list(range(len(lengths)))
    assert [lengths[i] for i in flat] == sorted(lengths)
    assert all(len(batch) == size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= size


@given(lengths=LENGTHS, size=st.integers(1, 12))
def test_grouping_never_costs_budget(lengths: list[int], size: int) -> None:
    """On average over the sequences, where every batch is full. Without padding B' is B."""
    full = len(lengths) // size * size
    lengths = lengths[:full]
    as_given, grouped = (padded_budgets(lengths, [100] * full, size, group) for group in (False, True))
    assert sum(grouped) >= sum(as_given)
    assert max([0, *grouped]) <= 100
    assert padded_budgets(lengths, [100] * full, 1, False) == [100] * full
    assert padded_budgets([10, 1000], [100, 100], 2, False) == [-890, 100], "padding may be longer than the budget"


def charged(engine: Engine, prompts: list[list[int]], policy: str, group: bool, new: int) -> list[int]:
    """Tokens that each sequence holds at the end, if batches of two pay for their padding."""
    chosen = parse(policy)
    stream = engine.stream(prompts, policy=chosen, max_new_tokens=new, temperature=0)
    charge(stream.sequences, chosen, 2, group)
    for _ in stream.steps():
        pass
    return [result.kv_tokens for result in stream.results]


def test_the_padding_of_a_batch_is_charged(engine: Engine) -> None:
    """By as many tokens as an engine would pad. A sequence keeps as much as its policy needs."""
    prompts = [[9] * n for n in (4, 10, 5, 9)]
    assert charged(engine, prompts, "window:budget=20", False, 30) == [14, 20, 16, 20]
    assert charged(engine, prompts, "window:budget=20", True, 30) == [19, 20, 20, 19]
    plain = engine.generate(prompts, policy="window:budget=20", max_new_tokens=30, temperature=0)
    assert [r.kv_tokens for r in plain] == [20] * 4
    with pytest.raises(UsageError, match="padded_budget charges a budget, and the policy full has none"):
        charge([], parse("full"), 2, False)
    for policy, least in (("window:budget=12", 3), ("window:budget=13,protect_prompt=true", 5)):
        held = charged(engine, [[9] * 4, [9] * 12], policy, False, 20)
        assert held[0] in (least, least + 1), "as much as the policy needs"


def test_padding_never_gives_budget(engine: Engine) -> None:
    """Also where the prompt is longer than what stays of it."""
    policy = parse("snapkv:cap=10,window=4+window:budget=20")
    sequences = [Track(i, i, 0, [9] * n, 5, "length") for i, n in enumerate((30, 25))]
    charge(sequences, policy, 2, False)
    assert [s.budget for s in sequences] == [20, 15]
    policy = parse("window:budget=12")  # the prompt may go: the padding takes more than there is
    sequences = [Track(i, i, 0, [9] * n, 5, "length") for i, n in enumerate((4, 30))]
    charge(sequences, policy, 2, False)
    assert [s.budget for s in sequences] == [policy.beside, 12]
    assert policy.beside > 0
    # A protected prompt leaves one token at least; of a longer prompt only `cap` tokens stay, and need room.
    for text, want in (
        ("window:budget=12,protect_prompt=true", [5, 12]),
        ("snapkv:cap=6,window=2+window:budget=34,protect_prompt=true", [8, 34]),
        ("snapkv:cap=3,window=2+window:budget=20,protect_prompt=true", [4, 20]),
    ):
        sequences = [Track(i, i, 0, [9] * n, 5, "length") for i, n in enumerate((4, 30))]
        charge(sequences, parse(text), 2, False)
        assert [s.budget for s in sequences] == want, text


def test_each_sequence_pays_from_its_own_budget() -> None:
    """A share of a text's length is a budget of each sequence's own; the policy's is the largest of them."""
    for group, want in ((False, [24, 50, 35]), (True, [29, 50, 40])):
        sequences = [Track(i, i, 0, [9] * n, 5, "length") for i, n in enumerate((4, 10, 5))]
        for s, budget in zip(sequences, (30, 50, 40), strict=True):
            s.budget = budget
        charge(sequences, parse("window:budget=50"), 2 if group else 3, group)
        assert [s.budget for s in sequences] == want


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_has_a_sequence(size: int) -> None:
    with pytest.raises(UsageError, match=f"A batch of {size} sequences makes no sense"):
        group_by_length([1, 2], size)
