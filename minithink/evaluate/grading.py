r"""Graders decide whether a generated text gives the right answer.

Only the text behind `</think>` counts. Each grader finds an answer in the text, then compares it with the right one.
If it finds no answer that it can read, the text is wrong. Datasets name these graders:

- `exact`: character for character, without spaces; of numbers with a power of ten the value counts (1e-5 is 0.00001).
- `math`: equal by math-verify (extra `math`): 1/2 is 0.5, and {1, 2} is {2, 1}. Numbers that differ are never equal.
- `number`: the one number in the answer; thousands separators, currencies and units do not matter.
- `none`: no text is right or wrong; for problems whose answer is not known.
- `choice`: the letter A to D in the last box, or, without a box, in the last "answer is (B)".

The answer of a text is its last \boxed{} (or \fbox{}, \boxed 7, …); without a box the number behind `####`, or what
"The answer is …" says (`minithink/tasks/answers.py`). All graders take time in proportion to the text, and `math`
compares in a process that is bounded in time and memory (`judge.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from minithink.errors import MinithinkError, UsageError, alternatives, quoted
from minithink.evaluate import judge, numerals
from minithink.tasks import boxed, same_characters
from minithink.tasks.answers import stated

NONE = "none"  # in place of a grader: texts are not graded


@dataclass(frozen=True)
class Graded:
    """The answer of a text, and whether it is right."""

    found: str | None  # None: no answer that the grader can read
    right: bool | None  # None: texts are not graded


@dataclass(frozen=True)
class Grader:
    """Finds an answer in a text and compares it. A call with a text and the right answer: is the text right?"""

    find: Callable[[str], str | None]
    equal: Callable[[str, str], bool]  # of the answer that was found and the right one

    def __call__(self, text: str, answer: str) -> bool:
        found = self.find(text)
        return found is not None and self.equal(found, answer)

    def grade(self, text: str, answer: str) -> Graded:
        found = self.find(text)
        return Graded(found, found is not None and self.equal(found, answer))


def grade(text: str, answer: str, grader: str) -> Graded:
    """Grade one generated text.

    Args:
        text: as generated; the text before `</think>` is no answer.
        answer: the right answer.
        grader: a name in CHOICES.

    Raises:
        UsageError: there is no such grader.
        MinithinkError: the grader is `math`, and math-verify is not installed.
    """
    if grader == NONE:
        return Graded(stated(text), None)
    if grader not in GRADERS:
        raise UsageError(f"There is no grader {quoted(grader)}; {alternatives(grader, GRADERS)}.")
    return GRADERS[grader].grade(text, answer)


def check(grader: str) -> None:
    """MinithinkError: a library that this grader needs is missing, or does not work."""
    if grader == "math" and not grade(r"\boxed{\frac{1}{2}}", "0.5", grader).right:
        raise MinithinkError(
            "The grader math does not find that 1/2 is 0.5, so something that math-verify needs is missing: pip "
            "install --force-reinstall 'math-verify>=0.9'."
        )


# --- exact


def _same_text(found: str, answer: str) -> bool:
    """Whether two answers have the same characters, or are one number that one of them writes with a power of ten."""
    if same_characters(found, answer):
        return True
    if not (numerals.is_scientific(found) or numerals.is_scientific(answer)):
        return False
    number = numerals.read(found)
    return number is not None and number == numerals.read(answer)


# --- number

# Characters in or around a number that are no part of it: \, \! \; {,} $ \$ and the like.
_SPACING = re.compile(r"\\[,!;: ]|\\?\$")
# A unit's exponent, as in m^2 or \text{ cm}^{3}, is no second number.
_EXPONENT = re.compile(r"(?<=[A-Za-z}])\^(?:\{-?[0-9]\}|-?[0-9])")
_POWER = rf"(?:{numerals.MARK}[+-]?[0-9]+)?"
_NUMBER = re.compile(rf"-?(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?{_POWER}|-?\.[0-9]+{_POWER}")


# A minus apart from its number; one behind a letter, a number or a bracket joins two things.
_MINUS = re.compile(r"(^|[=:(\[{])\s*-\s+(?=[.0-9])")
_JOINED = re.compile(r"[A-Za-z0-9)\]}]\s*-\s*[.0-9]")


def _number(text: str) -> str | None:
    """The one number in a short text, without thousands separators; None: there is none, or there are several. A
    power of ten is written as 1e-5."""
    text = numerals.with_marks(_SPACING.sub("", text.replace("{,}", ",")))
    text = _EXPONENT.sub("", text)
    if _JOINED.search(text):
        return None
    numbers = _NUMBER.findall(_MINUS.sub(r"\1-", text))
    return numbers[0].replace(",", "").replace(numerals.MARK, "e") if len(numbers) == 1 else None


def _find_number(text: str) -> str | None:
    answer = stated(text)
    return None if answer is None else _number(answer)


def _same_number(found: str, answer: str) -> bool:
    right = _number(answer)
    return right is not None and numerals.read(found) == numerals.read(right)


# --- choice

_FONT = r"\\(?:text|textbf|textit|textrm|mathbf|mathrm|mathsf|boldsymbol|bf|rm)"
# The letter alone, or with its text: "B) 5 m". A second label, "(A) or (B)", makes it no choice.
_LABEL = re.compile(r"\(?\s*([A-D])\s*(?:[).:](?!.*(?<![A-Za-z])[A-D][).:]).*)?", re.DOTALL)
# **B**, $B$, \text{(B)} and \boxed apart
_STATED = re.compile(
    rf"(?i:answer\s{{0,9}}(?:is|:))[\s:*$]{{0,20}}(?:{_FONT}\s{{0,9}}\{{)?[\s(*]{{0,20}}([A-D])(?![A-Za-z0-9])"
    r"(?!\W{0,20}(?:or|and)\W{1,20}[A-D]\b)"
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
    """Whether two expressions in LaTeX are equal. Numbers are compared here, all else by math-verify."""
    if same_characters(found, answer):
        return True  # even where math-verify can read neither
    bases = [_BASE.findall(text) for text in (found, answer)]
    if all(bases) and bases[0] != bases[1]:
        return False  # 204_5 is not 204_8; math-verify leaves subscripts out
    numbers = [numerals.read(text.strip().removesuffix(".")) for text in (found, answer)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    return judge.equal(found, answer)


GRADERS: Mapping[str, Grader] = {
    "exact": Grader(stated, _same_text),
    "math": Grader(stated, _same_mathematics),
    "number": Grader(_find_number, _same_number),
    "choice": Grader(_find_choice, lambda found, answer: found == answer.strip()),
}
CHOICES = (*GRADERS, NONE)
