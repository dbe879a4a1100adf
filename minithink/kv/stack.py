"""Stacks: several policies on one cache, such as one that evicts and one that quantizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from minithink.errors import UsageError
from minithink.kv import checks
from minithink.kv.contract import SCOPES, Demand, Edit, Model, Policy, Shape, Step, Storage, name_of


class Stack(Policy):
    """Several policies on one cache. When two disagree about a token, eviction wins over requantization.

    Tables have the finest scope of all members. Every member sees its own budget. Two policies that store tokens
    differently cannot be stacked, nor can two that steer.
    """

    def __init__(self, members: Sequence[Policy]) -> None:
        self.members = tuple(members)
        for member in members:
            checks.declared(member)
        stored = [m for m in members if m.storage != Storage()]
        if len(stored) > 1:
            names = " and ".join(name_of(m) for m in stored)
            raise UsageError(f"{names} store tokens in different ways and cannot be stacked: leave one out.")
        steering = [m for m in members if type(m).steer is not Policy.steer and getattr(m, "steers", True)]
        if len(steering) > 1:
            names = " and ".join(name_of(m) for m in steering)
            raise UsageError(
                f"{names} both steer the model, and their vectors would be added: leave one out, or switch its "
                "steering off."
            )
        _check_alike(members)
        self.name = "+".join(name_of(m) for m in members)  # type: ignore[misc]
        deciding = [m for m in members if type(m).decide is not Policy.decide]
        self.capturable = all(m.capturable for m in deciding)  # type: ignore[misc]
        self.tells_due = all(m.tells_due for m in deciding)  # type: ignore[misc]
        self.opens = any(m.opens for m in members)  # type: ignore[misc]
        self.scope = min((m.scope for m in members), key=SCOPES.index)
        self.storage = stored[0].storage if stored else Storage()
        self.protect_prompt = any(m.protect_prompt for m in members)
        self.cap = min((m.cap for m in members if m.cap is not None), default=None)
        self.exempt_answer = any(m.exempt_answer for m in members if m.budget is not None)
        self.pull = max(m.pull for m in members)
        self.beside = max(m.beside for m in members)
        budgets = [m.budget for m in members if m.budget is not None]
        self.budget = min(budgets, default=None)

    @property
    def demands(self) -> tuple[Demand, ...]:  # type: ignore[override]
        """Of all members, which may learn from a calibration what they have to see."""
        return tuple(d for m in self.members for d in m.demands)

    @property
    def limit(self) -> int | None:
        """The tightest limit of all members."""
        limits = [checks.limit_of(m) for m in self.members]
        return min((limit for limit in limits if limit is not None), default=None)

    def bind(self, model: Model) -> None:
        for member in self.members:
            member.bind(model)

    def setup(self, shape: Shape) -> None:
        for member in self.members:
            member.setup(shape)

    def reset(self, row: int) -> None:
        for member in self.members:
            member.reset(row)

    def state(self) -> Iterable[Tensor]:
        for member in self.members:
            yield from checks.state_of(member)

    def watch(self, step: Step) -> None:
        for member in self.members:
            member.watch(step.seen_by(member))

    def decide(self, step: Step) -> Iterable[Edit]:
        for member in self.members:
            yield from member.decide(step.seen_by(member))

    def steer(self, step: Step, layer: int, hidden: Tensor) -> Tensor:
        for member in self.members:
            hidden = member.steer(step, layer, hidden)
        return hidden


def _check_alike(members: Sequence[Policy]) -> None:
    """UsageError: a member needs lanes that hold the same tokens, and another one evicts in some of them only."""
    for one in members:
        for other in members:
            evicts = other.budget is not None or other.cap is not None
            if one.alike and other is not one and evicts and other.scope != "sequence":
                raise UsageError(
                    f"{name_of(one)} with these options needs layers that hold the same tokens, and {name_of(other)} "
                    "evicts in each lane for itself: they cannot be stacked."
                )


def members(policy: Policy) -> tuple[Policy, ...]:
    """The members of a stack; for any other policy, the policy itself."""
    return policy.members if isinstance(policy, Stack) else (policy,)


def decides_on_plain_tokens(policy: Policy) -> bool:
    """Whether a member has a `decide` and stores its tokens in the model's own number type, as `Storage()` does.
    Such a `decide` may evict and set budgets; there is no other format to which it could move tokens."""
    return any(type(m).decide is not Policy.decide and m.storage == Storage() for m in members(policy))


def listeners(policy: Policy) -> tuple[Policy, ...]:
    """The members that are told their texts, see `Policy.listen`."""
    found = []
    for member in members(policy):
        kind = type(member)
        hears = kind.listen is not Policy.listen or kind.listen_prompt is not Policy.listen_prompt
        if hears and member.listens:
            found.append(member)
    return tuple(found)
