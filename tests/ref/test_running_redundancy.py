"""Running redundancy equals the redundancy that is computed anew, however long it runs.

To run it alone: pytest tests/ref/test_running_redundancy.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.ref import running_redundancy as module
from minithink.ref.redundancy import redundancy
from minithink.ref.running_redundancy import NONE, NOWHERE, running_redundancy
from tests.compare import assert_close

torch.set_num_threads(1)
BUDGET = 40
STEPS = 10_000


def nothing_known(rows: int, heads: int, entries: int) -> tuple[Tensor, Tensor]:
    position = torch.full((rows, heads, entries), NOWHERE, dtype=torch.int32)
    return position, torch.full_like(position, NONE)


def run(steps: int, key: Callable[[], Tensor], generator: torch.Generator) -> tuple[Tensor, int]:
    """One lane that gets a token and evicts one at every step, a few of them by lot and the others by redundancy.

    Returns:
        The differences of all steps from `redundancy`, the largest of each: [steps]. And how many rows lost their j*.
    """
    k = torch.stack([key() for _ in range(BUDGET)])
    pos = torch.arange(BUDGET, dtype=torch.int32)
    known = nothing_known(1, 1, BUDGET + 1)
    at = torch.tensor([0])
    valid = torch.ones(1, 1, BUDGET + 1, dtype=torch.bool)
    apart = []
    left = 0
    for step in range(steps):
        k = torch.cat((k, key()[None]))
        pos = torch.cat((pos, torch.tensor([BUDGET + step], dtype=torch.int32)))
        got = running_redundancy(k[None, None], valid, pos[None, None], known, at)
        want = redundancy(k[None, None], valid)
        apart.append((got - want).abs().max())
        goes = int(want[0, 0, :-4].argmax())
        if step % 3 == 0:
            goes = int(torch.randint(BUDGET, (), generator=generator))
        left += int((known[1] == pos[goes]).sum())
        stays = torch.arange(BUDGET + 1) != goes
        k = k[stays]
        pos = pos[stays]
    return torch.stack(apart), left


def test_exact_over_10_000_steps() -> None:
    """Keys of 16 numbers ±1 have cosines of whole eighths, 1/2 among them: all sums are exact, and so is equality."""
    g = torch.Generator().manual_seed(1)
    directions = (1 - 2 * torch.randint(2, (60, 16), generator=g)).float()
    apart, left = run(STEPS, lambda: directions[torch.randint(60, (), generator=g)], g)
    assert not apart.any()
    assert left > STEPS / 5, "too few spared keys were evicted"


def test_nothing_drifts_over_10_000_steps() -> None:
    """The difference is rounding, and at the end no larger than at the beginning."""
    g = torch.Generator().manual_seed(2)
    centres = torch.randn(6, 24, generator=g)

    def key() -> Tensor:
        return centres[torch.randint(6, (), generator=g)] + 0.7 * torch.randn(24, generator=g)

    apart, left = run(STEPS, key, g)
    assert left > STEPS / 5
    assert apart.max() < 2e-8, "shares are about 1/40"
    assert apart[-1000:].mean() < 1.1 * apart[:1000].mean()


@given(
    lengths=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    calls=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.2, 0.6])), min_size=1, max_size=6),
    threshold=st.sampled_from([0.5, 0.0, 1.0, -0.5]),
    entries=st.sampled_from([3, 40]),
    at_once=st.sampled_from([1, 2, 256]),
    seed=st.integers(0, 2**31),
)
def test_equals_redundancy(
    lengths: list[int],
    calls: list[tuple[int, float]],
    threshold: float,
    entries: int,
    at_once: int,
    seed: int,
) -> None:
    """Lanes of differing length, whose tokens come and go; with too few entries nothing is remembered."""
    g = torch.Generator().manual_seed(seed)
    key = torch.zeros(4, 40, 16)
    for lane in key:
        lane[:] = (1 - 2 * torch.randint(2, (5, 16), generator=g))[torch.randint(5, (40,), generator=g)]
    held = [list(range(n)) for n in lengths]
    known = nothing_known(5, 2, entries)
    at = torch.tensor([3, 1])
    last = 12
    for come, dropped in calls:
        held = [[p for p in lane if torch.rand((), generator=g) >= dropped] for lane in held]
        held = [lane + list(range(last, last + come)) for lane in held]
        last += come
        width = max(1, *map(len, held))
        k = torch.full((4, width, 16), torch.nan)
        pos = torch.full((4, width), -1, dtype=torch.int32)
        for i, lane in enumerate(held):
            k[i, : len(lane)] = key[i, lane]
            pos[i, : len(lane)] = torch.tensor(lane, dtype=torch.int32)
        k = k.unflatten(0, (2, 2))
        pos = pos.unflatten(0, (2, 2))
        valid = pos >= 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "ROWS_AT_ONCE", at_once)
            got = running_redundancy(k, valid, pos, known, at, threshold)
        assert_close("redundancy", got, redundancy(k, valid, threshold), atol=1e-7, rtol=1e-6)
        assert (known[0][[0, 2, 4]] == NOWHERE).all(), "rows that were not shown"
        for i, lane in enumerate(held):
            there = known[0][at[i // 2], i % 2]
            if lane:
                assert there[there != NOWHERE].tolist() == (lane if len(lane) <= entries else [])


def test_rows_whose_match_left_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four equal keys the newest is spared by all others. When it leaves, the one before it is."""
    searched: list[list[int]] = []
    original = module._searched

    def listening(unit: Tensor, valid: Tensor, newest: Tensor, unknown: Tensor, threshold: float) -> Tensor:
        searched.append(unknown[0, 0].nonzero().flatten().tolist())
        return original(unit, valid, newest, unknown, threshold)

    monkeypatch.setattr(module, "_searched", listening)
    known = nothing_known(1, 1, 8)

    def call(kinds: list[int], positions: list[int]) -> list[int]:
        k = torch.eye(4)[kinds]
        pos = torch.tensor(positions, dtype=torch.int32)
        running_redundancy(k[None, None], (pos >= 0)[None, None], pos[None, None], known, torch.tensor([0]))
        return known[1][0, 0, : len(positions)].tolist()

    assert call([0, 0, 1, 0, 0], [0, 1, 2, 3, 4]) == [4, 4, NONE, 4, 3]
    assert call([0, 0, 1, 0, 1], [0, 1, 2, 3, 7]) == [3, 3, 7, 1, 2]
    assert call([0, 0, 1, 0, 1], [0, 1, 2, 3, 7]) == [3, 3, 7, 1, 2]
    assert call([0, 1, 0, 1, 0], [1, 2, 3, 7, 9]) == [9, 7, 9, 2, 3]
    assert searched == [[0, 1, 2, 3, 4], [0, 1, 3, 4], [], [4]]


def test_what_is_known_of_lanes_that_are_not_shown_stays() -> None:
    known = (torch.full((2, 1, 3), 7, dtype=torch.int32), torch.full((2, 1, 3), 7, dtype=torch.int32))
    none = torch.zeros(2, 1, 4, dtype=torch.bool)
    pos = torch.full((2, 1, 4), -1, dtype=torch.int32)
    got = running_redundancy(torch.full((2, 1, 4, 8), torch.nan), none, pos, known, torch.tensor([1, 0]))
    assert not got.any()
    assert all((x == 7).all() for x in known)
