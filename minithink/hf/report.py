"""What a cache has done with the sequences of a batch, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minithink.errors import counted
from minithink.kv.contract import Policy, name_of
from minithink.kv.ledger import Ledger
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.kv.stack import members
from minithink.text.tags import Tags
from minithink.text.thinking import never_opened


@dataclass(frozen=True)
class SequenceReport:
    """One sequence of the batch."""

    prompt: int  # tokens of the prompt, without padding
    tokens: int  # tokens that the model has read, the prompt's included
    held: int  # tokens that the fullest lane (a KV head of a layer) holds
    evicted: int  # tokens that lanes have evicted, all lanes together
    ledger: Ledger  # bytes by kind
    full_bytes: int  # what a full cache of these tokens would hold
    ended: bool  # whether it has left the cache; the numbers are those from before
    bound: tuple[bool, ...]  # for each of `Report.budgets`, whether it limited this sequence
    notes: str  # the policy's own words
    opened: bool = True  # whether the text has opened its thinking; True if the tags are not known

    @property
    def bytes(self) -> int:
        """Bytes of keys, values, scales, tables, buffers, and the policy's state."""
        return self.ledger.held


@dataclass(frozen=True)
class Budget:
    """How many tokens a policy may keep, and whether this number had an effect."""

    policy: str
    tokens: int
    bound: int  # sequences that it has limited
    sequences: int

    def __str__(self) -> str:
        all_of_them = counted(self.sequences, "sequence")
        what = f"{self.policy}'s budget of {self.tokens:,} tokens"
        if not self.bound:
            return f"{what} limited none of {all_of_them}: all were too short, or nothing was evicted."
        return f"{what} limited {self.bound} of {all_of_them}."


@dataclass(frozen=True)
class Report:
    """All sequences of a batch. `print` shows a table."""

    sequences: tuple[SequenceReport, ...]
    budgets: tuple[Budget, ...]  # of every policy of a stack that has one
    caution: str = ""  # what must be known of the budgets; "": nothing

    def __str__(self) -> str:
        if not self.sequences:
            return "The cache is empty: nothing was generated with it."
        lines = [f"{'sequence':>8} {'tokens':>8} {'held':>8} {'bytes':>14} {'of full':>8}"]
        for number, s in enumerate(self.sequences):
            share = s.bytes / s.full_bytes
            lines.append(f"{number:>8} {s.tokens:>8,} {s.held:>8,} {s.bytes:>14,} {share:>8.0%}")
        lines += [str(budget) for budget in self.budgets]
        if self.caution:
            lines.append(self.caution)
        return "\n".join(lines)


def report_of(
    manager: KVManager | PlainCache,
    seq: int,
    prompt: int,
    *,
    opened: bool,
    ended: bool = False,
) -> SequenceReport:
    """What a manager can say of one of its sequences.

    Args:
        prompt: tokens of its prompt.
        opened, ended: as in `SequenceReport`.
    """
    tokens = manager.length(seq)
    told = manager.told(seq)
    bound = []
    for _, limit in limits_of(manager.policy):
        bound.append(told.evicted > 0 and tokens > limit)
    return SequenceReport(
        prompt=prompt,
        tokens=tokens,
        held=manager.held(seq),
        evicted=told.evicted,
        ledger=manager.account(seq),
        full_bytes=tokens * manager.config.kv_bytes_per_token(manager.dtype.itemsize),
        ended=ended,
        bound=tuple(bound),
        notes=told.notes,
        opened=opened,
    )


def limits_of(policy: Policy) -> list[tuple[str, int]]:
    """The names of the members that limit the tokens of a lane, and to how many: a budget, or a prompt's cap."""
    found = []
    for member in members(policy):
        limit = member.cap if member.budget is None else member.budget
        if limit is not None:
            found.append((name_of(member), limit))
    return found


def summed(policy: Policy, sequences: Sequence[SequenceReport], tags: Tags) -> Report:
    """The report of a batch. tags: between which the model is taken to think."""
    budgets = []
    for i, (name, tokens) in enumerate(limits_of(policy)):
        bound = sum(s.bound[i] for s in sequences)
        budgets.append(Budget(name, tokens, bound, len(sequences)))
    caution = ""
    if policy.exempt_answer and policy.budget is not None:
        never = sum(s.tokens > s.prompt and not s.opened for s in sequences)
        caution = never_opened(name_of(policy), never, len(sequences), tags)
    if caution:
        caution = f"{caution[0].upper()}{caution[1:]}.".replace("--think-tags", "think_tags")  # an argument here
    return Report(tuple(sequences), tuple(budgets), caution)
