"""A policy at work: a tiny decoder reads prompts, then random tokens, and the test looks at the cache after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minithink.kv.contract import Policy
from minithink.kv.manager import KVManager
from minithink.model import Decoder, Rope
from tests.kv.run import informed, watched
from tests.strategies import example_config, random_decoder

TINY = example_config(hidden_size=12, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=4)  # 2 layers
DECODER = random_decoder(TINY)


def tokens_of(seq: int, n: int, decoder: Decoder = DECODER) -> list[int]:
    """The tokens of sequence number `seq`: the same whatever runs beside it."""
    return torch.randint(decoder.config.vocab_size, (n,), generator=torch.Generator().manual_seed(seq)).tolist()


class Ear:
    """A recorder that keeps the scores which a policy told it last, and of which tokens; it ignores all else."""

    score: Tensor
    where: Tensor

    def noted(self, step: Any, policy: Policy, score: Tensor, where: Tensor | None) -> None:
        assert where is not None
        self.score, self.where = score.clone(), where.clone()

    def ignore(self, *_: Any) -> None:
        pass

    joined = left = evicting = stepped = ignore


def follow(
    policy: Policy,
    prompts: Sequence[int],
    steps: int,
    *,
    seqs: Sequence[int] | None = None,
    rows: int | None = None,
    decoder: Decoder = DECODER,
    **options: Any,
) -> Iterator[KVManager]:
    """The manager when all prompts are read, and after each of `steps` tokens of all sequences.

    Args:
        prompts: their lengths.
        seqs: the sequences' numbers; None: 0, 1, …
        rows: of the manager, idle ones too; None: no idle ones.
        options: of the manager.
    """
    seqs = range(len(prompts)) if seqs is None else seqs
    longest = max(prompts) + steps
    manager = watched(
        KVManager(
            decoder.config,
            Rope(decoder.config),
            informed(policy, decoder.config),
            rows=rows or len(prompts),
            tokens=longest,
            **options,
        )
    )
    text = {seq: tokens_of(seq, longest, decoder) for seq in seqs}

    @torch.inference_mode()
    def step(seqs: Sequence[int], chunks: Sequence[list[int]]) -> None:
        flat = [token for chunk in chunks for token in chunk]
        manager.begin_step(seqs, [len(chunk) for chunk in chunks], flat)
        assert decoder(torch.tensor(flat), manager).isfinite().all()
        manager.end_step()

    for seq, n in zip(seqs, prompts, strict=True):
        manager.join(seq, longest, n)
        step([seq], [text[seq][: n // 2]]) if n > 1 else None  # in two chunks
        step([seq], [text[seq][n // 2 : n]])
    yield manager
    for i in range(steps):
        step(seqs, [text[seq][n + i : n + i + 1] for seq, n in zip(seqs, prompts, strict=True)])
        yield manager


def followed(*arguments: Any, **options: Any) -> KVManager:
    """The manager after the last step."""
    return list(follow(*arguments, **options))[-1]


def held(manager: KVManager, seq: int) -> list[list[int]]:
    """Original positions that each table of a sequence holds: all heads of layer 0, then of layer 1, …"""
    pos = manager.store.lists.positions()[:, manager.row_of(seq)].flatten(0, 1)
    return [[p for p in row if p >= 0] for row in pos.tolist()]


def formats(manager: KVManager, seq: int) -> list[str]:
    """Of the tokens that the first table of a sequence holds, oldest first; those in the buffer: "waits"."""
    row = manager.row_of(seq)
    names = {**dict(enumerate(manager.store.storage.formats)), 255: "waits"}
    return [names[f] for f in manager.store.format()[0, row, 0, : int(manager.store.lists.count[0, row, 0])].tolist()]
