"""Cumulative scores: both kernels equal their twins, step by step, on lanes that lose tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels import accumulate as kernel
from minithink.kernels import carry as carrier
from minithink.ref import accumulate as ref
from minithink.ref import carry as ref_carry
from tests.compare import assert_same
from tests.kernels.device import DEVICE


@given(
    shape=st.sampled_from([(1, 1, 1), (2, 2, 1), (1, 2, 2), (1, 3, 1), (0, 1, 2), (1, 0, 2)]),
    steps=st.integers(1, 5),
    first=st.integers(2, 18),
    entries=st.integers(3, 24),
    dropped=st.sampled_from([0.0, 0.1, 0.6]),
    others=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equal_their_twins(
    shape: tuple[int, int, int],
    steps: int,
    first: int,
    entries: int,
    dropped: float,
    others: bool,
    wide: bool,
    seed: int,
) -> None:
    """Rows in any order beside others, idle rows, tensors wider or narrower than the entries, anything behind the
    last token; tokens that others evict between the steps."""
    g = torch.Generator().manual_seed(seed)
    (layers, n, heads), rows = shape, shape[1] + 2
    at = torch.randperm(rows, generator=g)[:n]
    known = (
        torch.full((layers, rows, heads, entries), ref.NOWHERE, dtype=torch.int32),
        torch.zeros(layers, rows, heads, entries),
    )
    ours = tuple(x.to(DEVICE, copy=True) for x in known)
    begin = list(range(min(first, entries)))
    lanes = {(i, j, h): begin.copy() for i in range(layers) for j in range(n) for h in range(heads)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BLOCK", 8)
        patch.setattr(carrier, "BLOCK", 8)
        for t in range(first, first + steps):
            active = torch.rand(n, generator=g) < 0.8
            for (_, j, _), lane in lanes.items():
                lane += [t] * int(active[j])
            width = max([1, *map(len, lanes.values())]) + 7 * wide
            pos = torch.randint(-1, 99, (*shape, width), generator=g, dtype=torch.int32)
            held, stay = torch.zeros(shape, dtype=torch.int32), torch.zeros(*shape, width, dtype=torch.bool)
            for index, lane in lanes.items():
                pos[index][: len(lane)], held[index] = torch.tensor(lane, dtype=torch.int32), len(lane)
                kept = [p for p in lane if torch.rand((), generator=g) >= dropped][-entries:]
                if active[index[1]]:
                    stay[index][: len(lane)] = torch.tensor([p in kept for p in lane], dtype=torch.bool)
                    lanes[index] = [p for p in kept if not others or torch.rand((), generator=g) < 0.8]
            mass = torch.rand(*shape, width, generator=g)
            want = ref.accumulate(mass, pos, held, known, at)
            got = kernel.accumulate(*(x.to(DEVICE) for x in (mass, pos, held)), ours, at.to(DEVICE))
            assert_same("scores", got, want)
            ref_carry.carry(want, pos, stay, known, at, active)
            carrier.carry(got, pos.to(DEVICE), stay.to(DEVICE), ours, at.to(DEVICE), active.to(DEVICE))
            for name, x, y in zip(("positions", "scores"), ours, known, strict=True):
                assert_same(name, x, y)
