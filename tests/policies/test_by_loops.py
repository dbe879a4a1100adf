"""H2O, TOVA, Scissorhands and KeyDiff in a running decoder: loops over queries and keys choose the same tokens.

The loops know the keys and queries that the model has made, and what each lane held before the step. So these tests
see which queries score, how query heads become one, and what is remembered when tokens go.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.kv.manager import KVManager
from minithink.model import Rope
from minithink.policies import parse
from tests.kv.dense import Dense
from tests.policies.drive import DECODER, tokens_of

CONFIG = DECODER.config
HEADS, LAYERS = range(CONFIG.num_kv_heads), range(CONFIG.num_layers)
Lane = list[int]  # positions, oldest first


class Listener(Dense):
    """Remembers rotated queries and keys, and compares nothing itself."""

    def __init__(self, manager: KVManager) -> None:
        super().__init__(manager)
        # (sequence, layer) → of every token the heads of its query, then those of its key: [Hq + Hkv, D]
        self.known: dict[tuple[int | None, int], list[Tensor]] = defaultdict(list)

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        for (seq, _), new in zip(self._fed, qk.double().split([n for _, n in self._fed]), strict=True):
            known = self.known[seq, layer]
            for heads in new:
                known.append(torch.stack([self.rotated(x, len(known)) for x in heads]))
        return self.manager.attend(layer, qk, v)

    def row(self, seq: int, layer: int, head: int, at: int, lane: Lane) -> Tensor:
        """Attention of the query at a position over the tokens of a lane that it sees: [g, S], float64."""
        known = self.known[seq, layer]
        keys = torch.stack([known[p][CONFIG.num_heads + head] for p in lane if p <= at])
        group = known[at][: CONFIG.num_heads].unflatten(0, (len(HEADS), -1))[head]
        return (group @ keys.T / CONFIG.head_dim**0.5).softmax(-1)


def best(score: dict[int, float], among: Lane, n: int) -> set[int]:
    """Of equal scores the older token."""
    return set(sorted(among, key=lambda p: (-score[p], p))[:n])


# What each policy keeps of a lane: positions. at: layer and KV head; new: the queries that came since the last call;
# sums: what H2O remembers of the lane.


def by_h2o(policy: Any, heard: Listener, seq: int, at: tuple[int, int], lane: Lane, new: range, sums: Any) -> Lane:
    protected = heard.prompts[seq] if policy.protect_prompt else 0
    for w in new:
        seen = [p for p in lane if p <= w]
        for p, x in zip(seen, heard.row(seq, *at, w, lane).sum(0).tolist(), strict=True):
            sums[p] = sums.get(p, 0.0) + x
    if len(lane) <= policy.budget:
        return lane
    room = policy.budget - protected
    last = lane[len(lane) - int(room * policy.recent) :]
    others = [p for p in lane if p >= protected and p not in last]
    stays = {*range(protected), *last, *best(sums, others, room - len(last))}
    for p in set(lane) - stays:
        del sums[p]
    return sorted(stays)


def by_tova(policy: Any, heard: Listener, seq: int, at: tuple[int, int], lane: Lane, new: range, _: Any) -> Lane:
    protected = heard.prompts[seq] if policy.protect_prompt else 0
    rows = torch.cat([heard.row(seq, at[0], head, new[-1], lane) for head in HEADS])
    score = dict(zip(lane, rows.mean(0).tolist(), strict=True))
    if policy.newest:
        score[lane[-1]] = 2.0
    if len(lane) <= policy.budget:
        return lane
    others = [p for p in lane if p >= protected]
    return sorted({*range(protected), *best(score, others, policy.budget - protected)})


def by_scissorhands(
    policy: Any, heard: Listener, seq: int, at: tuple[int, int], lane: Lane, new: range, _: Any
) -> Lane:
    protected = heard.prompts[seq] if policy.protect_prompt else 0
    if len(lane) < policy.budget + max(1, policy.buffer):
        return lane
    of = defaultdict[int, list[float]](list)
    for w in range(max(0, new.stop - policy.history), new.stop):
        seen = [p for p in lane if p <= w]
        for p, x in zip(seen, heard.row(seq, *at, w, lane).mean(0).tolist(), strict=True) if seen else ():
            of[p].append(x if policy.by == "mean" else float(x * len(seen) >= 1))
    score = {p: sum(of[p]) / max(1, len(of[p])) for p in lane}
    room = policy.budget - protected
    last = lane[len(lane) - min(room, policy.recent) :]
    others = [p for p in lane if p >= protected and p not in last]
    return sorted({*range(protected), *last, *best(score, others, room - len(last))})


def by_keydiff(policy: Any, heard: Listener, seq: int, at: tuple[int, int], lane: Lane, new: range, _: Any) -> Lane:
    protected = heard.prompts[seq] if policy.protect_prompt else 0
    if len(lane) <= policy.budget:
        return lane
    layer, head = at
    keys = {p: heard.known[seq, layer][p][CONFIG.num_heads + head] for p in lane}
    mean = sum(k / k.norm() for k in keys.values()) / len(lane)
    score = {p: -float(k @ mean / (k.norm() * mean.norm())) for p, k in keys.items()}
    room = policy.budget - protected
    last = lane[len(lane) - policy.recent :]
    others = [p for p in lane if p >= protected and p not in last]
    return sorted({*range(protected), *last, *best(score, others, room - len(last))})


LOOPS = {"h2o": by_h2o, "tova": by_tova, "scissorhands": by_scissorhands, "keydiff": by_keydiff}


@pytest.mark.parametrize(
    "text",
    [
        "h2o:budget=7",
        "h2o:budget=17,recent=0.4,protect_prompt=true",
        "tova:budget=7",
        "tova:budget=13,newest=true,protect_prompt=true",
        "scissorhands:budget=8,recent=2,history=7,buffer=3",
        "scissorhands:budget=12,recent=4,history=40,buffer=0,by=mean,protect_prompt=true",
        "keydiff:budget=7",
        "keydiff:budget=15,recent=2,protect_prompt=true",
    ],
)
@torch.inference_mode()
def test_loops_choose_the_same_tokens(text: str) -> None:
    """Two sequences side by side, their prompts read in two chunks."""
    prompts, steps, gone = {0: 10, 1: 4}, 24, 0
    manager = KVManager(CONFIG, Rope(CONFIG), parse(text), rows=2, tokens=max(prompts.values()) + steps)
    policy, heard = manager.policy, Listener(manager)
    sums: Any = defaultdict(dict)

    def lanes(seq: int) -> dict[tuple[int, int], Lane]:
        return {(i, h): lane for i in LAYERS for h, lane in enumerate(heard.held(i, seq))}

    def feed(counts: dict[int, int]) -> None:
        nonlocal gone
        before = {seq: lanes(seq) for seq in counts}
        new = {seq: range(manager.length(seq), manager.length(seq) + n) for seq, n in counts.items()}
        ids = [t for seq in counts for t in tokens_of(seq, prompts[seq] + steps)[new[seq].start : new[seq].stop]]
        heard.expect(list(counts), list(counts.values()))
        manager.begin_step(list(counts), list(counts.values()), ids)
        DECODER(torch.tensor(ids), heard)
        manager.end_step()
        for seq, n in new.items():
            if n.stop < prompts[seq]:  # a part of the prompt is still to come
                continue
            read = range(n.stop) if n.stop == prompts[seq] else n
            for at, got in lanes(seq).items():
                lane = [*before[seq][at], *n]
                want = LOOPS[policy.name](policy, heard, seq, at, lane, read, sums[seq, at])
                assert got == want, f"sequence {seq}, {n.stop} tokens, layer {at[0]}, head {at[1]}"
                gone += len(lane) - len(want)

    for seq, prompt in prompts.items():
        manager.join(seq, prompt + steps, prompt)
        heard.join(seq, prompt)
        feed({seq: prompt // 2})
        feed({seq: prompt - prompt // 2})
    for _ in range(steps):
        feed({0: 1, 1: 1})
    assert gone > 100
