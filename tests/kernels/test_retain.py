"""Algorithm 1 in one launch: the kernel evicts and remembers exactly what its twin does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.retain import retain
from minithink.ref import retain as ref
from minithink.ref.lrfu import Decay
from minithink.ref.retain import NOWHERE, Known
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE

NOW = 2000
Lane = tuple[list[tuple[int, float, int]], list[int]]  # its entries (position, CRF, τ) and the positions at hand


def drawn_lane(room: int, prompt: int, astray: float, values: list[float], new: int, g: torch.Generator) -> Lane:
    """A lane that has lost some of the tokens that it remembers (`astray`), and got `new` ones."""
    used = min(room, int(torch.randint(room + 1, (), generator=g)) + room // 2)
    positions = (torch.rand(3 * room + 3, generator=g).argsort()[: used + new].sort().values).tolist()
    if new and torch.rand((), generator=g) < 0.5:
        positions[-1] = NOW - 1 + prompt  # it comes at this step
    ages = torch.tensor([0, 1, 2, 40, NOW])[torch.randint(5, (used,), generator=g)].tolist()
    crfs = torch.tensor(values)[torch.randint(len(values), (used,), generator=g)].tolist()
    entries = [(x, crf, NOW - age) for x, crf, age in zip(positions, crfs, ages, strict=False)]
    held = [x for x in positions[:used] if torch.rand((), generator=g) >= astray] + positions[used:]
    return entries, held


def empty(size: tuple[int, int]) -> Known:
    """Lists without entries: positions, CRF and τ."""
    crf = torch.zeros(size, dtype=torch.float64)
    return torch.full(size, NOWHERE, dtype=torch.int32), crf, torch.zeros(size, dtype=torch.int32)


def shuffled(some: Tensor, shape: tuple[int, int, int], g: torch.Generator) -> Tensor:
    """Budgets of all rows, in each row in another order: [L, N, H]."""
    rows = [some[torch.randperm(len(some), generator=g)].view(shape[0], shape[2]) for _ in range(shape[1])]
    return torch.stack(rows, 1) if rows else some.new_zeros(shape)


def drawn(
    shape: tuple[int, int, int], most: int, slack: int, astray: float, birth: int, few: bool, seed: int
) -> dict[str, Any]:
    """Arguments of `retain`: budgets from 1 to `most`, in each row the same in another order. There are more rows."""
    (layers, n, heads), g = shape, torch.Generator().manual_seed(seed)
    some = 1 + torch.randint(most, (layers * heads,), generator=g, dtype=torch.int32)
    budget = shuffled(some, shape, g)
    prompt = torch.randint(6, (n,), generator=g, dtype=torch.int32)
    at, rows = torch.randperm(n + 2, generator=g)[:n], n + 2
    size = rows, int((some + slack).sum()) + 1
    known = empty(size)
    # Many values: tokens of different ages, whose CRFs the kernel's estimates put in the wrong order.
    values = ([1.0, 2.0] if few else [1 + i / 50 for i in range(150)]) + ([] if birth else [0.0])
    lanes = list[list[int]]()
    first = [0] * n
    for lane in torch.cartesian_prod(*(torch.arange(x) for x in shape)).tolist() if budget.numel() else []:
        room, i = int(budget[tuple(lane)]) + slack, lane[1]
        new = int(torch.randint(4, (), generator=g))
        entries, held = drawn_lane(room, int(prompt[i]), astray, values, new, g)
        lanes.append(held)
        for k, entry in enumerate(entries):
            for list_, value in zip(known, entry, strict=True):
                list_[at[i], first[i] + k] = value
        first[i] += room
    held = torch.tensor([len(x) for x in lanes], dtype=torch.int32).view(shape)
    width = max([len(x) for x in lanes], default=0) + int(torch.randint(3, (), generator=g))
    pos = torch.tensor([x + [-1] * (width - len(x)) for x in lanes], dtype=torch.int32).view(*shape, width)
    mass = torch.randint(4 if few else 1 << 16, pos.shape, generator=g) / 2**16
    keep = (held - torch.randint(5, shape, generator=g, dtype=torch.int32)).clamp(min=0)
    keep = torch.where(torch.rand(shape, generator=g) < 0.1, 1, keep)  # almost all go
    tracked = torch.rand(n, generator=g) < 0.9
    return {
        "mass": mass.masked_fill(pos < 0, torch.nan),
        "pos": pos,
        "held": held,
        "known": known,
        "at": at,
        "budget": budget,
        "slack": slack,
        "keep": keep,
        "protected": prompt * (seed % 2),
        "prompt": prompt,
        "t": torch.full((n,), NOW, dtype=torch.int32),
        "tracked": tracked,
        "counted": tracked[:, None] & (torch.rand(shape, generator=g) < 0.9),
        "summed": tracked & (torch.rand(n, generator=g) < 0.5),
    }


def on_device(x: Any) -> Any:
    """A copy on the device: tensors are changed in place."""
    if isinstance(x, tuple):
        return tuple(map(on_device, x))
    return x.clone().to(DEVICE) if isinstance(x, Tensor) else x


def assert_known(got: Known, want: Known) -> None:
    """Equal entries; CRF and τ mean nothing in empty ones."""
    assert_same("positions", got[0], want[0])
    used = want[0] != NOWHERE
    assert_same("crf", got[1].cpu()[used], want[1][used])
    assert_same("last", got[2].cpu()[used], want[2][used])


def both(arguments: dict[str, Any], lam: float, *options: Any) -> tuple[Any, ...]:
    """Run kernel and twin, compare all that they give back or change; the twin's results."""
    on_gpu = {name: on_device(x) for name, x in arguments.items()}
    got = retain(*on_gpu.values(), Decay(lam, DEVICE), *options)
    want = ref.retain(*arguments.values(), Decay(lam), *options)
    for name, a, b in zip(("drop", "kept", "fixed"), got, want, strict=False):
        assert_same(name, a, b)
    assert_close("ΣCRF", got[3], want[3], atol=0.0, rtol=1e-12)
    assert_known(on_gpu["known"], arguments["known"])
    assert (got[4] is None) == (want[4] is None)
    if want[4] is not None:
        there = (arguments["pos"] >= 0) & arguments["tracked"][:, None, None]
        lost = there & (want[4] == -math.inf)
        assert torch.equal((got[4].cpu() == -math.inf) & there, lost)
        there &= ~lost
        assert_close("score", got[4].cpu()[there], want[4][there], atol=1e-9)
    return want


@pytest.mark.filterwarnings("ignore:divide by zero")  # log2 of a CRF of 0, in torch
@example((1, 1, 1), 24, 0, 0.2, False, 8, 0.0, 2**-20, 0, False, 1)  # more entries than columns
@given(
    shape=st.sampled_from([(1, 1, 1), (1, 2, 2), (2, 1, 3), (2, 2, 1), (0, 1, 2), (1, 0, 2)]),
    most=st.sampled_from([3, 12]),
    slack=st.integers(0, 2),
    astray=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    few=st.booleans(),
    block=st.sampled_from([8, 16]),
    lam=st.sampled_from([0.0, 0.5, 0.6, 0.99, 1.0]),
    p=st.sampled_from([2**-20, 0.5, 0.9, 1.0]),
    birth=st.integers(0, 1),
    scored=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    shape: tuple[int, int, int],
    most: int,
    slack: int,
    astray: float,
    few: bool,
    block: int,
    lam: float,
    p: float,
    birth: int,
    scored: bool,
    seed: int,
) -> None:
    """Ties of masses and of histories; one token goes, many or none; lists that lost tokens elsewhere; protected
    prompts; more tokens than entries; empty lanes; rows that are not tracked; NaN behind the last token."""
    arguments = drawn(shape, most, slack, astray, birth, few, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.retain.BLOCK", block)
        both(arguments, lam, p, birth, scored)


def one_lane(pos: Tensor, mass: Tensor, known: Known, t: int, keep: int, prompt: int = 0) -> dict[str, Any]:
    """Arguments for a single head whose entries are `known`."""
    row, count = torch.ones(1, dtype=torch.bool), torch.tensor([[[len(pos)]]], dtype=torch.int32)
    number = torch.tensor([prompt], dtype=torch.int32)
    return {
        "mass": mass.view(1, 1, 1, -1),
        "pos": pos.int().view(1, 1, 1, -1),
        "held": count,
        "known": known,
        "at": torch.zeros(1, dtype=torch.int64),
        "budget": torch.full_like(count, known[0].shape[1] - 1),
        "slack": 0,
        "keep": torch.full_like(count, keep),
        "protected": number,
        "prompt": number,
        "t": torch.tensor([t], dtype=torch.int32),
        "tracked": row,
        "counted": row[:, None].expand(1, 1, 1),
        "summed": row,
    }


def nothing(entries: int) -> Known:
    """An empty list."""
    size = 1, entries + 1
    return empty(size)


@pytest.mark.parametrize(
    ("sixteenths", "p", "want"),
    [
        ([5, 1, 3, 3, 2, 2], 0.9, {0, 2, 3, 4, 5}),
        ([5, 1, 3, 3, 2, 2], 0.75, {0, 2, 3, 4}),
        ([5, 1, 3, 3, 2, 2], 0.5, {0, 2}),
        ([5, 1, 3, 3, 2, 2], 1.0, {0, 1, 2, 3, 4, 5}),
        ([15, 1, 0, 0], 0.9, {0}),
        ([15, 1, 0, 0], 1.0, {0, 1}),
        ([12, 2, 1, 1], 0.9, {0, 1, 2}),
        ([4, 2, 2, 4], 0.8, {0, 1, 3}),
    ],
)
def test_hits_by_hand(sixteenths: list[int], p: float, want: set[int]) -> None:
    n, known = len(sixteenths), nothing(9)
    both(one_lane(torch.arange(n), torch.tensor(sixteenths) / 16, known, 50, n), 0.6, p, 1, False)
    assert set((known[2][0] == 50).nonzero().flatten().tolist()) == want


@pytest.mark.parametrize("p", [0.5, 0.9, 1.0])
def test_of_equal_masses_the_oldest_are_hit(p: float) -> None:
    """In several blocks of tokens, behind one that has more."""
    known, mass = nothing(200), torch.full((200,), 2.0**-8)
    mass[150] = 2.0**-5
    hits = math.ceil(p * 207) - 8  # beside the one, in units of 2^-8
    both(one_lane(torch.arange(200), mass, known, 500, 200), 0.6, p, 1, False)
    others = [i for i in range(200) if i != 150]
    assert (known[2][0] == 500).nonzero().flatten().tolist() == sorted([150, *others[:hits]])


def test_small_masses_count_beside_a_large_one() -> None:
    """Sums are float64: in float32, 1 + 2^-25 is 1."""
    known, mass = nothing(1001), torch.full((1001,), 2.0**-25)
    mass[0] = 1.0
    both(one_lane(torch.arange(1001), mass, known, 2000, 1001), 0.6, 1.0, 1, False)
    assert (known[2][0, :1001] == 2000).all()


def test_protected_tokens_stay_though_fewer_may_be_kept() -> None:
    arguments = one_lane(torch.arange(9), torch.ones(9), nothing(9), 4, keep=3, prompt=5)
    drop, kept, fixed, *_ = both(arguments, 0.6, 0.9, 1, False)
    assert drop.flatten().tolist() == [False] * 5 + [True] * 4
    assert (int(kept), int(fixed)) == (5, 5)


def test_estimates_in_the_wrong_order() -> None:
    """3.99·λ⁵ = 0.3103 goes before 1.44·λ³ = 0.3110. Estimates of their logarithms are −1.690 and −1.771."""
    known = nothing(3)
    for list_, values in zip(known, ([0, 1], [3.99, 1.44], [95, 97]), strict=True):
        list_[0, :2] = torch.tensor(values)
    drop, *_ = both(one_lane(torch.arange(2), torch.zeros(2), known, 100, 1), 0.6, 0.9, 1, True)
    assert drop.flatten().tolist() == [True, False]


# token → the times at which it is hit, at first its birth; the prompt has tokens 0 and 1, token 10 stands at 4 …
REWARDS = {10: (3, 9), 11: (4, 6), 12: (5,), 13: (7, 9), 14: (9,)}


@pytest.mark.parametrize(
    ("lam", "gone", "total"),
    [(1.0, {12, 14}, 6), (0.6, {12, 11}, 3.406656), (0.5, {12, 11}, 3.265625), (0.0, {12, 11}, 3)],
)
def test_eviction_by_hand(lam: float, gone: set[int], total: float) -> None:
    known = nothing(7)
    for t in range(3, 10):
        tokens = [token for token, hits in REWARDS.items() if hits[0] <= t]
        pos = torch.tensor([0, 1, *(REWARDS[token][0] + 1 for token in tokens)])
        mass = torch.tensor([0.0, 0.0, *(float(t in REWARDS[token]) for token in tokens)])
        drop, *_, crf, _ = both(one_lane(pos, mass, known, t, 5 if t == 9 else 7, prompt=2), lam, 1.0, 1, False)
    assert {tokens[i - 2] for i in drop.flatten().nonzero().flatten().tolist()} == gone
    prompt = 2 * lam**9
    assert float(crf) == pytest.approx(total + prompt, rel=1e-6)


@pytest.mark.parametrize(("p", "keep"), [(0.3, 1024), (0.9, 1000), (0.99, 1024), (1.0, 30)])
def test_a_long_lane(p: float, keep: int) -> None:
    """As it is launched, steps of a lane with one token more than the budget, whose attention is that of a model."""
    g, known = torch.Generator().manual_seed(3), nothing(1024)
    pos = torch.arange(1025)
    for t in range(1020, 1024):
        mass = (3 * torch.randn(1025, generator=g, dtype=torch.float64)).softmax(-1).float()
        drop, *_ = both(one_lane(pos, mass, known, t, keep, prompt=5), 0.6, p, 1, False)
        assert int(drop.sum()) == 1025 - keep
        pos = torch.cat((pos[~drop.flatten()], pos[-1:] + 1 + torch.arange(1025 - keep)))
        keep = 1024


def test_all_histories_are_equal() -> None:
    """When a prompt has been read that is not protected: the older tokens go."""
    drop, *_ = both(one_lane(torch.arange(600), torch.zeros(600), nothing(90), 0, 70, prompt=0), 0.6, 0.9, 1, True)
    assert drop.flatten().tolist() == [True] * 530 + [False] * 70
