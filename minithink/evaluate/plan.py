"""The plan of an evaluation: its cells, each a policy at a budget.

A budget counts all tokens that a lane (a KV head of a layer) holds, the prompt's too. A budget that is a share means
the prompt's tokens plus this share of the tokens that the full cache generates, on average over the problems of the
run (or of --reference-length tokens). So each sequence has its own budget, and a run of fewer problems has others.
A budget in bytes, such as 2MiB, is the tokens whose keys and values take these bytes with the model of the run
(`kv/sizes.py`). They are known when the model is loaded; until then `AMPLE` stands for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from minithink.cli.commands import finite, positive
from minithink.errors import UsageError, counted, quoted
from minithink.evaluate.journal import Record
from minithink.evaluate.summary import FULL, Budget
from minithink.kv.byte_size import EXAMPLE, ByteSize, looks_like_bytes
from minithink.kv.contract import Policy
from minithink.kv.sizes import check_budget, least_kept
from minithink.policies import AMPLE as AMPLE  # a share's tokens are not known at first, either
from minithink.policies import TokensOf, Written, ample, read
from minithink.text.tags import Tags
from minithink.text.thinking import never_opened


@dataclass(frozen=True)
class Spec:
    """A policy as the command line names it. Its text is read once, for all budgets.

    Args:
        text: as in "rkv:buffer=0". Records name the policy so.
        schedule: of --schedule, for members that have one and do not name it.
    """

    text: str
    schedule: str | None = None

    @cached_property
    def written(self) -> Written:
        """What its text says. UsageError: it makes no sense."""
        return read(self.text)

    @property
    def takes_budget(self) -> bool:
        """Whether --budgets decides how many tokens it keeps. UsageError: the text makes no sense."""
        return self.written.leaves_open("budget")

    @property
    def takes_schedule(self) -> bool:
        """Likewise of --schedule."""
        return self.written.leaves_open("schedule")

    def policy(self, budget: int | ByteSize | None = None, tokens_of: TokensOf = ample) -> Policy:
        """A new policy.

        Args:
            budget: tokens or bytes, if it takes its budget from --budgets.
            tokens_of: how many tokens bytes hold, these or those of the text.

        Raises:
            UsageError: the text makes no sense, or a budget is missing or does not suit it.
        """
        return self.written.make(
            budget=budget if self.takes_budget else None,
            schedule=self.schedule if self.takes_schedule else None,
            option="--budgets",
            tokens_of=tokens_of,
        )


def given(job: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a job that a command line has, by their names; policies as Specs.

    Args:
        job: a dataclass, whose fields are named as the options.
    """
    values = {field.name: getattr(args, field.name) for field in fields(job) if hasattr(args, field.name)}
    if values.get("policies") is not None:
        values["policies"] = [Spec(text, args.schedule) for text in args.policies]
    return values


class Cell(NamedTuple):
    """A policy at a budget."""

    spec: Spec
    budget: Budget
    tokens_of: TokensOf = ample  # how many tokens bytes hold, when the model is known

    @property
    def policy(self) -> str:
        """The policy's text, as records name it."""
        return self.spec.text

    @property
    def name(self) -> tuple[str, Budget]:
        """Both as records name them."""
        return self.policy, self.budget

    def make(self, longest: int = AMPLE) -> Policy:
        """A new policy. longest: tokens of the largest budget of any sequence, if the budget is a share."""
        budget = longest if isinstance(self.budget, float) else self.budget
        return self.spec.policy(budget, self.tokens_of)

    @property
    def tokens(self) -> int | None:
        """What a budget in bytes comes to; None: it is not in bytes."""
        return self.make().budget if isinstance(self.budget, ByteSize) else None

    def __str__(self) -> str:
        if self.budget is None:
            return self.policy
        if isinstance(self.budget, ByteSize):
            return f"{self.policy} at {self.budget}"
        if isinstance(self.budget, int):
            return f"{self.policy} at {counted(self.budget, 'token')}"
        return f"{self.policy} at {self.budget:,}"


def budgets(text: str) -> list[int | float | ByteSize]:
    """For argparse: "256,512", tokens; "0.25,0.5", shares; or "2MiB,512KiB", bytes."""
    return [_budget(part.strip()) for part in text.split(",")]


def _budget(text: str) -> int | float | ByteSize:
    try:
        if looks_like_bytes(text):
            return ByteSize(text)
        if text.isdigit():
            return positive(text)
        share = finite(text)
        if 0 < share < 1:
            return share
    except (argparse.ArgumentTypeError, ValueError):
        pass
    raise argparse.ArgumentTypeError(
        f"{quoted(text)} is no budget: give whole tokens from 1 on, shares between 0 and 1, or bytes such as "
        f"{EXAMPLE}"
    )


def plan(
    policies: Sequence[Spec] | None, budgets: Sequence[int | float | ByteSize], schedule: str | None = None
) -> list[Cell]:
    """The cells of a run, in order. If a budget is a share, `full` goes first.

    Args:
        policies: None: the user named none, and `full` is run. A policy whose text or schedule gives a budget, or
            that takes none, is run once.
        budgets: for the other policies.
        schedule: of --schedule; the policies have it, too.

    Raises:
        UsageError: a policy or a budget is named twice; a policy is unknown, or cannot have such a budget or
            schedule; no policy takes the budgets or the schedule.
    """
    full = Spec(FULL, schedule)
    specs = [full] if policies is None else policies
    _refuse_twice("policy", [spec.text for spec in specs])
    _refuse_twice("budget", budgets)
    cells = []
    for spec in specs:
        if budgets and spec.takes_budget:
            cells += [Cell(spec, budget) for budget in budgets]
        else:
            cells.append(Cell(spec, spec.written.size or spec.policy().budget))
    for cell in cells:
        grow = _grow(cell.spec) if isinstance(cell.budget, float) else None
        if grow is not None:
            raise UsageError(
                f"{cell.policy} lets lanes grow to {grow:,} tokens, as its schedule says, and --budgets gives the "
                f"share {cell.budget}: drop one of the two."
            )
        cell.make()
    if budgets and not any(spec.takes_budget for spec in specs):
        raise _unused("budget", "--budgets", policies)
    if schedule is not None and not any(spec.takes_schedule for spec in specs):
        raise _unused("schedule", "--schedule", policies)
    if any(isinstance(cell.budget, float) for cell in cells):
        cells = [Cell(full, None), *(cell for cell in cells if cell.policy != FULL)]
    return cells


def _refuse_twice(what: str, those: Sequence[object]) -> None:
    """UsageError: something is named twice."""
    for place, one in enumerate(those):
        if one in those[:place]:
            raise UsageError(f"The {what} {one} is named twice: leave one of the two out.")


def _unused(field: str, option: str, policies: Sequence[Spec] | None) -> UsageError:
    """The error that no policy takes the budgets or the schedule."""
    if policies is None:
        return UsageError(
            f"--policies was not given, and {FULL}, which is run then, takes no {field}: name one that does, as "
            f"in --policies {FULL},rkv, or drop {option}."
        )
    names = ", ".join(spec.text for spec in policies)
    return UsageError(
        f"None of the policies {names} leaves its {field} open: drop {option}, or name one that does, such as rkv."
    )


def _grow(spec: Spec) -> int | None:
    """The budget that a policy's schedule gives; None: its schedule gives none."""
    try:
        return spec.policy().budget
    except UsageError:  # it needs one
        return None


def tokens_of(budget: Budget, prompt: int, mean: float) -> int | None:
    """Tokens that a sequence may keep if its budget is a share; None: it is no share, and the policy knows.

    Args:
        prompt: tokens of the sequence's prompt.
        mean: tokens that the full cache generates, on average.
    """
    return prompt + max(1, round(budget * mean)) if isinstance(budget, float) else None


def check(cells: Sequence[Cell], prompts: Sequence[int], longest: int) -> None:
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
            check_budget(cell.make(), max(prompts))
        check_bytes(cell, max(prompts))
        check_share(cell, min(prompts), longest, "at most")


def known(cells: Sequence[Cell], tokens_of: TokensOf) -> list[Cell]:
    """The same cells, which now know how many tokens budgets in bytes hold. UsageError: a budget holds none."""
    found = [cell._replace(tokens_of=tokens_of) for cell in cells]
    for cell in found:
        cell.make()
    return found


def tokens_by_bytes(cells: Sequence[Cell]) -> dict[str, dict[str, int]]:
    """What budgets in bytes come to: policy → budget → tokens. Empty: there are none."""
    found = dict[str, dict[str, int]]()
    for cell in cells:
        if cell.tokens is not None:
            found.setdefault(cell.policy, {})[str(cell.budget)] = cell.tokens
    return found


def said_of_bytes(cells: Sequence[Cell], said: Callable[[Policy, ByteSize], str]) -> list[str]:
    """A sentence for each cell whose budget is in bytes. said: the sentence of a policy and its bytes."""
    return [said(cell.make(), cell.budget) for cell in cells if isinstance(cell.budget, ByteSize)]


def check_bytes(cell: Cell, prompt: int) -> None:
    """Refuse bytes that come to too few tokens for a policy and a prompt.

    Args:
        prompt: tokens of the longest prompt.

    Raises:
        UsageError: the bytes come to too few tokens.
    """
    if cell.tokens is None:
        return
    try:
        check_budget(cell.make(), prompt)
    except UsageError as error:
        raise UsageError(
            f"{cell.policy}: the budget {cell.budget} comes to {counted(cell.tokens, 'token')}; give more bytes, "
            f"or tokens ({str(error).rstrip('.')})."
        ) from None


def check_share(cell: Cell, prompt: int, mean: float, how: str = "on average", given: bool = False) -> None:
    """Refuse a share that comes to too few tokens for its policy.

    Args:
        prompt: tokens of the shortest prompt. A longer prompt raises the budget by as many tokens as it needs more.
        mean: tokens that the full cache generates.
        how: for the message, whether `mean` is an average or the most.
        given: `mean` is that of --reference-length.

    Raises:
        UsageError: the share comes to too few tokens.
    """
    tokens = tokens_of(cell.budget, prompt, mean)
    if tokens is None:
        return
    try:
        check_budget(cell.make(tokens), prompt)
    except UsageError as error:
        why = f"the full cache generates {mean:,.0f} {how}"
        if given:
            why = f"--reference-length is {mean:,.0f}"
        raise UsageError(
            f"{cell.policy}: the share {cell.budget} comes to {counted(tokens, 'token')} with a prompt of "
            f"{prompt:,}, for {why}; give a larger share, or tokens ({str(error).rstrip('.')})."
        ) from None


def said_of_prompts(cells: Sequence[Cell], prompts: Sequence[int]) -> list[str]:
    """A sentence if some policy keeps fewer tokens than a prompt has and does not protect prompts; else none."""
    kept = dict[str, int]()
    for cell in cells:
        least = least_kept(cell.make())
        if least is not None and least < max(prompts):
            kept[str(cell)] = least
    if not kept:
        return []
    longer = sum(prompt > min(kept.values()) for prompt in prompts)
    return [
        f"{longer:,} of {counted(len(prompts), 'prompt')}, of up to {max(prompts):,} tokens, "
        f"{'has' if longer == 1 else 'have'} more tokens than are kept with {', '.join(kept)}: "
        "parts of the question may be evicted"
    ]


def said_of_budgets(
    cells: Sequence[Cell], records: Sequence[Record], so: str = "these are the texts of the full cache"
) -> list[str]:
    """A sentence for each cell whose budget never applied, because no sequence has ever evicted a token.

    so: what follows from that.
    """
    said = []
    for cell in cells:
        own = [r for r in records if (r.policy, r.budget) == cell.name]
        policy = cell.make()
        if own and policy.budget is not None and not any(map(_evicted, own)):
            longest = max(r.prompt_tokens + r.generated_tokens for r in own)
            why = f"and the longest text has {longest:,} tokens"
            # A text that never opens the thinking counts as thinking.
            thought = max(r.prompt_tokens + (r.thinking_tokens or r.generated_tokens) for r in own)
            if policy.exempt_answer and thought < longest:
                why += f"; no prompt and thinking has more than {thought:,}, and answers stay beside the budget"
            said.append(f"{cell}: the budget never applied, so {so} (no token was evicted, {why})")
    return said


def said_of_stages(cells: Sequence[Cell], records: Sequence[Record], tags: Tags) -> list[str]:
    """A sentence for each cell whose policy evicts only while the model thinks, if texts never opened the thinking.

    tags: between which the model is taken to think; both are tokens.
    """
    said = []
    for cell in cells:
        policy = cell.make()
        if not policy.exempt_answer or policy.budget is None:
            continue
        own = [r for r in records if (r.policy, r.budget) == cell.name and r.generated_tokens]
        never = sum(not r.thinking_tokens for r in own)
        said.append(never_opened(str(cell), never, len(own), tags))
    return [sentence for sentence in said if sentence]


def _evicted(record: Record) -> bool:
    """Whether a sequence has evicted a token: in a decoding step, or when its prompt was read."""
    seen = record.prompt_tokens + max(0, record.generated_tokens - 1)  # the model never reads the last token
    return record.evicting_steps > 0 or record.tokens_peak < seen
