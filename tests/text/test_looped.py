"""Loops at the end of a text.

Alone: python -m pytest tests/text/test_looped.py
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.text.looped import LEAST, TIMES, looped

tokens = st.integers(0, 5)


@given(st.lists(tokens, max_size=30), st.lists(tokens, min_size=1, max_size=40), st.integers(0, 39))
def test_a_piece_that_is_repeated(before: list[int], piece: list[int], more: int) -> None:
    """Whatever came before, and even if the last piece is unfinished."""
    times = max(TIMES, -(-LEAST // len(piece)))
    assert looped(before + piece * times + piece[: more % len(piece)])


@given(st.lists(tokens, max_size=30), st.lists(tokens, min_size=1, max_size=40), st.integers(1, 40))
def test_it_ends_with_the_text(before: list[int], piece: list[int], other: int) -> None:
    """One token that differs, less than three pieces before the end, and it is no loop of this piece."""
    text = before + piece * max(TIMES, -(-LEAST // len(piece)))
    at = min(other, len(piece))
    text[-at] = 6
    assert not looped(text)


@given(st.lists(tokens, max_size=LEAST - 1))
def test_short_texts_have_no_loop(text: list[int]) -> None:
    assert not looped(text)


@given(st.lists(st.integers(), unique=True, max_size=200))
def test_texts_without_equal_tokens(text: list[int]) -> None:
    assert not looped(text)


@pytest.mark.parametrize(("piece", "found"), [(512, True), (513, False)])
def test_long_pieces(piece: int, found: bool) -> None:
    assert looped([*range(piece)] * TIMES) is found


@given(st.lists(tokens, max_size=30), st.lists(tokens, min_size=1, max_size=40), st.integers(0, 100))
def test_by_the_definition(before: list[int], piece: list[int], length: int) -> None:
    """Against the definition, written out: some piece p, the end equal to itself p tokens earlier."""
    text = before + (piece * 100)[:length]
    found = any(
        all(text[-i] == text[-i - p] for i in range(1, max(TIMES * p, LEAST) - p + 1))
        for p in range(1, len(text) // TIMES + 1)
        if len(text) >= LEAST
    )
    assert looped(text) == found
