"""The log-sum-exp merge: parts of an attention, cut anywhere, give the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.decode_attention import decode_attention
from minithink.ref.merge import merge, partial_attention
from tests.compare import assert_close

torch.set_num_threads(1)


def draw(s: int, kv_heads: int, group: int, d: int, sharp: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = sharp * torch.randn(2, kv_heads * group, d, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, s, d, generator=generator).unbind()
    return q, k, v


@given(
    s=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3]),
    d=st.integers(1, 16),
    parts=st.integers(1, 5),
    sharp=st.sampled_from([0.0, 1.0, 300.0]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parts_give_the_whole(
    s: int, kv_heads: int, group: int, d: int, parts: int, sharp: float, seed: int, dtype: torch.dtype
) -> None:
    """Every token belongs to one part of its lane or to none; parts may be empty, in all lanes or in some."""
    q, k, v = (x.to(dtype) for x in draw(s, kv_heads, group, d, sharp, seed))
    generator = torch.Generator().manual_seed(seed)
    part = torch.randint(-1, parts, (2, kv_heads, s), generator=generator)
    part[..., 0] = 0  # somewhere a token must be
    got, lse = merge([partial_attention(q, k, v, part == i) for i in range(parts)])
    assert got.dtype == lse.dtype == torch.float32
    # the logits' own rounding is magnified where they are extreme
    atol = 1e-5 + 2e-6 * sharp * d**0.5
    whole, whole_lse = partial_attention(q, k, v, part >= 0)
    assert_close("out", got, whole, atol=atol)
    assert_close("lse", lse, whole_lse, atol=1e-5, rtol=1e-6)
    assert_close("attention", got, decode_attention(q.float(), k.float(), v.float(), part >= 0), atol=atol)


def test_lse_is_what_it_says() -> None:
    q, k, v = draw(7, 2, 3, 4, 1.0, 0)
    valid = torch.rand(2, 2, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    _, lse = partial_attention(q, k, v, valid)
    for i, h in [(0, 0), (0, 2), (1, 3), (1, 5)]:
        logits = [float(k[i, h // 3, j] @ q[i, h]) / 2 for j in valid[i, h // 3].nonzero()[:, 0]]
        assert float(lse[i, h]) == pytest.approx(math.log(sum(map(math.exp, logits))), abs=1e-5)


def test_an_empty_part_is_nothing() -> None:
    q, k, v = draw(5, 2, 2, 6, 1.0, 0)
    valid = torch.ones(2, 2, 5, dtype=torch.bool)
    valid[0] = False
    out, lse = partial_attention(q, k, v, valid)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert lse[1].isfinite().all()
    whole = partial_attention(q, k, v, torch.ones_like(valid))
    for order in (1, -1):
        got, total = merge([whole, partial_attention(q, k, v, torch.zeros_like(valid))][::order])
        assert_close("out", got, whole[0], atol=1e-6)
        assert_close("lse", total, whole[1], atol=1e-6)


@pytest.mark.parametrize("logit", [-1e4, -200.0, 200.0, 1e4, 1e30])
def test_extreme_logits(logit: float) -> None:
    """exp of any of these is 0 or ∞ in float32. Equal logits give the mean, as far as lse can tell their number; and
    where three of them are 100 less, the other."""
    q, k = torch.ones(1, 1, 1), torch.full((1, 1, 4, 1), logit)
    v = torch.tensor([1.0, 2, 3, 6]).view(1, 1, 4, 1)
    first = torch.tensor([[[True, True, True, False]]])
    got, lse = merge([partial_attention(q, k, v, first), partial_attention(q, k, v, ~first)])
    # lse has 24 bits, and the weights of the parts' means, 2 and 6, suffer from it; they sum to 1 all the same
    assert_close("mean", got, torch.full((1, 1, 1), 3.0), atol=min(3.0, 1e-5 + abs(logit) * 2.0**-23))
    assert_close("lse", lse, torch.full((1, 1), logit + math.log(4)), atol=1e-5, rtol=1e-6)
    if abs(logit) < 1e5:
        k[0, 0, :3] -= 100
        got, _ = merge([partial_attention(q, k, v, first), partial_attention(q, k, v, ~first)])
        assert_close("the last", got, torch.full((1, 1, 1), 6.0), atol=1e-5)
