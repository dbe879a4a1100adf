"""The plan of an evaluation: its cells, each a policy at a budget.

A budget counts all tokens that a lane (a KV head of a layer) holds, the prompt's too. A budget that is a share means
the prompt's tokens plus this share of the tokens that the full cache generates, on average over the problems of the
run (or of --reference-length tokens). So each sequence has its own budget, and a run of fewer problems has others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from minithink.commands import finite, positive
from minithink.errors import UsageError, quoted
from minithink.evaluate.journal import Record
from minithink.evaluate.summary import FULL, Budget
from minithink.kv.contract import Policy
from minithink.kv.sizes import check_budget, least_kept
from minithink.policies import leaves_open, parse

AMPLE = 2**20  # tokens: stands for a share whose tokens are not known yet; no policy finds it too small


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
            budget: int | float = positive(part.strip()) if part.strip().isdigit() else finite(part.strip())
        except argparse.ArgumentTypeError:
            budget = 0
        if not (budget >= 1 if isinstance(budget, int) else 0 < budget < 1):
            raise argparse.ArgumentTypeError(
                f"{quoted(part)} is no budget: give whole tokens from 1 on, or shares between 0 and 1"
            )
        out.append(budget)
    return out


def plan(policies: Sequence[str] | None, budgets: Sequence[int | float], schedule: str | None = None) -> list[Cell]:
    """The cells of a run, in order. If a budget is a share, `full` goes first.

    Args:
        policies: texts, as in "rkv:buffer=0"; None: the user named none, and `full` is run. A policy whose text or
            schedule gives a budget, or that takes none, is run once.
        budgets: for the other policies.
        schedule: for policies that have one and whose text does not give it.

    Raises:
        UsageError: a policy or a budget is named twice; a policy is unknown, or cannot have such a budget or
            schedule; no policy takes the budgets or the schedule.
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
    """The budget that a policy's schedule gives; None: its schedule gives none."""
    try:
        return policy_of(Cell(text, None), schedule).budget
    except UsageError:  # it needs one
        return None


def policy_of(cell: Cell, schedule: str | None, longest: int = AMPLE) -> Policy:
    """The policy of a cell. longest: tokens of the largest budget of any sequence, if the cell's is a share."""
    own = not leaves_open(cell.policy, "budget")
    budget = None if own else longest if isinstance(cell.budget, float) else cell.budget
    schedule = schedule if leaves_open(cell.policy, "schedule") else None
    return parse(cell.policy, budget=budget, schedule=schedule, option="--budgets")


def tokens_of(budget: Budget, prompt: int, mean: float) -> int | None:
    """Tokens that a sequence may keep if its budget is a share; None: it is no share, and the policy knows.

    Args:
        prompt: tokens of the sequence's prompt.
        mean: tokens that the full cache generates, on average.
    """
    return prompt + max(1, round(budget * mean)) if isinstance(budget, float) else None


def check(cells: Sequence[Cell], schedule: str | None, prompts: Sequence[int], longest: int) -> None:
    """Refuse budgets that are too small, before anything is generated.

    Args:
        prompts: the number of tokens of each prompt.
        longest: tokens that a sequence generates at most.

    Raises:
        UsageError: a protected prompt does not fit into a budget in tokens, or a share is too small even if every
            sequence is as long as it may be.
    """
    for cell in cells:
        if isinstance(cell.budget, int):
            check_budget(policy_of(cell, schedule), max(prompts))
        check_share(cell, schedule, min(prompts), longest, "at most")


def check_share(
    cell: Cell, schedule: str | None, prompt: int, mean: float, how: str = "on average", given: bool = False
) -> None:
    """Refuse a share that comes to too few tokens for its policy.

    Args:
        prompt: tokens of the shortest prompt. A longer prompt raises the budget by as many tokens as it needs more.
        mean: tokens that the full cache generates.
        how: for the message, whether `mean` is an average or the most.
        given: `mean` is that of --reference-length.

    Raises:
        UsageError: the share comes to too few tokens.
    """
    if (tokens := tokens_of(cell.budget, prompt, mean)) is None:
        return
    try:
        check_budget(policy_of(cell, schedule, tokens), prompt)
    except UsageError as error:
        why = f"the full cache generates {mean:,.0f} {how}"
        if given:
            why = f"--reference-length is {mean:,.0f}"
        raise UsageError(
            f"{cell.policy}: the share {cell.budget} comes to {tokens:,} tokens with a prompt of {prompt:,}, for "
            f"{why}; give a larger share, or tokens ({str(error).rstrip('.')})."
        ) from None


def said_of_prompts(cells: Sequence[Cell], schedule: str | None, prompts: Sequence[int]) -> list[str]:
    """A sentence if some policy keeps fewer tokens than a prompt has and does not protect prompts; else none."""
    kept = dict[str, int]()
    for cell in cells:
        least = least_kept(policy_of(cell, schedule))
        if least is not None and least < max(prompts):
            kept[str(cell)] = least
    if not kept:
        return []
    longer = sum(prompt > min(kept.values()) for prompt in prompts)
    return [
        f"{longer:,} of {len(prompts):,} prompts, of up to {max(prompts):,} tokens, have more tokens than are kept "
        f"with {', '.join(kept)}: parts of the question may be evicted"
    ]


def said_of_budgets(cells: Sequence[Cell], schedule: str | None, records: Sequence[Record]) -> list[str]:
    """A sentence for each cell whose budget never applied, because no sequence has ever evicted a token."""
    said = []
    for cell in cells:
        own = [r for r in records if (r.policy, r.budget) == cell]
        if own and policy_of(cell, schedule).budget is not None and not any(map(_evicted, own)):
            longest = max(r.prompt_tokens + r.generated_tokens for r in own)
            said.append(
                f"{cell}: the budget never applied, so these are the texts of the full cache (no token was evicted, "
                f"and the longest text has {longest:,} tokens)"
            )
    return said


def _evicted(record: Record) -> bool:
    """Whether a sequence has evicted a token: in a decoding step, or when its prompt was read."""
    seen = record.prompt_tokens + max(0, record.generated_tokens - 1)  # the model never reads the last token
    return record.evicting_steps > 0 or record.tokens_peak < seen
