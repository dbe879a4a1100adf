"""What the task families share: names, calculations modulo 100, problems, manners, and the writing of a trace.

A trace is the text of a solution. It thinks as reasoning models do, in three kinds of thought (ThinKV's names):

    reasoning   plan: what must be computed, and from what
    execution   compute it: "Now led = lit - 13 = 31 - 13 = 18."
    transition  doubt: re-check a run, look back at an old value, work backwards, correct a slip; opened by "Wait" or
                "Alternatively"

A run is a series of calculations without a new plan. A blank line stands between two thoughts, as in the texts of
large models. There the model decides the kind of the next thought, and there steering acts.

The manner of a trace (brisk, steady, careful) is drawn once. It shows in the first line and in the later wording, and
it sets the inclination, the probability that a doubt follows a thought. Long runs and products raise the inclination.
A doubt may follow any thought, and is never certain: otherwise steering could change nothing. Slips (a lost carry,
one off) happen in some calculations and are corrected at once.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import ClassVar

MODULUS = 100

# Three-letter names: consonant, vowel, consonant. English words are left out, because traces use them as words.
_ENGLISH = {"for", "not", "now", "let", "get", "was", "yes", "but", "mod", "has", "him", "her", "his", "far", "sum"}
_SYLLABLES = map("".join, product("bdfghjklmnprstvz", "aeiou", "bdgklmnprstvz"))
NAMES = [word for word in islice(_SYLLABLES, 0, None, 4) if word not in _ENGLISH][:256]


class Definition(ABC):
    """Gives a name its value through two operands, which are numbers or other names."""

    name: str

    @property
    @abstractmethod
    def operands(self) -> tuple[int | str, int | str]: ...

    @property
    def needs(self) -> tuple[str, ...]:
        """The names among the operands, each once, in order."""
        return tuple(dict.fromkeys(x for x in self.operands if isinstance(x, str)))

    def read(self, values: Mapping[str, int]) -> tuple[int, int]:
        """The operands, each name replaced by its value."""
        a, b = (values[x] if isinstance(x, str) else x for x in self.operands)
        return a, b

    @abstractmethod
    def apply(self, values: Mapping[str, int]) -> int:
        """The name's value. values: at least those of the names in `needs`."""


def solve(definitions: Iterable[Definition]) -> dict[str, int]:
    """Every name's value. A name stands behind the names that it is computed from."""
    by_name = {d.name: d for d in definitions}
    known: dict[str, int] = {}

    def find(name: str) -> None:
        if name not in known:
            for need in by_name[name].needs:
                find(need)
            known[name] = by_name[name].apply(known)

    for name in by_name:
        find(name)
    return known


@dataclass(frozen=True)
class Fact(Definition):
    """One definition: `name = left op right`, or `name = left` if `op` is empty. Operands are names or numbers."""

    name: str
    left: str | int
    op: str = ""
    right: str | int = 0

    @property
    def operands(self) -> tuple[int | str, int | str]:
        return self.left, self.right

    @property
    def expression(self) -> str:
        return f"{self.left} {self.op} {self.right}" if self.op else str(self.left)

    def apply(self, values: Mapping[str, int]) -> int:
        a, b = self.read(values)
        return {"": a, "+": a + b, "-": a - b, "*": a * b}[self.op] % MODULUS

    def numbers(self, values: Mapping[str, int]) -> str:
        """The expression with every name replaced by its value."""
        a, b = self.read(values)
        return f"{a} {self.op} {b}" if self.op else str(a)


class Puzzle(ABC):
    """A problem as a family draws it: its question, and the three names that the question asks for."""

    family: ClassVar[str]
    targets: tuple[str, ...]

    @property
    @abstractmethod
    def question(self) -> str:
        """The user's message."""

    @abstractmethod
    def values(self) -> dict[str, int]:
        """Every name's value."""

    @abstractmethod
    def content(self) -> Iterable[str]:
        """What identifies the problem. The order in which the question lists its definitions does not count."""

    def asked(self) -> list[str]:
        """The names in `values` that the problem asks for."""
        return list(self.targets)

    @property
    def answer(self) -> str:
        r"""What the \boxed{} must hold."""
        values = self.values()
        return ", ".join(str(values[name]) for name in self.asked())

    def digest(self) -> bytes:
        """SHA-256 of its content."""
        return hashlib.sha256(";".join(self.content()).encode()).digest()

    def split(self) -> str:
        """The problem's split. It depends on the content alone, so no two splits can share a problem."""
        first = self.digest()[0]
        return "test" if first < 16 else "validation" if first < 32 else "train"


def listing(words: Sequence[str]) -> str:
    """One word: `a`; more: `a, b and c`."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


@dataclass(frozen=True)
class Manner:
    """A trait of the trace: how it speaks, and how much it doubts."""

    opening: tuple[str, ...]
    compute: tuple[str, ...]  # how a run of calculations begins
    slip: float  # the largest share of calculations with a slip
    doubt: float  # probability that a doubt follows a thought
    verify: float  # probability of a last pass over everything


MANNERS = (
    Manner(
        ("Okay, this should be quick.", "Right, straight to it."),
        ("So", "Then"),
        slip=0.12,
        doubt=0.12,
        verify=0.05,
    ),
    Manner(
        ("Okay, let me work through this step by step.", "Let me think about this step by step."),
        ("Now", "So now"),
        slip=0.06,
        doubt=0.27,
        verify=0.3,
    ),
    Manner(
        ("Okay, I want to be careful here and check my work as I go.", "Let me be careful, it is easy to slip here."),
        ("Carefully now,", "Slowly now,"),
        slip=0.04,
        doubt=0.48,
        verify=0.6,
    ),
)


class Writer:
    """Writes one solution; `lines` has the thinking so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line + "\n")

    def part(self) -> None:
        """End a thought: a blank line follows."""
        self.lines[-1] = self.lines[-1].rstrip("\n") + "\n\n"

    def close(self, targets: Sequence[str], truth: Mapping[str, int]) -> tuple[str, str]:
        """Write the last line, which seldom lists the results, and the answer → thinking, answer."""
        self.part()
        found = listing([f"{t} = {truth[t]}" for t in targets])
        if self.rng.random() < 0.12:
            self.say(f"So the results are {found}.")
        else:
            self.say(self.rng.choice(("That is all I need.", "Now I can answer.", "That settles it.")))
        boxed = ", ".join(str(truth[t]) for t in targets)
        return "".join(self.lines), f"\n\nI find {found}, so the answer is \\boxed{{{boxed}}}."


class Trace(Writer):
    """A solution by calculations. A subclass says what to plan and what to doubt."""

    def __init__(self, facts: Iterable[Fact], truth: Mapping[str, int], rng: random.Random) -> None:
        """facts: all definitions; truth: every name's value."""
        super().__init__(rng)
        self.facts = {f.name: f for f in facts}
        self.truth = truth
        self.known: dict[str, int] = {}  # what the trace has found, in the order of finding
        self.manner = rng.choice(MANNERS)
        self.slip = rng.uniform(0, self.manner.slip)
        self.say(rng.choice(self.manner.opening))

    def paragraph(self, *lines: str) -> None:
        """Write a transition, as a thought of its own."""
        self.part()
        for line in lines:
            self.say(line)
        self.part()

    def compute(self, run: Sequence[str]) -> None:
        """Execution: a line for each name of the run, slips corrected at once; then perhaps a doubt about the run."""
        self.part()
        for i, name in enumerate(run):
            fact = self.facts[name]
            for need in fact.needs:
                self.known.setdefault(need, self.truth[need])
            value = self.truth[name]
            first = self.rng.choice(self.manner.compute) if i == 0 else "And" if i == len(run) - 1 else "Then"
            if self.rng.random() < self.slip and fact.op:
                wrong = (value + self.rng.choice((10, -10, 1, -1))) % MODULUS
                self.say(f"{first} {self.derivation(fact, wrong)}.")
                right = f"{fact.numbers(self.known)} = {value}, not {wrong}"
                opener = self.rng.choice(("Wait, that is wrong.", "Wait, no, I made a slip."))
                self.paragraph(f"{opener} {right}. So {name} = {value}.")
            else:
                self.say(f"{first} {self.derivation(fact, value)}.")
            self.known[name] = value
        hard = sum(self.facts[name].op == "*" for name in run)
        if self.doubts(0.6 + 0.12 * len(run) + 0.2 * hard):
            self.recheck(run)
            self.look_back(run)

    def doubts(self, weight: float = 1.0) -> bool:
        """Draw whether a doubt comes now. Doubts follow plans about as often as runs, so that the kind of a thought
        does not tell whether a doubt follows."""
        return self.rng.random() < self.manner.doubt * weight

    def reread(self, what: str, text: str) -> None:
        """Transition, if a doubt is drawn: read again the text that the plan was made from."""
        if self.doubts():
            self.paragraph(f"Wait, let me look at {what} again: {text}. Yes, I have that.")
            self.look_back(())

    def doubtful(self, run: Sequence[str]) -> list[str]:
        """The names that a doubt after the run may look back at."""
        raise NotImplementedError

    def shown(self, fact: Fact, value: int) -> str:
        """How a calculation is written: `lit - 13 = 31 - 13 = 18`."""
        return f"{fact.expression} = {fact.numbers(self.known)} = {value}"

    def derivation(self, fact: Fact, value: int) -> str:
        """A calculation with the name that it defines: `led = lit - 13 = 31 - 13 = 18`."""
        return f"{fact.name} = {self.shown(fact, value)}"

    def check(self, name: str) -> str:
        return f"Again {self.derivation(self.facts[name], self.known[name])}"

    def recheck(self, run: Sequence[str]) -> None:
        """Transition: go over the run again, or work backwards from its last value."""
        fact = self.facts[run[-1]]
        if fact.op in ("+", "-") and self.rng.random() < 0.35:
            # name = left + right  =>  name - right = left
            back = Fact(str(fact.left), fact.name, "-" if fact.op == "+" else "+", fact.right)
            value = self.known[back.name]
            shown = f"{self.shown(back, value)}, and {back.name} = {value}"
            self.paragraph(f"Alternatively, work backwards: {shown}. Good, that agrees.")
            return
        lines = [self.rng.choice(("Wait, let me check that again.", "Wait, let me go over this again."))]
        lines += [f"{self.check(name)}, that matches." for name in run[-3:]]
        self.paragraph(*lines)

    def look_back(self, run: Sequence[str]) -> None:
        """Transition, if one more doubt is drawn: about a value that was found before this run."""
        if not (old := self.doubtful(run)) or not self.doubts():
            return
        name = self.rng.choice(old)
        self.paragraph(
            self.rng.choice((f"Wait, was {name} right?", f"Alternatively, look at {name} once more."))
            + f" {self.check(name)}. Yes, {name} = {self.known[name]} stands."
        )
