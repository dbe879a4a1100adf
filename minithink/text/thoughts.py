"""Thought types by keywords: what a text says of itself, beside what attention sparsity says (ThinKV §D.2, table 7).

A label is what earlier work went by, and a check on calibration. Table 7 lists words; how they make labels is chosen:

- a sentence that opens with a transition's words begins a transition, which ends with its paragraph (a blank line);
- otherwise every sentence has its own type: reasoning where it opens with, or holds, one of its phrases, else
  execution where it opens with one of its words or holds an equation with a number or code, else that of the sentence
  before in the same paragraph, and reasoning where there is none;
- a segment has the type that most of its tokens have, of equals the more important one.

The lists hold the table's words, and behind them those that the embedded model's text uses instead
(`tasks/writing.py`, `tasks/search.py`): there a "Now back to sar." plans, a "Then tak = 24 - 5 = 19." executes, and a
"Before I answer" doubts. In search, "I want", "I know" and "Still" plan; a trial ("Now try 5: …") executes, and so
does the line that takes its result down ("So gon = 9."); "None fits" doubts like a "Wait".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TRANSITION, EXECUTION, REASONING = 0, 1, 2  # by importance ρ (§4.2), and as figure 6 numbers them
NAMES = ("transition", "execution", "reasoning")
TRANSITIONS = (
    "Wait",
    "Hmm",
    "Wait no",
    "Alternatively",
    "But wait",
    "Earlier I said that",
    "Before I answer",
    "None fits",
)
REASONINGS = (
    "Think",
    "Approach",
    "Remember",
    "Find",
    "Okay",
    "Suppose",
    "Verify",
    "Let me",
    "Right,",
    "First,",
    "Next,",
    "Last,",
    "Here",
    "And here",
    "Well,",
    "Back to",
    "Now back to",
    "That leaves me at",
    "Still",
    "So the results are",
    "Now I can answer",
)
# Anywhere in a sentence: the embedded model's.
PLANS = ("I need", "I have", "I already have", "is given", "I want", "I know")
EXECUTIONS = (
    "Now",
    "The steps are",
    "So now",
    "So",
    "Then",
    "And",
    "Carefully now,",
    "Slowly now,",
    "Again",
    "Try",
    "Carefully try",
)
EQUATION = re.compile(r"=\s*-?\d|\d\s*[-+*/×·^]\s*\d|\\(?:frac|boxed|cdot|times)\b")  # "Mathematical equations"
CODE = re.compile(r"```|^\s*(?:def|return|import|for|while|if|print)\b.*[:(]", re.MULTILINE)  # "Code syntax"
# What goes on in lower case is no new sentence: "First, gon. gon * 7 + 2 = 65."
SENTENCE = re.compile(r"[^\n]*?(?:[.!?](?=\s)(?![^\S\n]+[a-z])[^\S\n]*|\n+|$)", re.DOTALL)


def _opens(words: Sequence[str]) -> re.Pattern[str]:
    listed = "|".join(re.escape(word) + (r"\b" if word[-1].isalpha() else "") for word in words)
    return re.compile(rf"\s*(?:{listed})", re.IGNORECASE)


_TRANSITION, _REASONING, _EXECUTION = (_opens(words) for words in (TRANSITIONS, REASONINGS, EXECUTIONS))
_PLAN = re.compile("|".join(map(re.escape, PLANS)))


def kinds(pieces: Sequence[str]) -> list[int]:
    """The type of every token of a text. pieces: their texts, which joined are the text."""
    text = "".join(pieces)
    of_character = list[int]()
    now = REASONING
    doubting = False
    fresh = True  # a paragraph begins
    for found in SENTENCE.finditer(text):
        sentence = found[0]
        if not sentence:
            continue
        if sentence.strip():
            if fresh:
                now = REASONING
                doubting = False
                fresh = False
            doubting = doubting or bool(_TRANSITION.match(sentence))
            now = TRANSITION if doubting else _kind(sentence, now)
        fresh = fresh or "\n\n" in text[max(0, found.end() - 2) : found.end()]
        of_character += [now] * len(sentence)
    out = list[int]()
    at = 0
    for piece in pieces:
        at += len(piece)
        # the last character says: a token may begin with the space behind the sentence before
        out.append(of_character[at - 1] if 0 < at <= len(of_character) else REASONING)
    return out


def doubts(paragraph: str) -> bool:
    """Whether a paragraph opens with a transition's words."""
    return bool(_TRANSITION.match(paragraph))


def _kind(sentence: str, before: int) -> int:
    """Of a sentence of a thought that is no transition. before: of the one before."""
    if _REASONING.match(sentence) or _PLAN.search(sentence):
        return REASONING
    if _EXECUTION.match(sentence) or EQUATION.search(sentence) or CODE.search(sentence):
        return EXECUTION
    return before


def ending(pieces: Sequence[str]) -> int:
    """The type of the thought that a text ends in; reasoning where there is none yet."""
    return kinds(pieces)[-1] if pieces else REASONING


def segments(kinds: Sequence[int], tau: int) -> list[int]:
    """The type of every τ tokens; the last segment may be shorter."""
    parts = (kinds[start : start + tau] for start in range(0, len(kinds), tau))
    return [max((TRANSITION, EXECUTION, REASONING), key=lambda kind: (part.count(kind), kind)) for part in parts]
