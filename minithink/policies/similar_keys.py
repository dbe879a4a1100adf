"""What R-KV remembers if it evicts often: for each token that a lane holds, the newest key that resembles its own.

R-KV's redundancy needs the cosines of all pairs of keys. A lane that evicts every few tokens would compute the same
ones again and again. With what is remembered it needs only those of tokens that came since the last eviction, and of
tokens whose remembered key was evicted (`ref/running_redundancy.py`). No sum is kept, so rounding does not add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.kv.contract import Shape, Step
from minithink.kv.schedule import Schedule

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others
NONE = -1  # in place of a position: the key resembles none
# Tokens from one eviction to the next, at most. It was chosen by counting, not by measuring: with longer gaps there
# is less to save, and what is remembered takes 8 bytes for each token of a lane.
OFTEN = 8


class SimilarKeys:
    """The memory of all layers, rows and heads."""

    def __init__(self, shape: Shape, entries: int) -> None:
        """
        Args:
            shape: of the cache.
            entries: tokens that a lane may hold when it decides. Of lanes with more nothing is remembered.
        """
        # int32 [L, rows, Hkv, E]: positions of the tokens held, ascending, and of the key that resembles each
        self._position = torch.full((*shape.tables, entries), NOWHERE, dtype=torch.int32, device=shape.device)
        self._match = torch.full_like(self._position, NONE)

    def redundancy(self, step: Step, layer: int, k: Tensor, held: Tensor, threshold: float) -> Tensor:
        """R of a layer's tokens, as of `step.ops.redundancy`, and remember these tokens.

        Args:
            step: of a decision.
            layer: whose keys these are.
            k: [B, Hkv, S, D], rotated keys.
            held: bool [B, Hkv, S], the columns that a lane holds.
            threshold: T, cosine above which two keys resemble each other.

        Returns:
            float32 [B, Hkv, S].
        """
        found: Tensor = step.ops.running_redundancy(
            k=k,
            valid=held,
            pos=step.pos(layer),
            known=(self._position[layer], self._match[layer]),
            at=step.row,
            threshold=threshold,
        )
        return found

    def reset(self, row: int) -> None:
        """Forget a row's sequence."""
        self._position[:, row] = NOWHERE
        self._match[:, row] = NONE

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All that is remembered."""
        return self._position, self._match


def evicts_often(schedule: str, buffer: int) -> bool:
    """Whether at most OFTEN tokens lie between two evictions.

    Args:
        schedule: of the policy, as in "interval:16".
        buffer: tokens that are gathered before an eviction, unless the schedule says when it comes.
    """
    when = Schedule.parse(schedule)
    if when.shares is not None:
        return False  # the gap grows with the text
    if when.interval is not None:
        return when.interval <= OFTEN
    if when.grow is not None and when.keep is not None:
        return when.grow - when.keep <= OFTEN
    return buffer <= OFTEN
