"""Reading a finished text again, with full attention: the weights that each query gives, in every layer.

With the full cache a second reading shows the queries and keys of the first, many at a time. So attention is measured
here, and decoding is not slowed down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minithink.loaded import Loaded
from minithink.ref.decode_attention import group_reduce
from minithink.ref.sparsity import mean_row

QUERIES = 128  # that `sparsity` reads at once: bounds the memory of their logits

See = Callable[[int, Tensor, Tensor], None]
Tap = Callable[[int, Tensor], None]
BeforeRope = Callable[[int, Tensor], None]
BeforeAttention = Callable[[int, Tensor, Tensor, Tensor], None]


@torch.inference_mode()
def read(
    loaded: Loaded,
    ids: Sequence[int],
    see: See | None = None,
    *,
    queries: Tensor | None = None,
    at_once: int | None = None,
    tap: Tap | None = None,
    before_rope: BeforeRope | None = None,
    before_attention: BeforeAttention | None = None,
) -> None:
    """Read a text.

    Args:
        loaded: the model, `Engine.loaded`.
        ids: the tokens of the text.
        see: called with (layer, logits, seen). logits: q·kᵀ/√D of n queries and the S tokens that are read so far,
            float32 [n, Hkv, g, S]; seen: which of these tokens a query sees, bool [n, 1, S]. None: nothing is
            shown.
        queries: int64 [N], the positions of the queries that are shown, ascending; None: all.
        at_once: tokens of a forward pass; None: all.
        tap: called with (layer, hidden states [tokens, d]) behind every layer; −1: behind the final norm. The next
            layer may overwrite them, so whoever keeps them makes a copy.
        before_rope: called with (layer, queries before RoPE [tokens, Hq, D]), after the norm or the bias of a model
            that has one.
        before_attention: called with (layer, q, k, v). q: the rotated queries of the pass, [tokens, Hq, D]; k, v:
            [Hkv, S, D], the rotated keys and the values of the S tokens that are read so far.
    """
    text = _Text(loaded, len(ids), see, queries, tap, before_rope, before_attention)
    step = at_once or len(ids)
    for start in range(0, len(ids), step):
        part = list(ids[start : start + step])
        text.begin(start, start + len(part))
        loaded.decoder(torch.tensor(part, device=loaded.device), text)


@torch.inference_mode()
def sparsity(loaded: Loaded, ids: Sequence[int], first: int) -> Tensor:
    """The sparsity of every query from position `first` on, in every layer: float32 [len(ids) − first, L]. It is what
    a policy measures (`ref/sparsity.py` over `layer_row`)."""
    found = defaultdict[int, list[Tensor]](list)

    def see(layer: int, logits: Tensor, seen: Tensor) -> None:
        row = layer_row(logits, seen)
        found[layer].append(loaded.decoder.backend.sparsity(row, seen).cpu())

    queries = torch.arange(first, len(ids), device=loaded.device)
    read(loaded, ids, see, queries=queries, at_once=QUERIES)
    layers = [torch.cat(parts) for parts in found.values()]
    return torch.stack(layers, dim=1)


def layer_row(logits: Tensor, seen: Tensor) -> Tensor:
    """The row of attention in which ThinKV counts (§C.2): for each KV head the softmax of its largest logits
    (equations 3 and 4), and the mean of these rows. logits: [n, Hkv, g, S]; seen: bool [n, 1, S] → float32 [n, 1, S].
    """
    return mean_row(group_reduce(logits, seen, "max_logit"))


class _Text:
    """The keys and values of one text: an `Attention` for the decoder."""

    def __init__(
        self,
        loaded: Loaded,
        length: int,
        see: See | None,
        queries: Tensor | None,
        tap: Tap | None,
        before_rope: BeforeRope | None,
        before_attention: BeforeAttention | None,
    ) -> None:
        """length: tokens of the text. The others as in `read`."""
        self.config = loaded.config
        self.rope = loaded.rope
        self.ops = loaded.decoder.backend
        self.see = see
        self.told = tap
        self.before_rope = before_rope
        self.before_attention = before_attention
        self.position = torch.arange(length, device=loaded.device)
        self.queries = self.position if queries is None else queries
        shape = (self.config.num_layers, 2, self.config.num_kv_heads, length, self.config.head_dim)
        self.kv = torch.empty(shape, dtype=loaded.dtype, device=loaded.device)

    def begin(self, start: int, end: int) -> None:
        """Announce the tokens at these positions."""
        self.start = start
        self.end = end
        self.cos, self.sin = self.rope.at(self.position[start:end])
        inside = (self.queries >= start) & (self.queries < end)
        self.own = self.queries[inside]  # [n], the queries of this pass that are shown
        self.seen = (self.position[:end] <= self.own[:, None])[:, None]  # [n, 1, end]

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """qk: [n, Hq + Hkv, D], unrotated, v: [n, Hkv, D] → [n, Hq, D]."""
        c = self.config
        if self.before_rope is not None:
            self.before_rope(layer, qk[:, : c.num_heads])
        rotated = self.ops.rope(qk, self.cos, self.sin)
        q, k = rotated.split_with_sizes((c.num_heads, c.num_kv_heads), dim=1)
        own = slice(self.start, self.end)
        self.kv[layer, 0, :, own] = k.transpose(0, 1)
        self.kv[layer, 1, :, own] = v.transpose(0, 1)
        keys, values = self.kv[layer, :, :, : self.end]  # [Hkv, end, D]
        if self.before_attention is not None:
            self.before_attention(layer, q, keys, values)
        if self.see is not None and len(self.own):
            shown = q[self.own - self.start].unflatten(1, (c.num_kv_heads, -1))  # [n, Hkv, g, D]
            products = torch.einsum("nhgd,htd->nhgt", shown.float(), keys.float())
            self.see(layer, products / c.head_dim**0.5, self.seen)
        return self.ops.attention(q, keys, values)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Pass on, and show."""
        if self.told is not None:
            self.told(layer, hidden)
        return hidden
