"""Reading a finished text again: the sparsity of every layer at every step, and the types that a policy gives it.

With the full cache a second reading shows the queries and keys of the first, many at a time: decoding is not slowed
down, and measured is what the policy measures (`ref/sparsity.py` over `group_reduce`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.engine import Engine
from minithink.kv.contract import Policy
from minithink.kv.manager import KVManager
from minithink.policies.thinkv import NAMES
from minithink.ref.decode_attention import group_reduce
from minithink.stream import PREFILL_CHUNK

QUERIES = 128  # that are read at once: bounds the memory of their logits


@torch.inference_mode()
def sparsity(engine: Engine, ids: Sequence[int], first: int) -> Tensor:
    """The sparsity of every query from position `first` on, in every layer: float32 [len(ids) − first, L]."""
    reader = _Reader(engine, len(ids), first)
    for start in range(0, len(ids), QUERIES):
        part = list(ids[start : start + QUERIES])
        reader.begin(start, start + len(part))
        engine.decoder(torch.tensor(part, device=engine.device), reader)
    return torch.stack([torch.cat(of_layer) for of_layer in reader.found], 1)


class _Reader:
    """A full cache of one text, for the decoder; it measures what passes."""

    def __init__(self, engine: Engine, length: int, first: int) -> None:
        c, self.engine, self.first = engine.config, engine, first
        shape = (c.num_layers, 2, c.num_kv_heads, length, c.head_dim)
        self.kv = torch.empty(shape, dtype=engine.dtype, device=engine.device)
        self.found = [list[Tensor]() for _ in range(c.num_layers)]

    def begin(self, start: int, end: int) -> None:
        """Announce tokens at these positions."""
        self.start, self.end = start, end
        self.pos = torch.arange(end, device=self.engine.device)
        self.cos, self.sin = self.engine.rope.at(self.pos[start:])

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """qk: [n, Hq + Hkv, D], unrotated, v: [n, Hkv, D] → [n, Hq, D]."""
        c, ops = self.engine.config, self.engine.decoder.backend
        qk = ops.rope(qk, self.cos, self.sin)
        q, k = qk.split_with_sizes((c.num_heads, c.num_kv_heads), dim=1)
        for held, new in zip(self.kv[layer], (k, v), strict=True):
            held[:, self.start : self.end] = new.transpose(0, 1)
        keys, values = self.kv[layer, :, :, : self.end]  # [Hkv, end, D]
        if (own := max(self.first, self.start)) < self.end:
            grouped = q[own - self.start :].unflatten(1, (c.num_kv_heads, -1)).float()  # [n, Hkv, g, D]
            valid = (self.pos <= self.pos[own:, None])[:, None]  # [n, 1, end]
            logits = torch.einsum("nhgd,htd->nhgt", grouped, keys.float()) / c.head_dim**0.5
            self.found[layer].append(ops.sparsity(group_reduce(logits, valid, "max_logit"), valid).cpu())
        return ops.attention(q, keys, values)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Nothing is steered."""
        return hidden


def averaged(u: Tensor, rows: int, steps: int) -> Tensor:
    """What a policy with so many sparsity_rows sees: means over the last queries, as many as there are, at each of
    the last `steps` steps. u: [N, L] → [steps, L]."""
    total = torch.nn.functional.pad(u.double().cumsum(0), (0, 0, 1, 0))  # [N + 1, L]
    end = torch.arange(len(u) - steps, len(u)) + 1
    start = (end - rows).clamp(min=0)
    return (total[end] - total[start]) / (end - start)[:, None]


@torch.inference_mode()
def types(engine: Engine, policy: Policy, prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
    """The types of the segments of a text that is given token by token (teacher-forced) under a policy."""
    length = len(prompt) + len(generated)
    cache = KVManager(
        engine.config, engine.rope, policy, rows=1, tokens=length, prompt=len(prompt), device=engine.device,
        dtype=engine.dtype, backend=engine.decoder.backend, columns=engine.columns,
    )  # fmt: skip
    cache.join(0, length, len(prompt))
    chunks = [list(prompt[start : start + PREFILL_CHUNK]) for start in range(0, len(prompt), PREFILL_CHUNK)]
    for part in (*chunks, *([token] for token in generated)):
        cache.begin_step([0], [len(part)], part)
        engine.decoder(torch.tensor(part, device=engine.device), cache)
        cache.end_step()
    return [NAMES.index(name) for name in cache.told(0).thoughts]
