"""Thoughts of a text: where they begin, which are no execution, and what they follow."""

from __future__ import annotations

import pytest
import regex

from minithink.text.openings import REFLECTIONS, TRANSITIONS, Sentence, Thought, found, label, sentences
from minithink.text.pieces import GPT2_PATTERN


@pytest.mark.parametrize(
    ("paragraph", "want"),
    [
        ("Wait, 3 + 4 = 7.", "reflection"),
        ("  WAIT: no.", "reflection"),
        ("So 7. Let me verify it.", "reflection"),
        ("That seems right. Alternatively, no.", "reflection"),
        ("Alternatively, x = 3.", "transition"),
        ("I can think differenly here.", "transition"),
        ("There is another approach.", "transition"),
        ("So x = 3. Alternatively, x = 4.", "execution"),
        ("I wait. 3 + 4 = 7.", "execution"),
        ("", "execution"),
    ],
)
def test_seals_labels(paragraph: str, want: str) -> None:
    assert label(paragraph) == want


def test_seals_words() -> None:
    """All of its code's words, anywhere in a paragraph and in any case; a reflection's words come first."""
    said = "verify, make sure, hold on, think again, 's correct, 's incorrect, let me check, seems right"
    for words in said.split(", "):
        assert label(f"So x = 3. {words.capitalize()}. Another way.") == "reflection"
    kinds = ("way", "approach", "method", "solution", "strategy", "technique")
    for words in ("think differenly", *(f"another {kind}" for kind in kinds)):
        assert label(f"So x = 3. {words.capitalize()}.") == "transition"
    assert (len(REFLECTIONS), len(TRANSITIONS)) == (8, 7)


def test_thoughts_of_a_text() -> None:
    """The first one is left out: no blank line stands before it. A blank line may be two tokens' work."""
    pieces = [
        "Let",
        " me see.",
        "\n\n",
        "So",
        " 3 + 4 = 7.",
        "\n",
        "Then x = 7.",
        "\n\n",
        "Wait",
        ", no.",
        "\n\n",
        "None fits.",
        ".\n\n",
        "x = 7",
    ]
    after = ["reasoning", "execution", "transition", "transition"]
    for labels, others in (("seal", [False, True, False, False]), ("words", [False, True, True, False])):
        want = [Thought(at, o, k) for at, o, k in zip((2, 7, 10, 12), others, after, strict=True)]
        assert found(pieces, labels) == want
    assert found([], "seal") == found(["x", "y\n"], "words") == []


LINES = ["Let me see.", "So 3 + 4 = 7.", "Wait, no.", "None fits."]


@pytest.mark.parametrize("gap", [["\n\n"], ["\n", "\n"], ["\n\n", "\n"], ["\n", "\n", "\n"], ["\n", "\n "]])
@pytest.mark.parametrize("labels", ["seal", "words"])
def test_a_blank_line_may_be_several_tokens(gap: list[str], labels: str) -> None:
    """The text counts: the same thoughts, of the same kinds, whatever tokens the blank lines are."""
    pieces = [LINES[0], *gap, LINES[1], "\n", LINES[2], *gap, LINES[2], *gap, LINES[3]]
    one = [LINES[0], "\n\n", LINES[1], "\n", LINES[2], "\n\n", LINES[2], "\n\n", LINES[3]]
    got = found(pieces, labels)
    want = found(one, labels)
    assert [(x.other, x.after) for x in got] == [(x.other, x.after) for x in want]
    starts = [x.before + 1 for x in got]
    assert [pieces[start] for start in starts] == LINES[1:]
    assert [pieces[start - len(gap) : start] for start in starts] == [gap] * 3


def test_a_break_alone_opens_nothing() -> None:
    lines = sentences(["\n", "a", "\n", "b", "\n", " c"])
    assert [(x.start, x.end, x.opens) for x in lines] == [(0, 1, False), (1, 3, False), (3, 5, False), (5, 6, False)]
    assert Sentence(0, 1, lines[0].kind) == lines[0]


def test_twenty_five_blank_lines_of_gpt2s_regex_open_twenty_five_thoughts() -> None:
    """As they were split in SmolLM2, where steering found none."""
    text = "\n\n".join(f"So step {n}." for n in range(26))
    pieces = regex.findall(GPT2_PATTERN, text)
    assert "\n\n" not in pieces
    assert len(found(pieces, "seal")) == 25
