"""The recorder: replaying what it wrote gives the cache at every step, and nobody notices that it was there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minithink.kv.contract import (
    Policy,
    Stack,
)  # fmt: skip
from minithink.kv.manager import UNLIMITED
from minithink.model import Decoder
from minithink.policies import parse
from minithink.trace.format import GONE, KINDS, File, read
from minithink.trace.recorder import Recorder
from tests.kv.run import feed, manager_for, text_of
from tests.policies.test_laws import CLOSE, OPEN, TEXTS, decoder_of

torch.set_num_threads(1)

PROMPTS = {0: 13, 1: 5, 2: 9, 3: 12}
DECODER = decoder_of(0)


class Watched:
    """A manager that is recorded, and what it held after every step of every sequence."""

    def __init__(self, path: Path, policy: Policy, decoder: Decoder = DECODER, **options: Any) -> None:
        options = {"tokens": 100, "think_ids": (OPEN, CLOSE), **options}
        self.decoder, self.manager, self.path = decoder, manager_for(decoder, policy, **options), path
        self.recorder = self.manager.recorder = Recorder(path, score_every=1)
        self.kept: dict[int, list[np.ndarray]] = {}  # formats by position of every unit, GONE where it holds none
        self.bytes: dict[int, list[list[int]]] = {}
        self.budgets: dict[int, list[np.ndarray]] = {}
        self.fed: dict[int, list[int]] = {}

    def join(self, seq: int, prompt: int, **options: Any) -> None:
        self.manager.join(seq, 100, prompt, **options)
        self.kept[seq], self.bytes[seq], self.fed[seq], self.budgets[seq] = [], [], [], []

    def feed(self, chunks: dict[int, list[int]]) -> None:
        feed(self.decoder, self.manager, chunks)
        for seq, chunk in chunks.items():
            self.fed[seq] += chunk
            row = self.manager._row_of[seq]
            if self.manager._row(row).clock < 0:
                continue
            pos = self.manager.store.positions()[:, row].flatten(0, 1)
            fmt = self.manager.store.format()[:, row].flatten(0, 1)
            held = torch.full((len(pos), len(self.fed[seq]) + 1), GONE, dtype=torch.uint8)
            held.scatter_(1, torch.where(pos < 0, held.shape[1] - 1, pos).long(), fmt)
            self.kept[seq].append(held[:, :-1].numpy())
            ledger = self.manager.account(seq).as_dict()
            self.bytes[seq].append([ledger[kind] for kind in KINDS])
            budget = torch.stack([b[:, row].flatten() for b in self.manager.budgets.values()]).amin(0)
            self.budgets[seq].append(torch.where(budget < UNLIMITED, budget, -1).numpy())

    def check(self) -> File:
        """The file tells the same."""
        self.recorder.close()
        file = read(self.path)
        assert set(file.traces) == {seq for seq in self.fed if self.fed[seq]}
        assert file.done is not None
        for seq, trace in file.traces.items():
            assert trace.ids.tolist() == self.fed[seq]
            assert trace.steps == len(self.kept[seq]) - 1
            assert trace.ledger.tolist() == self.bytes[seq]
            for t, want in enumerate(self.kept[seq]):
                n = want.shape[1]
                got = trace.format(t)
                assert (got[:, :n] == want).all(), (seq, t, np.argwhere(got[:, :n] != want)[:5], got, want)
                assert (got[:, n:] == GONE).all()
                assert (trace.kept(t)[:, :n] == (want != GONE)).all()
                changed = np.searchsorted(trace.budget_step, t, side="right") - 1
                assert (trace.budgets[changed] == self.budgets[seq][t]).all()
        return file


def converse(watched: Watched, steps: int = 34) -> None:
    """Sequences come and go; prompts come in chunks, two of them in one step; some rows pause."""
    texts = {s: text_of(DECODER.config, n + steps, s) for s, n in PROMPTS.items()}
    for s, n in PROMPTS.items():  # one ends its thoughts, and that once
        texts[s] = [5 if t in (OPEN, CLOSE) else t for t in texts[s]]
        texts[s][n + 20] = CLOSE
    at = dict.fromkeys(PROMPTS, 0)

    def advance(chunks: dict[int, int]) -> None:
        watched.feed({s: texts[s][at[s] : at[s] + n] for s, n in chunks.items()})
        for s, n in chunks.items():
            at[s] += n

    watched.join(0, PROMPTS[0])
    watched.join(1, PROMPTS[1])
    advance({1: 2, 0: 6})
    advance({0: 7, 1: 3})
    for i in range(15):
        advance({1: 1, 0: 1} if i % 3 else {0: 1})
    watched.join(2, PROMPTS[2])
    advance({2: 9})
    for i in range(13):
        advance({0: 1, 2: 1, 1: 1} if i % 4 else {2: 1, 1: 1})
    watched.manager.leave(0)
    watched.join(3, PROMPTS[3])
    advance({3: 11})
    if steps % 2:
        return  # a prompt that is not read to its end
    advance({3: 1})
    for _ in range(8):
        advance({3: 1, 1: 1})


@pytest.mark.parametrize("text", TEXTS)
def test_the_trace_is_what_the_cache_held(text: str, tmp_path: Path) -> None:
    """Every policy and stack: positions, formats, bytes and budgets of every unit after every step."""
    watched = Watched(tmp_path / "trace", parse(text))
    converse(watched)
    file = watched.check()
    policy = watched.manager.policy
    names = [p.name for p in policy.members] if isinstance(policy, Stack) else [policy.name]
    assert file.head.policies == names
    trace = file.traces[1]
    for by in set(trace.evict_by.tolist()):
        assert names[by] not in ("full", "quant", "kivi", "pm_kvq"), "these evict nothing"
    assert (len(trace.evict_pos) > 0) == (policy.budget is not None)
    # where a policy notes scores, every eviction but those of other members has one
    noting = [i for i, name in enumerate(names) if name in ("rkv", "crystal_kv_lite")]
    known = np.isin(trace.evict_by, noting)
    assert not np.isnan(trace.evict_score[known]).any()
    assert np.isnan(trace.evict_score[~known]).all()
    assert (len(trace.rank) > 0) == bool(noting)
