"""Listing new tokens: kernel and twin, and both as the store lists them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.enlist import enlist
from minithink.ref import enlist as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE


@given(
    sizes=st.sampled_from([(1, 1, 1), (1, 3, 2), (3, 5, 2), (2, 4, 1), (1, 0, 2)]),
    units=st.sampled_from([4, 128]),
    columns=st.integers(2, 9),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin(sizes: tuple[int, int, int], units: int, columns: int, seed: int) -> None:
    """Any rows in any order, some of them idle; nothing else changes."""
    generator = torch.Generator().manual_seed(seed)
    rows = sizes[1]
    n = int(torch.randint(rows + 1, (1,), generator=generator))
    at = torch.randperm(rows, generator=generator)[:n].to(DEVICE)
    active = (torch.rand(n, generator=generator) < 0.7).to(DEVICE)
    lengths, waiting = torch.randint(2**20, (2, n), generator=generator).to(DEVICE).unbind()
    count = torch.randint(columns - 1, sizes, generator=generator, dtype=torch.int32).to(DEVICE)
    place, pos = torch.randint(99, (2, *sizes, columns), generator=generator, dtype=torch.int32).to(DEVICE).unbind()
    pos[..., -1] = -1  # where lists grow, it becomes a column like the others
    got, want = ([x.clone() for x in (place, pos, count)] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.enlist.UNITS", units)
        enlist(*got, at, active, lengths, waiting)
    ref.enlist(*want, at, active, lengths, waiting)
    assert_same("place", got[0][..., :-1], want[0][..., :-1])
    assert_same("pos", got[1], want[1])
    assert_same("count", got[2], want[2])

    for unit in ((layer, row, head) for layer in range(sizes[0]) for row in range(rows) for head in range(sizes[2])):
        end = (*unit, int(count[unit]))
        place[end], pos[end] = got[0][end], got[1][end]
        brings = [i for i in range(n) if int(at[i]) == unit[1] and active[i]]
        assert int(got[2][unit]) == end[-1] + len(brings)
        for i in brings:
            assert int(got[0][end]) == -1 - int(waiting[i])
            assert int(got[1][end]) == int(lengths[i])
    assert_same("place elsewhere", got[0][..., :-1], place[..., :-1])
    assert_same("pos elsewhere", got[1], pos)
