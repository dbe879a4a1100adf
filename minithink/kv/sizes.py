"""Sizes: the memory that a sequence needs at worst under a policy, and the budgets that are refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minithink.errors import UsageError, quoted
from minithink.kv.contract import Policy, kept
from minithink.kv.pages import layouts
from minithink.kv.schedule import Schedule
from minithink.kv.stack import members

UNLIMITED = 2**30  # tokens: no lane exceeds such a budget


def check_budget(policy: Policy, prompt: int, budget: int | None = None) -> None:
    """Refuse a budget that cannot work. UsageError: it is no positive number, or less than a lane needs."""
    # A stack protects the prompt if one of its members does, and its smallest budget must hold it.
    tokens = policy.budget if budget is None else budget
    stays = prompt if policy.cap is None else min(prompt, policy.cap)
    for member in members(policy):
        if member.budget is not None:
            _check_number(member, "a budget of", member.budget)
    cases = [("a budget of", tokens, "")]
    for schedule in (Schedule.parse(m.schedule) for m in members(policy)):
        if schedule.keep is not None:
            cases.append(("a schedule that keeps", schedule.keep, ""))
        elif schedule.shares is not None and tokens is not None:
            left = kept(schedule, *(torch.tensor(min(n, UNLIMITED)) for n in (tokens, prompt)))
            cases.append(("a schedule that keeps", int(left), ", with a larger budget or other shares"))
    for what, number, larger in cases:
        if number is None:
            continue
        _check_number(policy, what, number)
        if not policy.protect_prompt and number < policy.beside:
            raise UsageError(f"{policy.name}: {what} {number} tokens is below the {policy.beside} that a lane needs.")
        if policy.protect_prompt and number < stays + policy.beside:
            more = "anything else" if policy.beside == 1 else f"{policy.beside} tokens beside it"
            ours = any("protect_prompt" in getattr(m, "__dataclass_fields__", ()) for m in members(policy))
            spared = ", or protect_prompt=false" if ours else ""
            raise UsageError(
                f"{policy.name}: {what} {number} tokens cannot hold the protected prompt of {stays} and {more}: "
                f"give at least {stays + policy.beside}{larger}{spared}."
            )


def _check_number(policy: Policy, what: str, number: int) -> None:
    """UsageError: it is no possible number of tokens."""
    if not 1 <= number <= UNLIMITED:
        raise UsageError(f"{policy.name}: {what} {quoted(number)} tokens makes no sense: give 1 to {UNLIMITED:,}.")


def least_kept(policy: Policy) -> int | None:
    """The tokens that evictions may leave of a prompt that is not protected. None: no number bounds them, or prompts
    are protected."""
    keep = (Schedule.parse(member.schedule).keep for member in members(policy))
    return None if policy.protect_prompt else min((n for n in (policy.budget, *keep) if n is not None), default=None)


@dataclass(frozen=True)
class Needs:
    """The memory that one unit needs at worst, for one sequence."""

    pages: int
    prompt_pages: int  # beside these, while the prompt is read
    scale_rows: int  # groups of keys by token
    width: int  # tokens in its list


def needs(policy: Policy, dim: int, dtype: torch.dtype, tokens: int, prompt: int) -> Needs:
    """Sizes for a sequence of at most `tokens` tokens, of which at most `prompt` are its prompt.

    A page is opened only when all slots of its thought type are taken. So a type never has more pages than its
    fullest moment needs, but a few remaining tokens may keep all of these pages. A prompt that will be quantized
    needs plain pages while it is read; then it frees all of them but the sink's.

    Where all lanes share a budget, no lane has a limit, and each gets pages for the whole text. Pages for the shared
    budget would be too few: a lane that shrinks keeps its pages, nearly empty, while another lane grows.
    """
    storage = policy.storage
    lay = dict(zip(storage.formats, layouts(storage, dim, dtype), strict=True))
    home = storage.thoughts[storage.prompt]
    stays = lay[home].plain and not storage.buffer  # the prompt's tokens never move
    at_home = prompt if stays or policy.cap is None else min(prompt, policy.cap)
    moments = policy.peaks(tokens, prompt)
    peaks = [[(name, max(n, at_home) if name == home else n) for name, n in moment] for moment in moments]
    pages = max(sum(-(-n // lay[name].slots) for name, n in moment) for moment in peaks)
    most = max(sum(n for _, n in moment) for moment in peaks)
    sink = 0 if stays else -(-storage.sink // lay["plain"].slots)
    # A buffer that is no multiple of a group makes a short group whenever it is full: 2 of 24 tokens in groups of 16.
    groups = max((-(-storage.buffer // x.k.group) for x in lay.values() if x.by_token), default=0)  # of a buffer
    return Needs(
        pages=pages + sink,
        prompt_pages=0 if stays else -(-prompt // lay["plain"].slots),
        scale_rows=min(most, -(-tokens * groups // storage.buffer) + 2) if groups else 0,
        width=max(prompt, min(tokens, most)) + 1,
    )
