"""A store whose freed memory is NaN, or codes that no token has: what reads it gives itself away."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.kv.lists import Lists
from minithink.kv.slots import Slots
from minithink.kv.store import PagedStore


class PoisonedSlots(Slots):
    """Fills slots and the parameters of groups as they become free."""

    def evict(self, lists: Lists, drop: Tensor, at: Tensor, keep_pages: bool = False) -> None:
        before = self._taken()
        super().evict(lists, drop, at, keep_pages)
        self._fill(*before)

    def release(self, place: Tensor, which: Tensor, at: Tensor) -> None:
        before = self._taken()
        super().release(place, which, at)
        self._fill(*before)

    def _taken(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.table.live.clone(), self.table.format.clone(), self.group_uses > 0

    def _fill(self, live: Tensor, formats: Tensor, groups: Tensor) -> None:
        """live, formats, groups: which slots were live, in which format, and which groups had tokens."""
        freed, pages = live & ~self.table.live, self.pages.count
        for f, lay in enumerate(self.pages.layouts):
            mine = (freed & (formats == f)[:, None])[:pages, : lay.slots].nonzero(as_tuple=True)
            for pool in (self.pages.pool, self.pages.side):
                slots = pool[:pages].view(pages, pool.shape[1], lay.slots, -1).transpose(1, 2)
                slots[mine] = 255
        self.pages.group_params[: self.pages.groups][(groups & (self.group_uses == 0))[:-1]] = 255


class Poisoned(PagedStore):
    """Fills the ring of a row that is cleared."""

    def clear(self, row: int) -> None:
        super().clear(row)
        self.ring[:, row] = torch.nan


def poison(store: PagedStore) -> PagedStore:
    """Make this store a poisoned one. Moves that wait (`Storage.compaction`) are made at once, because they read from
    free slots."""
    store.__class__ = Poisoned
    store.slots.__class__ = PoisonedSlots
    if store.compaction:
        store.compaction.late = False
    return store
