"""DecodePass: one forward pass that feeds one token to each row of a batch.

Every layer appends its keys and values, attends over what the lanes hold, and keeps the observations that the policy
demands. A decode step reads everything from a batch's tensors, so it can be captured as a CUDA graph. `prompts.py`
has the other kind of pass, which reads prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.kv import checks
from minithink.kv.batch import Batch
from minithink.kv.contract import UNLIMITED, Demand, See
from minithink.kv.parts import Parts
from minithink.kv.reading import Reading
from minithink.ref.decode_attention import decode_probabilities, group_reduce


class DecodePass:
    """A decode step that is under way: its tokens have slots, its layers are still to come."""

    def __init__(self, parts: Parts, batch: Batch, demands: Sequence[Demand]) -> None:
        """Take slots for the tokens of a batch.

        Args:
            batch: the rows; those that are not active change nothing.
            demands: those whose observations this step makes.
        """
        store = parts.store
        self.parts = parts
        self.policy = parts.policy
        self.store = parts.store
        self.backend = parts.store.pages.backend
        self.observations = parts.observations
        self.batch = batch
        self.demands = demands
        # Rows that bring a token; None: all do, because steps without a fixed width have no padding rows.
        self.active = None if store.lists.columns is None else batch.active
        self.position = batch.length - 1  # of the tokens, int64 [N]
        self.writer = store.take(batch)
        if store.compaction:
            store.compaction.start()
        self.cos, self.sin = parts.rope.at(self.position)
        self.read = Reading(store, None if batch.whole else batch.row, batch.length)
        self.pulled = self._pull() if parts.policy.pull else None
        self.view = parts.view(batch) if parts.steers else None

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Append and attend. qk: [N, Hq + Hkv, D], unrotated, v: [N, Hkv, D]; returns [N, Hq, D]."""
        raw, q = self.append(layer, qk, v)
        asked = self.observations.asked(self.demands, layer)
        if self.parts.dense:
            return self._over_copies(layer, raw, q, asked)
        return self._over_pages(layer, q, asked)

    def append(self, layer: int, qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values → its queries [N, Hq, D], unrotated and rotated. qk, v: as of `attend`."""
        if self.store.compaction:
            self.store.compaction.wait(layer)
        raw, k = qk.split_with_sizes(self.parts.heads, dim=1)
        q = self.backend.append(
            raw,
            k,
            v,
            cos=self.cos,
            sin=self.sin,
            writer=self.writer,
            layer=layer,
        )
        self.observations.keep_queries(layer, q, self.batch.row, self.position)
        return raw, q

    def _over_pages(self, layer: int, q: Tensor, asked: dict[str, See]) -> Tensor:
        """Attention of one new token of each row over the tokens of its lanes. q: [N, Hq, D]; asked: the rules
        of the weights that must be kept."""
        if not asked:
            attended, _ = self.backend.paged_attention(q, self.read, layer, None)
            return attended
        # A call keeps weights under one rule, so several rules take several calls. Their output is the same.
        for rule, what in asked.items():
            self.read.into = self.observations.in_place(layer, rule, what, self.active)
            attended, mass = self.backend.paged_attention(q, self.read, layer, rule)
            if mass is not None:
                self._keep_weights(layer, rule, what, mass)
        return attended

    def _over_copies(self, layer: int, raw: Tensor, q: Tensor, asked: dict[str, See]) -> Tensor:
        """The same over dense copies of keys and values. Pulled tokens and values that lag need it, because no kernel
        reads them in place. raw: [N, Hq, D], the unrotated queries."""
        k, v = self.read(layer)  # [N, Hkv, S, D]
        pos = self.read.pos
        t = min(layer, len(pos) - 1)
        valid = pos[t] >= 0  # [N, Ht, S]
        if self.pulled is None and not asked:
            return self.backend.decode_attention(q, k, v, valid)
        n, _, dim = q.shape
        kv_heads = k.shape[1]
        grouped = q.view(n, kv_heads, -1, dim)  # [N, Hkv, g, D]
        logits = _scores(grouped, k)  # [N, Hkv, g, S]
        if self.pulled is not None:
            near, cos, sin = self.pulled.of(layer, kv_heads)
            of_lanes = raw.reshape(n * kv_heads, -1, dim)
            closer = self.backend.rope(of_lanes, cos, sin).view(grouped.shape)
            logits = torch.where(near.unsqueeze(2), _scores(closer, k), logits)
        for rule, what in asked.items():
            weights = group_reduce(logits, valid, rule)
            self._keep_weights(layer, rule, what, weights)
        if self.pulled is None:  # the output must not depend on whether it is observed
            return self.backend.decode_attention(q, k, v, valid)
        p = decode_probabilities(logits, valid)
        return (p.to(v.dtype) @ v).view(q.shape)

    def _keep_weights(self, layer: int, rule: str, what: See, mass: Tensor) -> None:
        at = None if self.batch.whole else self.batch.row
        self.observations.keep_weights(layer, rule, what, at, self.active, mass)

    def _pull(self) -> Pulled:
        """Find the pulled tokens: those below `pull`, which are attended as if they stood directly before the next
        token that is held."""
        pull = self.policy.pull
        pos = self.read.pos
        next_held = torch.where(pos >= pull, pos, UNLIMITED).amin(-1)  # [Lt, N, Ht]
        gap = torch.where(next_held < UNLIMITED, next_held - pull, 0).long()
        at = self.position[None, :, None] - gap
        at = at.clamp(min=0)
        cos, sin = self.parts.rope.at(at.flatten())  # [Lt·N·Ht, 1, D]
        return Pulled(
            near=(pos >= 0) & (pos < pull),
            cos=cos.view(*at.shape, -1),
            sin=sin.view(*at.shape, -1),
        )

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Let the policy steer the residual stream, and keep it if the policy demands it. Behind the final norm
        (−1) the policy may look at the whole step. hidden: [N, d]."""
        if self.view is not None:
            steered = self.policy.steer(self.view, layer, hidden)
            hidden = checks.steered(self.policy, steered, hidden)
        for _ in self.observations.of(self.demands, See.HIDDEN, layer):
            self.observations.keep_hidden(layer, hidden, self.batch.row, self.active)
        if layer == -1 and self.parts.watches:
            self.policy.watch(self.parts.view(self.batch))
        return hidden


@dataclass(frozen=True)
class Pulled:
    """Tokens that are attended from a shorter distance (`Policy.pull`)."""

    near: Tensor  # bool [Lt, N, Ht, S]: the tokens
    cos: Tensor  # [Lt, N, Ht, D]: RoPE of their queries
    sin: Tensor

    def of(self, layer: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of a layer, bool [N, Ht, S], with cos and sin for every KV head, [N·Hkv, 1, D]."""
        t = min(layer, len(self.near) - 1)
        dim = self.cos.shape[-1]
        cos = self.cos[t].expand(-1, kv_heads, -1)
        sin = self.sin[t].expand(-1, kv_heads, -1)
        return self.near[t], cos.reshape(-1, 1, dim), sin.reshape(-1, 1, dim)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q·kᵀ/√D. q: [N, Hkv, g, D], k: [N, Hkv, S, D] → [N, Hkv, g, S]."""
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
