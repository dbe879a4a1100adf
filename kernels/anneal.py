"""How many tokens every segment may keep: ThinKV's retention schedule. Twin: `minithink/ref/anneal.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.anneal import anneal
    >>> size = torch.tensor([[[[8, 8, 8, 3]]]], dtype=torch.int32)  # [Lt, N, Ht, G], tokens of each segment
    >>> excess = torch.tensor([[[5]]], dtype=torch.int32)  # [Lt, N, Ht]: five tokens must go
    >>> kind = torch.tensor([[2, 0, 1, 0]], dtype=torch.uint8)  # [B, G]: segment 1 is of the least important type
    >>> level = torch.zeros(1, 4, dtype=torch.uint8)  # [B, G], changed in place
    >>> cases = torch.zeros(2, 1, dtype=torch.int32)  # [2, B], changed in place
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> clock = torch.tensor([27], dtype=torch.int32)  # [N], generated tokens
    >>> active = torch.tensor([True])  # [N]
    >>> options = {"tau": 8, "retention": (4, 2), "hard": False, "transitions": False}
    >>> anneal(size, excess, kind, level, cases, at, clock, active, **options).tolist()  # int32 [N, G]
    [[8, 2, 8, 3]]

Layout: one launch, a program per row. A program takes the size of each segment in its fullest lane, and holds all
segments in registers. A running sum over the segments of each type replaces the loop over segments. Rows within
their budget compute none of this. R is a constant of the compiled kernel.
Bound: the launch. 4 bytes for each segment and lane, 7 more for each segment, a few hundred segments in a sequence.
The twin has about seventy small operations, each of which would be a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

BEYOND = (2, 1, 0)  # tokens of a segment: the levels after R under a hard budget
UNITS = 16  # lists whose sizes are compared at a time
WARPS = 4


@triton.jit
def _before(spare, kind):
    """Tokens that the segments before each segment could give, ordered by type and then by age."""
    out = tl.zeros_like(spare)
    given = tl.zeros((), tl.int32)
    for k in tl.static_range(3):
        mine = tl.where(kind == k, spare, 0)
        out = tl.where(kind == k, given + tl.cumsum(mine) - mine, out)
        given += tl.sum(mine)
    return out


@triton.jit(do_not_specialize=["n", "rows"])
def _anneal(
    p_size,
    p_excess,
    p_kind,
    p_level,
    p_cases,
    p_at,
    p_clock,
    p_active,
    p_goal,
    n,
    rows,
    layers,
    heads,
    segments,
    tau,
    RETENTION: tl.constexpr,
    FLOORS: tl.constexpr,
    TRANSITIONS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All segments of one row, in three phases: segments that a transition shrinks (case 1), segments that shrink
    because a lane is too full (case 2), and what a hard budget takes beyond that."""
    LEVELS: tl.constexpr = len(RETENTION)
    i_n = tl.program_id(0)
    i_row = tl.load(p_at + i_n)
    number = tl.arange(0, BLOCK)
    m = number < segments
    size, excess = _fullest(p_size, p_excess, number, m, i_n, n, layers, heads, segments, UNITS, BLOCK)
    clock = tl.load(p_clock + i_n)
    active = tl.load(p_active + i_n) != 0
    excess = tl.where(active, excess, 0)
    running = tl.maximum(clock - 1, 0) // tau
    ended = active & (clock > 0) & (clock % tau == 0)
    past = number < running + ended.to(tl.int32)
    kind = tl.load(p_kind + i_row * segments + number, m, other=0)
    before = tl.load(p_level + i_row * segments + number, m, other=0).to(tl.int32)

    # case 1
    level = before
    goal = size
    if TRANSITIONS:
        turn = ended & (tl.load(p_kind + i_row * segments + running) == 0)
        earlier = (number < tl.where(turn, running, 0)) & (size > 0)
        level, goal = _transition(size, level, earlier, RETENTION)
        first = tl.sum((goal < size).to(tl.int32))
        tl.store(p_cases + i_row, tl.load(p_cases + i_row) + first)
        excess -= tl.sum(size - goal)

    if excess > 0:
        # case 2
        after, level, times = _shrink(goal, level, kind, past, excess, RETENTION, BLOCK)
        excess -= tl.sum(goal - after)

        # a hard budget: the running segment, then all
        if excess > 0:
            after, times = _beyond(after, times, kind, past, number == running, excess, LEVELS, FLOORS)
        tl.store(p_cases + rows + i_row, tl.load(p_cases + rows + i_row) + tl.sum(times))
        goal = after

    tl.store(p_goal + i_n.to(tl.int64) * segments + number, goal, m)
    tl.store(p_level + i_row * segments + number, level.to(tl.uint8), m)


@triton.jit
def _fullest(
    p_size,
    p_excess,
    number,
    m,
    i_n,
    n,
    layers,
    heads,
    segments,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The most tokens that a lane of the row has of each segment, int32 [BLOCK], and the largest excess of a lane."""
    size = tl.zeros((BLOCK,), tl.int32)
    excess = tl.full((), 0, tl.int32)
    for start in range(0, layers * heads, UNITS):
        i = start + tl.arange(0, UNITS)
        m_unit = i < layers * heads
        i_unit = ((i // heads).to(tl.int64) * n + i_n) * heads + i % heads
        here = tl.load(p_size + i_unit[:, None] * segments + number[None, :], m_unit[:, None] & m[None, :], other=0)
        size = tl.maximum(size, tl.max(here, 0))
        excess = tl.maximum(excess, tl.max(tl.load(p_excess + i_unit, m_unit, other=0)))
    return size, excess


@triton.jit
def _transition(size, level, earlier, RETENTION: tl.constexpr):
    """The segments' levels and goals after a transition: earlier ones go one level further."""
    LEVELS: tl.constexpr = len(RETENTION)
    goal = size
    level += (earlier & (level < LEVELS)).to(tl.int32)
    for i in tl.static_range(LEVELS):
        goal = tl.where(earlier & (level == i + 1), tl.minimum(goal, RETENTION[i]), goal)
    return level, goal


@triton.jit
def _shrink(goal, level, kind, past, excess, RETENTION: tl.constexpr, BLOCK: tl.constexpr):
    """The least important segments go to the first level that leaves room, or to the last one.

    Returns the tokens that each segment may keep, its level, and how often it loses tokens.
    """
    LEVELS: tl.constexpr = len(RETENTION)
    spare = tl.where(past, tl.maximum(goal - RETENTION[LEVELS - 1], 0), 0)
    needed = excess - _before(spare, kind)
    asked = (spare > 0) & (needed > 0)
    enough = tl.full((BLOCK,), LEVELS, tl.int32)
    for i in tl.static_range(LEVELS):
        gives = goal - tl.minimum(goal, RETENTION[LEVELS - 1 - i])
        enough = tl.where((level < LEVELS - i) & (gives >= needed), LEVELS - i, enough)
    times = tl.zeros((BLOCK,), tl.int32)
    after = goal
    for i in tl.static_range(LEVELS):
        down = asked & (level < i + 1) & (i + 1 <= enough) & (goal > RETENTION[i])
        times += down.to(tl.int32)
        after = tl.where(down, RETENTION[i], after)
    return after, tl.where(asked, enough, level), times


@triton.jit
def _beyond(after, times, kind, past, current, excess, LEVELS: tl.constexpr, FLOORS: tl.constexpr):
    """Under a hard budget: go down to one floor after the other, until there is room. The first floors are the
    levels, for the running segment alone; the others are for all segments."""
    for i in tl.static_range(len(FLOORS)):
        spare = tl.maximum(after - FLOORS[i], 0)
        if i < LEVELS:
            spare = tl.where(current, spare, 0)
        else:
            spare = tl.where(past | current, spare, 0)
        asked = (spare > 0) & (excess > _before(spare, kind))
        excess -= tl.sum(tl.where(asked, spare, 0))
        after = tl.where(asked, FLOORS[i], after)
        times += asked.to(tl.int32)
    return after, times


def anneal(
    size: Tensor,
    excess: Tensor,
    kind: Tensor,
    level: Tensor,
    cases: Tensor,
    at: Tensor,
    clock: Tensor,
    active: Tensor,
    tau: int,
    retention: Sequence[int],
    hard: bool,
    transitions: bool,
) -> Tensor:
    """Apply the retention schedule once to the segments of N rows. A segment's size is that in its fullest lane.

    Args:
        size: int32 [Lt, N, Ht, G], tokens of every segment, oldest first; at most R_n at level n.
        excess: int32 [Lt, N, Ht], tokens beyond the budget; 0 or less: none must go.
        kind: uint8 [B, G], thought types of all rows' segments, 0 the least important of three. Contiguous.
        level: uint8 [B, G], how often each segment was annealed, at most len(retention). Contiguous, changed in
            place.
        cases: int32 [2, B], counts how many times a segment lost tokens: first in case 1, then in case 2 and after
            it. Changed in place, contiguous.
        at: int64 [N], the rows, each once.
        clock: int32 [N], generated tokens, with the newest one: it tells which segment, of τ tokens, is running.
        active: bool [N]; rows that are not active stay as they are.
        tau: τ, tokens of a segment.
        retention: R, descending, at least one number.
        hard: True: keep the budget even if segments must go below the last of R.
        transitions: True: case 1 applies.

    Returns:
        int32 [N, G], tokens that every segment may keep: at most as many as it has in the fullest lane.
    """
    layers, n, heads, segments = size.shape
    goal = torch.empty(n, segments, dtype=torch.int32, device=size.device)
    if not goal.numel():
        return goal
    size, excess, at, clock, active = (x.contiguous() for x in (size, excess, at, clock, active))
    block = max(16, power_of_2(segments))
    _anneal[(n,)](
        p_size=size,
        p_excess=excess,
        p_kind=kind,
        p_level=level,
        p_cases=cases,
        p_at=at,
        p_clock=clock,
        p_active=active.view(torch.uint8),
        p_goal=goal,
        n=n,
        rows=len(kind),
        layers=layers,
        heads=heads,
        segments=segments,
        tau=tau,
        RETENTION=tuple(retention),
        FLOORS=(*retention, *BEYOND) if hard else (),
        TRANSITIONS=transitions,
        UNITS=min(UNITS, power_of_2(layers * heads)),
        BLOCK=block,
        num_warps=WARPS,
    )
    return goal


def variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("p_size", "p_excess", "p_cases", "p_clock", "p_goal"), "*i32") | {"p_at": "*i64"}
    signature |= dict.fromkeys(("p_kind", "p_level", "p_active"), "*u8")
    signature |= dict.fromkeys(("n", "rows", "layers", "heads", "segments", "tau"), "i32")
    retention = (64, 32, 16, 8, 4)
    for block, floors in ((32, ()), (512, (*retention, *BEYOND))):
        constexprs = {
            "RETENTION": retention,
            "FLOORS": floors,
            "TRANSITIONS": block == 512,
            "UNITS": UNITS,
            "BLOCK": block,
        }
        yield Variant(_anneal, signature, constexprs, {"num_warps": WARPS})
