"""Windows of queries and lanes of keys, for tests of scores by the newest queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.compare import assert_close


def drawn(
    shape: tuple[int, int, int, int],
    window: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Strided queries [B, Hq, W, D] and keys [B, Hkv, S, D]. shape: B, Hkv, query heads of a KV head, S."""
    b, hkv, group, s = shape
    q = torch.randn(b, window, hkv * group, dim, generator=generator).transpose(1, 2).to(dtypes[0])
    return q, (scale * torch.randn(b, s, hkv, dim, generator=generator).transpose(1, 2)).to(dtypes[1])


def assert_lanes_are_scored_alone(
    score: Callable[[Tensor, Tensor, Tensor], Tensor],
    plain: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    shared: bool,
    data: st.DataObject,
) -> None:
    """Of lanes of differing length, some of them empty, NaN behind their ends, each has the plain score of its keys.

    score: of q, k, valid. plain: of one lane, q [g, W, D] and k [n, D] in double precision → [n]. shape: B, Hkv, g,
    W, S. shared: all heads have one mask.
    """
    b, hkv, g, w, s = shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    q = 2 * torch.randn(b, hkv * g, w, 5, generator=generator)
    k = torch.randn(b, hkv, s, 5, generator=generator)
    heads = 1 if shared else hkv
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, s), min_size=b * heads, max_size=b * heads)))
    valid = torch.arange(s) < lengths.view(b, heads, 1)
    k[~valid.expand(b, hkv, s)] = torch.nan
    want = torch.zeros(b, hkv, s)
    for i in range(b):
        for h in range(hkv):
            n = int(lengths.view(b, heads)[i, 0 if shared else h])
            if n:
                want[i, h, :n] = plain(q[i, h * g : (h + 1) * g].double(), k[i, h, :n].double())
    assert_close("score", score(q, k, valid), want, atol=1e-6)
