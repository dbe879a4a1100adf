"""TriAttention's scores of keys: the worked example, a sum over distances with unrotated keys, and laws.

To run it alone: pytest tests/ref/test_tri_score.py
"""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref.tri_score import tri_score
from tests.compare import assert_close, assert_same

torch.set_num_threads(1)


class Keys:
    """Keys of N rows, [N, Hkv, S, D], as `tri_score` reads them."""

    def __init__(self, k: Tensor) -> None:
        self.k = k

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.k, torch.full_like(self.k, torch.nan)  # values are not read


def by_loops(k: Tensor, query: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
    """The formula, number by number, in float64."""
    n, kv_heads, tokens, dim = k.shape
    group = query.shape[1] // kv_heads
    out = torch.zeros(n, kv_heads, tokens, dtype=torch.float64)
    for row in range(n):
        for head in range(kv_heads):
            own = [s for s in range(tokens) if candidates[row, head % candidates.shape[1], s]]
            best = [-math.inf] * len(own)
            for h in range(head * group, head * group + group):
                scores = []
                for s in own:
                    key = k[row, head, s].double()
                    total = float(query[row, h].double() @ key)
                    for f in range(dim // 2):
                        total += float(weight[h, f]) * math.hypot(float(key[f]), float(key[f + dim // 2]))
                    scores.append(total)
                mean = sum(scores) / max(1, len(scores))
                deviation = math.sqrt(sum((x - mean) ** 2 for x in scores) / max(1, len(scores)))
                for i, x in enumerate(scores):
                    best[i] = max(best[i], (x - mean) / max(deviation, 1e-6))
            for s, z in zip(own, best, strict=True):
                out[row, head, s] = z
    return out


@given(
    n=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tokens=st.integers(1, 9),
    half=st.integers(1, 5),
    together=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_loops_give_the_same(
    n: int, kv_heads: int, group: int, tokens: int, half: int, together: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    k = torch.randn(n, kv_heads, tokens, 2 * half, generator=draw)
    query = torch.randn(n, kv_heads * group, 2 * half, generator=draw)
    weight = torch.rand(kv_heads * group, half, generator=draw)
    candidates = torch.rand(n, 1 if together else kv_heads, tokens, generator=draw) < 0.7
    got = tri_score(Keys(k), 0, query, weight, candidates)
    assert got.dtype == torch.float32
    assert_close("Z", got, by_loops(k, query, weight, candidates).float(), atol=2e-4, rtol=1e-4)


def test_tokens_that_are_no_candidates_have_no_influence() -> None:
    draw = torch.Generator().manual_seed(1)
    k = torch.randn(1, 2, 6, 4, generator=draw)
    query = torch.randn(1, 4, 4, generator=draw)
    weight = torch.rand(4, 2, generator=draw)
    candidates = torch.tensor([True, False, True, True, False, True]).view(1, 1, 6)
    want = tri_score(Keys(k), 0, query, weight, candidates)
    other = torch.where(candidates[..., None], k, 100.0)
    assert_close("Z", tri_score(Keys(other), 0, query, weight, candidates), want, atol=1e-5)
    assert not want[0, :, 1].any()


def test_one_candidate_and_equal_ones_score_0() -> None:
    k = torch.randn(1, 1, 1, 4).expand(1, 1, 3, 4)
    query = torch.randn(1, 2, 4)
    weight = torch.rand(2, 2)
    for count in (0, 1, 3):
        candidates = (torch.arange(3) < count).view(1, 1, 3)
        z = tri_score(Keys(k), 0, query, weight, candidates)
        assert z.abs().max() < 0.5, "rounding alone, over 1e−6"


def test_a_batch_may_be_in_any_order() -> None:
    draw = torch.Generator().manual_seed(2)
    k = torch.randn(3, 2, 5, 6, generator=draw)
    query = torch.randn(3, 4, 6, generator=draw)
    weight = torch.rand(4, 3, generator=draw)
    candidates = torch.rand(3, 2, 5, generator=draw) < 0.8
    order = torch.tensor([2, 0, 1])
    whole = tri_score(Keys(k), 0, query, weight, candidates)
    turned = tri_score(Keys(k[order]), 0, query[order], weight, candidates[order])
    assert_same("Z", turned, whole[order])
