"""Where segments lie: the kernel and its twin say what counting token by token says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.segments import segments
from minithink.ref import segments as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE


@given(
    units=st.sampled_from([(1, 1, 1), (2, 3, 1), (1, 4, 2), (3, 2, 2)]),
    width=st.integers(1, 40),
    tau=st.sampled_from([1, 3, 8]),
    total=st.integers(1, 40),
    block=st.sampled_from([32, 64]),
    seed=st.integers(0, 2**31),
)
def test_counted_token_by_token(
    units: tuple[int, int, int], width: int, tau: int, total: int, block: int, seed: int
) -> None:
    """Lists of any tokens, also none and as many as columns; prompts of which some are gone, or all; empty segments,
    and tokens behind the last segment that is asked for. Behind the lists stands anything."""
    draw = torch.Generator().manual_seed(seed)
    layers, rows, heads = units
    count = torch.randint(width + 1, units, generator=draw).int()
    longest = width + int(torch.randint(30, (), generator=draw))
    pos = torch.randint(-5, 99, (*units, width), generator=draw).int()
    for unit in count.nonzero().tolist():
        n = int(count[tuple(unit)])
        pos[(*unit, slice(n))] = torch.randperm(longest, generator=draw)[:n].sort().values.int()
    at = torch.randperm(rows, generator=draw)[: 1 + seed % rows]
    prompt = torch.randint(9, (len(at),), generator=draw).int()
    arguments = [x.to(DEVICE) for x in (pos, count, at, prompt)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.segments.BLOCK", block)
        got = segments(*arguments, tau, total)
    want = ref.segments(*arguments, tau, total)
    for name, x, y in zip(("first", "size"), got, want, strict=True):
        assert_same(name, x, y)
        assert x.dtype == y.dtype == torch.int32
        assert x.is_contiguous()
        assert y.is_contiguous()
    for layer in range(layers):
        for i, row in enumerate(at.tolist()):
            for head in range(heads):
                there = pos[layer, row, head, : int(count[layer, row, head])].tolist()
                of = [(p - int(prompt[i])) // tau for p in there]
                assert got[1][layer, i, head].tolist() == [of.count(g) for g in range(total)]
                assert got[0][layer, i, head].tolist() == [sum(x < g for x in of) for g in range(total)]


def test_nobody() -> None:
    none = torch.zeros(2, 3, 1, 5, dtype=torch.int32, device=DEVICE)
    at = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for operation in (segments, ref.segments):
        first, size = operation(none, none[..., 0], at, at.int(), 4, 7)
        assert first.shape == size.shape == (2, 0, 1, 7)
