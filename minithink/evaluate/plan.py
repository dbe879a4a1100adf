"""What is to be run: every policy, at every budget that it takes.

A budget counts all tokens that a lane holds, the prompt's too. As a share it is the prompt's length and that share of
what the full cache generates, on average over the problems of the run; so each sequence has its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from minithink.errors import UsageError
from minithink.evaluate.summary import FULL, Budget
from minithink.kv.contract import Policy
from minithink.kv.manager import check_budget
from minithink.policies import leaves_open, parse

AMPLE = 2**20  # tokens, that stand for a share while nobody knows what it comes to: no policy finds that too few


class Cell(NamedTuple):
    """A policy at a budget, as records name them."""

    policy: str
    budget: Budget

    def __str__(self) -> str:
        if self.budget is None:
            return self.policy
        return f"{self.policy} at {self.budget:,}" + (" tokens" if isinstance(self.budget, int) else "")


def budgets(text: str) -> list[int | float]:
    """For argparse: "256,512", tokens, or "0.25,0.5", shares."""
    out: list[int | float] = []
    for part in text.split(","):
        try:
            number: int | float = int(part) if part.strip().isdigit() else float(part)
        except ValueError:
            number = 0
        if not (number >= 1 if isinstance(number, int) else 0 < number < 1):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no budget: give whole tokens from 1 on, or shares between 0 and 1"
            )
        out.append(number)
    return out


def plan(policies: Sequence[str], budgets: Sequence[int | float], schedule: str | None = None) -> list[Cell]:
    """The cells of a run, in order; `full` goes first where a share needs it.

    Args:
        policies: texts. One that names its budget, or has a schedule that does, or takes none, is run once.
        budgets: for the others.
        schedule: of those that have one and do not name it.

    Raises:
        UsageError: something is there twice; a policy is unknown, or cannot have such a budget or schedule; nobody
            takes the budgets or the schedule.
    """
    for what, given in (("policy", policies), ("budget", budgets)):
        if twice := next((x for i, x in enumerate(given) if x in given[:i]), None):
            raise UsageError(f"The {what} {twice} is named twice: leave one of the two out.")
    cells = []
    for text in policies:
        if budgets and leaves_open(text, "budget"):
            cells += [Cell(text, budget) for budget in budgets]
        else:
            cells.append(Cell(text, policy_of(Cell(text, None), schedule).budget))
    for cell in cells:
        if isinstance(cell.budget, float) and (grow := _grow(cell.policy, schedule)) is not None:
            raise UsageError(
                f"{cell.policy} lets lanes grow to {grow:,} tokens, as its schedule says, and --budgets gives the "
                f"share {cell.budget}: drop one of the two."
            )
        policy_of(cell, schedule)
    if budgets and not any(leaves_open(text, "budget") for text in policies):
        raise UsageError(f"None of the policies {', '.join(policies)} leaves its budget open: drop --budgets.")
    if schedule is not None and not any(leaves_open(text, "schedule") for text in policies):
        raise UsageError(f"None of the policies {', '.join(policies)} leaves its schedule open: drop --schedule.")
    if any(isinstance(cell.budget, float) for cell in cells):
        cells = [Cell(FULL, None), *(cell for cell in cells if cell.policy != FULL)]
    return cells


def _grow(text: str, schedule: str | None) -> int | None:
    """The budget that a policy has from its schedule; None: from elsewhere."""
    try:
        return policy_of(Cell(text, None), schedule).budget
    except UsageError:  # it needs one
        return None


def policy_of(cell: Cell, schedule: str | None, longest: int = AMPLE) -> Policy:
    """The policy of a cell; `longest`: the largest budget of any sequence, in tokens, where the cell's is a share."""
    own = not leaves_open(cell.policy, "budget")
    budget = None if own else longest if isinstance(cell.budget, float) else cell.budget
    schedule = schedule if leaves_open(cell.policy, "schedule") else None
    return parse(cell.policy, budget=budget, schedule=schedule, option="--budgets")


def tokens_of(budget: Budget, prompt: int, mean: float) -> int | None:
    """Tokens that a sequence may keep where its budget is a share; None: the policy knows.

    Args:
        prompt: its tokens.
        mean: tokens that the full cache generates.
    """
    return prompt + max(1, round(budget * mean)) if isinstance(budget, float) else None


def check(cells: Sequence[Cell], schedule: str | None, longest: int) -> None:
    """UsageError: a protected prompt does not fit into a budget in tokens. longest: tokens of the longest prompt."""
    for cell in cells:
        if isinstance(cell.budget, int):
            check_budget(policy_of(cell, schedule), longest)
