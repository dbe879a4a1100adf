"""What attention gives is what the dense oracle gives of the tokens that are held, under every policy that rounds
nothing, and under KIVI's official schedule: by whole steps and by their parts, beside idle rows, with widths that
follow the lanes and fixed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minithink.kv.manager as manager_module
from minithink.kv.contract import SCOPES, Scope, Storage
from minithink.kv.plain import PlainCache
from minithink.model import Rope
from minithink.policies import parse
from tests.kv.dense import Dense, DenseKivi
from tests.kv.run import Cut, feed, manager_for, text_of
from tests.kv.test_batches import feed_batch, turned
from tests.policies.test_laws import CLOSE, OPEN, decoder_of

torch.set_num_threads(1)
TOKENS = 60
POLICIES = (
    "full",
    "window:budget=12",
    "streaming_llm:budget=12,sink=3",
    "streaming_llm:budget=12,sink=3,rerotate=true",
    "random:budget=14,schedule=interval:3",
    "rkv:budget=12,buffer=4,alpha=3",
    "rkv:budget=12,buffer=0,alpha=3,compaction=gather",
    "crystal_kv_lite:budget=18",
    "snapkv:cap=8,window=3,kernel_size=3",
    "thinkv:budget=26,tau=4,retention=2/1,g=4,precision=R16E16T16,block=2,layers=0/1,thresholds=0.21/0.31",
    "kivi:bits=4,group=16,residual=16,flush=official",
)


def live(dense: Dense, parts: bool, steps: int = 26) -> Dense:
    """Three sequences of different lengths, one that leaves and one that comes."""
    decoder, draw = decoder_of(0), torch.Generator().manual_seed(1)
    manager, seqs = dense.manager, list[int]()

    def some(high: int) -> int:
        return int(torch.randint(high, (), generator=draw))

    def welcome(seq: int, n: int) -> None:
        words = text_of(decoder.config, n, seq)
        manager.join(seq, TOKENS, n)
        dense.join(seq, n)
        for chunk in (words[: n // 2], words[n // 2 :]):
            if chunk:
                dense.expect([seq], [len(chunk)])
                feed(decoder, manager, {seq: chunk}, dense)
        seqs.append(seq)

    for seq, n in ((0, 11), (1, 4), (2, 7)):
        welcome(seq, n)
    for i in range(steps):
        if i == 12:
            dense.leave(1)
            manager.leave(1)
            seqs.remove(1)
            welcome(5, 9)
        batch = [seqs[j] for j in torch.randperm(3, generator=draw)][: 1 + some(3)]
        tokens = {seq: CLOSE if (seq, i) == (0, 15) else some(OPEN) for seq in batch}
        if parts:
            taken = {dense.row_of[seq] for seq in batch}
            idle = [row for row in range(4) if row not in taken][: some(3)]
            dense.expect(turned([*batch, *[None] * len(idle)], i))
            feed_batch(decoder, manager, tokens, idle, turn=i, through=dense)
        else:
            dense.expect(batch)
            feed(decoder, manager, {seq: [token] for seq, token in tokens.items()}, dense)
    return dense


@pytest.mark.parametrize("text", POLICIES)
def test_attention_of_the_plain_manager_is_that_of_the_tokens_held(text: str) -> None:
    decoder = decoder_of(0)
    policy = parse(text)
    cache = PlainCache(decoder.config, Rope(decoder.config), policy, rows=4, tokens=TOKENS, think_ids=(OPEN, CLOSE))
    if text.startswith("kivi"):
        oracle: Dense = DenseKivi(cache, 4, 16, 16)
    else:
        oracle = Dense(cache, pull=policy.pull)
    assert live(oracle, parts=False).compared > 100


@pytest.mark.parametrize("how", ["whole steps", "parts", "captured parts", "fixed width"])
@pytest.mark.parametrize("text", POLICIES)
def test_attention_is_that_of_the_tokens_held(text: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "NARROWEST", 4)
    columns: Any = {"whole steps": None, "fixed width": TOKENS + 1}.get(how, "fit")
    manager = manager_for(
        decoder_of(0), parse(text), rows=4, tokens=TOKENS, columns=columns, think_ids=(OPEN, CLOSE), poison=False
    )
    manager.captured = how == "captured parts"
    official = text.startswith("kivi")
    oracle = DenseKivi(manager, 4, 16, 16) if official else Dense(manager, pull=3 if "rerotate" in text else 0)
    assert live(oracle, "parts" in how).compared > 100
    assert (manager.held(0) < manager.length(0)) == (text != "full" and not official)


@pytest.mark.parametrize(
    "storage",
    [
        Storage(block=1),
        Storage(("fp32",), buffer=4, block=2),
        Storage(("fp32", "plain"), buffer=3, block=4, tail="keep", sink=2),
    ],
)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("parts", [False, True])
def test_buffers_and_formats_that_round_nothing(storage: Storage, scope: Scope, parts: bool) -> None:
    """Freed memory is NaN: nothing that was evicted is read."""
    policy = Cut(9, scope=scope, storage=storage, slack=2)
    manager = manager_for(decoder_of(0), policy, rows=4, tokens=TOKENS, columns="fit" if parts else None, poison=True)
    assert live(Dense(manager), parts).compared > 100
