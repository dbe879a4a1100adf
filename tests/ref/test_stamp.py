"""Stamps against plain histories: a token's stamp is its last hit, its MRI the longest time between two of them."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.stamp import NOWHERE, stamp


@given(
    prompt=st.integers(1, 5),
    trace=st.lists(
        st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 30), max_size=2)), min_size=1, max_size=25
    ),
    gaps=st.booleans(),
)
def test_last_hit_and_longest_gap(prompt: int, trace: list[tuple[set[int], set[int]]], gaps: bool) -> None:
    """At each step one token comes, some are hit, and then some go, whoever evicts them."""
    known = tuple(torch.full((1, 1, 1, 40), x, dtype=torch.int32) for x in (NOWHERE, 0, 0)[: 2 + gaps])
    hits = {p: [0] for p in range(prompt)}  # token → times of its hits, after the time before it came
    for t, (hit, gone) in enumerate(trace, start=1):
        hits[prompt + t - 1] = [t - 1]
        for p in hit & hits.keys():
            hits[p].append(t)
        held = len(hits)
        pos = torch.tensor([*hits, -1, -1], dtype=torch.int32).view(1, 1, 1, -1)
        flags = torch.tensor([p in hit for p in [*hits, 99, 99]]).view(1, 1, 1, -1)
        flags[..., -1] = True  # behind the last token: means nothing
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        stamp(flags, pos, held * one, known, torch.tensor([0]), prompt * one[0, 0], t * one[0, 0], one[0, 0].bool())
        assert known[0].flatten().tolist() == [*hits, *[NOWHERE] * (40 - held)]
        assert known[1].flatten().tolist() == [*(times[-1] for times in hits.values()), *[0] * (40 - held)]
        before = [x.clone() for x in known]
        rest = held * one, known, torch.tensor([0]), prompt * one[0, 0], (t + 9) * one[0, 0]
        stamp(~flags, pos, *rest, torch.tensor([False]))  # an idle row
        assert all(map(torch.equal, known, before))
        if gaps:
            longest = [max((b - a for a, b in pairwise(x)), default=0) for x in hits.values()]
            assert known[2].flatten().tolist()[:held] == longest
        hits = {p: times for p, times in hits.items() if p not in gone}
