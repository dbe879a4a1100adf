"""Recall: of the tokens that full attention looks at most, how many does a policy still hold? (ThinKV, figure 10a)

Every EVERY tokens that a sequence generates, the positions that its lanes hold are noted. When it has ended, its text
goes through the model once more, with full attention, and for each of those steps and each KV head the TOP earlier
tokens are found to which the next query pays most attention (mean over the query heads of the KV head). Recall is the
share of them that the lane held, mean over steps, layers and KV heads.

The paper says "at each decoding step" and not how heads become one; every EVERY-th step is looked at here. The query
is that of the policy's own text, but computed with full attention below it, so it is not exactly the policy's query.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from minithink.engine import Engine
from minithink.kv.apart import Apart
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.ref.decode_attention import group_reduce
from minithink.stream import Stream, Track

TOP = 10  # tokens
EVERY = 16  # generated tokens


class Recall:
    """Notes what the sequences of a stream hold; called after every forward pass."""

    def __init__(self, stream: Stream) -> None:
        self.engine, self.cache = stream.engine, stream.cache
        # sequence's number → position of the next query, positions that the lanes hold: int32 [Lt, Ht, S]
        self._held = defaultdict[int, list[tuple[int, Tensor]]](list)

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Track]) -> None:
        for s in sequences:
            if s.tokens and len(s.tokens) % EVERY == 0:
                self._held[s.number].append((len(s.prompt) + len(s.tokens), self._positions(s)))

    def _positions(self, s: Track) -> Tensor:
        cache = self.cache.caches[s.number] if isinstance(self.cache, Apart) else self.cache
        if isinstance(cache, FullCache):
            return torch.arange(cache.held(s.number), dtype=torch.int32)[None, None]
        assert isinstance(cache, KVManager)
        return cache.store.positions()[:, cache.next_state(s.number)[0]].clone()

    @torch.inference_mode()
    def take(self, s: Track) -> dict[str, float | None]:
        """The recall of a sequence that has ended; None: it was too short. It is forgotten."""
        last = len(s.prompt) + len(s.tokens) - 1  # which was never fed
        held = [(query, positions) for query, positions in self._held.pop(s.number, []) if query < last]
        if not held:
            return {"recall": None}
        queries = [query for query, _ in held]
        top = top_attended(self.engine, [*s.prompt, *s.tokens[:-1]], queries)
        shares = [share_held(positions, tokens) for (_, positions), tokens in zip(held, top, strict=True)]
        return {"recall": fmean(shares)}


def share_held(positions: Tensor, tokens: Tensor) -> float:
    """The share of tokens, int64 [L, Hkv, TOP], among the positions of their lanes, int32 [Lt, Ht, S] (−1: none)."""
    held = torch.zeros(*positions.shape[:2], int(tokens.max()) + 2, dtype=torch.bool, device=tokens.device)
    positions = positions.to(tokens.device).long().clamp(max=held.shape[-1] - 1)
    held.scatter_(-1, torch.where(positions < 0, held.shape[-1] - 1, positions), True)
    return float(held.expand(*tokens.shape[:2], -1).gather(-1, tokens).double().mean())


def top_attended(engine: Engine, text: Sequence[int], queries: Sequence[int]) -> Tensor:
    """The tokens before each query that get most of its attention, where nothing is evicted.

    Args:
        text: token ids.
        queries: positions in it, from 1 on.

    Returns:
        int64 [queries, L, Hkv, TOP], positions; fewer than TOP where a query has fewer before it.
    """
    watch = _Watch(engine, torch.tensor(queries, device=engine.device), len(text))
    engine.decoder(torch.tensor(text, device=engine.device), watch)
    return torch.stack(watch.top, dim=1)


class _Watch:
    """Attention over one text that remembers what was looked at most."""

    def __init__(self, engine: Engine, queries: Tensor, length: int) -> None:
        self.config, self.backend, self.queries = engine.config, engine.decoder.backend, queries
        positions = torch.arange(length, device=queries.device)
        self.cos, self.sin = engine.rope.at(positions)
        self.seen = (positions <= queries[:, None])[:, None]  # bool [n, 1, S]
        self.own = (positions == queries[:, None])[:, None]
        self.count = min(TOP, int(queries.min()))
        self.top: list[Tensor] = []  # of each layer [n, Hkv, count]

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """qk: [S, Hq + Hkv, D], unrotated, v: [S, Hkv, D] → [S, Hq, D]."""
        heads = self.config.num_heads, self.config.num_kv_heads
        q, k = self.backend.rope(qk, self.cos, self.sin).split_with_sizes(heads, dim=1)
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # [Hkv, S, D]
        grouped = q[self.queries].unflatten(1, (heads[1], -1)).float()  # [n, Hkv, g, D]
        logits = grouped @ k.float().mT / q.shape[-1] ** 0.5
        mass = group_reduce(logits, self.seen, "mean").masked_fill(self.own, -1)  # [n, Hkv, S]
        self.top.append(mass.topk(self.count, dim=-1).indices)
        return self.backend.attention(q, k, v)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Nothing is steered."""
        return hidden
