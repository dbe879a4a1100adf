"""Apart: every sequence has a cache of its own, and all batches have one size.

So the tokens of a sequence are the same, bit for bit, whatever runs beside it and in whichever order. The last bits
of a matrix product depend on its number of rows, and the last bits of a sum on its length. Here the decoder sees
the same number of rows when it generates, with padding rows, and every cache is as wide as its own sequence needs.
Prompts are read alone. The price is one step of the cache for every sequence. CUDA graphs have the same property for
less (`minithink/loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minithink.kv.full import FullCache
from minithink.kv.ledger import Ledger, Told
from minithink.kv.manager import KVManager


class Apart:
    """Any number of sequences, each with its own cache."""

    def __init__(self, make: Callable[[], FullCache | KVManager]) -> None:
        """make: a cache for one sequence."""
        self._make = make
        self.caches: dict[int, FullCache | KVManager] = {}  # by the numbers of their sequences
        # called with the number of a new sequence and the cache made for it; returns the cache that it gets
        self.prepare: Callable[[int, FullCache | KVManager], FullCache | KVManager] = lambda seq, cache: cache
        self._now: list[tuple[FullCache | KVManager, int]] = []  # of this step: caches, new tokens

    def join(
        self, seq: int, capacity: int, prompt: int = 0, thinking: bool = True, budget: int | None = None
    ) -> None:
        """A new sequence; arguments as of KVManager."""
        if seq in self.caches:
            raise ValueError(f"sequence {seq} is in the cache already")
        cache = self.prepare(seq, self._make())
        cache.join(seq, capacity, prompt, thinking, budget)
        self.caches[seq] = cache

    def leave(self, seq: int) -> None:
        """Free a sequence's memory."""
        self.caches.pop(seq).leave(seq)

    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        """Announce one forward pass, as `KVManager` does. Rows behind these tokens are padding."""
        self._now = []
        at = 0
        for seq, count in zip(seqs, counts, strict=True):
            cache = self.caches[seq]
            cache.begin_step([seq], [count], tokens[at : at + count])
            self._now.append((cache, count))
            at += count

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Append and attend. qk: [T, Hq + Hkv, D], v: [T, Hkv, D]; returns [T, Hq, D], 0 for padding rows."""
        rows, heads, dim = qk.shape
        out = qk.new_zeros(rows, heads - v.shape[1], dim)
        at = 0
        for cache, count in self._now:
            own = slice(at, at + count)
            out[own] = cache.attend(layer, qk[own], v[own])
            at += count
        return out

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Let the policy steer the residual stream, and keep it if the policy demands it. hidden: [T, d]."""
        parts = []
        at = 0
        for cache, count in self._now:
            parts.append(cache.tap(layer, hidden[at : at + count]))
            at += count
        return torch.cat([*parts, hidden[at:]])

    def end_step(self) -> None:
        """Close the step."""
        for cache, _ in self._now:
            cache.end_step()
        self._now = []

    def account(self, seq: int) -> Ledger:
        """Bytes that one sequence holds, by kind."""
        return self.caches[seq].account(seq)

    def told(self, seq: int) -> Told:
        """A summary of one sequence for people."""
        return self.caches[seq].told(seq)

    def counts(self, seq: int) -> dict[str, int]:
        """What the policy has counted of a sequence."""
        return self.caches[seq].counts(seq)

    def thought(self, seq: int) -> str:
        """The type of the sequence's running segment."""
        return self.caches[seq].thought(seq)

    def held(self, seq: int) -> int:
        """Tokens that the fullest lane of a sequence holds."""
        return self.caches[seq].held(seq)

    def reserved_bytes(self) -> int:
        """All bytes of the caches, used or not."""
        return sum(cache.reserved_bytes() for cache in self.caches.values())
