"""Stamps: the kernel equals its twin, step by step, on lanes that lose tokens between the steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.stamp import stamp
from minithink.ref import stamp as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE


@given(
    shape=st.sampled_from([(1, 1, 1), (2, 2, 1), (1, 2, 2), (1, 3, 1), (0, 1, 2), (1, 0, 2)]),
    steps=st.integers(1, 5),
    entries=st.integers(3, 20),
    gaps=st.booleans(),
    dropped=st.sampled_from([0.0, 0.1, 0.6]),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    shape: tuple[int, int, int], steps: int, entries: int, gaps: bool, dropped: float, wide: bool, seed: int
) -> None:
    """Prompts of differing lengths, rows in any order beside others, idle rows, tensors wider or narrower than the
    entries, anything behind the last token."""
    g = torch.Generator().manual_seed(seed)
    (layers, n, heads), rows = shape, shape[1] + 2
    at, prompt = torch.randperm(rows, generator=g)[:n], torch.randint(1, 15, (n,), generator=g).int()
    known = [torch.zeros(layers, rows, heads, entries, dtype=torch.int32) for _ in range(2 + gaps)]
    known[0].fill_(ref.NOWHERE)
    ours, t = [x.clone().to(DEVICE) for x in known], torch.zeros(n, dtype=torch.int32)
    lanes = {
        (i, j, h): list(range(int(prompt[j])))[: entries - 1]
        for i in range(layers)
        for j in range(n)
        for h in range(heads)
    }
    for _ in range(steps):
        active = torch.rand(n, generator=g) < 0.8
        t += active
        for (_, j, _), lane in lanes.items():
            lane += [int(prompt[j] + t[j] - 1)] * int(active[j])
        width = max([1, *map(len, lanes.values())]) + 7 * wide
        pos = torch.randint(-1, 99, (*shape, width), generator=g, dtype=torch.int32)
        held = torch.zeros(shape, dtype=torch.int32)
        for index, lane in lanes.items():
            pos[index][: len(lane)], held[index] = torch.tensor(lane, dtype=torch.int32), len(lane)
        hit = torch.rand(*shape, width, generator=g) < 0.4
        rest = at, prompt, t, active
        ref.stamp(hit, pos, held, tuple(known), *rest)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minithink.kernels.stamp.BLOCK", 8)
            arguments = (x.to(DEVICE) for x in (hit, pos, held))
            stamp(*arguments, tuple(ours), *(x.to(DEVICE) for x in rest))
        for name, got, want in zip(("positions", "TS", "MRI"), ours, known, strict=False):
            assert_same(name, got, want)
        for index, lane in lanes.items():
            stay = [p for p in lane if torch.rand((), generator=g) >= dropped]
            lanes[index] = stay[-(entries - 1) :]
