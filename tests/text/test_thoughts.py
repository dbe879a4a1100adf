"""Labels by keywords: of the papers' kind of text, of the embedded model's, and of any cut into tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.tasks import facts, ledger, search
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION, doubts, kinds, segments
from tests.tasks.manners import written

T, E, R = TRANSITION, EXECUTION, REASONING


def labelled(text: str) -> list[tuple[str, int]]:
    """Stretches of one type, and which."""
    out: list[tuple[str, int]] = []
    for character, kind in zip(text, kinds(list(text)), strict=True):
        if out and out[-1][1] == kind:
            out[-1] = (out[-1][0] + character, kind)
        else:
            out.append((character, kind))
    return out


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Okay, so the chairs are red.", R),
        ("approach it from the left.", R),
        ("Suppose that x = 3.", R),  # reasoning goes before an equation
        ("Now the other side.", E),
        ("The steps are these.", E),
        ("That is 17 + 4.", E),
        ("And y = -2 there.", E),
        ("```python\n", E),
        ("def area(r):", E),
        ("Wait, that is odd.", T),
        ("Hmm.", T),
        ("But wait, is it?", T),
        ("Earlier I said that x = 3.", T),
        ("None fits. Let me look at it again. gon * 7 + 2 = 65.", T),
        ("I want gon with gon * 7 + 2 = 65, from 1 up.", R),
        ("I know gon = 9.", R),
        ("Still gon with gon * 7 + 2 = 65.", R),
        ("First, gon. gon * 7 + 2 = 65.", R),
        ("Try 5:", E),  # no equation yet
        ("Carefully try 5:", E),
        ("Carefully now.", R),
        ("Carefully now, led", E),
        ("Now I can answer.", R),
        ("So the results are gon = 9.", R),
        ("Nowhere in sight.", R),  # no word of the lists, though it begins like one
        ("A chair for whom?", R),
        ("", R),
    ],
)
def test_keywords_of_the_table(text: str, want: int) -> None:
    assert kinds([text]) == [want]


def test_a_sentence_without_keywords_goes_with_the_one_before_in_its_paragraph() -> None:
    text = "Now 3 + 4 is 7. It is odd. I need two more. They come.\n\nThey do. "
    text += "Then 5. Wait, is it? It = 5.\nYes.\n\nAh. "
    assert labelled(text) == [
        ("Now 3 + 4 is 7. It is odd. ", E),
        ("I need two more. They come.\n\nThey do. ", R),
        ("Then 5. ", E),
        ("Wait, is it? It = 5.\nYes.\n\n", T),
        ("Ah. ", R),
    ]


@pytest.mark.parametrize("family", [facts, ledger, search])
def test_the_embedded_models_text(family: Any) -> None:
    """Every line of a reference trace has the type that its writer meant."""
    rng = random.Random(3)
    seen = set()
    for _ in range(30):
        text, lines = written(family, 8, rng)
        found, at = kinds(list(text)), 0
        for line, kind in lines:
            at = text.index(line, at)
            assert set(found[at : at + len(line)]) == {kind}, line
            at += len(line)
            seen.add(kind)
    assert seen == {T, E, R}


def test_paragraphs_that_doubt() -> None:
    assert doubts("Wait, no.\nIt is 3.")
    assert doubts("Before I answer, let me look.")
    assert not doubts("It is 3. Wait, no.")


@given(st.data())
def test_a_token_has_the_type_of_its_last_character(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["Okay. Now 3 = 3. Wait, no.\n\nThen it is. I need x.", "Hm\n\n\nSo. \n\n Now"]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    of_characters = kinds(list(text))
    assert kinds(pieces) == [of_characters[end - 1] for end in [*cuts, len(text)]]


def test_segments_have_the_type_of_most_tokens_of_equals_the_more_important_one() -> None:
    assert segments([T, T, E, R, R, E, T, E], 3) == [T, R, E]
    assert segments([E] * 5, 5) == [E]
    assert segments([T], 4) == [T]
    assert segments([T, R, E], 4) == [R]
    assert segments([], 4) == []
