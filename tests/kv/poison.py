"""A store whose freed memory is NaN, or codes that no token has: what reads it gives itself away."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.kv.store import PagedStore


class Poisoned(PagedStore):
    """Fills slots and rows of key scales as they become free, and the ring of a row that is cleared."""

    def evict(self, drop: Tensor, at: Tensor | None = None) -> None:
        before = self._taken()
        super().evict(drop, at)
        self._fill(*before)

    def release(self, place: Tensor, which: Tensor, at: Tensor) -> None:
        before = self._taken()
        super().release(place, which, at)
        self._fill(*before)

    def clear(self, row: int) -> None:
        super().clear(row)
        self.ring[:, row] = torch.nan

    def _taken(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.table.live.clone(), self.table.format.clone(), self.row_uses > 0

    def _fill(self, live: Tensor, formats: Tensor, rows: Tensor) -> None:
        """live, formats, rows: which slots were live, in which format, and which rows of key scales were used."""
        freed, pages = live & ~self.table.live, self.table.pages.count
        for f, lay in enumerate(self.layouts):
            mine = (freed & (formats == f)[:, None])[:pages, : lay.slots].nonzero(as_tuple=True)
            for pool in (self.pool, self.side):
                slots = pool[:pages].view(pages, pool.shape[1], lay.slots, -1).transpose(1, 2)
                slots[mine] = 255
        self.scale_rows[: self.free_rows.count][(rows & (self.row_uses == 0))[:-1]] = 255


def poison(store: PagedStore) -> PagedStore:
    """Make this store a poisoned one. Moves that wait (`Storage.compaction`) are made at once, because they read from
    free slots."""
    store.__class__ = Poisoned
    if store.compaction:
        store.compaction.late = False
    return store
