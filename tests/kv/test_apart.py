"""Caches side by side: each sequence as if it were alone, in batches of one shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.kv.apart import Apart
from minithink.kv.contract import Policy, Step
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.model import Decoder, Rope
from minithink.policies import parse
from tests.compare import assert_same
from tests.kv.run import text_of
from tests.kv.test_batches import ONE_BY_ONE, with_backend
from tests.policies.test_laws import decoder_of

torch.set_num_threads(1)


class Push(Policy):
    """Steers: adds what depends on the layer, the sequence's clock and its newest token."""

    name = "push"

    def steer(self, step: Step, layer: int, hidden: Tensor) -> Tensor:
        assert hidden.shape[0] == 1, "of one sequence alone"
        return hidden + 0.1 * (layer + 1) + 0.01 * (step.clock + step.tokens)[:, None]


def caches(decoder: Decoder, kind: str) -> Any:
    if kind == "plain":
        return lambda: FullCache(decoder.config, Rope(decoder.config))
    policy = (lambda: Push()) if kind == "push" else (lambda: parse(kind))
    return lambda: KVManager(decoder.config, Rope(decoder.config), policy(), rows=1, tokens=60)


@torch.inference_mode()
def feed(decoder: Decoder, cache: Any, chunks: dict[int, list[int]], idle: int = 0) -> list[Tensor]:
    counts, tokens = [len(c) for c in chunks.values()], [t for c in chunks.values() for t in c]
    cache.begin_step(list(chunks), counts, tokens)
    hidden = decoder(torch.tensor(tokens + [0] * idle), cache)
    cache.end_step()
    assert len(hidden) == sum(counts) + idle
    return [x[-1] for x in decoder.logits(hidden)[: sum(counts)].split(counts)]


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "push",
        "rkv:budget=12,buffer=2,alpha=3",
        "kivi:bits=8,group=16,residual=16",
        "streaming_llm:budget=12,sink=3,rerotate=true",
    ],
)
def test_each_as_if_it_were_alone(kind: str) -> None:
    """In any company, and beside idle rows, which change nothing; with products one row at a time, bit for bit."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    make = caches(decoder, kind)
    together, alone = Apart(make), {seq: make() for seq in range(4)}
    last = {}
    for seq, n in enumerate((9, 1, 14, 5)):
        for cache in (together, alone[seq]):
            cache.join(seq, 60, n, budget=10 if seq == 2 and "budget" in kind else None)
            (logits,) = feed(decoder, cache, {seq: text_of(decoder.config, n, seq)})
            before = last.setdefault(seq, logits)
            assert_same("prompt", logits, before)
    for i in range(16):
        seqs = [(0, 1, 2, 3), (2, 0), (3,), (3, 1, 2)][i % 4]
        fed = {seq: [(5 * seq + i) % 19] for seq in seqs}
        got = feed(decoder, together, fed, idle=6 - len(seqs))
        for seq, logits in zip(seqs, got, strict=True):
            assert_same(f"{seq} at {i}", logits, feed(decoder, alone[seq], {seq: fed[seq]})[0])
            assert together.account(seq) == alone[seq].account(seq)
            assert together.held(seq) == alone[seq].held(seq)
    assert together.reserved_bytes() == sum(cache.reserved_bytes() for cache in alone.values())
    if "budget" in kind:
        assert together.held(2) <= 11 < together.held(0)
    together.leave(1)
    assert sorted(together.caches) == [0, 2, 3]
    with pytest.raises(ValueError, match="sequence 2 is in the cache already"):
        together.join(2, 60)
