"""Recall: of the tokens that full attention looks at most, how many does a policy still hold? (ThinKV, figure 10a)

At every EVERY-th generated token the positions that each lane (a KV head of a layer) holds are noted. When the
sequence has ended, its text goes through the model once more, with full attention. For each noted step and each KV
head, this pass finds the TOP earlier tokens to which the next query pays most attention (mean over the query heads of
the KV head). Recall is the share of them that the lane held, mean over steps, layers and KV heads.

The paper says "at each decoding step", and does not say how query heads are joined; here only every EVERY-th step is
looked at. The query belongs to the policy's own text, but the layers below it are computed with full attention. So it
is not exactly the policy's query.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from minithink.kv.apart import Apart
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.loaded import Loaded
from minithink.ref.decode_attention import group_reduce
from minithink.reread.attention import read
from minithink.sequence import Track
from minithink.stream import Stream

TOP = 10  # tokens
EVERY = 16  # generated tokens


class Recall:
    """Notes the positions that the sequences of a stream hold; called after every forward pass (`Stream.on_step`)."""

    def __init__(self, stream: Stream) -> None:
        self.loaded = stream.loaded
        self.cache = stream.cache
        # sequence's number → position of the next query, positions that the lanes hold: int32 [Lt, Ht, S]
        self._held = defaultdict[int, list[tuple[int, Tensor]]](list)

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Track]) -> None:
        for s in sequences:
            if not s.tokens:
                self._held.pop(s.number, None)  # it begins, perhaps once more
            elif len(s.tokens) % EVERY == 0:
                self._held[s.number].append((len(s.prompt) + len(s.tokens), self._positions(s)))

    def _positions(self, s: Track) -> Tensor:
        cache = self.cache.caches[s.number] if isinstance(self.cache, Apart) else self.cache
        if isinstance(cache, FullCache):
            return torch.arange(cache.held(s.number), dtype=torch.int32)[None, None]
        assert isinstance(cache, KVManager)
        return cache.store.lists.positions()[:, cache.row_of(s.number)].clone()

    @torch.inference_mode()
    def take(self, s: Track) -> dict[str, float | None]:
        """The recall of a sequence that has ended; None: it was too short. The sequence is forgotten."""
        last = len(s.prompt) + len(s.tokens) - 1  # the last token, which the model never reads
        held = [(query, positions) for query, positions in self._held.pop(s.number, []) if query < last]
        if not held:
            return {"recall": None}
        queries = [query for query, _ in held]
        top = top_attended(self.loaded, [*s.prompt, *s.tokens[:-1]], queries)
        shares = [share_held(positions, tokens) for (_, positions), tokens in zip(held, top, strict=True)]
        return {"recall": fmean(shares)}


def share_held(positions: Tensor, tokens: Tensor) -> float:
    """The share of tokens, int64 [L, Hkv, TOP], among the positions of their lanes, int32 [Lt, Ht, S] (−1: none)."""
    held = torch.zeros(*positions.shape[:2], int(tokens.max()) + 2, dtype=torch.bool, device=tokens.device)
    positions = positions.to(tokens.device).long().clamp(max=held.shape[-1] - 1)
    held.scatter_(-1, torch.where(positions < 0, held.shape[-1] - 1, positions), True)
    return float(held.expand(*tokens.shape[:2], -1).gather(-1, tokens).double().mean())


def top_attended(loaded: Loaded, text: Sequence[int], queries: Sequence[int]) -> Tensor:
    """The tokens before each query that get most of its attention if nothing is evicted.

    Args:
        text: token ids.
        queries: positions in it, from 1 on.

    Returns:
        int64 [queries, L, Hkv, TOP], positions; fewer than TOP if a query has fewer tokens before it.
    """
    at = torch.tensor(queries, device=loaded.device)
    top = list[Tensor]()  # of each layer [n, Hkv, count]
    own = (torch.arange(len(text), device=loaded.device) == at[:, None])[:, None]  # bool [n, 1, S]
    count = min(TOP, *queries)

    def see(layer: int, logits: Tensor, seen: Tensor) -> None:
        mass = group_reduce(logits, seen, "mean").masked_fill(own, -1)  # [n, Hkv, S]
        top.append(mass.topk(count, dim=-1).indices)

    read(loaded, text, see, queries=at)
    return torch.stack(top, dim=1)
