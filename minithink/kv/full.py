"""FullCache: every token's key and value, unrounded, for as long as its sequence runs.

It is the baseline of every comparison, and the step protocol in its plainest form:

    begin_step   which sequences run, and with how many new tokens each: their positions follow
    attend       (per layer) rotate q and k, append k and v, attend over all that the sequence holds
    tap          (per layer) the residual stream passes by
    end_step     nothing here; a policy would edit the cache now

Each sequence owns one buffer of the size that it may grow to, because a full cache must promise room for the longest
answer. What is held and what is only reserved are counted apart: the difference is what paging saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.config import ModelConfig
from minithink.errors import MinithinkError
from minithink.kv.ledger import Ledger, Told
from minithink.model import Rope
from minithink.ref.attention import of_any_length


@dataclass
class _Lane:
    """One sequence's keys and values, and where this step reads and writes them."""

    kv: Tensor  # [L, 2, Hkv, capacity, D]; keys are rotated
    length: int = 0  # tokens held
    new: tuple[Tensor, ...] = ()  # of every layer: the slots to write, a view [2·Hkv, new tokens, D]
    all: tuple[Tensor, ...] = ()  # keys and values of layer 0, of layer 1, …: views [Hkv, tokens and new ones, D]

    def grow(self, count: int) -> range:
        """Open the slots of `count` new tokens; returns their positions."""
        before = self.length
        after = self.length + count
        # One call makes the views of all layers: at batch 1 on a CPU, slicing in every layer would be felt.
        self.new = self.kv[:, :, :, before:after].flatten(1, 2).unbind()
        self.all = self.kv[:, :, :, :after].flatten(0, 1).unbind()
        return range(before, after)


class FullCache:
    """Keys and values of any number of sequences, of any lengths, without padding."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: Backend = REFERENCE,
    ) -> None:
        self.config = config
        self.rope = rope
        self.backend = backend
        self.device = torch.device(device)
        self.dtype = dtype
        self.lanes: dict[int, _Lane] = {}
        self._lanes: list[_Lane] = []  # of this step, in the order of its rows
        self._counts: list[int] = []  # new tokens of each
        self._masked = False  # does attention need a mask: later chunks of a prompt
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def join(
        self, seq: int, capacity: int, prompt: int = 0, thinking: bool = True, budget: int | None = None
    ) -> None:
        """Reserve room for `capacity` tokens of a new sequence; what else KVManager wants to know is ignored."""
        c = self.config
        shape = (c.num_layers, 2, c.num_kv_heads, capacity, c.head_dim)
        if seq in self.lanes:
            raise ValueError(f"sequence {seq} is in the cache already")
        try:
            self.lanes[seq] = _Lane(torch.empty(shape, device=self.device, dtype=self.dtype))
        except RuntimeError as error:  # torch's out of memory on every device
            per_token = c.kv_bytes_per_token(self.dtype.itemsize)
            raise MinithinkError(
                f"Out of memory: a full cache of {capacity} tokens needs {capacity * per_token / 2**20:,.0f} MiB "
                f"({per_token:,} bytes a token) beside {self.reserved_bytes() / 2**20:,.0f} MiB reserved already; "
                f"use fewer --max-new-tokens or a smaller --batch-size."
            ) from error

    def leave(self, seq: int) -> None:
        """Free a sequence's memory."""
        del self.lanes[seq]

    def length(self, seq: int) -> int:
        """Tokens that the sequence holds."""
        return self.lanes[seq].length

    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """Announce one forward pass: sequence seqs[i] brings counts[i] new tokens, in this order."""
        for seq, count in zip(seqs, counts, strict=True):
            lane = self.lanes[seq]
            if lane.length + count > lane.kv.shape[3]:
                raise ValueError(
                    f"sequence {seq} holds {lane.length} tokens and reserved {lane.kv.shape[3]}: {count} do not fit"
                )
        self._lanes = [self.lanes[seq] for seq in seqs]
        self._counts = list(counts)
        self._masked = False
        positions = list[int]()
        for lane, count in zip(self._lanes, counts, strict=True):
            self._masked |= lane.length > 0 and count > 1
            positions += lane.grow(count)
        self._cos, self._sin = self.rope.at(torch.tensor(positions, device=self.device))

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Append and attend. qk: [T, Hq + Hkv, D], unrotated, v: [T, Hkv, D]; returns [T, Hq, D]."""
        qk = self.backend.rope(qk, self._cos, self._sin)
        q, k = qk.split_with_sizes((self.config.num_heads, self.config.num_kv_heads), dim=1)
        kv = torch.cat((k, v), dim=1).transpose(0, 1)  # [2·Hkv, T, D]
        queries = q.split_with_sizes(self._counts)
        new = kv.split_with_sizes(self._counts, dim=1)
        out = []
        with of_any_length(self.device, self._masked):
            for lane, q_i, kv_i in zip(self._lanes, queries, new, strict=True):
                lane.new[layer].copy_(kv_i)
                k_i = lane.all[2 * layer]
                v_i = lane.all[2 * layer + 1]
                out.append(self.backend.attention(q_i, k_i, v_i))
        return out[0] if len(out) == 1 else torch.cat(out)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """A full cache has nothing to see or to steer."""
        return hidden

    def end_step(self) -> None:
        """Close the step: its tokens count from now on. A full cache changes nothing between steps."""
        for lane, count in zip(self._lanes, self._counts, strict=True):
            lane.length += count
            lane.new = ()
            lane.all = ()
        self._lanes = []
        self._counts = []

    def held_bytes(self, seq: int) -> int:
        """Bytes of the keys and values that a sequence holds."""
        return self.lanes[seq].length * self.config.kv_bytes_per_token(self.dtype.itemsize)

    def held(self, seq: int) -> int:
        """Tokens that a lane of the sequence holds: all of them."""
        return self.lanes[seq].length

    def reserved_bytes(self) -> int:
        """Bytes that all sequences' buffers occupy, held or not."""
        return sum(lane.kv.nbytes for lane in self.lanes.values())

    def account(self, seq: int) -> Ledger:
        """What one sequence holds, by kind."""
        return Ledger(payload=self.held_bytes(seq))

    def told(self, seq: int) -> Told:
        """A full cache reports its bytes and nothing else."""
        return Told()

    def counts(self, seq: int) -> dict[str, int]:
        """A full cache has nothing to count."""
        return {}

    def thought(self, seq: int) -> str:
        """A full cache knows no types of thoughts."""
        return ""

    def ledger(self) -> Ledger:
        """What all buffers are for."""
        payload = sum(self.held_bytes(seq) for seq in self.lanes)
        return Ledger(payload=payload, reserve=self.reserved_bytes() - payload)
