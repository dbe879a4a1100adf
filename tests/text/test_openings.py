"""Thoughts of a text: where they begin, which are no execution, and what they follow."""

from __future__ import annotations

import pytest

from minithink.text.openings import REFLECTIONS, TRANSITIONS, Thought, found, label


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
