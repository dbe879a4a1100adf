"""Recorder: what a manager tells an object that watches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from minithink.kv.contract import Edit, Policy
from minithink.kv.view import View


class Recorder(Protocol):
    """Hears what happens in a cache and changes nothing. `minithink/trace/` has one that writes a file."""

    def joined(self, manager: Any, seq: int, row: int) -> None:
        """A sequence has taken a row."""

    def noted(self, step: View, policy: Policy, score: Tensor, where: Tensor | None) -> None:
        """A policy tells the scores of tokens, see `Step.note`."""

    def evicting(self, step: View, edits: Sequence[tuple[Policy, Edit]], drop: Tensor) -> None:
        """Tokens are about to be evicted and are still in the cache.

        Args:
            edits: of the decision, each with the policy that made it.
            drop: bool [Lt, B, Ht, S], the tokens.
        """

    def stepped(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        ids: Sequence[int],
        edits: Sequence[tuple[Policy, Edit]],
    ) -> None:
        """A step is over; the cache is as the next step will find it.

        Args:
            rows: of the step.
            counts: new tokens of each row.
            ids: of all new tokens, one row after the other; empty: they are not known.
            edits: of the decision, each with the policy that made it.
        """

    def left(self, seq: int) -> None:
        """A sequence is about to free its row."""
