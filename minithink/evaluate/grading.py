r"""Graders decide whether a generated text gives the right answer.

Only the text behind `</think>` counts. Each grader finds an answer in the text, then compares it with the right one.
If it finds no answer that it can read, the text is wrong. Datasets name these graders:

- `exact`: the last \boxed{}, character for character, without spaces.
- `math`: the last \boxed{}, equal by math-verify (extra `math`): 1/2 is 0.5, and {1, 2} is {2, 1}.
- `number`: the one number in the last \boxed{}; thousands separators, currencies and units do not matter.
- `choice`: the letter A to D in the last \boxed{}, or, without a box, in the last "answer is (B)".
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from minithink.errors import MinithinkError, UsageError
from minithink.tasks import boxed, same_characters


@dataclass(frozen=True)
class Graded:
    """The answer of a text, and whether it is right."""

    found: str | None  # None: no answer that the grader can read
    right: bool


@dataclass(frozen=True)
class Grader:
    """Finds an answer in a text and compares it. A call with a text and the right answer: is the text right?"""

    find: Callable[[str], str | None]
    equal: Callable[[str, str], bool]  # of the answer that was found and the right one

    def __call__(self, text: str, answer: str) -> bool:
        return self.grade(text, answer).right

    def grade(self, text: str, answer: str) -> Graded:
        found = self.find(text)
        return Graded(found, found is not None and self.equal(found, answer))


def grade(text: str, answer: str, grader: str) -> Graded:
    """Grade one generated text.

    Args:
        text: as generated; the text before `</think>` is no answer.
        answer: the right answer.
        grader: a name in GRADERS.

    Raises:
        UsageError: there is no such grader.
        MinithinkError: the grader is `math`, and math-verify is not installed or this is not the main thread.
    """
    if grader not in GRADERS:
        raise UsageError(f"There is no grader {grader!r}; there are {', '.join(GRADERS)}.")
    return GRADERS[grader].grade(text, answer)


def check(grader: str) -> None:
    """MinithinkError: a library that this grader needs is missing, or does not work."""
    if grader == "math" and not grade(r"\boxed{\frac{1}{2}}", "0.5", grader).right:
        raise MinithinkError(
            "The grader math does not find that 1/2 is 0.5, so something that math-verify needs is missing: pip "
            "install --force-reinstall 'minithink[math]'."
        )


# --- number

# Characters in or around a number that are no part of it: \, \! \; {,} $ \$ and the like.
_SPACING = re.compile(r"\\[,!;: ]|\\?\$")
# A unit's exponent, as in m^2 or \text{ cm}^{3}, is no second number.
_EXPONENT = re.compile(r"(?<=[A-Za-z}])\^(?:\{-?[0-9]\}|-?[0-9])")
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")


# A minus apart from its number; one behind a letter, a number or a bracket joins two things.
_MINUS = re.compile(r"(^|[=:(\[{])\s*-\s+(?=[.0-9])")
_JOINED = re.compile(r"[A-Za-z0-9)\]}]\s*-\s*[.0-9]")


def _number(text: str) -> str | None:
    """The one number in a short text, without thousands separators; None: there is none, or there are several."""
    text = _EXPONENT.sub("", _SPACING.sub("", text.replace("−", "-").replace("{,}", ",")))
    numbers = [] if _JOINED.search(text) else _NUMBER.findall(_MINUS.sub(r"\1-", text))
    return numbers[0].replace(",", "") if len(numbers) == 1 else None


def _find_number(text: str) -> str | None:
    box = boxed(text)
    return None if box is None else _number(box)


def _same_number(found: str, answer: str) -> bool:
    right = _number(answer)
    return right is not None and Decimal(found) == Decimal(right)


# --- choice

_FONT = r"\\(?:text|textbf|textit|textrm|mathbf|mathrm|mathsf|boldsymbol|bf|rm)"
# The letter alone, or with its text: "B) 5 m". A second label, "(A) or (B)", makes it no choice.
_LABEL = re.compile(r"\(?\s*([A-D])\s*(?:[).:](?!.*(?<![A-Za-z])[A-D][).:]).*)?", re.DOTALL)
# **B**, $B$, \text{(B)} and \boxed apart
_STATED = re.compile(
    rf"(?i:answer\s*(?:is|:))[\s:*$]*(?:{_FONT}\s*\{{)?[\s(*]*([A-D])(?![A-Za-z0-9])(?!\W*(?:or|and)\W+[A-D]\b)"
)


def _find_choice(text: str) -> str | None:
    box = boxed(text)
    if box is None:
        stated = _STATED.findall(text.rpartition("</think>")[2])
        return stated[-1] if stated else None
    label = _LABEL.fullmatch(re.sub(rf"{_FONT}(?![A-Za-z])|[{{}}$*~]|\\ ", "", box).strip())
    return label[1] if label else None


# --- math


_BASE = re.compile(r"[0-9]_\{?([0-9]+)")  # of the system that a number is written in


def _same_mathematics(found: str, answer: str) -> bool:
    """Whether two expressions in LaTeX are equal, as math-verify sees it."""
    parse, verify = _math_verify()
    if threading.current_thread() is not threading.main_thread():
        # Its limits of time are signals, which only the main thread gets; without them 9^{9^9} never ends.
        raise MinithinkError("The grader math works in the main thread only: grade there.")
    if same_characters(found, answer):
        return True  # even where math-verify can read neither
    bases = [_BASE.findall(text) for text in (found, answer)]
    if all(bases) and bases[0] != bases[1]:
        return False  # 204_5 is not 204_8; math-verify leaves subscripts out

    def read(text: str) -> list[Any]:
        # In a box both are read alike: 0.\overline{3} between dollars would be 0. It does not read "204.".
        return parse(rf"\boxed{{{text.strip().removesuffix('.')}}}")

    try:
        # The right answer first: verify treats assignments (x = 5) and intervals by their place.
        return bool(verify(read(answer), read(found)))
    except Exception:  # sympy, whose errors are of every kind
        return False


def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    try:
        from math_verify import parse, verify  # here: an extra, and slow to import
    except ImportError:
        raise MinithinkError(
            "The grader math needs math-verify, which is not installed: pip install 'minithink[math]'."
        ) from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warnings of unreadable answers are not needed
    return parse, verify


GRADERS: Mapping[str, Grader] = {
    "exact": Grader(boxed, same_characters),
    "math": Grader(boxed, _same_mathematics),
    "number": Grader(_find_number, _same_number),
    "choice": Grader(_find_choice, lambda found, answer: found == answer.strip()),
}
