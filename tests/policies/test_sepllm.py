"""SepLLM: the worked examples, which tokens separate, and what stays in a running decoder."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minithink.errors import UsageError
from minithink.kv.contract import Policy
from minithink.policies.sepllm import SepLLM
from minithink.policies.window import Window
from tests.kv.run import Known
from tests.policies.drive import follow, held
from tests.policies.test_random_attention import stays, step_of

torch.set_num_threads(1)
NINE = [b"." if i == 9 else b"x" for i in range(10)]  # token 9 separates


def told(policy: SepLLM, ids: list[int], rows: int = 1) -> SepLLM:
    policy.bind(Known(vocabulary=NINE))
    policy.setup(shape(rows))
    policy.listen_prompt(0, ids)
    return policy


def shape(rows: int) -> Any:
    return type("Shape", (), {"rows": rows, "tokens": 20, "device": torch.device("cpu")})()


def step(pos: list[int], budget: int) -> Any:
    out = step_of([pos], len(pos), budget, 0)
    out.row = torch.tensor([0])
    return out


def test_worked_example() -> None:
    """The official manager with a 1, s 2, w 3, c 7."""
    ids, got, pos = [5, 6, 9, 7, 9, 8, 9, 4, 3, 9, 2, 1, 9, 9, 5, 6], {}, list[int]()
    policy = told(SepLLM(budget=7, initial=1, separators=2, window=3), ids)
    for t in range(len(ids)):
        pos.append(t)
        if len(pos) > 7:
            (pos,) = stays(policy, step(pos, 7))
            got[t] = list(pos)
    assert got == {
        7: [0, 2, 4, 5, 6, 7],
        9: [0, 4, 6, 7, 8, 9],
        11: [0, 4, 6, 9, 10, 11],
        13: [0, 6, 9, 11, 12, 13],
        15: [0, 9, 12, 13, 14, 15],
    }


@pytest.mark.parametrize(
    ("ids", "want"),
    [([7, 9, 5, 9, 6, 9, 4, 3, 2, 1], [1, 3, 5, 7, 8, 9]), ([7, 9, 5, 5, 6, 5, 4, 3, 2, 1], [1, 5, 6, 7, 8, 9])],
)
def test_fill(ids: list[int], want: list[int]) -> None:
    """DynTS's form: the newest other tokens fill up to the target of 3."""
    policy = told(SepLLM(budget=9, initial=0, separators=3, window=3, fill=True), ids)
    assert stays(policy, step(list(range(10)), 9)) == [want]


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ({"initial": 0, "separators": 0.25, "window": 0.5}, range(4, 13)),  # shares of 12
        ({"initial": 2, "separators": 1, "window": 1}, [0, 1, 11, 12]),  # tokens
        ({"initial": 3, "separators": 0, "window": 1e-6}, [0, 1, 2, 12]),  # the newest token always stays
        ({}, [0, 1, 2, 3, 10, 11, 12]),  # by default 0.08 · 12 and 0.32 · 12, rounded down
        ({"initial": 4, "separators": 8, "window": 6}, [0, 1, 2, 3, *range(5, 13)]),
        ({"initial": 4, "separators": 8, "window": 10}, [0, 1, *range(3, 13)]),
        ({"initial": 4, "separators": 8, "window": 20}, range(1, 13)),
    ],
)
def test_sizes(sizes: Any, want: Any) -> None:
    """All tokens separate. If the sizes do not fit, the window comes first, then the initial tokens."""
    policy = told(SepLLM(budget=12, **sizes), [], rows=2)
    policy.listen_prompt(1, [9] * 13)
    now = step(list(range(13)), 12)
    now.row = torch.tensor([1])
    assert stays(policy, now) == [list(want)]


@pytest.mark.parametrize("strict", [False, True])
def test_these_characters_separate(strict: bool) -> None:
    policy = SepLLM(budget=9, strict=strict)
    policy.bind(Known(vocabulary=[bytes([i]) for i in range(256)]))
    assert policy._ids == set(b".,?!;:\n ")


@pytest.mark.parametrize(("strict", "want"), [(False, {0, 1, 2, 4, 5}), (True, {0, 4, 5})])
def test_which_tokens_separate(strict: bool, want: set[int]) -> None:
    policy = SepLLM(budget=9, strict=strict)
    policy.bind(Known(vocabulary=[b".", b" .", b"  ", b".\n", b" ", b"\n", b"", b"a,", b"\n\n"]))
    assert policy._ids == want


@pytest.mark.parametrize(
    "options", [{"initial": -1}, {"window": 0}, {"window": -1}, {"separators": -0.5}, {"separators": 1.5}]
)
def test_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="sepllm"):
        SepLLM(budget=9, **options)


@pytest.mark.parametrize("size", [math.nan, 3e9])
@pytest.mark.parametrize("field", ["separators", "window"])
def test_sizes_that_are_no_numbers_of_tokens_are_refused(field: str, size: float) -> None:
    """No number, and more tokens than 32 bits count."""
    sizes: Any = {field: size}
    with pytest.raises(UsageError, match=re.escape(f"{field} {size:g}")):
        SepLLM(budget=9, **sizes)


def test_defaults() -> None:
    """Of the script of the authors' code: a 4, s 64, w 256, c 800."""
    policy = SepLLM(budget=800)
    assert (policy.initial, policy.separators * 800, policy.window * 800) == (4, 64, 256)
    assert (policy.fill, policy.strict, policy.protect_prompt) == (False, False, False)


def test_it_needs_a_tokenizer() -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        SepLLM(budget=9).setup(shape(1))


def test_what_stays() -> None:
    policy: Policy = SepLLM(budget=14, initial=2, separators=4, window=5)
    for i, manager in enumerate(follow(policy, [6], 40)):
        (table,) = held(manager, 0)
        assert len(table) <= 14
        assert table[:2] == [0, 1]
        assert table[-5:] == list(range(1 + i, 6 + i))


def test_without_fill_missing_separators_leave_room() -> None:
    """One separator of three; and a new sequence in the row has separators of its own."""
    policy = told(SepLLM(budget=9, initial=0, separators=3, window=3), [7, 9, 5, 5, 6, 5, 4, 3, 2, 1])
    assert stays(policy, step(list(range(10)), 9)) == [[1, 7, 8, 9]]
    policy.reset(0)
    policy.listen_prompt(0, [7, 7, 5, 9, 9, 5, 4, 3, 2, 1])
    assert stays(policy, step(list(range(10)), 9)) == [[3, 4, 7, 8, 9]]


def test_the_form_in_dynts_paper_keeps_as_many_tokens_as_a_window() -> None:
    """At the same triggers, also where nearly every token is a separator."""
    for separators in (range(0), range(0, 100, 3), range(100)):
        lengths = []
        paper = SepLLM(budget=24, initial=0, separators=1000, window=1, fill=True)
        for policy in (paper, Window(budget=24)):
            policy.schedule, policy.protect_prompt = "share:0.3/0.4", True
            if isinstance(policy, SepLLM):
                policy._ids = frozenset(separators)
            lengths.append([len(lane) for cache in follow(policy, [8], 50) for lane in held(cache, 0)])
        assert lengths[0] == lengths[1]
        assert min(lengths[0][40:]) < max(lengths[0][40:]) <= 24


def test_generated_tokens_are_read_by_position() -> None:
    """Of rows that take part; an id that is not known, or has no token, is no separator."""
    policy = told(SepLLM(budget=9), [5, 9], rows=3)
    policy.listen_prompt(1, [9])
    before = policy._by_position.clone()
    now = SimpleNamespace(
        row=torch.tensor([1, 0, 2]),
        active=torch.tensor([True, True, False]),
        prompt=torch.tensor([1, 2, 1], dtype=torch.int32),
        clock=torch.tensor([3, 1, 1], dtype=torch.int32),
        tokens=torch.tensor([9, 9, 9]),
    )
    policy.watch(now)  # type: ignore[arg-type]
    before[1, 3] = before[0, 2] = True
    assert torch.equal(policy._by_position, before)
    for token in (-1, 10, 1000, 4):
        now.tokens = torch.tensor([token] * 3)
        policy.watch(now)  # type: ignore[arg-type]
        assert policy._by_position.sum() == 2, "the prompts' separators are left"
