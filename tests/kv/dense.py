"""A dense oracle: attention over the tokens that a policy has kept, computed from what the model has said of them.

It remembers the unrotated keys and values of every token, and asks the cache one thing: which positions a lane holds.
It is told which sequences a forward pass feeds, and knows their rows by itself. Pages, slots, formats, kernels and
twins have no part in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from tests.compare import assert_close

Said = list[tuple[Tensor, Tensor]]  # of every token: unrotated keys and values, float64 [Hkv, D]


class Dense:
    """Stands between a decoder and a manager, and compares each token's attention in float64."""

    def __init__(self, manager: KVManager | PlainCache, atol: float = 2e-6, pull: int = 0) -> None:
        """pull: tokens below this position are attended as if they stood directly before the next one held."""
        self.manager, self.atol, self.pull, self.compared = manager, atol, pull, 0
        self.said: dict[tuple[int, int], Said] = defaultdict(list)  # (sequence, layer) → its tokens
        self.prompts: dict[int, int] = {}
        self.row_of: dict[int, int] = {}
        self._fed: list[tuple[int | None, int]] = []

    def join(self, seq: int, prompt: int) -> None:
        """A sequence takes the first free row."""
        self.row_of[seq] = min(set(range(self.manager.shape.rows)) - set(self.row_of.values()))
        self.prompts[seq] = prompt

    def leave(self, seq: int) -> None:
        """A sequence frees its row."""
        del self.row_of[seq]

    def expect(self, seqs: Sequence[int | None], counts: Sequence[int] | None = None) -> None:
        """The next forward pass feeds counts[i] tokens of seqs[i]. None: an idle row, or one token each."""
        self._fed = list(zip(seqs, [1] * len(seqs) if counts is None else counts, strict=True))

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Pass on, remember, and compare."""
        out, heads, i = self.manager.attend(layer, qk, v), v.shape[1], 0
        q, k = qk[:, :-heads].double(), qk[:, -heads:].double()
        assert len(q) == sum(count for _, count in self._fed)
        for seq, count in self._fed:
            for at in range(i, i + count):
                if seq is not None:
                    self.said[seq, layer].append((k[at], v[at].double()))
                    scale = max(1.0, float(v.abs().max()))
                    want = self.attention(q[at], seq, layer)
                    assert_close(f"sequence {seq}, layer {layer}", out[at].double(), want, atol=self.atol * scale)
                    self.compared += 1
            i += count
        return out

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Pass on."""
        return self.manager.tap(layer, hidden)

    def attention(self, q: Tensor, seq: int, layer: int) -> Tensor:
        """softmax(q·kᵀ/√D)·v of the newest token, each KV head over the positions of its lane. q: [Hq, D]."""
        said, out = self.said[seq, layer], []
        heads, position = len(said[0][0]), len(said) - 1
        reads = position < self.prompts[seq]
        lanes = [list(range(len(said)))] * heads if reads else self.held(layer, seq)
        for head, own in enumerate(q.split(len(q) // heads)):
            lane = lanes[head]
            keys, values = self.exact(said, head, lane) if reads else self.cached(said, head, lane)
            for one in own:
                logits = keys @ self.rotated(one, position) / len(one) ** 0.5
                out.append(logits.softmax(0) @ values)
        return torch.stack(out)

    def held(self, layer: int, seq: int) -> list[list[int]]:
        """Positions that each KV head of a layer holds."""
        pos = self.manager.positions(seq)
        lanes = [[p for p in lane if p >= 0] for lane in pos[min(layer, len(pos) - 1)].tolist()]
        return lanes * (self.manager.config.num_kv_heads // len(lanes))

    def exact(self, said: Said, head: int, lane: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of a lane, as they were said: [S, D] each."""
        keys = torch.stack([self.rotated(said[p][0][head], p) for p in lane])
        return keys, torch.stack([said[p][1][head] for p in lane])

    def cached(self, said: Said, head: int, lane: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same as a decode step must see them."""
        keys, values = self.exact(said, head, lane)
        gap = next((p for p in lane if p >= self.pull), self.pull) - self.pull
        near = [self.rotated(said[p][0][head], p + gap) for p in lane if p < self.pull]
        return torch.cat((torch.stack(near), keys[len(near) :])) if near else keys, values

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """RoPE: the pairs (x_i, x_{i + D/2}) as complex numbers, turned by position · θ^(−2i/D). x: [D]."""
        half = len(x) // 2
        angle = position / self.manager.config.rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag))


class DenseKivi(Dense):
    """KIVI's official schedule, where a lane keeps every token: keys are quantized `residual` at a time, in groups of
    tokens of one channel; the values of the newest token and of the last `residual` before it are exact, older ones
    are quantized one by one."""

    def __init__(self, manager: KVManager | PlainCache, bits: int, group: int, residual: int) -> None:
        super().__init__(manager, atol=4e-6)
        self.bits, self.group, self.residual = bits, group, residual

    def cached(self, said: Said, head: int, lane: Sequence[int]) -> tuple[Tensor, Tensor]:
        keys, values = self.exact(said, head, lane)
        blocks = (len(said) - 1) // self.residual * self.residual  # the newest token waits in any case
        for start in range(0, blocks, self.group):
            keys[start : start + self.group] = self.rounded(keys[start : start + self.group].T).T
        # The oldest value is quantized after the step's attention. The prompt keeps `residual` exact values.
        for p in range(len(said) - 1 - self.residual):
            values[p] = self.rounded(values[p].view(-1, self.group)).flatten()
        return keys, values

    def rounded(self, x: Tensor) -> Tensor:
        """Integers between the smallest and the largest element of each group, in steps of FP16. x: [groups, G]."""
        low = x.amin(-1, keepdim=True).half().double()
        step = ((x.amax(-1, keepdim=True) - low) / (2**self.bits - 1)).half().double()
        return low + step * ((x - low) / step).round().clamp(0, 2**self.bits - 1)
