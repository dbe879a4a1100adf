"""Thoughts of a text, the hidden states before them, and the direction away from doubts.

A thought is a paragraph. The model decides its kind at the blank line before it, so this token's hidden state stands
for it. A steering vector is the mean of these states before execution thoughts less the mean before other thoughts
(SEAL, SkipKV §4.2).

Which thoughts are others:

    seal    SEAL's word lists (`hidden_analysis.py`), of the whole paragraph: reflections and transitions
    words   ThinKV's table 7 and the embedded model's words, of the paragraph's first sentence (`thoughts.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minithink.text import thoughts
from minithink.text.thoughts import NAMES

# SEAL's words, in lower case; "differenly" is theirs
REFLECTIONS = (
    "verify",
    "make sure",
    "hold on",
    "think again",
    "'s correct",
    "'s incorrect",
    "let me check",
    "seems right",
)
TRANSITIONS = (
    "think differenly",
    "another way",
    "another approach",
    "another method",
    "another solution",
    "another strategy",
    "another technique",
)


class Sentence(NamedTuple):
    """A line of a text: tokens `start` to `end`, where the next one begins."""

    start: int
    end: int
    kind: str
    opens: bool = False  # True if it opens a thought, behind a blank line


class Thought(NamedTuple):
    """A thought behind a blank line."""

    before: int  # the token that ends with the blank line
    other: bool  # whether it is a non-execution thought
    after: str  # ThinKV's kind of the sentence before it


def sentences(pieces: Sequence[str]) -> list[Sentence]:
    """The lines of a text, given as the texts of its tokens.

    A blank line belongs to the line before it. It is two breaks in a row, which may be one token or two: GPT-2's
    regex splits them if a word follows.
    """
    out = list[Sentence]()
    start = 0
    fresh = True
    of_tokens = thoughts.kinds(pieces)
    before = ""  # the token before
    for i, piece in enumerate(pieces):
        behind_break = before.endswith("\n") and piece.startswith("\n")
        before = piece or before
        if behind_break and not piece.strip():  # the break before it has ended the line
            out[-1] = out[-1]._replace(end=i + 1)
            start = i + 1
            fresh = True
            continue
        if "\n" not in piece and i + 1 < len(pieces):
            continue
        out.append(Sentence(start, i + 1, NAMES[of_tokens[start]], fresh and start > 0))
        start = i + 1
        fresh = behind_break or "\n\n" in piece
    return out


def found(pieces: Sequence[str], labels: str) -> list[Thought]:
    """The thoughts of a text but the first. pieces: the texts of its tokens; labels: "seal" or "words"."""
    lines = sentences(pieces)
    starts = [i for i, line in enumerate(lines) if line.opens]
    out = []
    for i, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        text = "".join(pieces[lines[i].start : lines[end - 1].end])
        other = lines[i].kind == "transition" if labels == "words" else label(text) != "execution"
        out.append(Thought(lines[i].start - 1, other, lines[i - 1].kind))
    return out


def label(paragraph: str) -> str:
    """SEAL's label of a paragraph: reflection, transition or execution."""
    text = paragraph.strip().lower()
    if text.startswith("wait") or any(words in text for words in REFLECTIONS):
        return "reflection"
    if text.startswith("alternatively") or any(words in text for words in TRANSITIONS):
        return "transition"
    return "execution"


def openings(hidden: Tensor, found: Sequence[Sentence]) -> tuple[Tensor, Tensor]:
    """hidden: [thinking tokens, d] → the hidden states before thoughts, [thoughts but the first, d]; which of these
    thoughts are transitions."""
    opening = [s for s in found if s.opens]
    before = torch.tensor([s.start - 1 for s in opening], dtype=torch.long)
    return hidden[before], torch.tensor([s.kind == "transition" for s in opening], dtype=torch.bool)


def direction(opening: Tensor, doubts: Tensor) -> Tensor:
    """From transitions to other thoughts: the difference of the means of hidden states, [d]."""
    return opening[~doubts].mean(0) - opening[doubts].mean(0)


def area(a: Tensor, b: Tensor) -> float:
    """Area under the ROC curve: the probability that one of a lies above one of b, ties counting half."""
    return float(((a[:, None] > b).double() + 0.5 * (a[:, None] == b).double()).mean())
