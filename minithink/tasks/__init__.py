"""The embedded task families: problems that ship with the package, and how an answer is graded.

The hash of a problem's content decides its split, so no two splits can share a problem. The training tool draws its
own problems and skips those of the other splits.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from minithink.errors import MinithinkError, UsageError, alternatives, quoted, reason
from minithink.tasks.answers import boxed as boxed

SPLITS = ("validation", "test")
DATA = Path(__file__).parent / "data"
# How a question of the families begins and ends, anywhere in a text.
QUESTION_BEGINS = re.compile(r"((Facts|Balances) \(mod 100\): \w+(@0)?|Numbers from 1 to 9: \w+ \* \w+ \+ \w+) = ")
QUESTION_ENDS = re.compile(r"\. Find \w+[\w, ]*")
BINS = ((0, 600), (600, 1200), (1200, 2000), (2000, 3000))  # tokens of the reference trace: from, below


@dataclass(frozen=True)
class Problem:
    """One problem of a shipped split."""

    id: str
    family: str
    question: str  # the user's message
    answer: str  # what the last \boxed{} must hold
    thinking_tokens: int  # of the reference trace; they decide the problem's length bin

    @property
    def length_bin(self) -> str:
        """The problem's bin of BINS, as tables name it; empty if the reference trace is longer than every bin."""
        return next((f"{low}–{high}" for low, high in BINS if low <= self.thinking_tokens < high), "")


def families() -> list[str]:
    """The names of the families whose problems ship, sorted."""
    return sorted(path.name.removesuffix("-test.jsonl.gz") for path in DATA.glob("*-test.jsonl.gz"))


def load_problems(split: str, family: str = "facts") -> list[Problem]:
    """The problems of a split, in file order.

    Args:
        split: "validation" or "test".
        family: one of `families()`.

    Raises:
        UsageError: there is no such family, or no such split.
        MinithinkError: there is no file for this family and split, or it is damaged.
    """
    if split not in SPLITS:
        raise UsageError(f"The split {quoted(split)} does not exist; {alternatives(split, SPLITS)}.")
    if (known := families()) and family not in known:
        raise UsageError(f"There is no family {quoted(family)}; {alternatives(family, known)}.")
    path = DATA / f"{family}-{split}.jsonl.gz"
    if not path.is_file():
        raise MinithinkError(f"{path} is missing: the package was installed without its data.")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [Problem(**json.loads(line)) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, TypeError) as error:
        raise MinithinkError(f"{path} is damaged ({reason(error)}): install the package again.") from None


def holds_question(text: str) -> bool:
    """True if a text holds a question that is worded as those of the families."""
    return question_in(text) is not None


def question_in(text: str) -> str | None:
    """The last question of the families in a text, up to the last name that it asks for; None if there is none."""
    last = None
    begin = QUESTION_BEGINS.search(text)
    while begin is not None:
        end = QUESTION_ENDS.search(text, begin.end())
        if end is None:  # then no later question ends either
            break
        last = text[begin.start() : end.end()]
        begin = QUESTION_BEGINS.search(text, end.end())
    return last


def grade(text: str, answer: str) -> bool:
    """True if the last box of a generated text holds `answer`, apart from spaces."""
    found = boxed(text)
    return found is not None and same_characters(found, answer)


def same_characters(found: str, answer: str) -> bool:
    """True if two answers are equal, apart from spaces."""
    return re.sub(r"\s", "", found) == re.sub(r"\s", "", answer)
