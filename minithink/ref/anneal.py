"""How many tokens every segment may keep: the retention schedule at work (ThinKV §4.3, listing 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BEYOND = (2, 1, 0)  # tokens of a segment that a hard budget goes on to
TYPES = 3  # of thoughts, the least important first


def anneal(
    size: Tensor, excess: Tensor, kind: Tensor, level: Tensor, cases: Tensor, at: Tensor, clock: Tensor,
    active: Tensor, tau: int, retention: Sequence[int], hard: bool, transitions: bool,
) -> Tensor:  # fmt: skip
    """One look at the segments of N rows, at those of their fullest lanes.

        case 1   where a transition has ended, every segment before it goes to its next level R_n
        case 2   while a lane holds more than its budget: the oldest ended segment of the least important type that
                 holds more than the last of R goes to its next level
        then     if `hard`, and all ended segments are there: the running segment goes down R level by level, then all
                 segments, in the order of case 2, to 2, to 1 and to 0 tokens

    At a level a segment holds at most R_n tokens, so levels that are above its size cost it nothing.

    Args:
        size: int32 [Lt, N, Ht, G], tokens of every segment, oldest first; at most R_n at level n.
        excess: int32 [Lt, N, Ht], tokens that must go; nothing must where it is not positive.
        kind: uint8 [B, G], types, 0 the least important of three, of all rows.
        level: uint8 [B, G], how often each was annealed, at most len(retention). Changed in place.
        cases: int32 [2, B], counts how many times a segment lost tokens, in case 1, and in case 2 and after it.
            Changed in place.
        at: int64 [N], the rows that these are, each once.
        clock: int32 [N], generated tokens, the newest one included: it tells the running segment, of τ tokens.
        active: bool [N]; nothing happens to the others.
        tau: τ.
        retention: R, descending, at least one number.
        hard: whether the budget is kept whatever it takes.
        transitions: whether there is a case 1.

    Returns:
        int32 [N, G], tokens that every segment may keep: at most as many as it has in the fullest lane.
    """
    of, before = kind[at], level[at]
    running = ((clock - 1).clamp(min=0) // tau).long()
    ended = active & (clock > 0) & (clock % tau == 0)
    turn = ended & (of.gather(1, running[:, None])[:, 0] == 0) & transitions
    too_many = torch.where(active, excess.amax((0, 2)), 0)
    goal, after, lost = _look(size.amax((0, 2)), of, before, too_many, running, ended, turn, retention, hard)
    level[at] = after
    cases[:, at] += lost
    return goal


def _look(
    size: Tensor, kind: Tensor, level: Tensor, excess: Tensor, running: Tensor, ended: Tensor, turn: Tensor,
    retention: Sequence[int], hard: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Goals, levels and what to add to the cases. running: int64 [N], the number of the newest token's segment;
    ended: bool [N], whether it is complete; turn: bool [N], whether case 1 applies."""
    goal, number = size.int(), torch.arange(size.shape[1], device=size.device)
    past = number < (running + ended.to(running.dtype))[:, None]
    steps = list(enumerate(retention, 1))  # (n, R_n)

    earlier = turn[:, None] & (number < running[:, None]) & (goal > 0)
    level = level + (earlier & (level < len(retention))).to(level.dtype)
    for n, kept in steps:
        goal = torch.where(earlier & (level == n), goal.clamp(max=kept), goal)
    first = (goal < size).sum(-1, dtype=torch.int32)
    excess = excess - (size - goal).sum(-1)

    # Each segment is asked for what those before it could not give.
    spare = torch.where(past, (goal - retention[-1]).clamp(min=0), 0)
    needed = excess[:, None] - _before(spare, kind)
    asked = (spare > 0) & (needed > 0)
    enough = torch.full_like(level, len(retention))  # the first level at which that much is given, or the last
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
        for of, floor in [*((current, kept) for _, kept in steps), *((everything, n) for n in BEYOND)]:
            excess_now = excess - (goal - after).sum(-1)
            spare = torch.where(of, (after - floor).clamp(min=0), 0)
            asked = (spare > 0) & (excess_now[:, None] > _before(spare, kind))
            after = torch.where(asked, floor, after)
            second += asked.sum(-1, dtype=torch.int32)
    return after, level, torch.stack((first, second))


def _before(spare: Tensor, kind: Tensor) -> Tensor:
    """What the segments before each could give, by type and then by age: [B, G]."""
    out, given = torch.zeros_like(spare), torch.zeros_like(spare[:, :1])
    for k in range(TYPES):
        mine = torch.where(kind == k, spare, 0)
        out = torch.where(kind == k, given + mine.cumsum(-1) - mine, out)
        given = given + mine.sum(-1, keepdim=True)
    return out
