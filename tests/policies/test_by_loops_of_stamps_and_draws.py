"""Six policies in a running decoder: loops over tokens choose the same tokens.

The policies are RaaS, LazyEviction, MorphKV, Random Attention, VaSE and SepLLM. The loops know the keys, queries and
values that the model has made, and what each lane held before the step. Of the policies they use only the settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.kv.manager import KVManager
from minithink.kv.stack import members
from minithink.model import Rope
from minithink.policies import parse
from minithink.policies.random import lots
from tests.kv.run import informed
from tests.policies.drive import DECODER, Ear, tokens_of
from tests.policies.test_by_loops import CONFIG, HEADS, LAYERS, Lane, Listener, best

torch.set_num_threads(1)


class Heard(Listener):
    """Remembers the values, too."""

    def __init__(self, manager: KVManager) -> None:
        super().__init__(manager)
        self.values: dict[tuple[int | None, int], list[Tensor]] = defaultdict(list)  # of every token [Hkv, D]

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        for (seq, _), new in zip(self._fed, v.double().split([n for _, n in self._fed]), strict=True):
            self.values[seq, layer] += new
        return super().attend(layer, qk, v)

    def queries(self, seq: int, at: tuple[int, int], last: int, lane: Lane) -> Tensor:
        """Logits of the last queries of a KV head's group over a lane, without a causal mask: [g, last, S]."""
        known = self.known[seq, at[0]]
        q = torch.stack([x[: CONFIG.num_heads].unflatten(0, (len(HEADS), -1))[at[1]] for x in known[-last:]], 1)
        return q @ self.keys(seq, at, lane).T / CONFIG.head_dim**0.5

    def keys(self, seq: int, at: tuple[int, int], lane: Lane) -> Tensor:
        return torch.stack([self.known[seq, at[0]][p][CONFIG.num_heads + at[1]] for p in lane])


class Notes(Ear):
    """A recorder that keeps the scores that policies told it in the last step."""

    def __init__(self) -> None:
        self.said: dict[int, tuple[Any, ...]] = {}  # by the policy's id

    def noted(self, step: Any, policy: Any, score: Tensor, where: Tensor) -> None:
        self.said[id(policy)] = step.row.tolist(), step.pos().clone(), score, where

    def scores(self, policy: Any, row: int, at: tuple[int, int]) -> dict[int, float]:
        """By position: scores of the tokens of one lane that the policy may evict."""
        rows, *tensors = self.said[id(policy)]
        pos, score, where = (x[min(at[0], len(x) - 1), rows.index(row), min(at[1], x.shape[2] - 1)] for x in tensors)
        return dict(zip(pos[where].tolist(), score[where].tolist(), strict=True))


class Look:
    """What a loop may know of one lane after a step."""

    def __init__(self, policy: Any, stack: Any, heard: Heard, seq: int, at: tuple[int, int], lane: Lane, n: int):
        self.policy, self.heard, self.seq, self.at, self.lane = policy, heard, seq, at, lane
        self.prompt = heard.prompts[seq]
        self.clock = n - self.prompt  # generated tokens
        self.fixed = self.prompt if stack.protect_prompt else 0
        self.heads = HEADS if stack.scope == "layer" else [at[1]]  # heads that share the lane
        self.others = [p for p in lane if p >= self.fixed]

    def due(self, slack: int = 0) -> int | None:
        """The tokens to keep, of a lane that must evict now."""
        budget, (kind, _, rest) = self.policy.budget, self.policy.schedule.partition(":")
        if kind == "interval":
            return budget if self.clock % int(rest) == 0 and len(self.lane) > budget else None
        if kind == "sawtooth":
            grow, keep = map(int, rest.split("/"))
            return keep if len(self.lane) >= grow else None
        return budget if len(self.lane) >= budget + max(1, slack) else None

    def last(self, n: int) -> Lane:
        """The newest n tokens that are not protected."""
        return self.others[len(self.others) - n :]

    def stay(self, *some: Any) -> Lane:
        """The protected tokens and some others."""
        return sorted(set(range(self.fixed)).union(*some))

    def u(self, head: int, position: int) -> float:
        """The lot of a position, by Python's whole numbers."""
        layers, heads = max(LAYERS) + 1, len(HEADS) if len(self.heads) == 1 else 1
        prompt = torch.full((layers, 1, heads, 1), self.prompt)
        key = int(lots(self.policy.seed, torch.tensor([self.clock]), prompt)[self.at[0], 0, head % heads, 0])
        x = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return ((x ^ x >> 31) >> 11) / 2**53


def by_raas_official(x: Look, stamps: dict[int, int]) -> Lane:
    """form=official. stamps: of pages."""
    size = x.policy.page
    seen = x.prompt + x.clock
    most = x.policy.budget // size
    pages = sorted({p // size for p in x.lane})
    if x.clock > 0:
        group = CONFIG.num_heads // len(HEADS)
        queries = x.heard.known[x.seq, x.at[0]][-1][x.at[1] * group : (x.at[1] + 1) * group]
        bound = {}
        for number in pages:
            k = x.heard.keys(x.seq, x.at, [p for p in x.lane if p // size == number])
            bound[number] = max(float(torch.maximum(q * k.amin(0), q * k.amax(0)).sum()) for q in queries)
        read = max(3, min(seen, x.policy.budget) // size)
        for number in best(bound, pages, min(most // 2, read)):
            stamps[number] = x.clock
    if seen < x.policy.budget or len(x.lane) <= most * size:
        return x.lane
    fixed = {p // size for p in range(x.fixed)}
    kept = sorted(pages, key=lambda number: (number not in fixed, -stamps.get(number, 0), number))[:most]
    return x.stay(p for p in x.lane if p // size in {*kept, seen // size})


def by_raas(x: Look, stamps: dict[int, int]) -> Lane:
    if x.policy.form == "official":
        return by_raas_official(x, stamps)
    size = x.policy.page

    def page(p: int) -> int:
        return (p - x.prompt) // size

    if x.clock == 0:
        stamps.update(dict.fromkeys(x.lane, 0))
    else:
        pages, score = sorted({page(p) for p in x.lane}), defaultdict[int, float](float)
        if size == 1:
            rows = [x.heard.row(x.seq, x.at[0], head, x.lane[-1], x.lane).mean(0) for head in x.heads]
            score.update(zip(pages, torch.stack(rows).mean(0).tolist(), strict=True))
        else:
            group = CONFIG.num_heads // len(HEADS)
            for head in [h for h in range(CONFIG.num_heads) if h // group in x.heads]:
                at = x.at[0], head // group
                q, u = x.heard.known[x.seq, x.at[0]][-1][head], list[Tensor]()
                for number in pages:
                    k = x.heard.keys(x.seq, at, [p for p in x.lane if page(p) == number])
                    u.append(torch.maximum(q * k.amin(0), q * k.amax(0)).sum())
                chances = (torch.stack(u) / CONFIG.head_dim**0.5).softmax(0) / (group * len(x.heads))
                for number, chance in zip(pages, chances.tolist(), strict=True):
                    score[number] += chance
        hit = best(score, pages, math.ceil(x.policy.share * len(pages)))
        if x.policy.alpha is not None:
            hit = {number for number in pages if score[number] >= x.policy.alpha}
        for p in x.lane:
            if p == x.lane[-1] or page(p) == page(x.lane[-1]) or page(p) in hit:
                stamps[p] = x.clock
    keep = x.due()
    if keep is None:
        return x.lane
    others = x.others
    while len(others) > keep - x.fixed:
        oldest = page(min(others, key=lambda p: (stamps[p], page(p))))
        others = [p for p in others if page(p) != oldest]
    for gone in set(x.lane) - set(x.stay(others)):
        del stamps[gone]
    return x.stay(others)


def by_lazy_eviction(x: Look, known: dict[int, tuple[int, int]]) -> Lane:
    """known: TS and MRI."""
    if x.clock == 0:
        known.update(dict.fromkeys(x.lane, (0, 0)))
    else:
        known[x.lane[-1]] = x.clock - 1, 0
        each = x.heard.row(x.seq, *x.at, x.lane[-1], x.lane)
        p = each.mean(0) if x.policy.group == "mean" else each.amax(0)
        for token, chance in zip(x.lane, p.tolist(), strict=True):
            if chance >= x.policy.alpha:
                ts, mri = known[token]
                known[token] = x.clock, max(mri, x.clock - ts)
    keep = x.due()
    if x.policy.schedule == "every":
        keep = x.policy.budget if x.clock % x.policy.window == 0 and len(x.lane) > x.policy.budget else None
    if keep is None:
        return x.lane

    def worth(token: int) -> float:
        ts, mri = known[token]
        h1 = 2 / (1 + math.exp(min(700, 1 + (x.clock - ts) / (mri + 1e-5))))
        return round(h1 + (2 / (1 + math.exp(mri - 1)) if mri else 0), 7)

    room = keep - x.fixed
    last = x.last(min(room, x.policy.window))
    older = [p for p in x.others if p not in last]
    stays = x.stay(last, best({p: worth(p) for p in older}, older, room - len(last)))
    for gone in set(x.lane) - set(stays):
        del known[gone]
    return stays


def by_morphkv(x: Look, _: Any) -> Lane:
    if (keep := x.due()) is None:
        return x.lane
    room = keep - x.fixed
    last = x.last(min(room, x.policy.window))
    older = [p for p in x.lane if p not in last]
    if not older or room == len(last):
        return x.stay(last)
    rows = x.policy.window - (x.policy.queries == "W-1")
    each = x.heard.queries(x.seq, x.at, rows, older).softmax(-1).amax(0)
    score = each.amax(0) if x.policy.fuse == "max" else each.sum(0)
    may = [p for p in older if p >= x.fixed]
    return x.stay(last, best(dict(zip(older, score.tolist(), strict=True)), may, room - len(last)))


def by_random_attention(x: Look, _: Any) -> Lane:
    if (keep := x.due(x.policy.buffer)) is None:
        return x.lane
    room = keep - x.fixed
    last = x.last(min(room, x.policy.buffer))
    score = {p: x.u(x.at[1], p) for p in x.others if p not in last}
    if x.policy.clip:
        score |= dict.fromkeys(range(min(x.prompt, keep - x.policy.buffer - 1)), 2.0)
    return x.stay(last, best(score, [p for p in x.others if p not in last], room - len(last)))


def by_vase(x: Look, _: Any) -> Lane:
    policy, budget = x.policy, x.policy.budget
    if (keep := x.due(policy.buffer)) is None:
        return x.lane
    room = keep - x.fixed
    last = x.last(min(room, policy.buffer))
    older = [p for p in x.lane if p not in last]
    may, room = [p for p in older if p >= x.fixed], room - len(last)
    if policy.variant == "dkv":
        u = torch.tensor([x.u(0, i) for i in range(CONFIG.head_dim * policy.rank)], dtype=torch.float64)
        g = (torch.special.ndtri(u) / policy.rank**0.5).view(CONFIG.head_dim, -1)
        v = torch.stack([x.heard.values[x.seq, x.at[0]][p][x.at[1]] for p in older])
        s = (x.heard.keys(x.seq, x.at, older) @ g).square().sum(-1) * (v @ g).square().sum(-1)
        score = {p: math.inf if p < policy.n_sink else a for p, a in zip(older, s.tolist(), strict=True)}
        return x.stay(last, best(score, may, room))
    values = {p: x.heard.values[x.seq, x.at[0]][p][x.at[1]] for p in older}
    m = {p: math.inf if p < policy.n_sink else float(v.max() - v.min()) for p, v in values.items()}
    large = best(m, may, min(room, max(policy.n_sink, budget // 4 if policy.n_large is None else policy.n_large)))
    p = (x.heard.queries(x.seq, x.at, policy.buffer, older) / policy.temperature).softmax(-1).mean(1)  # [g, S]
    half = policy.smooth // 2
    wide = torch.nn.functional.pad(p, (half, half))
    w = (wide.unfold(-1, policy.smooth, 1).sum(-1) / policy.smooth).mean(0)
    race = {p: math.log(x.u(x.at[1], p)) / float(w[i]) for i, p in enumerate(older)}
    return x.stay(last, large, best(race, [p for p in may if p not in large], room - len(large)))


def by_sepllm(x: Look, _: Any) -> Lane:
    if (keep := x.due()) is None:
        return x.lane
    room = keep - x.fixed

    def tokens(size: float) -> int:
        return int(size) if size >= 1 else int(round(size * room, 6))

    last = x.last(min(room, max(1, tokens(x.policy.window))))
    older = [p for p in x.others if p not in last]
    first = [p for p in older if p < x.policy.initial][: room - len(last)]
    left = max(0, min(room - len(last) - len(first), tokens(x.policy.separators)))
    text = tokens_of(x.seq, 100)
    others = [p for p in older if p not in first]
    separators = [p for p in others if text[p] in x.policy._ids]
    kept = separators[max(0, len(separators) - left) :]
    if x.policy.fill:
        plain = [p for p in others if p not in separators]
        kept += plain[max(0, len(plain) - (left - len(kept))) :]
    return x.stay(last, first, kept)


LOOPS: dict[str, Callable[[Look, Any], Lane]] = {
    "raas": by_raas,
    "lazy_eviction": by_lazy_eviction,
    "morphkv": by_morphkv,
    "random_attention": by_random_attention,
    "vase": by_vase,
    "sepllm": by_sepllm,
}


# Of policies that note scores: newest tokens, which always stay.
WINDOWS: dict[str, Callable[[Any], int]] = {
    "raas": lambda policy: 0,
    "lazy_eviction": lambda policy: policy.window,
    "morphkv": lambda policy: policy.window,
    "vase": lambda policy: policy.buffer,
}


@pytest.mark.parametrize(
    "text",
    [
        "raas:budget=13",
        "raas:budget=9,alpha=0.11,protect_prompt=false",
        "raas:budget=17,share=0.3,schedule=sawtooth:17/13",
        "raas:budget=16,page=3",
        "raas:budget=12,page=4,alpha=0.2,protect_prompt=false,schedule=interval:3",
        "raas:schedule=sawtooth:13/5,page=4,protect_prompt=false,share=0.3",
        "raas:budget=13,page=3,form=official",
        "raas:budget=20,page=4,form=official,protect_prompt=true",
        "raas:budget=11,form=official",
        "lazy_eviction:budget=9,window=3,alpha=0.11",
        "lazy_eviction:budget=15,window=4,alpha=0.13,group=max,protect_prompt=true",
        "lazy_eviction:budget=9,window=3,alpha=0.11,schedule=interval:2",
        "lazy_eviction:budget=6,window=2,alpha=0.11",
        "lazy_eviction:budget=11,window=3,alpha=0.09,schedule=sawtooth:11/8",
        "morphkv:budget=8",
        "morphkv:budget=16,window=4,fuse=sum,protect_prompt=true",
        "morphkv:budget=9,window=2,queries=W,schedule=interval:3",
        "random_attention:budget=15,buffer=3",
        "random_attention:budget=9,buffer=3,scope=layer,protect_prompt=false,clip=true,seed=5",
        "random_attention:budget=12,buffer=2,protect_prompt=false,schedule=sawtooth:12/8",
        "vase:budget=12,buffer=3,n_sink=2",
        "vase:budget=16,buffer=3,n_large=2,n_sink=0,smooth=3,temperature=0.3,protect_prompt=true",
        "vase:budget=10,buffer=2,n_sink=1,n_large=2,smooth=1,schedule=interval:3,seed=2",
        "vase:budget=10,buffer=3,n_sink=1,variant=dkv,rank=3",
        "sepllm:budget=14,initial=1,separators=3,window=4",
        "sepllm:budget=18,separators=0.3,window=0.4,fill=true,protect_prompt=true",
        "sepllm:budget=12,separators=2,window=3,schedule=sawtooth:12/10",
        "raas:budget=16,share=0.3+random_attention:budget=13,buffer=2",
        "raas:budget=15,page=3,share=0.3+vase:budget=14,buffer=2,n_sink=1",
        "lazy_eviction:budget=10,window=2,alpha=0.11+morphkv:budget=9",
        "sepllm:budget=12,separators=2,window=3+morphkv:budget=12",
    ],
)
@torch.inference_mode()
def test_loops_choose_the_same_tokens(text: str) -> None:
    """Three rows, one of them idle; prompts are read in two chunks. Sequence 0 ends, and 2 takes its row.

    Of a stack, a lane keeps the tokens that every member's loop keeps. No token goes while its prompt is read, or in
    the rows that have no new token. A recorder hears scores of all tokens that may go, and none stays with a lower
    score than one that goes.
    """
    prompts, length, gone = {0: 10, 1: 4, 2: 7}, 60, 0
    policy = informed(parse(text), CONFIG, [(b"x", b" .", b"y")[token % 3] for token in range(CONFIG.vocab_size)])
    manager = KVManager(CONFIG, Rope(CONFIG), policy, rows=3, tokens=length)
    heard, states = Heard(manager), defaultdict[Any, dict[Any, Any]](dict)
    notes: Any = Notes()
    manager.recorder = notes

    def lanes(seq: int) -> dict[tuple[int, int], Lane]:
        return {(i, h): sorted(lane) for i in LAYERS for h, lane in enumerate(heard.held(i, seq))}

    def feed(counts: dict[int, int]) -> None:
        nonlocal gone
        before = {seq: lanes(seq) for seq in heard.row_of}
        new = {seq: range(manager.length(seq), manager.length(seq) + n) for seq, n in counts.items()}
        ids = [t for seq in counts for t in tokens_of(seq, 100)[new[seq].start : new[seq].stop]]
        heard.expect(list(counts), list(counts.values()))
        manager.begin_step(list(counts), list(counts.values()), ids)
        DECODER(torch.tensor(ids), heard)
        manager.end_step()
        for seq in heard.row_of:
            n = new.get(seq, range(0))
            if n.stop < prompts[seq]:  # it has no new token, or a part of its prompt is still to come
                assert lanes(seq) == {at: [*lane, *n] for at, lane in before[seq].items()}
                continue
            for at, got in lanes(seq).items():
                lane = [*before[seq][at], *n]
                want = set(lane)
                for i, member in enumerate(members(policy)):
                    look = Look(member, policy, heard, seq, at, lane, n.stop)
                    stay = LOOPS[member.name](look, states[seq, at, i])
                    want &= set(stay)
                    if len(stay) < len(lane) and member.name in WINDOWS:
                        score = notes.scores(member, heard.row_of[seq], at)
                        newest = look.last(min(len(stay) - look.fixed, WINDOWS[member.name](member)))
                        assert list(score) == [p for p in look.others if p not in newest]
                        left = [score[p] for p in score if p in stay]
                        right = [score[p] for p in set(lane) - set(stay)]
                        assert min(left, default=math.inf) >= max(right)
                assert got == sorted(want), f"sequence {seq}, {n.stop} tokens, layer {at[0]}, head {at[1]}"
                gone += len(lane) - len(want)

    def begin(seq: int) -> None:
        manager.join(seq, length, prompts[seq])
        heard.join(seq, prompts[seq])
        feed({seq: prompts[seq] - 2})
        feed({seq: 2})

    begin(0)
    begin(1)
    for _ in range(16):
        feed({0: 1, 1: 1})
    manager.leave(0)
    heard.leave(0)
    for _ in range(2):
        feed({1: 1})
    begin(2)
    assert heard.row_of[2] == manager.row_of(2) == 0
    for _ in range(22):
        feed({1: 1, 2: 1})
    assert gone > 80
