"""The byte ledger: what every byte of the cache is for.

Nothing is estimated. `total` is the sum of the sizes of all tensors of the store, the manager and the policy.
`reserve` is the part that no token, running sequence or policy needs now. Of one sequence, it is the free slots of
its pages, which no other sequence can take: used pages are 1.05 to 1.28 × as large as the payload in them.

The two managers agree on a sequence's payload. They differ in its observations when it runs in a batch. In pages
these are tensors with a row for each sequence, as wide as the longest lane of the batch, and every sequence has an
equal share of them; so the number depends on the sequences beside it. The plain manager keeps each sequence's
observations by themselves, and counts these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from torch import Tensor

from minithink.kv import checks
from minithink.kv.contract import Policy


@dataclass(frozen=True)
class Told:
    """A summary of one sequence for people, without its bytes."""

    thoughts: tuple[str, ...] = ()  # the type of every segment, in order; empty where types have no names
    bits: float | None = None  # of a number in the pages, with its share of the scales
    notes: str = ""  # the policy's own words
    evicted: int = 0  # tokens that its lanes have evicted, all lanes together


@dataclass(frozen=True)
class Ledger:
    """Bytes by kind."""

    payload: int = 0  # codes of the keys and values held
    scales: int = 0  # scales and minima that belong to them
    tables: int = 0  # page tables, slot masks, lists of tokens with their positions, of what is held
    buffers: int = 0  # full-precision buffers of running sequences
    state: int = 0  # of the policy
    observations: int = 0  # what the manager keeps for a policy to see; of one sequence in pages: an equal share
    reserve: int = 0  # free pages, free slots (of used pages, too), unused rows, lists of free pages

    @property
    def held(self) -> int:
        """Everything but the reserve."""
        return self.total - self.reserve

    @property
    def total(self) -> int:
        """Everything: the sum of all tensors' sizes."""
        return sum(getattr(self, f.name) for f in fields(self))

    def as_dict(self) -> dict[str, int]:
        """Kinds by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Stored(Protocol):
    """What accounts must know of a store."""

    def tensors(self) -> Iterable[Tensor]:
        """Everything that the store occupies."""

    def account(self, rows: Sequence[int] | None = None) -> Ledger:
        """Bytes that the tokens of some rows hold; None: of all rows."""


class Observed(Protocol):
    """What accounts must know of observations."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of observations."""


@dataclass(frozen=True)
class Accounts:
    """The ledger of a manager and of its rows."""

    store: Stored
    policy: Policy
    budgets: Mapping[int, Tensor]  # of every member of the policy
    observations: Observed
    rows: int

    def tensors(self) -> list[Tensor]:
        """Everything that the store, the policy and the observations occupy."""
        return [*self.store.tensors(), *self.state(), *self.observed()]

    def state(self) -> list[Tensor]:
        """The policy's own tensors, and its budgets."""
        return [*checks.state_of(self.policy), *self.budgets.values()]

    def observed(self) -> list[Tensor]:
        """What is kept for the policy to see."""
        return self.observations.tensors

    def ledger(self) -> Ledger:
        """What every byte is for now."""
        used = replace(
            self.store.account(),
            state=_bytes(self.state()),
            observations=_bytes(self.observed()),
        )
        return replace(used, reserve=_bytes(self.tensors()) - used.held)

    def of_row(self, row: int) -> Ledger:
        """Bytes that one row holds: its tokens, their scales and tables, its buffers, and its share of the policy's
        state and observations. Its reserve is the free slots of its pages."""
        return replace(self.store.account([row]), **self.shares())

    def shares(self) -> dict[str, int]:
        """Bytes of the policy's state and of the observations, divided by the number of rows."""
        return {
            "state": _bytes(self.state()) // self.rows,
            "observations": _bytes(self.observed()) // self.rows,
        }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)
