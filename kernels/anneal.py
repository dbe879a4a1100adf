"""How many tokens every segment may keep: ThinKV's retention schedule at work. Twin: `minithink/ref/anneal.py`.

Layout: one launch, a program per sequence, which holds all its segments in registers; what "one after the other"
means, a running sum over the segments of each type says. R is a constant of the compiled kernel.
Bound: 11 bytes a segment, some hundreds of segments a sequence: the launch. It is a kernel because the fifty small
operations of its twin would each be one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

BEYOND = (2, 1, 0)  # tokens of a segment that a hard budget goes on to


@triton.jit
def _before(spare, kind):
    """What the segments before each could give, by type and then by age."""
    out = tl.zeros_like(spare)
    given = tl.zeros((), tl.int32)
    for k in tl.static_range(3):
        mine = tl.where(kind == k, spare, 0)
        out = tl.where(kind == k, given + tl.cumsum(mine) - mine, out)
        given += tl.sum(mine)
    return out


@triton.jit
def _anneal(
    p_size, p_kind, p_level, p_excess, p_running, p_ended, p_turn, p_goal, p_after, p_cases, rows, segments,
    RETENTION: tl.constexpr, FLOORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = len(RETENTION)
    i_row = tl.program_id(0)
    number = tl.arange(0, BLOCK)
    m = number < segments
    o = i_row.to(tl.int64) * segments + number
    size = tl.load(p_size + o, m, other=0)
    kind = tl.load(p_kind + o, m, other=0)
    level = tl.load(p_level + o, m, other=0).to(tl.int32)
    running = tl.load(p_running + i_row)
    past = number < running + tl.load(p_ended + i_row)

    # case 1
    earlier = (tl.load(p_turn + i_row) != 0) & (number < running) & (size > 0)
    level += (earlier & (level < LEVELS)).to(tl.int32)
    goal = size
    for n in tl.static_range(LEVELS):
        goal = tl.where(earlier & (level == n + 1), tl.minimum(goal, RETENTION[n]), goal)
    tl.store(p_cases + i_row, tl.sum((goal < size).to(tl.int32)))
    excess = tl.load(p_excess + i_row) - tl.sum(size - goal)

    # case 2
    spare = tl.where(past, tl.maximum(goal - RETENTION[LEVELS - 1], 0), 0)
    needed = excess - _before(spare, kind)
    asked = (spare > 0) & (needed > 0)
    enough = tl.full((BLOCK,), LEVELS, tl.int32)
    for i in tl.static_range(LEVELS):
        gives = goal - tl.minimum(goal, RETENTION[LEVELS - 1 - i])
        enough = tl.where((level < LEVELS - i) & (gives >= needed), LEVELS - i, enough)
    times = tl.zeros((BLOCK,), tl.int32)  # that each loses tokens
    after = goal
    for n in tl.static_range(LEVELS):
        down = asked & (level < n + 1) & (n + 1 <= enough) & (goal > RETENTION[n])
        times += down.to(tl.int32)
        after = tl.where(down, RETENTION[n], after)
    level = tl.where(asked, enough, level)

    # a hard budget: the running segment, then all
    current = number == running
    for i in tl.static_range(len(FLOORS)):
        spare = tl.maximum(after - FLOORS[i], 0)
        if i < LEVELS:
            spare = tl.where(current, spare, 0)
        else:
            spare = tl.where(past | current, spare, 0)
        asked = (spare > 0) & (excess - tl.sum(goal - after) > _before(spare, kind))
        after = tl.where(asked, FLOORS[i], after)
        times += asked.to(tl.int32)

    tl.store(p_goal + o, after, m)
    tl.store(p_after + o, level.to(tl.uint8), m)
    tl.store(p_cases + rows + i_row, tl.sum(times))


def anneal(
    size: Tensor, kind: Tensor, level: Tensor, excess: Tensor, running: Tensor, ended: Tensor, turn: Tensor,
    retention: Sequence[int], hard: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One look at the segments of B sequences.

    Args:
        size: integers [B, G], tokens of every segment, oldest first; at most R_n at level n.
        kind: uint8 [B, G], types, 0 the least important of three.
        level: uint8 [B, G], how often each was annealed, at most len(retention).
        excess: integers [B], tokens that must go; nothing must where it is not positive.
        running: integers [B], the number of the newest token's segment.
        ended: bool [B], whether it is complete.
        turn: bool [B], whether case 1 applies; only where it is complete.
        retention: R, descending, at least one number.

    Returns:
        goal: int32 [B, G], at most size.
        level: uint8 [B, G], from now on.
        cases: int32 [2, B], how many times a segment lost tokens, in case 1, and in case 2 and after it.
    """
    rows, segments = size.shape
    goal, after = torch.empty_like(size, dtype=torch.int32), torch.empty_like(level)
    goal, after = goal.contiguous(), after.contiguous()
    cases = torch.zeros(2, rows, dtype=torch.int32, device=size.device)
    if not size.numel():
        return goal, after, cases
    numbers = [x.int().contiguous() for x in (excess, running, ended, turn)]
    _anneal[(rows,)](
        size.int().contiguous(), kind.contiguous(), level.contiguous(), *numbers, goal, after, cases, rows, segments,
        RETENTION=tuple(retention), FLOORS=(*retention, *BEYOND) if hard else (),
        BLOCK=max(16, power_of_2(segments)), num_warps=1 if segments <= 128 else 4,
    )  # fmt: skip
    return goal, after, cases


def variants() -> Iterator[Variant]:
    names = "p_size p_excess p_running p_ended p_turn p_goal p_cases"
    signature = dict.fromkeys(names.split(), "*i32") | dict.fromkeys(["p_kind", "p_level", "p_after"], "*u8")
    signature |= {"rows": "i32", "segments": "i32"}
    retention = (64, 32, 16, 8, 4)
    for block, floors in ((32, ()), (512, (*retention, *BEYOND))):
        constexprs = {"RETENTION": retention, "FLOORS": floors, "BLOCK": block}
        yield Variant(_anneal, signature, constexprs, {"num_warps": 1 if block <= 128 else 4})
