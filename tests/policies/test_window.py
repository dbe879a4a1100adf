"""Window: the last tokens and no others, under every schedule."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.policies.window import Window
from tests.policies.drive import follow, held

torch.set_num_threads(1)


@settings(max_examples=30)
@given(st.integers(1, 9), st.lists(st.integers(1, 15), min_size=1, max_size=3))
def test_the_last_tokens_stay(budget: int, prompts: list[int]) -> None:
    for i, manager in enumerate(follow(Window(budget), prompts, 8)):
        for seq, n in enumerate(prompts):
            assert held(manager, seq) == [list(range(max(0, n + i - budget), n + i))]


def test_a_protected_prompt_counts() -> None:
    for i, manager in enumerate(follow(Window(6, protect_prompt=True), [4], 9)):
        want = [0, 1, 2, 3, *range(max(4, 4 + i - 2), 4 + i)]
        assert held(manager, 0) == [want]


def test_at_intervals_of_the_sequences_own_clock() -> None:
    kept = []
    for i, manager in enumerate(follow(Window(5, "interval:3"), [7, 4], 9)):
        kept.append([len(held(manager, seq)[0]) for seq in range(2)])
        assert held(manager, 0)[0][-1] == 6 + i
    assert kept == [[5, 4], [6, 5], [7, 6], [5, 5], [6, 6], [7, 7], [5, 5], [6, 6], [7, 7], [5, 5]]


def test_in_sawteeth_of_each_sequence() -> None:
    kept = [[len(held(m, seq)[0]) for seq in range(2)] for m in follow(Window(6, "sawtooth:6/2"), [4, 5], 9)]
    assert kept == [[4, 5], [5, 2], [2, 3], [3, 4], [4, 5], [5, 2], [2, 3], [3, 4], [4, 5], [5, 2]]
