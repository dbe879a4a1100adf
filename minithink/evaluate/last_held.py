"""Records, for each token and lane, the last step after which the lane held the token.

After every step the device stamps the positions that a lane holds with the number of tokens seen so far. An evicted
token never comes back, so its last stamp says when the lane held it for the last time. The host
reads the stamps when a sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.kv.apart import Apart
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.sequence import Track
from minithink.stream import Stream


class LastHeld:
    """Watches the sequences of a stream; called after every forward pass (`Stream.on_step`)."""

    def __init__(self, stream: Stream) -> None:
        if isinstance(stream.cache, PlainCache):
            raise ValueError("tokens are followed in pages: Engine.stream(cache='paged')")
        self.cache = stream.cache
        self.longest = max((len(s.prompt) + s.limit for s in stream.sequences), default=0)
        # Stamps of each manager: key None for the shared one, else the number of the sequence that has its own.
        # int32 [Lt, rows, Ht, longest + 1]; the last column takes the stamps that belong to no token.
        self._stamps = dict[int | None, Tensor]()
        self._row = dict[int, int]()  # number of a sequence → its row

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Track]) -> None:
        if isinstance(self.cache, Apart):
            for s in sequences:
                cache = self.cache.caches[s.number]
                if isinstance(cache, KVManager):
                    self._stamp(s.number, cache, [s])
        elif isinstance(self.cache, KVManager):
            self._stamp(None, self.cache, sequences)

    def _stamp(self, key: int | None, cache: KVManager, sequences: Sequence[Track]) -> None:
        positions = cache.store.lists.positions()  # [Lt, B, Ht, S], −1: no token
        if key not in self._stamps:
            shape = (*positions.shape[:3], self.longest + 1)
            self._stamps[key] = torch.zeros(shape, dtype=torch.int32, device=positions.device)
        first = not sequences[0].tokens  # this step read their prompts
        if first:
            self._row |= {s.number: cache.row_of(s.number) for s in sequences}
        rows = [self._row[s.number] for s in sequences]
        step = torch.full((positions.shape[1],), -1, dtype=torch.int32)  # rows that took no part keep their stamps
        step[rows] = torch.tensor([len(s.prompt) + len(s.tokens) for s in sequences], dtype=torch.int32)
        step = step.to(positions.device, non_blocking=True)
        stamps = self._stamps[key]
        if first:  # the rows may have belonged to other sequences
            stamps[:, rows] = 0
        index = torch.where((positions < 0) | (step < 0)[:, None, None], self.longest, positions).long()
        stamps.scatter_(-1, index, step[:, None, None].expand_as(positions))

    def take(self, s: Track) -> Tensor | None:
        """For a sequence that has ended: how many tokens were seen when a lane held each position for the last time,
        int32 [Lt, Ht, tokens]; 0: never. None: all tokens stay in every lane."""
        row = self._row.pop(s.number, None)
        if row is None:
            return None
        tokens = len(s.prompt) + len(s.tokens)
        stamps = self._stamps.pop(s.number) if s.number in self._stamps else self._stamps[None]
        return stamps[:, row, :, :tokens].to("cpu", copy=True)
