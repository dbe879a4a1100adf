"""Gather compaction, which other implementations need and this one only measures (ThinKV §5.1, figure 7).

Where slots are used again in place nothing has to move. Here, if a policy's `Storage.compaction` asks for it, what
stays of a lane moves together into its first slots whenever something is evicted, so that freed pages are whole:

    plan      which token moves where; what the eviction then frees are the lane's last slots
    gather    keys and values move: the call whose time is the cost

"gather" moves everything at once before the next step begins. "overlapped" moves layer by layer on a second CUDA
stream while the next step runs, and attention of a layer waits for its own (without CUDA: when the next step begins).
Until then a freed page stays with its lane: a lane of another layer, whose turn is earlier, would write into it what
has not been read. It is the lane's next page, and the pool's when sequences come or go.

Tokens keep their order, so nothing that is computed changes by a bit.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from minithink.kv.pages import Pages


class Compaction:
    """Of one store, whose tokens are all plain ones in pages."""

    def __init__(self, store: Pages, poison: bool) -> None:
        self.store = store
        # Poisoned slots are those that are free, and late moves read from free slots.
        self.late = store.storage.compaction == "overlapped" and not poison
        self.source = torch.zeros_like(store.place)  # see `ref/close_ranks.py`
        self.moves = torch.zeros(*store.shape.tables, 2, dtype=torch.int32, device=store.shape.device)
        cuda = self.late and store.shape.device.type == "cuda"
        self._beside = torch.cuda.Stream(store.shape.device) if cuda else None
        self._moved = [torch.cuda.Event() for _ in range(store.shape.layers if cuda else 0)]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it occupies."""
        return self.source, self.moves

    def widen(self, more: int) -> None:
        """The store's lists have so many more columns."""
        self.source = torch.nn.functional.pad(self.source, (0, more))

    def plan(self, drop: Tensor) -> Tensor:
        """What is to be evicted in place of these tokens, the ends of the lists: bool [Lt, B, Ht, S] both. Nothing
        may wait still."""
        store = self.store
        ends = store.backend.close_ranks(drop, store.place, store.pos, store.count, self.source, self.moves)
        if not self.late:
            self.gather()
        return ends

    def gather(self, layer: int | None = None) -> None:
        """Move what waits, of a layer or of all of them."""
        store, pool = self.store, self.store.pool
        units = slice(None) if layer is None else min(layer, len(self.moves) - 1)
        if layer is not None and store.shape.scope == "sequence":  # its lanes are those of all layers
            heads = store.shape.kv_heads
            pool = pool[:, layer * heads : (layer + 1) * heads]
        store.backend.gather(self.source[units], self.moves[units], store.place[units], pool, store.table.most)
        if layer in (None, store.shape.layers - 1):
            self.moves.zero_()

    def start(self) -> None:
        """A decoding step begins: move beside it what waits."""
        if not self.late:
            return
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside) if self._beside is not None else nullcontext():
            for layer in range(self.store.shape.layers):
                self.gather(layer)
                if self._moved:
                    self._moved[layer].record()

    def wait(self, layer: int) -> None:
        """What follows on the current stream sees the layer's keys and values where they shall be."""
        if self._moved:
            torch.cuda.current_stream().wait_event(self._moved[layer])

    def finish(self) -> None:
        """Between steps: move what waits, and return to the pool pages that are empty."""
        if not self.late:
            return
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        self.gather()
        self.store.table.give_back()
