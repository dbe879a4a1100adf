"""After budgets have moved: heads that shrink evict, and CRF and τ move to their new entries (Crystal-KV)."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.ref.lrfu import Decay, decayed
from minithink.ref.retain import Known, entries, lanes, remember, worst


def repack(
    drop: Tensor,
    held: Tensor,
    known: Known,
    at: Tensor,
    old: Tensor,
    new: Tensor,
    slack: int,
    protected: Tensor,
    t: Tensor,
    moves: Tensor,
    decay: Decay,
) -> None:
    """Budgets have moved: heads that shrink evict in the order of algorithm 1, then the lists move to their entries.

    Args as of `retain`, and:
        drop: bool [L, N, H, S], the tokens that `retain` drops; changed in place: the tokens that go now are added.
        held: int32 [L, N, H], tokens of each head before `drop`. Each token that stays has an entry.
        old, new: int32 [L, N, H], the budgets.
        moves: bool [N]. In other rows nothing changes.
    """
    column = torch.arange(drop.shape[-1], device=drop.device)
    there = (column < held[..., None]) & ~drop  # [L, N, H, S]
    rank = there.cumsum(-1) - 1
    entry = entries(known, old, slack, rank)
    shape = lanes(drop)

    def of_tokens(x: Tensor) -> Tensor:
        """[B, E] → [L, N, H, S]."""
        own = x[at].gather(1, entry)
        return own.unflatten(1, shape).transpose(0, 1)

    pos = of_tokens(known[0])
    crf = of_tokens(known[1])
    last = of_tokens(known[2])

    free = there & (pos >= protected[:, None, None])
    fixed = there & ~free
    score = decayed(crf, last, t[:, None, None], decay)
    room = new - fixed.sum(-1)
    gone = worst(score, last, free, room)
    remember(
        known=known,
        at=at,
        rows=moves,
        budget=new,
        slack=slack,
        stay=there & ~gone,
        pos=pos,
        crf=crf,
        last=last,
    )
    drop |= gone & moves[:, None, None]
