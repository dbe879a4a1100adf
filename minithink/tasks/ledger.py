"""The task family "ledger": balances that are changed step by step, modulo 100, so that newer values supersede older.

A problem gives the balances of four to nine accounts and up to about fifty numbered steps. Each step sets one account
anew or moves an amount between two. The problem asks for three balances at the end:

    Balances (mod 100): tup@0 = 56; nug@0 = 20; lim@0 = 7; ded@0 = 33. Steps: 1: tup = tup + nug; 2: lim = lim * 3;
    3: move 12 from ded to nug; 4: tup = lim - tup. Find tup, ded and nug.

`tup@3` is the balance of tup since step 3. The prompt's steps name accounts only, so the trace must first find the
step that set an account's newest balance. The reference trace (`writing.py` describes its three kinds of thought and
its manners) names this step first. Then it fetches the value, by a key such as `lim@2`:

    reasoning   "Next, step 4: tup = lim - tup. I need lim@2 and tup@1 to find tup@4."
    execution   "Now lim@2 = 21 and tup@1 = 76, 21 - 76 = 45, so tup@4 = 45."

Every value stands directly behind its key, both where it is found and where it is read, because induction heads find
the token that followed a key before. The wording of facts, "tup@4 = lim@2 - tup@1 = 21 - 76 = 45", would put fifteen
tokens between key and value.

After step 4, tup@1 is superseded: only a doubt about one of the last few steps needs it again. Some accounts are
busy, others rest for hundreds of tokens until a step needs them. So the newest balance of each account must be kept,
however old it is, and nothing else. The answer reads the balances where they were found.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from minithink.tasks.writing import MODULUS, NAMES, Fact, Puzzle, Trace, listing, solve

FAMILY = "ledger"
MULTIPLIERS = (2, 3, 7, 9)  # times 4, 5 and 8 would soon leave nothing but a few round balances
RECENT = 5  # how many of the newest balances a doubt may look back at


@dataclass(frozen=True)
class Step:
    """A step: it sets one account, or moves an amount from a first account to a second."""

    sets: tuple[Fact, ...]

    @property
    def text(self) -> str:
        if len(self.sets) == 1:
            return f"{self.sets[0].name} = {self.sets[0].expression}"
        source, target = self.sets
        return f"move {source.right} from {source.name} to {target.name}"


@dataclass(frozen=True)
class LedgerProblem(Puzzle):
    """Balances at the beginning, steps in their order, and the three accounts that the problem asks for."""

    family: ClassVar[str] = FAMILY
    balances: tuple[Fact, ...]  # name = number
    steps: tuple[Step, ...]
    targets: tuple[str, ...]

    @property
    def question(self) -> str:
        given = "; ".join(f"{f.name}@0 = {f.expression}" for f in self.balances)
        steps = "; ".join(f"{i}: {step.text}" for i, step in enumerate(self.steps, 1))
        return f"Balances (mod {MODULUS}): {given}. Steps: {steps}. Find {listing(self.targets)}."

    def versions(self) -> list[list[Fact]]:
        """What each step sets, every name with its step: `tup@4 = lim@2 - tup@1`. Step 0: the given balances."""
        newest = {f.name: f"{f.name}@0" for f in self.balances}
        out = [[replace(f, name=newest[f.name]) for f in self.balances]]
        for i, step in enumerate(self.steps, 1):

            def since(operand: str | int) -> str | int:
                return newest[operand] if isinstance(operand, str) else operand

            out.append([Fact(f"{f.name}@{i}", since(f.left), f.op, since(f.right)) for f in step.sets])
            newest.update((f.name, f"{f.name}@{i}") for f in step.sets)
        return out

    def newest(self) -> dict[str, str]:
        """The last version of every account: `{"tup": "tup@4"}`."""
        last = {}
        for f in chain.from_iterable(self.versions()):
            name, _, _ = f.name.partition("@")
            last[name] = f.name
        return last

    def values(self) -> dict[str, int]:
        """Every version's value."""
        return solve(chain.from_iterable(self.versions()))

    def asked(self) -> list[str]:
        newest = self.newest()
        return [newest[t] for t in self.targets]

    def content(self) -> list[str]:
        given = sorted(f"{f.name}={f.left}" for f in self.balances)
        return [FAMILY, *given, *(step.text for step in self.steps), *self.targets]


def draw_problem(rng: random.Random, size: int) -> LedgerProblem:
    """A problem of `size` steps."""
    accounts = rng.sample(NAMES, rng.randint(4, min(9, 4 + size)))
    balances = tuple(Fact(name, rng.randrange(MODULUS)) for name in accounts)
    busy = rng.sample(accounts, 3)  # most steps set one of these; which accounts are busy changes
    steps: list[Step] = []
    for _ in range(size):
        if rng.random() < 0.2:
            busy[rng.randrange(3)] = rng.choice([a for a in accounts if a not in busy])
        name = rng.choice(busy if rng.random() < 0.75 else accounts)
        other, third = rng.sample([a for a in accounts if a != name], 2)
        kind = rng.random()
        sign = rng.choice("+-")
        if kind < 0.4:
            fact = Fact(name, name, sign, other)
        elif kind < 0.55:
            fact = Fact(name, name, sign, rng.randint(2, 29))
        elif kind < 0.65:
            fact = Fact(name, name, "*", rng.choice(MULTIPLIERS))
        elif kind < 0.8:
            fact = Fact(name, other, sign, third)
        elif kind < 0.85:
            fact = Fact(name, other)
        else:
            amount = rng.randint(2, 29)
            steps.append(Step((Fact(name, name, "-", amount), Fact(other, other, "+", amount))))
            continue
        steps.append(Step((fact,)))
    changed = set[str]()
    for step in steps:
        changed |= {fact.name for fact in step.sets}
    targets = sorted(rng.sample(accounts, len(accounts)), key=lambda a: a not in changed)[:3]  # first those changed
    return LedgerProblem(balances, tuple(steps), tuple(rng.sample(targets, 3)))


def draw_trace(problem: LedgerProblem, rng: random.Random) -> tuple[str, str]:
    """One solution: the thinking (between `<think>\\n` and `</think>`) and the answer (what follows)."""
    return _Trace(problem, rng).write()


class _Trace(Trace):
    """Carries the steps out in their order, a few at a time."""

    def __init__(self, problem: LedgerProblem, rng: random.Random) -> None:
        self.problem = problem
        self.versions = problem.versions()
        super().__init__([*chain.from_iterable(self.versions)], problem.values(), rng)

    def write(self) -> tuple[str, str]:
        steps = len(self.problem.steps)
        done = 0
        while done < steps:
            run = range(done + 1, min(steps, done + self.rng.choice((1, 2, 2, 3, 3, 4))) + 1)
            self.part()
            self.plan(run)
            changed = chain.from_iterable(self.versions[i] for i in run)
            self.compute([f.name for f in changed])
            done = run[-1]
        if self.rng.random() < self.manner.verify:
            self.verify()
        return self.close(self.problem.asked(), self.truth)

    def plan(self, run: range) -> None:
        """Reasoning: the balances that the steps of a run need, each with the step that set it."""
        for i in run:
            if i == run[0]:
                lead = "First," if i == 1 else "Last," if run[-1] == len(self.problem.steps) else "Next,"
            else:
                lead = self.rng.choice(("Here", "And here", "Well,"))
            needs = list(dict.fromkeys(chain.from_iterable(f.needs for f in self.versions[i])))
            sets = listing([f.name for f in self.versions[i]])
            self.say(f"{lead} step {i}: {self.problem.steps[i - 1].text}. I need {listing(needs)} to find {sets}.")
        again = self.rng.choice(run)
        self.reread(f"step {again}", self.problem.steps[again - 1].text)

    def shown(self, fact: Fact, value: int) -> str:
        """How a calculation is written: `lim@2 = 21 and tup@1 = 76, 21 - 76 = 45`; a copied balance: `lim@2 = 21`."""
        read = " and ".join(f"{need} = {self.known[need]}" for need in fact.needs)
        return f"{read}, {fact.numbers(self.known)} = {value}" if fact.op else read

    def derivation(self, fact: Fact, value: int) -> str:
        """A calculation, and the balance that it sets: `lim@2 = 21 and tup@1 = 76, 21 - 76 = 45, so tup@4 = 45`."""
        return f"{self.shown(fact, value)}, so {fact.name} = {value}"

    def doubtful(self, run: Sequence[str]) -> list[str]:
        """The newest balances that steps before the run have set."""
        return [n for n in self.known if n not in run and not n.endswith("@0")][-RECENT:]

    def verify(self) -> None:
        """Transition: a last look at the newest balances, of all accounts or of those that are asked for."""
        newest = self.problem.newest()
        over = list(newest) if self.rng.random() < 0.5 else self.problem.targets
        found = [f"{name} is {newest[name]} = {self.truth[newest[name]]}" for name in over]
        self.paragraph("Before I answer, let me look over it all again.", *(f"Again {line}, fine." for line in found))
