"""Lists: which tokens every unit holds, oldest first, and where each of them lies.

    place    where the token lies: the number of its slot, or a place in the ring (`slots.py` explains both)
    pos      its original position in the text; −1 after the last token
    count    how many tokens the list has

`place` and `pos` are int32 [Lt, B, Ht, S + 1], `count` is int32 [Lt, B, Ht]. Column i of a list is its i-th token.
The extra last column takes masked-out writes and is never read. Reading and evicting go by the lists: the order of
slots in memory says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from minithink.errors import UsageError
from minithink.kv.contract import Shape


class Lists:
    """The lists of all units."""

    def __init__(self, shape: Shape, columns: int | None, width: int) -> None:
        """
        Args:
            columns: how many columns are read, fixed; None: as many as the longest list has tokens.
            width: tokens that lists have room for at first; they grow, unless `columns` are fixed.
        """
        room = columns or width
        size = (*shape.tables, room + 1)
        self.count = torch.zeros(shape.tables, dtype=torch.int32, device=shape.device)
        self.place = self.count.new_zeros(size)
        self.pos = self.count.new_full(size, -1)
        self.columns = columns
        # How long the longest list of each row may be, as the host knows it: it does not count evictions.
        self.longest = [0] * shape.rows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return self.place, self.pos, self.count

    @property
    def columns_read(self) -> int:
        """S: the columns that are read."""
        return self.columns or max(1, *self.longest)

    def positions(self) -> Tensor:
        """Original positions, oldest first, −1 after the last token: int32 [Lt, B, Ht, S]."""
        return self.pos[..., : self.columns_read]

    def places(self) -> Tensor:
        """Where the tokens lie, int32 [Lt, B, Ht, S]; undefined after the last token."""
        return self.place[..., : self.columns_read]

    # -- room for more tokens

    def require(self, rows: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Check that lists of a fixed width have room for new tokens: counts[i] of row rows[i].

        Returns:
            how long the longest list of every row may be then.

        Raises:
            UsageError: a lane would hold more tokens than the fixed width.
        """
        more = [0] * len(self.longest)
        for row, count in zip(rows, counts, strict=True):
            more[row] += count
        longest = _sums(self.longest, more)
        if self.columns is None or max(longest) <= self.columns:
            return longest
        counted = self._counted()
        longest = _sums(counted, more)
        most = max(longest)
        if most > self.columns:
            raise UsageError(
                f"A lane may hold {most:,} tokens and the width was fixed to {self.columns:,}: use a "
                "smaller budget or --max-new-tokens."
            )
        return longest

    def require_one(self, rows: Sequence[int]) -> list[int]:
        """The same for one new token of each of these rows, which are few: in every decode step."""
        if self.columns is None or max(self.longest) >= self.columns:
            ones = [1] * len(rows)
            return self.require(rows, ones)
        longest = list(self.longest)
        for row in rows:
            longest[row] += 1
        return longest

    def widen(self, width: int) -> None:
        """Widen every list to at least `width` tokens."""
        have = self.place.shape[-1] - 1
        if width > have:
            more = max(width, 2 * have) - have
            self.place = pad(self.place, (0, more))
            self.pos = pad(self.pos, (0, more), value=-1)

    def append(self, at: Tensor, valid: Tensor, place: Tensor, first: Tensor) -> None:
        """Put new tokens behind the tokens that some units hold.

        Args:
            at: int64 [N], the rows.
            valid: bool [Lt, N, Ht, n], the new tokens; those of a row come first.
            place: [Lt, N, Ht, n], where they lie.
            first: int64 [N], the position of each row's first new token.
        """
        column = torch.arange(valid.shape[-1], device=valid.device)
        held = self.count[:, at]  # [Lt, N, Ht]
        trash = self.place.shape[-1] - 1
        end = held[..., None] + column  # [Lt, N, Ht, n]
        end = torch.where(valid, end, trash)
        position = first[:, None] + column  # [N, n]
        position = position[None, :, None]
        position = torch.where(valid, position, -1)  # [Lt, N, Ht, n]
        self._put(self.place, at, end, place)
        self._put(self.pos, at, end, position)
        self.pos[..., -1] = -1
        added = valid.sum(-1, dtype=torch.int32)  # [Lt, N, Ht]
        self.count[:, at] = held + added

    def _put(self, lists: Tensor, at: Tensor, columns: Tensor, new: Tensor) -> None:
        """Write into some columns of the lists of some rows."""
        own = lists[:, at]
        own.scatter_(-1, columns, new.to(torch.int32))
        lists[:, at] = own

    def refresh(self) -> None:
        """Read from the device how many tokens the lists have; the host does not count evictions."""
        self.longest = self._counted()

    def _counted(self) -> list[int]:
        longest: list[int] = self.count.amax((0, 2)).tolist()
        return longest


def _sums(held: Sequence[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(held, more, strict=True)]
