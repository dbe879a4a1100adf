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
    own_kind = kind[at]  # [N, G]
    running = (clock - 1).clamp(min=0) // tau
    running = running.long()  # [N]
    ended = active & (clock > 0) & (clock % tau == 0)
    newest = own_kind.gather(1, running[:, None])  # [N, 1]
    turn = ended & (newest[:, 0] == 0) & transitions
    fullest = excess.amax((0, 2))  # [N]
    goal, new_level, lost = _goals(
        size=size.amax((0, 2)),
        kind=own_kind,
        level=level[at],
        excess=torch.where(active, fullest, 0),
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
    complete = running + ended.to(running.dtype)  # [N], segments that have ended
    past = number < complete[:, None]
    steps = list(enumerate(retention, 1))  # (n, R_n)

    # Case 1: goal ← min(goal, R_n)
    earlier = number < running[:, None]
    earlier = turn[:, None] & earlier & (goal > 0)
    higher = earlier & (level < len(retention))
    level = level + higher.to(level.dtype)
    for n, kept in steps:
        here = earlier & (level == n)
        goal = torch.where(here, goal.clamp(max=kept), goal)
    first = (goal < size).sum(-1, dtype=torch.int32)
    excess = excess - (size - goal).sum(-1)

    # Case 2: in the order of types, then of age, each segment must give the tokens that the segments before it could
    # not give.
    spare = (goal - retention[-1]).clamp(min=0)
    spare = torch.where(past, spare, 0)
    needed = excess[:, None] - _before(spare, kind)
    asked = (spare > 0) & (needed > 0)
    enough = torch.full_like(level, len(retention))  # the first level at which it gives as many, or the last level
    for n, kept in reversed(steps):
        given = goal - goal.clamp(max=kept)
        fits = (level < n) & (given >= needed)
        enough = torch.where(fits, n, enough)
    second = torch.zeros_like(first)
    after = goal
    for n, kept in steps:
        down = asked & (level < n) & (n <= enough)
        down = down & (goal > kept)
        second += down.sum(-1, dtype=torch.int32)
        after = torch.where(down, kept, after)
    level = torch.where(asked, enough, level)

    # A hard budget: the running segment down to the last of R, then every segment down to 0.
    if hard:
        current = number == running[:, None]
        everything = past | current
        rounds = [(current, kept) for kept in retention]
        rounds += [(everything, n) for n in BEYOND]
        for where, floor in rounds:
            excess_now = excess - (goal - after).sum(-1)
            spare = (after - floor).clamp(min=0)
            spare = torch.where(where, spare, 0)
            asked = excess_now[:, None] > _before(spare, kind)
            asked = (spare > 0) & asked
            after = torch.where(asked, floor, after)
            second += asked.sum(-1, dtype=torch.int32)
    return after, level, torch.stack((first, second))


def _before(spare: Tensor, kind: Tensor) -> Tensor:
    """Tokens that the segments before each segment could give, ordered by type and then by age: [N, G]."""
    out = torch.zeros_like(spare)
    given = torch.zeros_like(spare[:, :1])  # [N, 1], by all types before
    for k in range(TYPES):
        mine = torch.where(kind == k, spare, 0)
        before = given + mine.cumsum(-1) - mine
        out = torch.where(kind == k, before, out)
        given = given + mine.sum(-1, keepdim=True)
    return out
