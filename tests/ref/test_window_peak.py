"""The score of MorphKV: the worked example of its code, a plain calculation, and lanes that differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.window_peak import window_peak
from tests.compare import assert_close
from tests.windows import assert_lanes_are_scored_alone

# 5 keys and the query 4 of two heads that share them; keys 3 and 4 stay, W = 2
KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2)])
QUERIES = torch.tensor([[(1, 0.2)], [(0.5, -0.5)]])
BEFORE_WINDOW = torch.arange(5) < 3


@pytest.mark.parametrize("fuse", ["max", "sum"])
def test_worked_example(fuse: str) -> None:
    """What `morphkv/morph_cache.py` gives; of one query maximum and sum are the same."""
    got = window_peak(QUERIES[None], KEYS[None, None], BEFORE_WINDOW[None, None], fuse)
    assert_close("score", got[0, 0], torch.tensor([0.4785, 0.4274, 0.1344, 0.0, 0.0]), atol=6e-5)


def plain(q: Tensor, k: Tensor, fuse: str) -> Tensor:
    """One lane, one query after the other, in double precision. q: [g, W, D], k: [n, D] → [n]."""
    rows = []
    for w in range(q.shape[1]):
        heads = [torch.stack([q_h[w] @ k_j for k_j in k]) / q.shape[-1] ** 0.5 for q_h in q]
        rows.append(torch.stack([logits.softmax(0) for logits in heads]).amax(0))
    return torch.stack(rows).amax(0) if fuse == "max" else torch.stack(rows).sum(0)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    fuse=st.sampled_from(["max", "sum"]),
    shared=st.booleans(),
    data=st.data(),
)
def test_every_lane_is_scored_by_its_own_keys(
    shape: tuple[int, ...], fuse: str, shared: bool, data: st.DataObject
) -> None:
    assert_lanes_are_scored_alone(
        lambda q, k, valid: window_peak(q, k, valid, fuse), lambda q, k: plain(q, k, fuse), shape, shared, data
    )
