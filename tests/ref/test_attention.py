"""Causal grouped attention against loops over queries and heads in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.attention import attention
from tests.compare import assert_close

torch.set_num_threads(1)


def loops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query and one head at a time."""
    (n, heads, d), s = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(n):
        for h in range(heads):
            seen, kv = s - n + i + 1, h // (heads // k.shape[0])
            p = (k[kv, :seen].double() @ q[i, h].double() / d**0.5).softmax(0)
            out[i, h] = p @ v[kv, :seen].double()
    return out


def draw(n: int, s: int, kv_heads: int, group: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(n, kv_heads * group, d, generator=generator)
    k, v = torch.randn(2, kv_heads, s, d, generator=generator).unbind()
    return q, k, v


@given(
    n=st.integers(1, 9),
    before=st.integers(0, 20),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    d=st.integers(1, 20),
    seed=st.integers(0, 999),
)
def test_loops(n: int, before: int, kv_heads: int, group: int, d: int, seed: int) -> None:
    q, k, v = draw(n, n + before, kv_heads, group, d, seed)
    assert_close(f"n {n}, before {before}", attention(q, k, v), loops(q, k, v), atol=1e-5)


@given(n=st.integers(1, 6), before=st.integers(0, 6), seed=st.integers(0, 999))
def test_views_into_a_larger_cache(n: int, before: int, seed: int) -> None:
    """Keys and values are slices of buffers whose rest is not defined."""
    q, k, v = draw(n, n + before, 2, 2, 6, seed)
    s = n + before
    cache = torch.full((2, 2, s + 5, 6), torch.nan)
    cache[0, :, :s], cache[1, :, :s] = k, v
    assert_close("in a cache", attention(q, cache[0, :, :s], cache[1, :, :s]), loops(q, k, v), atol=1e-5)


def test_the_future_is_not_seen() -> None:
    q, k, v = draw(5, 8, 2, 2, 6, 0)
    want = attention(q, k, v)
    k[:, 6:], v[:, 6:] = 100.0, 100.0  # tokens 6 and 7: only the last two of the five queries may notice
    got = attention(q, k, v)
    assert_close("past", got[:3], want[:3], atol=1e-6)
    assert ((got[3:] - want[3:]).abs().amax((1, 2)) > 1).all()


# Probabilities and outputs are averages of values of size 1, each rounded to 2^-9 or 2^-12 a few times.
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize("n", [1, 4, 30])
def test_half_precision(n: int, dtype: torch.dtype, atol: float) -> None:
    q, k, v = (x.to(dtype) for x in draw(n, 30, 2, 3, 16, 1))
    got = attention(q, k, v)
    assert got.dtype == dtype
    assert_close(f"{dtype}, {n} queries", got, loops(q, k, v), atol=atol)
