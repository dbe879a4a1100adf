"""Importance by the newest queries: the worked example of R-KV's code, a plain calculation, and lanes that differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.window_importance import window_importance
from tests.compare import assert_close
from tests.windows import assert_lanes_are_scored_alone

# 6 keys and the queries 4 and 5 of two heads that share them; the window is keys 4 and 5
KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])
QUERIES = torch.tensor([[(1, 0.2), (0.3, 1)], [(0.5, -0.5), (1, 0.5)]])
BEFORE_WINDOW = torch.arange(6) < 4
PLAIN = [0.3600, 0.3276, 0.1096, 0.2027]


@pytest.mark.parametrize(
    ("kernel_size", "pooling", "want"),
    [(1, "max", PLAIN), (1, "avg", PLAIN), (3, "max", [0.3600, 0.3600, 0.3276, 0.2027])],
)
def test_worked_example(kernel_size: int, pooling: str, want: list[float]) -> None:
    """What `rkv/compression/r1_kv.py` gives."""
    got = window_importance(QUERIES[None], KEYS[None, None], BEFORE_WINDOW[None, None], kernel_size, pooling)
    assert_close("importance", got[0, 0], torch.tensor([*want, 0.0, 0.0]), atol=6e-5)


def plain(q: Tensor, k: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """One lane, one number after the other, in double precision. q: [g, W, D], k: [n, D] → [n]."""
    rows = []
    for w in range(q.shape[1]):
        logits = [max(float(q_h[w] @ k_j) for q_h in q) / q.shape[-1] ** 0.5 for k_j in k]
        rows.append(torch.tensor(logits, dtype=torch.float64).softmax(0))
    mean, n, side = torch.stack(rows).mean(0), len(k), kernel_size // 2
    near = [mean[max(0, j - side) : min(n, j + side + 1)] for j in range(n)]
    return torch.stack([x.max() if pooling == "max" else x.sum() / kernel_size for x in near])


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    kernel_size=st.sampled_from([1, 3, 5, 7]),
    pooling=st.sampled_from(["max", "avg"]),
    shared=st.booleans(),
    data=st.data(),
)
def test_every_lane_is_scored_by_its_own_keys(
    shape: tuple[int, ...], kernel_size: int, pooling: str, shared: bool, data: st.DataObject
) -> None:
    assert_lanes_are_scored_alone(
        lambda q, k, valid: window_importance(q, k, valid, kernel_size, pooling),
        lambda q, k: plain(q, k, kernel_size, pooling),
        shape,
        shared,
        data,
    )
