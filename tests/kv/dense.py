"""A dense oracle: attention over the tokens that a policy has kept, computed from what the model has said of them.

It remembers the unrotated keys and values of every token, and asks the cache one thing: which positions a lane holds.
Pages, slots, formats, kernels and twins have no part in it.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from minithink.kv.manager import KVManager
from tests.compare import assert_close


class Dense:
    """Stands between a decoder and a manager, and compares each token's attention in float64."""

    def __init__(self, manager: KVManager, atol: float = 2e-6) -> None:
        self.manager, self.atol, self.compared = manager, atol, 0
        self.said: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)  # (row, layer) → k, v

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        out, now, heads = self.manager.attend(layer, qk, v), self.manager._now, v.shape[1]
        q, k = qk[:, :-heads].double(), qk[:, -heads:].double()
        reads = not hasattr(now, "batch")
        counts = list(now.counts) if reads else [1] * len(now.batch)
        rows = list(now.rows) if reads else now.batch.row.tolist()
        active = [True] * len(rows) if reads else now.batch.active.tolist()
        i = 0
        for row, count, takes_part in zip(rows, counts, active, strict=True):
            for _ in range(count):
                if takes_part:
                    own = self.said[row, layer]
                    own.append((k[i], v[i].double()))
                    lanes = [list(range(len(own)))] * heads if reads else self.held(layer, row)
                    want = attention(q[i], own, lanes, self.manager.config.rope_theta)
                    scale = max(1.0, float(v.abs().max()))
                    assert_close(f"row {row}, layer {layer}", out[i].double(), want, atol=self.atol * scale)
                    self.compared += 1
                i += 1
        return out

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        return self.manager.tap(layer, hidden)

    def held(self, layer: int, row: int) -> list[list[int]]:
        """Positions that each KV head of a layer holds."""
        pos = self.manager.store.pos
        lanes = pos[min(layer, len(pos) - 1), row].tolist()
        lanes = [[p for p in lane if p >= 0] for lane in lanes]
        return lanes * (self.manager.config.num_kv_heads // len(lanes))

    def forget(self, row: int) -> None:
        """The sequence of this row has left."""
        for key in [key for key in self.said if key[0] == row]:
            del self.said[key]


def attention(q: Tensor, said: list[tuple[Tensor, Tensor]], lanes: list[list[int]], theta: float) -> Tensor:
    """softmax(q·kᵀ/√D)·v of the newest token, each KV head over the positions of its lane. q: [Hq, D]."""
    group, out = len(q) // len(lanes), []
    for head, lane in enumerate(lanes):
        keys = torch.stack([rotated(said[p][0][head], p, theta) for p in lane])  # [S, D]
        values = torch.stack([said[p][1][head] for p in lane])
        for own in q[head * group : (head + 1) * group]:
            logits = keys @ rotated(own, len(said) - 1, theta) / len(own) ** 0.5
            out.append(logits.softmax(0) @ values)
    return torch.stack(out)


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE: the pairs (x_i, x_{i + D/2}) as complex numbers, turned by position · θ^(−2i/D). x: [D]."""
    half = len(x) // 2
    angle = position / theta ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag))
