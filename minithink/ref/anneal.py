"""How many tokens every segment may keep: ThinKV's retention schedule (§4.3, listing 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BEYOND = (2, 1, 0)  # tokens of a segment: the levels after R under a hard budget
TYPES = 3  # thought types, the least important first


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

        case 1   where a transition has ended, every segment before it goes to its next level R_n
        case 2   while a lane holds more than its budget: the oldest ended segment of the least important type that
                 holds more than the last of R goes to its next level
        then     if `hard`, and all ended segments are at the last level: the running segment goes down R level by
                 level, then all segments, in the order of case 2, to 2, to 1 and to 0 tokens

    At level n a segment holds at most R_n tokens. A segment that is already smaller than R_n loses nothing.

    Args:
        size: int32 [Lt, N, Ht, G], tokens of every segment, oldest first; at most R_n at level n.
        excess: int32 [Lt, N, Ht], tokens beyond the budget; 0 or less: none must go.
        kind: uint8 [B, G], thought types of all rows' segments, 0 the least important of three.
        level: uint8 [B, G], how often each segment was annealed, at most len(retention). Changed in place.
        cases: int32 [2, B], counts how many times a segment lost tokens: first in case 1, then in case 2 and after
            it. Changed in place.
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
    own_kind = kind[at]
    running = ((clock - 1).clamp(min=0) // tau).long()
    ended = active & (clock > 0) & (clock % tau == 0)
    turn = ended & (own_kind.gather(1, running[:, None])[:, 0] == 0) & transitions
    goal, new_level, lost = _goals(
        size=size.amax((0, 2)),
        kind=own_kind,
        level=level[at],
        excess=torch.where(active, excess.amax((0, 2)), 0),
        running=running,
        ended=ended,
        turn=turn,
        retention=retention,
        hard=hard,
    )
    level[at] = new_level
    cases[:, at] += lost
    return goal


def _goals(
    size: Tensor,
    kind: Tensor,
    level: Tensor,
    excess: Tensor,
    running: Tensor,
    ended: Tensor,
    turn: Tensor,
    retention: Sequence[int],
    hard: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Goals and new levels, [N, G], and what to add to `cases`, [2, N].

    running: int64 [N], the number of the newest token's segment; ended: bool [N], True if this segment is complete;
    turn: bool [N], True if case 1 applies.
    """
    goal = size.int()
    number = torch.arange(size.shape[1], device=size.device)
    past = number < (running + ended.to(running.dtype))[:, None]
    steps = list(enumerate(retention, 1))  # (n, R_n)

    # Case 1: goal ← min(goal, R_n)
    earlier = turn[:, None] & (number < running[:, None]) & (goal > 0)
    level = level + (earlier & (level < len(retention))).to(level.dtype)
    for n, kept in steps:
        goal = torch.where(earlier & (level == n), goal.clamp(max=kept), goal)
    first = (goal < size).sum(-1, dtype=torch.int32)
    excess = excess - (size - goal).sum(-1)

    # Case 2: in the order of types, then of age, each segment must give the tokens that the segments before it could
    # not give.
    spare = torch.where(past, (goal - retention[-1]).clamp(min=0), 0)
    needed = excess[:, None] - _before(spare, kind)
    asked = (spare > 0) & (needed > 0)
    enough = torch.full_like(level, len(retention))  # the first level at which it gives as many, or the last level
    for n, kept in reversed(steps):
        enough = torch.where((level < n) & (goal - goal.clamp(max=kept) >= needed), n, enough)
    second = torch.zeros_like(first)
    after = goal
    for n, kept in steps:
        down = asked & (level < n) & (n <= enough) & (goal > kept)
        second += down.sum(-1, dtype=torch.int32)
        after = torch.where(down, kept, after)
    level = torch.where(asked, enough, level)

    current = number == running[:, None]
    if hard:
        everything = past | current
        for where, floor in [*((current, kept) for _, kept in steps), *((everything, n) for n in BEYOND)]:
            excess_now = excess - (goal - after).sum(-1)
            spare = torch.where(where, (after - floor).clamp(min=0), 0)
            asked = (spare > 0) & (excess_now[:, None] > _before(spare, kind))
            after = torch.where(asked, floor, after)
            second += asked.sum(-1, dtype=torch.int32)
    return after, level, torch.stack((first, second))


def _before(spare: Tensor, kind: Tensor) -> Tensor:
    """Tokens that the segments before each segment could give, ordered by type and then by age: [N, G]."""
    out = torch.zeros_like(spare)
    given = torch.zeros_like(spare[:, :1])
    for k in range(TYPES):
        mine = torch.where(kind == k, spare, 0)
        out = torch.where(kind == k, given + mine.cumsum(-1) - mine, out)
        given = given + mine.sum(-1, keepdim=True)
    return out
