"""The task family "search": numbers found by trial. Few results are read again much later, most attempts never.

A problem is a list of locks. A lock says `x * c + d = r`, where x is a number from 1 to 9 and c and d are numbers or
the names of other locks; the problem asks for three names:

    Numbers from 1 to 9: gon * duv + 7 = 79; duv * 8 + 14 = 78; zog * 7 + duv = 29; … Find gon, ved and zog.
    Repeat some.

The reference trace plans down to a lock whose operands are known, and then tries one number after the other:

    reasoning   "Back to gon. gon * duv + 7 = 79, I have duv = 8. I want gon with gon * 8 + 7 = 79, from 1 up."
    execution   "Try 5: 5 * 8 = 40, 40 + 7 = 47, no."    most of the text; not needed after the next trial
    reasoning   "So gon = 9."                            a milestone: read again much later
    transition  "Wait, was ved right? ved * 8 + 34 = 90, 7 * 8 = 56, 56 + 34 = 90. Yes, ved = 7."

At any moment the trace needs the current lock, the last trial and the numbers that it found: 1 or 2 % of the text.
The trace may give a search up and begin it again from the other side. A search may also end without a hit, because a
slip hid the hit or the lock was misread. Then the trace reads the lock again and begins anew, and no later line needs
the old attempts. So a trace can notice its own mistakes, as large models do.

The inclination is the probability that a trace doubts after a paragraph. The trace's mood (brisk, steady, careful)
sets the base of the inclination. The text says the mood in words, and the mood is drawn anew now and then. Every
doubt in the last two paragraphs raises the inclination. The content of a paragraph does not, and all doubts open with
"Wait": only the inclination decides between a doubt and the next step.

The last sentence of the question sets the redundancy: how often the trace states milestones and the current lock
again. It changes neither the numbers nor the answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from minithink.tasks.writing import NAMES, Definition, Puzzle, Writer, listing, solve

FAMILY = "search"
LOW, HIGH = 1, 9  # the numbers that are tried
LARGEST_FACTOR, LARGEST = 9, 99  # no trial's result exceeds LARGEST, so every number is one token
WORDING = ("Repeat little.", "Repeat some.", "Repeat much.")  # by redundancy
RESTATED = ((), (5,), (3, 5, 7))  # by redundancy: the trials at which the current lock is stated again
RECAP = (0.0, 0.5, 1.0)  # by redundancy: probability that the trace lists what it knows after a new number
MISREAD = 0.03  # share of searches that begin with a misread lock
# The inclination depends on the last MEMORY paragraphs: each doubt among them adds EXCITEMENT, up to CEILING.
MEMORY = 2
EXCITEMENT = 0.25
CEILING = 0.6


@dataclass(frozen=True)
class Lock(Definition):
    """`name * factor + added = result`. factor, added: numbers, or names of other locks."""

    name: str
    factor: int | str
    added: int | str
    result: int

    @property
    def text(self) -> str:
        return f"{self.name} * {self.factor} + {self.added} = {self.result}"

    @property
    def operands(self) -> tuple[int | str, int | str]:
        return self.factor, self.added

    def apply(self, values: Mapping[str, int]) -> int:
        factor, added = self.read(values)
        return (self.result - added) // factor


@dataclass(frozen=True)
class SearchProblem(Puzzle):
    """Locks in the order in which the prompt gives them, the three names that it asks for, and the redundancy."""

    family: ClassVar[str] = FAMILY
    locks: tuple[Lock, ...]
    targets: tuple[str, ...]
    redundancy: int = 1

    @property
    def question(self) -> str:
        listed = "; ".join(lock.text for lock in self.locks)
        return f"Numbers from {LOW} to {HIGH}: {listed}. Find {listing(self.targets)}. {WORDING[self.redundancy]}"

    def values(self) -> dict[str, int]:
        return solve(self.locks)

    def content(self) -> list[str]:
        """The redundancy is left out: it changes how often a trace says things, not what is asked."""
        return [FAMILY, *sorted(lock.text for lock in self.locks), *self.targets]


def reworded(question: str, redundancy: int) -> str:
    """The same question with another redundancy.

    Args:
        question: of this family.
        redundancy: 0, 1 or 2: little, some, much.

    Raises:
        ValueError: the question does not end as those of this family do.
    """
    for words in WORDING:
        if question.endswith(words):
            return question.removesuffix(words) + WORDING[redundancy]
    raise ValueError(f"{question!r} does not say how much to repeat.")


def draw_problem(rng: random.Random, size: int) -> SearchProblem:
    """A problem of `size` locks, of which the last three are asked for, and up to two locks that nothing needs."""
    names = rng.sample(NAMES, size + 2)
    unused = list(range(max(0, size - 3)))  # a lock that is not asked for must be an operand of a later one
    operands: list[list[int | str]] = [[] for _ in range(size)]
    for i in reversed(range(size)):
        for _ in range(rng.choice((0, 1, 2, 2)) if i else 0):
            earlier = [j for j in unused if j < i]
            j = rng.choice(earlier) if earlier and rng.random() < 0.6 else rng.randrange(i)
            if names[j] not in operands[i]:
                operands[i].append(names[j])
                unused = [k for k in unused if k != j]
    for j in unused:
        free = [i for i in range(j + 1, size) if len(operands[i]) < 2]
        if free:
            operands[rng.choice(free)].append(names[j])
    values = {name: rng.randint(LOW, HIGH) for name in names}
    locks = []
    extra = rng.randint(0, 2)
    for name, used in zip(names, [*operands, *([[]] * extra)], strict=False):
        factor: int | str = rng.randint(2, LARGEST_FACTOR)
        if len(used) == 2 or (used and rng.random() < 0.6):
            factor = used[0]
        c = values[factor] if isinstance(factor, str) else factor
        added: int | str = rng.randint(1, LARGEST - HIGH * c)
        if len(used) == 2 or (used and factor != used[0]):
            added = used[-1]
        d = values[added] if isinstance(added, str) else added
        locks.append(Lock(name, factor, added, values[name] * c + d))
    targets = rng.sample(names[max(0, size - 3) : size], min(3, size))
    rng.shuffle(locks)
    return SearchProblem(tuple(locks), tuple(targets), rng.randrange(len(WORDING)))


def draw_trace(problem: SearchProblem, rng: random.Random) -> tuple[str, str]:
    """One solution: the thinking (between `<think>\\n` and `</think>`) and the answer (what follows)."""
    return _Trace(problem, rng).write()


@dataclass(frozen=True)
class Mood:
    """How the trace speaks, and how much it doubts."""

    opening: tuple[str, ...]
    said: str  # words at the beginning of a search
    trial: str  # words at the beginning of a trial
    base: float  # inclination to doubt when nothing was doubted lately
    slip: float  # share of trials with a slip


MOODS = (
    Mood(("Okay, this should be quick.", "Right, straight to it."), "Quick now.", "Try", 0.02, 0.03),
    Mood(
        ("Okay, let me work through this step by step.", "Let me think about this step by step."),
        "Step by step.",
        "Now try",
        0.08,
        0.02,
    ),
    Mood(
        ("Okay, I want to be careful here and check my work as I go.", "Let me be careful, it is easy to slip here."),
        "Carefully now.",
        "Carefully try",
        0.18,
        0.015,
    ),
)


class _Trace(Writer):
    """Resolves the three targets one after the other, depth first."""

    def __init__(self, problem: SearchProblem, rng: random.Random) -> None:
        super().__init__(rng)
        self.problem = problem
        self.locks = {lock.name: lock for lock in problem.locks}
        self.truth = problem.values()
        self.known: dict[str, int] = {}  # what the trace has found, in the order of finding
        self.recent: list[bool] = []  # for each paragraph so far: True if a doubt followed it
        self.mood = rng.choice(MOODS)
        # The current search: its lock with numbers for names, and the numbers that are still to be tried.
        self.current: Lock | None = None
        self.left: list[int] = []
        self.turned = False
        self.last = (0, 0)  # the last trial, and the product that it shows
        self.rechecked = ""  # the number that was doubted last
        self.say(rng.choice(self.mood.opening))

    def write(self) -> tuple[str, str]:
        for i, target in enumerate(self.problem.targets):
            lead = ("First,", "Next,", "Last,")[i]
            if target in self.known:
                self.say(f"{lead} {target}. I already have {target} = {self.known[target]}.")
                self.boundary()
            else:
                self.resolve(target, f"{lead} {target}.")
        return self.close(self.problem.targets, self.truth)

    def resolve(self, target: str, lead: str) -> None:
        """Plan down to a lock whose operands are known, search it, go back to the lock that waits, and so on."""
        waiting = [target]
        while waiting:
            name = waiting[-1]
            lock = self.locks[name]
            missing = [need for need in lock.needs if need not in self.known]
            goal = [f"so I need {listing(missing)} first"] if missing else []
            self.say(f"{lead} {', '.join([self.read(lock), *goal])}.")
            if missing:
                waiting.append(missing[0])
                lead = "Here"
                continue
            self.search(lock)
            waiting.pop()
            if waiting:
                lead = f"Back to {waiting[-1]}."

    def read(self, lock: Lock) -> str:
        """A lock and its known operands: `gon * duv + 7 = 79, I have duv = 8`."""
        return ", ".join([lock.text, *(f"I have {n} = {self.known[n]}" for n in lock.needs if n in self.known)])

    def search(self, lock: Lock) -> None:
        """Reasoning: the goal; execution: trials; reasoning: the milestone, `So gon = 9.`"""
        if self.rng.random() < 0.3:
            self.mood = self.rng.choice(MOODS)
        factor, added = lock.read(self.known)
        true = replace(lock, factor=factor, added=added)
        self.current = self.misread(true) if self.rng.random() < MISREAD else true
        self.turned = False
        self.start(up=self.rng.random() < 0.5)
        self.want()
        while not self.trial(self.left.pop(0)):
            if not self.left:  # a slip hid the hit, or the lock was misread
                self.boundary()
                self.current = true
                self.start(up=not self.up)
                self.say(f"None fits. Let me look at it again. {self.read(lock)}.")
                self.want()
            else:
                self.boundary()
        self.boundary()
        self.current = None
        name = lock.name
        value = self.truth[lock.name]
        self.known[name] = value
        self.say(f"So {name} = {value}.")
        if len(self.known) > 1 and self.rng.random() < RECAP[self.problem.redundancy]:
            self.say(f"I know {listing([f'{n} = {v}' for n, v in [*self.known.items()][-6:]])}.")
        self.boundary()

    def want(self) -> None:
        assert self.current is not None
        self.say(f"I want {self.current.name} with {self.goal}. {self.mood.said}")
        self.boundary()

    def misread(self, lock: Lock) -> Lock:
        """The lock with one number changed, so that no x fits; the lock itself if ten draws give no such change."""
        for _ in range(10):
            which = self.rng.randrange(3)
            number = self.rng.randint(1, LARGEST)
            factor = 1 + number % LARGEST_FACTOR
            other = (replace(lock, factor=factor), replace(lock, added=number), replace(lock, result=number))[which]
            results = [x * int(other.factor) + int(other.added) for x in range(LOW, HIGH + 1)]
            if other.result not in results and max(results) <= LARGEST:
                return other
        return lock

    def start(self, up: bool) -> None:
        self.up = up
        self.left = list(range(LOW, HIGH + 1)) if up else list(range(HIGH, LOW - 1, -1))

    @property
    def side(self) -> str:
        return f"from {LOW} up" if self.up else f"from {HIGH} down"

    @property
    def goal(self) -> str:
        assert self.current is not None
        return f"{self.current.text}, {self.side}"

    def trial(self, x: int) -> bool:
        """Execution: one number → True if the text says that it fits. A slip is corrected at once or unnoticed."""
        assert self.current is not None
        lock = self.current
        rng = self.rng
        c = int(lock.factor)
        d = int(lock.added)
        if x in RESTATED[self.problem.redundancy]:
            self.say(f"Still {lock.name} with {self.goal}.")
        product = shown = x * c
        text = f"{self.mood.trial} {x}: {x} * {c} = "
        wrong = product + rng.choice((10, -10, 1, -1))
        if rng.random() < self.mood.slip and 0 < wrong <= LARGEST - d:
            if rng.random() < 0.7 or wrong + d == lock.result:
                text += f"{wrong}, no, {x} * {c} = "
            else:
                shown = wrong
        fits = shown + d == lock.result
        self.say(f"{text}{shown}, {shown} + {d} = {shown + d}, {'yes' if fits else 'no'}.")
        self.last = x, shown
        return fits

    def boundary(self) -> None:
        """End a paragraph; then write doubts, as long as the inclination draws one."""
        self.part()
        while self.doubts():
            self.doubt()
            self.part()

    def doubts(self) -> bool:
        inclination = min(CEILING, self.mood.base + EXCITEMENT * sum(self.recent[-MEMORY:]))
        self.recent.append(self.rng.random() < inclination)
        return self.recent[-1]

    def doubt(self) -> None:
        """Write a doubt (transition) of a drawn kind; if that kind does not fit here, of the next kind that fits."""
        drawn = self.rng.random()
        at = 0
        while drawn >= self.KINDS[at][0]:
            drawn -= self.KINDS[at][0]
            at += 1
        while not self.KINDS[at][1](self):
            at = (at + 1) % len(self.KINDS)

    def follows(self, openings: tuple[str, ...]) -> bool:
        """True if the last line opens with one of these words."""
        return self.lines[-1].split(" ", 1)[0] in openings

    def calculation(self, name: str) -> str:
        """A found number's lock and why it fits: `ved * 8 + 34 = 90, 7 * 8 = 56, 56 + 34 = 90`."""
        lock = self.locks[name]
        x = self.known[name]
        c, d = lock.read(self.known)
        return f"{lock.text}, {x} * {c} = {x * c}, {x * c} + {d} = {x * c + d}"

    def recheck(self) -> bool:
        """An old result is read again."""
        names = [name for name in self.known if name != self.rechecked]
        if not names:
            return False
        self.rechecked = name = self.rng.choice(names)
        self.say(f"Wait, was {name} right? {self.calculation(name)}. Yes, {name} = {self.known[name]}.")
        return True

    def review(self) -> bool:
        """Up to three old results are read again."""
        if len(self.known) < 2:
            return False
        names = self.rng.sample([*self.known], min(3, len(self.known)))
        self.say(" ".join(["Wait, let me look over what I have.", *(f"{self.calculation(n)}, fine." for n in names)]))
        return True

    def remind(self) -> bool:
        """The current lock is read again."""
        if self.current is None or not self.follows(("Try", "Now", "Carefully")):
            return False
        self.say(f"Wait, what do I want? {self.current.name} with {self.goal}.")
        return True

    def retry(self) -> bool:
        """The last trial is calculated again, if it is the last line."""
        if self.current is None or not self.follows(("Try", "Now", "Carefully")):
            return False
        lock = self.current
        x, shown = self.last
        c = int(lock.factor)
        d = int(lock.added)
        if shown != x * c:  # an unnoticed slip stays unnoticed
            return False
        verdict = f"that is {lock.result}" if x * c + d == lock.result else f"not {lock.result}"
        self.say(f"Wait, let me check {x} again. {x} * {c} = {x * c}, {x * c} + {d} = {x * c + d}, {verdict}.")
        return True

    def turn(self) -> bool:
        """The search is given up and begun again from the other side: no later line needs the old trials."""
        if self.current is None or self.turned or not 3 <= len(self.left) <= HIGH - 2:
            return False
        if self.last[0] * int(self.current.factor) + int(self.current.added) == self.current.result:
            return False
        self.start(up=not self.up)
        self.turned = True
        self.say(f"Wait, this takes too long. I want {self.current.name} with {self.goal}.")
        return True

    def reread(self) -> bool:
        """One or two locks of the question are read again."""
        locks = self.rng.sample(self.problem.locks, min(self.rng.choice((1, 2)), len(self.problem.locks)))
        self.say(f"Wait, let me look at that again. {'; '.join(lock.text for lock in locks)}. I have that.")
        return True

    # Probabilities; the last kind fits everywhere.
    KINDS = ((0.35, recheck), (0.15, retry), (0.15, remind), (0.1, turn), (0.05, review), (math.inf, reread))
