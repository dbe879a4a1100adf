"""Gather compaction: after an eviction the remaining tokens of a lane move together into the lane's first slots.

Other implementations need it, so that they free whole pages. This one only measures it (ThinKV §5.1, figure 7): here
new tokens take the slots of evicted tokens, and no token has to move. A policy asks for it by `Storage.compaction`.

    plan      decide which token moves where; the eviction then frees the lane's last slots
    gather    move keys and values; the time of this call is the cost

"gather" moves everything at once before the next step begins. "overlapped" moves layer by layer on a second CUDA
stream while the next step runs, and attention of a layer waits for its own (without CUDA: when the next step begins).
Until then a freed page stays with its lane: if a lane of an earlier layer took it, that lane would overwrite tokens
that have not moved yet. The page is the lane's next page; it returns to the pool when a sequence joins or leaves.

Tokens keep their order, so no result changes by a bit.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from minithink.kv.lists import Lists
from minithink.kv.slots import Slots


class Compaction:
    """Compaction of one store. All its tokens are plain and in pages."""

    def __init__(self, lists: Lists, slots: Slots, late: bool) -> None:
        """late: "overlapped"; else "gather"."""
        shape = slots.shape
        self.lists = lists
        self.slots = slots
        self.shape = shape
        self.backend = slots.pages.backend
        self.late = late
        self.source = torch.zeros_like(lists.place)  # see `ref/close_ranks.py`
        self.moves = torch.zeros(*shape.tables, 2, dtype=torch.int32, device=shape.device)
        cuda = late and shape.device.type == "cuda"
        self._beside = torch.cuda.Stream(shape.device) if cuda else None
        self._moved = [torch.cuda.Event() for _ in range(shape.layers if cuda else 0)]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors."""
        return self.source, self.moves

    def widen(self) -> None:
        """Become as wide as the lists are."""
        more = self.lists.place.shape[-1] - self.source.shape[-1]
        if more:
            self.source = torch.nn.functional.pad(self.source, (0, more))

    def plan(self, drop: Tensor) -> Tensor:
        """Plan the moves → the entries at the ends of the lists to evict instead of these tokens. No planned move may
        still wait. Both bool [Lt, B, Ht, S]."""
        lists = self.lists
        ends = self.backend.close_ranks(drop, lists.place, lists.pos, lists.count, self.source, self.moves)
        if not self.late:
            self.gather()
        return ends

    def gather(self, layer: int | None = None) -> None:
        """Make the planned moves of one layer, or of all layers."""
        place = self.lists.place
        pool = self.slots.pages.pool
        units = slice(None) if layer is None else min(layer, len(self.moves) - 1)
        if layer is not None and self.shape.scope == "sequence":  # its lanes are those of all layers
            heads = self.shape.kv_heads
            pool = pool[:, layer * heads : (layer + 1) * heads]
        self.backend.gather(self.source[units], self.moves[units], place[units], pool, self.slots.table.stride)
        if layer in (None, self.shape.layers - 1):
            self.moves.zero_()

    def start(self) -> None:
        """A decode step begins: make the planned moves beside it."""
        if not self.late:
            return
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside) if self._beside is not None else nullcontext():
            for layer in range(self.shape.layers):
                self.gather(layer)
                if self._moved:
                    self._moved[layer].record()

    def wait(self, layer: int) -> None:
        """Make the current stream wait until the layer's keys and values have moved."""
        if self._moved:
            torch.cuda.current_stream().wait_event(self._moved[layer])

    def finish(self) -> None:
        """Between steps: make the planned moves, and return empty pages to the pool."""
        if not self.late:
            return
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        self.gather()
        self.slots.table.give_back()
