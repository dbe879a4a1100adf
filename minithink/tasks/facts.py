"""The task family "facts": arithmetic over named values, modulo 100, that must be looked up, chained and recalled.

A problem defines ten to seventy names in shuffled order, each as a number or through one or two other names, and asks
for three of them:

    Facts (mod 100): zum = sab - 18; gag = 86; vum = led * 5; ... Find fob, ded and ket.

The reference trace (`writing.py` describes its three kinds of thought and its manners) plans a chain down to known
names, "fob = rip - 19, so I need rip.", and computes it back up, "Now led = lit - 13 = 31 - 13 = 18."

A derived value may be needed again hundreds of tokens after it was found; most other tokens never are. Most traces do
not collect their results before `</think>`: the answer has to read them where they were derived.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minithink.tasks.writing import MODULUS, NAMES, Fact, Puzzle, Trace, listing, solve

FAMILY = "facts"


@dataclass(frozen=True)
class FactsProblem(Puzzle):
    """Definitions in the order in which the prompt gives them, and the three names that it asks for."""

    family: ClassVar[str] = FAMILY
    facts: tuple[Fact, ...]
    targets: tuple[str, ...]

    @property
    def question(self) -> str:
        listed = "; ".join(f"{f.name} = {f.expression}" for f in self.facts)
        return f"Facts (mod {MODULUS}): {listed}. Find {listing(self.targets)}."

    def values(self) -> dict[str, int]:
        return solve(self.facts)

    def content(self) -> list[str]:
        listed = sorted(f"{f.name}={f.left}{f.op}{f.right if f.op else ''}" for f in self.facts)
        return [*listed, *self.targets]


def draw_problem(rng: random.Random, derived: int) -> FactsProblem:
    """A problem whose three targets need `derived` calculations in all, with a few facts that nothing needs."""
    names = iter(rng.sample(NAMES, len(NAMES)))
    targets = [next(names) for _ in range(3)]
    waiting = list(targets)  # used somewhere, not defined yet
    depth = dict.fromkeys(targets, 0)
    facts: list[Fact] = []
    while len(facts) < derived:
        # Define the shallower of two drawn names, so that chains stay some four to eight names long.
        name = min(rng.sample(waiting, min(2, len(waiting))), key=lambda n: depth[n])
        waiting.remove(name)

        def operand(name: str = name) -> str:
            # A shared operand has to be recalled later. It makes no cycle, because it is defined after this name.
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
            left = operand()
            right = operand()
            if left == right:
                right = fresh()
            facts.append(Fact(name, left, rng.choice("+-"), right))
        elif kind < 0.75:
            facts.append(Fact(name, operand(), rng.choice("+-"), rng.randint(2, 29)))
        else:
            facts.append(Fact(name, operand(), "*", rng.randint(2, 9)))
        if not waiting:  # every chain ended in a shared name: drop the last fact and define its name anew
            facts.pop()
            waiting.append(name)
    facts += [Fact(name, rng.randrange(MODULUS)) for name in waiting]
    for _ in range(rng.randint(0, 1 + derived // 6)):  # facts that nothing needs
        some = rng.choice(facts).name
        extra = next(names)
        facts.append(rng.choice([Fact(extra, rng.randrange(MODULUS)), Fact(extra, some, "+", rng.randint(2, 29))]))
    rng.shuffle(facts)
    return FactsProblem(tuple(facts), tuple(targets))


def draw_trace(problem: FactsProblem, rng: random.Random) -> tuple[str, str]:
    """One solution: the thinking (between `<think>\\n` and `</think>`) and the answer (what follows)."""
    return _Trace(problem, rng).write()


class _Trace(Trace):
    """Resolves the three targets one after the other, depth first."""

    def __init__(self, problem: FactsProblem, rng: random.Random) -> None:
        super().__init__(problem.facts, problem.values(), rng)
        self.targets = problem.targets

    def write(self) -> tuple[str, str]:
        for i, target in enumerate(self.targets):
            self.part()
            lead = ("First,", "Next,", "Last,")[i]
            if target in self.known:
                self.say(f"{lead} {target}. I already have {target} = {self.known[target]}.")
            elif not self.facts[target].op:
                self.known[target] = self.truth[target]
                self.say(f"{lead} {target}. {target} = {self.truth[target]} is given.")
            else:
                self.resolve(target, f"{lead} {target}.")
        if self.rng.random() < self.manner.verify:
            self.verify()
        return self.close(self.targets, self.truth)

    def resolve(self, target: str, lead: str) -> None:
        """Plan down to known names, compute back up as far as possible, and repeat this until `target` is found."""
        open_names = [target]  # the chain of names that wait for the one after them
        while open_names:
            self.plan(open_names, lead)
            run: list[str] = []
            while open_names and not set(self.missing(open_names[-1])) - set(run):
                run.append(open_names.pop())
            self.compute(run)
            if open_names:
                self.part()
                lead = self.rng.choice(("Back to", "Now back to", "That leaves me at")) + f" {open_names[-1]}."

    def missing(self, name: str) -> list[str]:
        """The names that must be derived before this one."""
        return [n for n in self.facts[name].needs if n not in self.known and self.facts[n].op]

    def plan(self, open_names: list[str], lead: str) -> None:
        """Reasoning: from the last open name down to one whose operands are all known or given."""
        while True:
            name = open_names[-1]
            fact = self.facts[name]
            missing = self.missing(name)
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
                self.reread(name, f"{name} = {fact.expression}")
                return
            open_names.append(missing[0])

    def doubtful(self, run: Sequence[str]) -> list[str]:
        """The names that were derived before the run; empty unless they are more than four."""
        old = [n for n in self.known if self.facts[n].op and n not in run]
        return old if len(old) > 4 else []

    def verify(self) -> None:
        """Transition: a last pass over everything, or over the targets alone."""
        derived = [n for n in self.known if self.facts[n].op]
        over = derived if self.rng.random() < 0.5 else [n for n in derived if n in self.targets]
        lines = ["Before I answer, let me look over it all again."]
        self.paragraph(*lines, *(f"{self.check(name)}, fine." for name in over))
