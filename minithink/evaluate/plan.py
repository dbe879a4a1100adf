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
from minithink.kv.contract import Policy, Schedule
from minithink.kv.manager import check_budget, members
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


def plan(policies: Sequence[str] | None, budgets: Sequence[int | float], schedule: str | None = None) -> list[Cell]:
    """The cells of a run, in order; `full` goes first where a share needs it.

    Args:
        policies: texts; None: nobody named one, and `full` is run. One that names its budget, or has a schedule
            that does, or takes none, is run once.
        budgets: for the others.
        schedule: of those that have one and do not name it.

    Raises:
        UsageError: something is there twice; a policy is unknown, or cannot have such a budget or schedule; nobody
            takes the budgets or the schedule.
    """
    named, policies = policies is not None, [FULL] if policies is None else policies
    for what, those in (("policy", policies), ("budget", budgets)):
        if twice := next((x for i, x in enumerate(those) if x in those[:i]), None):
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
    for field, option, given in (("budget", "--budgets", budgets or None), ("schedule", "--schedule", schedule)):
        if given is None or any(leaves_open(text, field) for text in policies):
            continue
        if not named:
            raise UsageError(
                f"--policies was not given, and {FULL}, which is run then, takes no {field}: name one that does, as "
                f"in --policies {FULL},rkv, or drop {option}."
            )
        raise UsageError(
            f"None of the policies {', '.join(policies)} leaves its {field} open: drop {option}, or name one that "
            "does, such as rkv."
        )
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


def check(cells: Sequence[Cell], schedule: str | None, prompts: Sequence[int], longest: int) -> None:
    """Refuse what cannot be, before anything is generated.

    Args:
        prompts: tokens of each.
        longest: tokens that a sequence generates at most.

    Raises:
        UsageError: a protected prompt does not fit into a budget in tokens, or a share is too small even if every
            sequence is as long as it may be.
    """
    for cell in cells:
        if isinstance(cell.budget, int):
            check_budget(policy_of(cell, schedule), max(prompts))
        check_share(cell, schedule, min(prompts), longest, "at most")


def check_share(cell: Cell, schedule: str | None, prompt: int, mean: float, how: str = "on average") -> None:
    """Refuse a share that comes to too few tokens for its policy.

    Args:
        prompt: tokens of the shortest, where it is the fewest; a longer one adds as many as it needs.
        mean: tokens that the full cache generates.
        how: it does so.

    Raises:
        UsageError: the share comes to too little.
    """
    if (tokens := tokens_of(cell.budget, prompt, mean)) is None:
        return
    try:
        check_budget(policy_of(cell, schedule, tokens), prompt)
    except UsageError as error:
        raise UsageError(
            f"{cell.policy}: the share {cell.budget} comes to {tokens:,} tokens with a prompt of {prompt:,}, for the "
            f"full cache generates {mean:,.0f} {how}; give a larger share, or tokens ({str(error).rstrip('.')})."
        ) from None


def said_of_prompts(cells: Sequence[Cell], schedule: str | None, prompts: Sequence[int]) -> list[str]:
    """A sentence, where prompts have more tokens than some policy keeps, and it does not protect them."""
    kept = dict[str, int]()
    for cell in cells:
        policy = policy_of(cell, schedule)
        keep = [Schedule.parse(member.schedule).keep for member in members(policy)]
        least = min((n for n in (policy.budget, *keep) if n is not None), default=max(prompts))
        if least < max(prompts) and not policy.protect_prompt:
            kept[str(cell)] = least
    if not kept:
        return []
    longer = sum(prompt > min(kept.values()) for prompt in prompts)
    return [
        f"{longer:,} of {len(prompts):,} prompts, of up to {max(prompts):,} tokens, have more tokens than are kept "
        f"with {', '.join(kept)}: parts of the question may be evicted"
    ]
