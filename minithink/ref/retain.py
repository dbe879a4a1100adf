"""Algorithm 1 of Crystal-KV (`policies/crystal_kv.py`): update CRF by the hits, and select the tokens that go.

CRF is a token's score, combined recency and frequency. τ is the time of its last hit. A token that goes is evicted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.ref.lrfu import Decay, Scaled, lrfu

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others
Known = tuple[Tensor, Tensor, Tensor]  # positions, CRF and τ


def retain(
    mass: Tensor,
    pos: Tensor,
    held: Tensor,
    known: Known,
    at: Tensor,
    budget: Tensor,
    slack: int,
    keep: Tensor,
    protected: Tensor,
    prompt: Tensor,
    t: Tensor,
    tracked: Tensor,
    counted: Tensor,
    summed: Tensor,
    decay: Decay,
    p: float,
    birth: int,
    scored: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """One step of algorithm 1.

    `known` has the positions, CRF and τ of the tokens that each row held after its last tracked step. A row has one
    list for all its heads: layer by layer, head by head. A head has budget + slack entries, and its tokens fill the
    first of them, oldest first. So the lists do not grow when budgets move. The lists of tracked rows are changed in
    place. A token finds its entry by its position. A token without an entry is new, and newer than all others.

    Args:
        mass: float [L, N, H, S], the newest query's attention; anything (also NaN) behind the last token.
        pos: int32 [L, N, H, S], the tokens' positions, ascending; anything behind the last token.
        held: int32 [L, N, H], tokens of each head.
        known: int32, float64 and int32 [B, E]; E is more than the entries of a row's heads. The last entry is for
            tokens without an entry of their own, and its content means nothing.
        at: int64 [N], the rows, each once.
        budget: int32 [L, N, H].
        keep: int32 [L, N, H], tokens that a head may keep, protected ones included (those stay in any case).
        protected: int32 [N], tokens at positions below this are protected.
        prompt: int32 [N], tokens of the prompt.
        t: int32 [N], generated tokens.
        tracked: bool [N]. In other rows nothing changes.
        counted: bool [L, N, H], heads in which hits count.
        summed: bool [N], rows of which ΣCRF is wanted.
        decay, p: the powers of λ and the share of the hit set, see `lrfu`.
        birth: CRF of a new token, 1 or 0. With 1, its attention to itself is no second hit.
        scored: whether `score` is wanted.

    Returns:
        drop: bool [L, N, H, S], the tokens that go; False in rows that are not tracked.
        kept, fixed: int32 [L, N, H], tokens of each head that stay, and the protected ones among them; 0 in rows that
            are not tracked.
        crf: float64 [L, N, H], ΣCRF of the tokens that stay, decayed to t; 0 in rows that are not summed.
        score: float64 [L, N, H, S], log2 of the decayed CRF of every token, where tracked; None if not wanted.
    """
    rows = tracked[:, None]
    there, crf, last, score = used(
        mass=mass,
        pos=pos,
        held=held,
        known=known,
        at=at,
        budget=budget,
        slack=slack,
        prompt=prompt,
        t=t,
        counted=counted,
        decay=decay,
        p=p,
        birth=birth,
    )
    free = there & (pos >= protected[:, None, None])
    fixed = there & ~free
    fixed = fixed.sum(-1, dtype=torch.int32)
    gone = worst(score, last, free, keep - fixed)  # line 10
    stay = there & ~gone
    remember(  # lines 11 to 13
        known=known,
        at=at,
        rows=tracked,
        budget=budget,
        slack=slack,
        stay=stay,
        pos=pos,
        crf=crf,
        last=last,
    )
    drop = there & ~stay & rows[..., None]
    kept = stay.sum(-1, dtype=torch.int32)
    kept = torch.where(rows, kept, 0)
    fixed = torch.where(rows, fixed, 0)
    wanted = stay & summed[:, None, None]
    total = torch.where(wanted, score.number(), 0.0)
    total = total.sum(-1)
    log_score = score.log2() if scored else None
    return drop, kept, fixed, total, log_score


def used(
    mass: Tensor,
    pos: Tensor,
    held: Tensor,
    known: Known,
    at: Tensor,
    budget: Tensor,
    slack: int,
    prompt: Tensor,
    t: Tensor,
    counted: Tensor,
    decay: Decay,
    p: float,
    birth: int,
) -> tuple[Tensor, Tensor, Tensor, Scaled]:
    """Lines 3 to 9, with the arguments of `retain`: which columns hold a token, its CRF, τ and the decayed CRF."""
    column = torch.arange(pos.shape[-1], device=pos.device)
    there = column < held[..., None]
    t = t[:, None, None]
    prompt = prompt[:, None, None]
    born = (pos - prompt + 1).clamp(min=0)  # the time at which each token came, 0: the prompt
    crf, last = recall(
        pos=pos,
        born=born,
        known=known,
        at=at,
        budget=budget,
        slack=slack,
        birth=birth,
    )
    older = (born < t) | (birth == 0)
    crf, last, score = lrfu(
        mass=mass,
        valid=there,
        counted=counted[..., None] & older,
        crf=crf,
        last=last,
        t=t,
        decay=decay,
        p=p,
    )
    return there, crf, last, score


def worst(crf: Scaled, last: Tensor, free: Tensor, room: Tensor) -> Tensor:
    """The free tokens that go, so that `room` of them stay: bool [..., S]. The smallest CRF goes first, of equal CRFs
    the token whose last hit is oldest, then the oldest token."""
    exponent, mantissa = crf.ordered()
    column = torch.arange(last.shape[-1], device=last.device)
    order = column.expand(last.shape)  # columns are oldest first
    for key in (last, mantissa, exponent):  # sorts are stable, so the last key decides first
        ordered = key.gather(-1, order)
        by_key = ordered.sort(dim=-1, stable=True).indices
        order = order.gather(-1, by_key)
    those = free.gather(-1, order)
    goes = those.sum(-1) - room.clamp(min=0)
    first = those.cumsum(-1) <= goes[..., None]
    gone = torch.zeros_like(free)
    return gone.scatter(-1, order, those & first)


def recall(
    pos: Tensor,
    born: Tensor,
    known: Known,
    at: Tensor,
    budget: Tensor,
    slack: int,
    birth: int,
) -> tuple[Tensor, Tensor]:
    """CRF and τ of the token in each column, found by its position; a new token has CRF `birth` and τ `born`."""
    positions, crfs, times = known
    room = (budget + slack).transpose(0, 1).flatten(1)
    end = room.cumsum(1)  # the end of each head's entries: [N, L·H]
    n, heads = end.shape
    count = positions.shape[1]
    entry = torch.arange(count, device=pos.device)
    entry = entry.repeat(n, 1)  # [N, E]

    # The head's number in the high bits, the position in the low bits: one ascending list a row.
    head = torch.searchsorted(end, entry, right=True)
    there = (head << 32) + positions[at]  # [N, E]
    of_heads = torch.arange(heads, device=pos.device) << 32
    wanted = pos.transpose(0, 1).flatten(1, 2)  # [N, L·H, S]
    wanted = of_heads[:, None] + wanted
    wanted = wanted.flatten(1)
    here = torch.searchsorted(there, wanted.contiguous())
    here = here.clamp(max=count - 1)

    def of_lanes(x: Tensor) -> Tensor:
        """[N, L·H·S] → [L, N, H, S]."""
        return x.unflatten(1, lanes(pos)).transpose(0, 1)

    same = there.gather(1, here) == wanted
    same = of_lanes(same)
    crf = crfs[at].gather(1, here)
    crf = torch.where(same, of_lanes(crf), birth)
    last = times[at].gather(1, here)
    last = torch.where(same, of_lanes(last), born)
    return crf, last


def remember(
    known: Known,
    at: Tensor,
    rows: Tensor,
    budget: Tensor,
    slack: int,
    stay: Tensor,
    pos: Tensor,
    crf: Tensor,
    last: Tensor,
) -> None:
    """Keep positions, CRF and τ of the tokens that stay, in place. rows: bool [N], the rows whose lists change."""
    rank = stay.cumsum(-1) - 1
    rank = torch.where(stay, rank, NOWHERE)
    entry = entries(known, budget, slack, rank)
    for list_, new, nothing in zip(known, (pos, crf, last), (NOWHERE, 0, 0), strict=True):
        old = list_[at]
        of_tokens = new.transpose(0, 1).flatten(1)  # [N, L·H·S]
        kept = torch.full_like(old, nothing)
        kept.scatter_(1, entry, of_tokens)
        kept[:, -1].fill_(nothing)
        list_[at] = torch.where(rows[:, None], kept, old)


def entries(known: Known, budget: Tensor, slack: int, number: Tensor) -> Tensor:
    """The entry of each token: int64 [N, L·H·S]. A token beyond its head's entries gets the last entry of the row.

    number: [L, N, H, S], the token's number in its head, 0 for the oldest.
    """
    room = (budget + slack).transpose(0, 1)  # [N, L, H]
    end = room.flatten(1).cumsum(1)
    first = end.view(room.shape) - room  # where each head's entries begin
    first = first[..., None]
    number = number.transpose(0, 1)  # [N, L, H, S]
    nowhere = known[0].shape[1] - 1
    inside = (number >= 0) & (number < room[..., None])
    entry = torch.where(inside, first + number, nowhere)
    return entry.clamp(max=nowhere).flatten(1)


def lanes(x: Tensor) -> tuple[int, int, int]:
    """(L, H, S) of a tensor [L, N, H, S]."""
    return x.shape[0], x.shape[2], x.shape[3]
