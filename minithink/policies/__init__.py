"""The policies: what decides which keys and values stay in the cache, and in what form."""

from __future__ import annotations

from dataclasses import dataclass

from minithink.errors import UsageError


@dataclass(frozen=True)
class Policy:
    """One row of the table that `--list-policies` prints."""

    name: str
    summary: str  # one line
    takes_budget: bool  # whether it keeps to a number of tokens


POLICIES = {
    policy.name: policy
    for policy in (Policy("full", "keep every token's key and value (the baseline)", takes_budget=False),)
}


def lookup(name: str) -> Policy:
    """The policy of that name. UsageError: there is none; the message lists the names."""
    if name not in POLICIES:
        raise UsageError(f"The policy {name!r} is unknown; there are: {', '.join(POLICIES)}.")
    return POLICIES[name]
