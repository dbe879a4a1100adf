"""The task family "facts": arithmetic over named values, modulo 100, that must be looked up, chained and recalled.

A problem defines some ten to seventy names in shuffled order, each as a number or through one or two other names,
and asks for three of them:

    Facts (mod 100): zum = sab - 18; gag = 86; vum = led * 5; ... Find fob, ded and ket.

The reference trace thinks as reasoning models do, in three kinds of thought (the names are ThinKV's):

    reasoning   plan a chain down to what is known: "fob = rip - 19, so I need rip."
    execution   compute it back up: "Now led = lit - 13 = 31 - 13 = 18."
    transition  doubt: re-check a run, look back at an old value, work backwards, correct a slip; set off by blank
                lines and opened by "Wait" or "Alternatively".

A derived value may be needed again hundreds of tokens after it was found; most other tokens never are. How much a
trace doubts is a trait of the trace: its manner (brisk, steady, careful) is drawn once, shows in the first line and
in the wording after it, and raises or lowers every inclination to re-check, which long runs and products raise
further. Slips (a lost carry, one off) happen in some calculations and are corrected at once. Most traces do not
collect their results before `</think>`: the answer has to read them where they were derived.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

MODULUS = 100
FAMILY = "facts"

# Three-letter names: consonant, vowel, consonant; words that the traces use otherwise are left out.
_ENGLISH = {"for", "not", "now", "let", "get", "was", "yes", "but", "mod", "has", "him", "her", "his", "far", "sum"}
NAMES = [
    word
    for i, word in enumerate(c + v + e for c in "bdfghjklmnprstvz" for v in "aeiou" for e in "bdgklmnprstvz")
    if i % 4 == 0 and word not in _ENGLISH
][:256]


@dataclass(frozen=True)
class Fact:
    """One definition: `name = left op right`, or `name = left` where `op` is empty. Operands: names or numbers."""

    name: str
    left: str | int
    op: str = ""
    right: str | int = 0

    @property
    def expression(self) -> str:
        return f"{self.left} {self.op} {self.right}" if self.op else str(self.left)

    @property
    def needs(self) -> tuple[str, ...]:
        """The names that it is defined through, each once, in order."""
        operands = (self.left, self.right) if self.op else (self.left,)
        return tuple(dict.fromkeys(x for x in operands if isinstance(x, str)))

    def apply(self, values: dict[str, int]) -> int:
        a, b = (values[x] if isinstance(x, str) else x for x in (self.left, self.right))
        return {"": a, "+": a + b, "-": a - b, "*": a * b}[self.op] % MODULUS

    def numbers(self, values: dict[str, int]) -> str:
        """The expression with every name replaced by its value."""
        a, b = (values[x] if isinstance(x, str) else x for x in (self.left, self.right))
        return f"{a} {self.op} {b}" if self.op else str(a)


@dataclass(frozen=True)
class FactsProblem:
    """Definitions in the order in which the prompt gives them, and the three names that it asks for."""

    facts: tuple[Fact, ...]
    targets: tuple[str, ...]

    @property
    def question(self) -> str:
        listed = "; ".join(f"{f.name} = {f.expression}" for f in self.facts)
        return f"Facts (mod {MODULUS}): {listed}. Find {_listing(self.targets)}."

    def values(self) -> dict[str, int]:
        """Every name's value."""
        by_name = {f.name: f for f in self.facts}
        known: dict[str, int] = {}

        def solve(name: str) -> int:
            if name not in known:
                for need in by_name[name].needs:
                    solve(need)
                known[name] = by_name[name].apply(known)
            return known[name]

        for fact in self.facts:
            solve(fact.name)
        return known

    @property
    def answer(self) -> str:
        values = self.values()
        return ", ".join(str(values[t]) for t in self.targets)

    def digest(self) -> bytes:
        """SHA-256 of the problem's content, whatever the order in which the facts are listed."""
        listed = sorted(f"{f.name}={f.left}{f.op}{f.right if f.op else ''}" for f in self.facts)
        return hashlib.sha256(";".join([*listed, *self.targets]).encode()).digest()

    def split(self) -> str:
        """The split that the problem belongs to by its content alone: no two splits can share a problem."""
        first = self.digest()[0]
        return "test" if first < 16 else "validation" if first < 32 else "train"


def draw_problem(rng: random.Random, derived: int) -> FactsProblem:
    """A problem whose three targets need `derived` calculations in all, with a few facts that nothing needs."""
    names = iter(rng.sample(NAMES, len(NAMES)))
    targets = [next(names) for _ in range(3)]
    waiting = list(targets)  # used somewhere, not defined yet
    depth = dict.fromkeys(targets, 0)
    facts: list[Fact] = []
    while len(facts) < derived:
        # Mostly the shallowest of two, so that chains stay some four to eight long.
        name = min(rng.sample(waiting, min(2, len(waiting))), key=lambda n: depth[n])
        waiting.remove(name)

        def operand(name: str = name) -> str:
            # An operand that something else needs too has to be recalled later. No cycle: it is defined later on.
            if waiting and rng.random() < 0.35:
                other = rng.choice(waiting)
                if other not in targets or rng.random() < 0.3:
                    depth[other] = max(depth[other], depth[name] + 1)
                    return other
            return fresh()

        def fresh(name: str = name) -> str:
            other = next(names)
            waiting.append(other)
            depth[other] = depth[name] + 1
            return other

        kind = rng.random()
        if kind < 0.45:
            left, right = operand(), operand()
            if left == right:
                right = fresh()
            facts.append(Fact(name, left, rng.choice("+-"), right))
        elif kind < 0.75:
            facts.append(Fact(name, operand(), rng.choice("+-"), rng.randint(2, 29)))
        else:
            facts.append(Fact(name, operand(), "*", rng.randint(2, 9)))
        if not waiting:  # every chain ended in a shared name: open a new one below the last fact
            facts.pop()
            waiting.append(name)
    facts += [Fact(name, rng.randrange(MODULUS)) for name in waiting]
    for _ in range(rng.randint(0, 1 + derived // 6)):  # facts that nothing needs
        some = rng.choice(facts).name
        extra = next(names)
        facts.append(rng.choice([Fact(extra, rng.randrange(MODULUS)), Fact(extra, some, "+", rng.randint(2, 29))]))
    rng.shuffle(facts)
    return FactsProblem(tuple(facts), tuple(targets))


@dataclass(frozen=True)
class Manner:
    """A trait of the trace: how it speaks, and how much it doubts."""

    opening: tuple[str, ...]
    compute: tuple[str, ...]  # how a run of calculations begins
    slip: float  # the largest share of calculations with a slip
    recheck: float  # inclination to re-check a run
    look_back: float  # inclination to doubt an old value
    verify: float  # probability of a last pass over everything


MANNERS = (
    Manner(
        ("Okay, this should be quick.", "Right, straight to it."),
        ("So", "Then"), slip=0.12, recheck=0.06, look_back=0.02, verify=0.05,
    ),
    Manner(
        ("Okay, let me work through this step by step.", "Let me think about this step by step."),
        ("Now", "So now"), slip=0.06, recheck=0.2, look_back=0.08, verify=0.3,
    ),
    Manner(
        ("Okay, I want to be careful here and check my work as I go.", "Let me be careful, it is easy to slip here."),
        ("Carefully now,", "Slowly now,"), slip=0.04, recheck=0.5, look_back=0.2, verify=0.7,
    ),
)  # fmt: skip


def draw_trace(problem: FactsProblem, rng: random.Random) -> tuple[str, str]:
    """One solution: the thinking (between `<think>\\n` and `</think>`) and the answer (what follows)."""
    return _Trace(problem, rng).write()


class _Trace:
    """Writes one solution; `lines` grows as the thinking does."""

    def __init__(self, problem: FactsProblem, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        self.facts = {f.name: f for f in problem.facts}
        self.truth = problem.values()
        self.known: dict[str, int] = {}  # what the trace has found, in that order
        self.manner = rng.choice(MANNERS)
        self.slip = rng.uniform(0, self.manner.slip)
        self.lines: list[str] = []

    def write(self) -> tuple[str, str]:
        rng, targets = self.rng, self.problem.targets
        self.say(rng.choice(self.manner.opening))
        for i, target in enumerate(targets):
            lead = ("First,", "Next,", "Last,")[i]
            if target in self.known:
                self.say(f"{lead} {target}. I already have {target} = {self.known[target]}.")
            else:
                self.resolve(target, f"{lead} {target}.")
        if rng.random() < self.manner.verify:
            self.verify()
        if rng.random() < 0.12:
            self.say("So the results are " + _listing([f"{t} = {self.truth[t]}" for t in targets]) + ".")
        else:
            self.say(rng.choice(("That is all I need.", "Now I can answer.", "That settles it.")))
        found = _listing([f"{t} = {self.truth[t]}" for t in targets])
        answer = f"\n\nI find {found}, so the answer is \\boxed{{{self.problem.answer}}}."
        return "".join(self.lines), answer

    def say(self, line: str) -> None:
        self.lines.append(line + "\n")

    def paragraph(self, *lines: str) -> None:
        """A transition: set off by blank lines on both sides."""
        self.lines[-1] = self.lines[-1].rstrip("\n") + "\n\n"
        self.lines.extend(line + "\n" for line in lines)
        self.lines[-1] += "\n"

    def resolve(self, target: str, lead: str) -> None:
        """Plan down to what is known, compute back up as far as it goes, and again until `target` is found."""
        open_names = [target]  # the chain of names that wait for the one after them
        while open_names:
            self.plan(open_names, lead)
            run: list[str] = []
            while open_names and not set(self.missing(open_names[-1])) - set(run):
                run.append(open_names.pop())
            self.compute(run)
            if open_names:
                lead = self.rng.choice(("Back to", "Now back to", "That leaves me at")) + f" {open_names[-1]}."

    def missing(self, name: str) -> list[str]:
        """The names that must be derived before this one."""
        return [n for n in self.facts[name].needs if n not in self.known and self.facts[n].op]

    def plan(self, open_names: list[str], lead: str) -> None:
        """Reasoning: from the last open name down to one whose operands are all known or given."""
        while True:
            name = open_names[-1]
            fact, missing = self.facts[name], self.missing(name)
            parts = [f"{name} = {fact.expression}"]
            for need in fact.needs:
                if need in self.known:
                    parts.append(f"I have {need} = {self.known[need]}")
                elif not self.facts[need].op:
                    parts.append(f"{need} = {self.facts[need].left} is given")
            if missing:
                goal = missing[0] if len(missing) == 1 else f"{missing[0]} and {missing[1]}"
                parts.append(f"so I need {goal}" + (" first" if self.rng.random() < 0.3 else ""))
            self.say(f"{lead} {', '.join(parts)}.")
            lead = self.rng.choice(("Here", "And here", "Well,"))  # so that no line begins with a name
            if not missing:
                return
            open_names.append(missing[0])

    def compute(self, run: list[str]) -> None:
        """Execution: one line a name, then perhaps a doubt about the run."""
        for i, name in enumerate(run):
            fact = self.facts[name]
            for need in fact.needs:
                self.known.setdefault(need, self.truth[need])
            value = self.truth[name]
            first = self.rng.choice(self.manner.compute) if i == 0 else "And" if i == len(run) - 1 else "Then"
            steps = f"{name} = {fact.expression} = {fact.numbers(self.known)}"
            if self.rng.random() < self.slip:
                wrong = (value + self.rng.choice((10, -10, 1, -1))) % MODULUS
                self.say(f"{first} {steps} = {wrong}.")
                right = f"{fact.numbers(self.known)} = {value}, not {wrong}"
                opener = self.rng.choice(("Wait, that is wrong.", "Wait, no, I made a slip."))
                self.paragraph(f"{opener} {right}. So {name} = {value}.")
            else:
                self.say(f"{first} {steps} = {value}.")
            self.known[name] = value
        hard = sum(self.facts[name].op == "*" for name in run)
        if self.rng.random() < self.manner.recheck * (0.6 + 0.2 * len(run) + 0.3 * hard):
            self.recheck(run)
        old = [n for n in self.known if self.facts[n].op and n not in run]
        if len(old) > 4 and self.rng.random() < self.manner.look_back:
            self.look_back(self.rng.choice(old))

    def recheck(self, run: list[str]) -> None:
        """Transition: go over the run again, or work backwards from its last value."""
        fact = self.facts[run[-1]]
        if fact.op in ("+", "-") and self.rng.random() < 0.35:
            # name = a + b  =>  name - b = a
            back = "-" if fact.op == "+" else "+"
            b = self.known[fact.right] if isinstance(fact.right, str) else fact.right
            a = self.known[str(fact.left)]
            steps = f"{fact.name} {back} {fact.right} = {self.known[fact.name]} {back} {b} = {a}"
            self.paragraph(f"Alternatively, work backwards: {steps}, and {fact.left} = {a}. Good, that agrees.")
            return
        lines = [self.rng.choice(("Wait, let me check that again.", "Wait, let me go over this again."))]
        lines += [f"{self.check(name)}, that matches." for name in run[-3:]]
        self.paragraph(*lines)

    def look_back(self, name: str) -> None:
        """Transition: doubt a value that was found long ago."""
        self.paragraph(
            self.rng.choice((f"Wait, was {name} right?", f"Alternatively, look at {name} once more."))
            + f" {self.check(name)}. Yes, {name} = {self.known[name]} stands."
        )

    def verify(self) -> None:
        """Transition: a last pass over everything, or over the targets alone."""
        derived = [n for n in self.known if self.facts[n].op]
        over = derived if self.rng.random() < 0.5 else [n for n in derived if n in self.problem.targets]
        lines = ["Before I answer, let me look over it all again."]
        self.paragraph(*lines, *(f"{self.check(name)}, fine." for name in over))

    def check(self, name: str) -> str:
        fact = self.facts[name]
        return f"Again {name} = {fact.expression} = {fact.numbers(self.known)} = {self.known[name]}"


def _listing(words: list[str] | tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1]
