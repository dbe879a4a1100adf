"""Whether scores of eviction find the tokens that statements need, in one text of the full cache.

The rules of the text say which tokens a statement needs (`tasks/needs.py`). A pair of a statement and a need counts
if all tokens that carry the need are generated, and more than 64 tokens old when the statement begins. Each score
ranks all generated tokens of that age at this moment, and the best rank of the pair's tokens counts:

    crf       LRFU (Crystal-KV §5.2)    lru       the last hit
    lfu       the number of hits        h2o       attention received so far
    position  the newest first          random    noise

A rank is the share of the other tokens with a lower score, ties counting half. As in Crystal-KV, queries of the
answer do not count. No eviction disturbs the scores: all are of the same text. `all` and `answer` hold shares of all
pairs and of the answer's pairs whose rank is in the best quarter:

    heads      mean over all heads
    readers    over the heads that read the pair: a query that writes the statement looks at one of its tokens more
               than at any other token that is ranked
    somewhere  in at least one head
    like_crf   heads in which the score and CRF agree on whether the rank is in the best quarter

`random` says what chance gives. It gives more than a quarter, because a need may have several tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minithink.tasks.needs import Reading

FAR = 64  # tokens: a token is far if it is older
BEST = 0.75  # the least rank of the best quarter
SCORES = ("crf", "lru", "lfu", "h2o", "position", "random")
BESIDE = ("reads", "hits", "late_hits", "rest")


class Pair(NamedTuple):
    """A statement and one of its needs."""

    start: int  # of the statement
    end: int
    time: int  # queries before this position count: the statement's start, in the answer the end of the thinking
    places: tuple[int, ...]  # the tokens that carry the need, the newest last
    answers: bool  # whether the statement is in the answer

    @property
    def old(self) -> int:
        """The tokens before this position are more than FAR tokens old."""
        return max(0, self.time - FAR)


def pairs_of(reading: Reading, prompt: int, end: int) -> tuple[list[Pair], int]:
    """The pairs of a text that count, where there are more than FAR tokens to rank; and how many needs of the same
    age do not count, because a token of the prompt meets them, too.

    prompt: its tokens; end: the generated tokens of the thinking.
    """
    pairs = list[Pair]()
    given = 0
    for need in reading.needs:
        start, stop = (at - prompt for at in reading.statements[need.statement][:2])
        places = sorted(place - prompt for place in need.places)
        pair = Pair(start, stop, min(start, end + 1), tuple(places), start > end)
        if pair.old > FAR and 0 <= places[-1] < pair.old:
            given += places[0] < 0
            pairs += [pair] if places[0] >= 0 else []
    return pairs, given


def scores(
    mass: Tensor, hits: Tensor, times: Collection[int], noise: Tensor, lam: float
) -> dict[int, dict[str, Tensor]]:
    """Every score of every token at some moments: time → score → float64 [Hkv, T].

    CRF is a logarithm, which never underflows: log CRF ← log(λ·CRF + [hit]).

    Args:
        mass: float32 [T, Hkv, T], weights: queries, heads, keys; all of generated tokens.
        hits: bool, alike; a token's birth is a hit.
        times: from 1 to T; at time t, the queries before position t have been seen.
        noise: float64 [Hkv, T].
        lam: λ, from 0 to 1.
    """
    out = dict[int, dict[str, Tensor]]()
    decay = math.log(lam) if lam > 0 else -math.inf
    nothing = torch.zeros_like(noise)
    crf = nothing - math.inf
    last = nothing - 1
    count = nothing
    received = nothing
    position = torch.arange(noise.shape[1], dtype=torch.float64, device=noise.device).expand_as(noise)
    for t in range(max(times, default=0)):
        crf = crf + decay
        crf = torch.where(hits[t], torch.logaddexp(crf, nothing), crf)
        last = last.masked_fill(hits[t], t)
        count = count + hits[t]
        received = received + mass[t]
        if t + 1 in times:
            out[t + 1] = dict(zip(SCORES, (crf, last, count, received, position, noise), strict=True))
    return out


def rank(score: Tensor, places: Sequence[int]) -> Tensor:
    """The best rank of some tokens: the share of the other tokens with a lower score, ties counting half.

    score: [Hkv, n], n ≥ 2, not NaN; places: columns → float64 [Hkv].
    """
    own = score[:, list(places), None]  # [Hkv, places, 1]
    every = score[:, None]  # [Hkv, 1, n]
    lower = (every < own).sum(-1).double()
    equal = (every == own).sum(-1).double()
    others = score.shape[1] - 1
    return ((lower + (equal - 1) / 2) / others).amax(1)


def of_pairs(
    pairs: Sequence[Pair], mass: Tensor, hits: Tensor, at: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """One layer's measures of every pair: name → [pairs, Hkv]. Without pairs: empty.

    mass, hits: as `scores` takes them, at: as it gives them.
    Beside the ranks: `reads`, whether the head reads the pair. Of the pair's newest token, until the statement:
    `hits` after its birth, `late_hits` more than FAR tokens after it, and `rest`, the tokens since the last hit.
    """
    out = defaultdict[str, list[Tensor]](list)
    for pair in pairs:
        newest = pair.places[-1]
        places = list(pair.places)
        for name, score in at[pair.time].items():
            out[name].append(rank(score[:, : pair.old], places))
        own = hits[newest + 1 : pair.time, :, newest]
        seen = mass[pair.start - 1 : pair.end - 1, :, : pair.old].argmax(-1)  # [queries, Hkv]
        out["reads"].append((seen[..., None] == seen.new_tensor(places)).any(-1).any(0))
        out["hits"].append(own.sum(0).double())
        out["late_hits"].append(own[FAR:].sum(0).double())
        out["rest"].append(pair.time - 1 - at[pair.time]["lru"][:, newest])
    return {name: torch.stack(values) for name, values in out.items()}


def needs_of(pairs: Sequence[Pair], looks: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """What each score finds, and means over the pairs by layer and head.

    pairs: of all texts in turn, at least one; looks: of texts, as `of_pairs` gives them, but [pairs, L, Hkv].
    """
    of = {name: torch.cat([x[name] for x in looks if name in x]) for name in (*SCORES, *BESIDE)}
    answer = torch.tensor([pair.answers for pair in pairs])
    best = {name: of[name] >= BEST for name in SCORES}

    def shares(name: str, chosen: Tensor) -> dict[str, float]:
        found = best[name][chosen]
        reads = of["reads"][chosen]
        values = {
            "heads": found,
            "readers": found[reads],
            "somewhere": found.flatten(1).any(1),
            "like_crf": found == best["crf"][chosen],
            "rank": of[name][chosen],
        }
        return {what: float(x.double().mean()) for what, x in values.items()}

    groups = {"all": torch.ones_like(answer), "answer": answer}
    scores = []
    for name in SCORES:
        of_groups = {group: shares(name, chosen) for group, chosen in groups.items()}
        scores.append({"score": name, **of_groups})
    return {
        "pairs": len(answer),
        "pairs_of_answer": int(answer.sum()),
        "scores": scores,
        **{name: of[name].double().mean(0).tolist() for name in BESIDE},
        "best_quarter": {name: best[name].double().mean(0).tolist() for name in SCORES},
    }
