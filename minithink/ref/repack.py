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
    there = (torch.arange(drop.shape[-1], device=drop.device) < held[..., None]) & ~drop
    entry = entries(known, old, slack, there.cumsum(-1) - 1)
    pos, crf, last = (x[at].gather(1, entry).unflatten(1, lanes(drop)).transpose(0, 1) for x in known)
    free = there & (pos >= protected[:, None, None])
    gone = worst(decayed(crf, last, t[:, None, None], decay), last, free, new - (there & ~free).sum(-1))
    remember(known, at, moves, new, slack, there & ~gone, pos, crf, last)
    drop |= gone & moves[:, None, None]
