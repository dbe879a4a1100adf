"""The byte ledger: what every byte of the cache is for.

Nothing is estimated. `total` is the sum of the sizes of all tensors of the store, the manager and the policy.
`reserve` is the part that no token, running sequence or policy needs now. Of one sequence, it is the free slots of
its pages, which no other sequence can take: used pages are 1.05 to 1.28 × as large as the payload in them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


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
    observations: int = 0  # what the manager keeps for a policy to see
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
