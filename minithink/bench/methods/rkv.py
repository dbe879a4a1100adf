"""R-KV on synthetic caches: its scores are drawn while a cache is filled (`thinkv.py` lists its cases).

Its redundancy is also timed by itself, computed anew and with similar keys remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from minithink.bench.methods import Inputs, Operation, StandIn, StandIns
from minithink.kv.contract import Step
from minithink.policies.rkv import Rkv
from minithink.policies.scored import Choice
from minithink.policies.similar_keys import NONE, NOWHERE


class DrawnRkv(StandIn, Rkv):
    """R-KV whose scores are drawn while a cache is filled."""

    capturable = True

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 2 * self.budget + self.slack  # a full lane has been replaced once

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        if self.filling:
            return torch.rand(choice.held.shape, device=choice.held.device)
        return super().score(step, layer, choice)


STAND_INS: StandIns = {
    Rkv: lambda policy, share, seed, layers: DrawnRkv(**{f.name: getattr(policy, f.name) for f in fields(policy)})
}

# Kernels ------------------------------------------------------------------------------------------------------------

KV_HEADS = 8
DIM = 128  # channels of a head
SEQUENCES = 64  # that are due together: R-KV without a buffer decides in every step


def pairs(tokens: int, device: str) -> Inputs:
    """Keys of one channel each, which come in pairs: a key resembles its partner and no other. So all redundancies
    are equal, and exact if the number of tokens is a power of two."""
    half = tokens // 2
    channel = torch.arange(tokens, device=device) % half
    k = (channel[:, None] == torch.arange(DIM, device=device)).to(torch.bfloat16)
    k = k.expand(2, KV_HEADS, tokens, DIM).contiguous()
    return k, torch.ones(k.shape[:3], dtype=torch.bool, device=device)


def known_pairs(tokens: int, device: str) -> Inputs:
    """The same. The newest token has come, and its partner remembers a token that was evicted."""
    k, valid = pairs(tokens, device)
    half = tokens // 2
    pos = 2 * torch.arange(tokens, dtype=torch.int32, device=device)
    match = pos.roll(half)
    match[half - 1] = 2 * tokens - 3  # no token has this position now
    match[-1] = NONE
    position = pos.clone()
    position[-1] = NOWHERE
    shape = k.shape[:3]
    known = (position.expand(shape).contiguous(), match.expand(shape).contiguous())
    return k, valid, pos.expand(shape).contiguous(), known, torch.arange(2, device=device)


def noise(rows: int, tokens: int, device: str) -> Inputs:
    """One layer of lanes that hold so many tokens, and one more. Keys are noise, as on synthetic caches: only the
    newest resembles another one."""
    k = torch.randn(rows, KV_HEADS, tokens + 1, DIM, dtype=torch.bfloat16, device=device)
    k[:, :, tokens] = k[:, :, tokens // 2]
    return k, torch.ones(k.shape[:3], dtype=torch.bool, device=device)


def anew(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """One layer, and the shortest length, because the work grows with its square. Bytes: keys, flags and scores."""
    tokens = min(lengths)
    for rows in (*due, SEQUENCES):
        own = (2 * DIM + 5) * rows * KV_HEADS * (tokens + 1)
        yield (
            f"{rows} × {tokens:,} tokens, a layer",
            own,
            [noise(rows, tokens, "cuda") for _ in range(-(-size // own))],
        )


def steps(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """The same, step by step. Bytes: besides, positions, what is known, and what is known from now on.

    Two inputs share what is known, and each brings another newest token. So at every replay one token has come, one
    has left, and one remembers the token that left. The twin is called with one input alone, where nothing is new.
    """
    tokens = min(lengths)
    for rows in (*due, SEQUENCES):
        own = (2 * DIM + 25) * rows * KV_HEADS * (tokens + 1)
        inputs = list[Inputs]()
        for _ in range(-(-size // own)):
            k, valid = noise(rows, tokens, "cuda")
            position = torch.full(valid.shape, NOWHERE, dtype=torch.int32, device="cuda")
            known = (position, torch.full_like(position, NONE))
            for newest in (tokens, tokens + 1):
                pos = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
                pos[-1] = newest
                inputs.append(
                    (k, valid, pos.expand(valid.shape).contiguous(), known, torch.arange(rows, device="cuda"))
                )
        yield f"{rows} × {tokens:,} tokens, a layer", own, inputs


OPERATIONS = {
    "redundancy": Operation(lambda device, tokens: pairs(tokens, device), anew),
    "running_redundancy": Operation(lambda device, tokens: known_pairs(tokens, device), steps, capturable=False),
}
