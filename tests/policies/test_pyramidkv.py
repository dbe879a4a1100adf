"""PyramidKV: budgets of layers, by hand and by laws. `test_snapkv_decode.py` has it in a running decoder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.errors import UsageError
from minithink.policies import parse
from minithink.policies.pyramidkv import PyramidKV, ladder
from tests.policies.drive import follow, held


def whole(cap: int, window: int, beta: int, layers: int, n: int, uniform: bool) -> list[int]:
    """Budgets of all layers, the window's tokens included."""
    b, w = (torch.full((layers, 1, 1), x, dtype=torch.int32) for x in (cap - window, window))
    return (w + ladder(b, torch.tensor([[[n]]], dtype=torch.int32), w, beta, uniform)).flatten().tolist()


def test_layers_by_hand() -> None:
    """What `pyramidkv_utils.py` gives; only its sum of 32 layers is too large, by 304 tokens."""
    assert whole(12, 4, 4, 4, 14, True) == [12, 12, 12, 12]
    assert whole(12, 4, 4, 4, 14, False) == [14, 13, 11, 10]
    for n in (1, 11, 12):
        assert whole(12, 4, 4, 4, n, False) == [12, 12, 12, 12], "room for all that are there"
    assert whole(12, 4, 4, 4, 15, True) == [12, 12, 12, 12], "fewer than 2b tokens"
    assert whole(12, 4, 4, 4, 16, True) == whole(12, 4, 4, 4, 16, False) == [16, 14, 10, 8]
    for n in (18, 100):
        assert whole(12, 4, 4, 4, n, True) == whole(12, 4, 4, 4, n, False) == [18, 14, 10, 6]
    assert whole(128, 8, 20, 4, 1000, True) == [242, 166, 90, 14]
    budgets = whole(2048, 32, 20, 32, 8000, True)
    assert budgets[:2] == [3964, 3841]
    assert sum(budgets) - 32 * 32 == 64512 == 64816 - 304


@given(
    b=st.integers(0, 300),
    layers=st.integers(1, 40),
    more=st.integers(0, 700),
    window=st.integers(1, 8),
    beta=st.integers(1, 30),
    uniform=st.booleans(),
)
def test_a_ladder_falls_and_its_sum_is_exact(
    b: int, layers: int, more: int, window: int, beta: int, uniform: bool
) -> None:
    """From one token to the next no layer gains more than this token, so no layer needs what it has evicted."""
    n = b + window + more
    tokens = [whole(b + window, window, beta, layers, n + i, uniform) for i in (0, 1)]
    for t in tokens:
        assert sum(t) == layers * (b + window)
        assert sorted(t, reverse=True) == t
        assert t[-1] >= window + b // beta * (layers > 1)
        assert t[0] <= n + 1
    if not uniform:
        assert all(after - before <= 1 for before, after in zip(*tokens, strict=True))
    if beta == 1 or not more:
        assert set(tokens[0]) == {b + window}


def test_recent_tokens_are_part_of_the_window() -> None:
    """Budget 44, half of it for recent tokens, β = 4: b = 22, lo = 5, hi = 39, each beside a window of 22. So the
    layers hold 61 and 27 tokens; with the window of α tokens they would hold 74 and 14. The recent tokens of a layer
    are half of what it holds."""
    *_, cache = follow(PyramidKV(budget=44, recent=0.5, alpha=4, buffer=0, beta=4), [30], 80)
    lanes = held(cache, 0)
    assert [len(lane) for lane in lanes] == [61, 61, 27, 27]
    for lane, newest in zip(lanes, (30, 30, 13, 13), strict=True):
        assert {*range(110 - newest, 110)} <= {*lane}


def test_defaults() -> None:
    """Of the authors' code."""
    assert (PyramidKV(budget=64).beta, PyramidKV(budget=64).uniform) == (20, False)


def test_a_beta_below_1_is_refused() -> None:
    with pytest.raises(UsageError, match="beta is 0; it must be at least 1"):
        parse("pyramidkv:beta=0", budget=64)
