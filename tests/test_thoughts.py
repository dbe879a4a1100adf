"""Labels by keywords: of the papers' kind of text, of the embedded model's, and of any cut into tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.policies.thinkv import EXECUTION, REASONING, TRANSITION
from minithink.tasks import facts, ledger
from minithink.thoughts import kinds, segments

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


@pytest.mark.parametrize("family", ["facts", "ledger"])
def test_the_embedded_models_text(family: str) -> None:
    """Every line of a reference trace has the type that its writer meant."""
    rng = random.Random(3)
    seen = set()
    for _ in range(6):
        if family == "facts":
            problem = facts.draw_problem(rng, 12)
            trace = facts.draw_trace(problem, rng)[0]
        else:
            steps = ledger.draw_problem(rng, 12)
            trace = ledger.draw_trace(steps, rng)[0]
        found = kinds(list(trace))
        at, doubting = 0, False
        for paragraph in trace.split("\n\n"):
            doubting = paragraph.startswith(("Wait", "Alternatively", "Before I answer"))
            for line in paragraph.split("\n"):
                plans = "I need" in line or "is given" in line or ("I have" in line and " so " not in line)
                computes = line.startswith(("Now ", "So ", "Then ", "And ", "So now ", "Carefully", "Slowly"))
                computes = computes and not line.startswith(("Now back", "And here", "So the", "Now I can"))
                want = T if doubting else R if plans else E if computes else None
                if want is not None and line:
                    assert set(found[at : at + len(line)]) == {want}, line
                    seen.add(want)
                at += len(line) + 1
            at += 1
    assert seen == {T, E, R}


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
