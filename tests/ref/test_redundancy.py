"""Redundancy of keys: the worked example of R-KV's code, the code's own steps lane by lane, and lanes that differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.redundancy import redundancy
from tests.compare import assert_close

KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])


def test_worked_example() -> None:
    """What `rkv/utils.py` gives with retain_direction="last"; key 4 resembles none and costs key 0 its similarity."""
    got = redundancy(KEYS[None, None], torch.ones(1, 1, 6, dtype=torch.bool))
    want = torch.tensor([0.2054, 0.1827, 0.1853, 0.1674, 0.1026, 0.1566])
    assert_close("redundancy", got[0, 0], want, atol=6e-5)


def test_the_newest_of_equal_keys_is_spared() -> None:
    """Three equal keys: each of the first two has the third for j*, the third has the second."""
    k = torch.tensor([(3.0, 4.0)] * 3)[None, None]
    got = redundancy(k, torch.ones(1, 1, 3, dtype=torch.bool))[0, 0]
    # columns of C without the spared elements: 1 and 1 on key 0, 1 on key 1, none on key 2
    assert_close("redundancy", got, torch.tensor([2 / 3, 1 / 3, 0.0]).softmax(0), atol=1e-6)


def plain(k: Tensor, threshold: float) -> Tensor:
    """One lane, element by element. k: [n, D] → [n]."""
    n, unit = len(k), k / (k.norm(dim=-1, keepdim=True) + 1e-8)
    c = [[0.0 if i == j else float(unit[i] @ unit[j]) for j in range(n)] for i in range(n)]
    for row in c:
        similar = [j for j in range(n) if row[j] > threshold]
        row[max(similar, default=0)] = 0.0
    return torch.tensor([sum(row[j] for row in c) / n for j in range(n)], dtype=torch.float64).softmax(0)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
    dim=st.integers(1, 4),
    threshold=st.sampled_from([0.5, 0.9, 0.0, -0.3]),
    at_once=st.sampled_from([1, 2, 4, 256]),
    shared=st.booleans(),
    data=st.data(),
)
def test_every_lane_is_scored_by_its_own_keys(
    shape: tuple[int, ...], dim: int, threshold: float, at_once: int, shared: bool, data: st.DataObject
) -> None:
    """Lanes of differing length, some of them empty, NaN behind their ends; however many rows are taken at once."""
    b, hkv, s = shape
    k = torch.randn(b, hkv, s, dim, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))
    heads = 1 if shared else hkv
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, s), min_size=b * heads, max_size=b * heads)))
    valid = torch.arange(s) < lengths.view(b, heads, 1)
    k[~valid.expand(b, hkv, s)] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.ref.redundancy.ROWS_AT_ONCE", at_once)
        got = redundancy(k, valid, threshold)
    want = torch.zeros(b, hkv, s)
    for i in range(b):
        for h in range(hkv):
            n = int(lengths.view(b, heads)[i, 0 if shared else h])
            if n:
                want[i, h, :n] = plain(k[i, h, :n], threshold)  # in float32 too: the threshold is sharp
    assert_close("redundancy", got, want, atol=1e-6)
