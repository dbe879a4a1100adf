"""After budgets have moved: heads that shrink evict, lists move to their entries. Twin: `minithink/ref/repack.py`.

To use it alone, copy this file, `retain.py`, `_common.py` and `_entries.py`. With the GPU as torch's default device:

    >>> from types import SimpleNamespace
    >>> import torch
    >>> from minithink.kernels.repack import repack
    >>> age = torch.arange(1024, dtype=torch.int32)  # λ = 1/2: λ^age and λ^(1024·age), as factors times powers of 2
    >>> factor = torch.ones(2048, dtype=torch.float64)
    >>> decay = SimpleNamespace(lam=0.5, factor=factor, exponent=-torch.cat((age, 1024 * age)))
    >>> drop = torch.zeros(1, 1, 2, 2, dtype=torch.bool)  # [L, N, H, S], changed in place
    >>> held = torch.tensor([[[2, 2]]], dtype=torch.int32)  # [L, N, H]
    >>> position = torch.tensor([[0, 1, 0, 1, 2**31 - 1]], dtype=torch.int32)  # [B, E]; these three change in place
    >>> crf = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0]], dtype=torch.float64)  # [B, E]
    >>> last = torch.ones(1, 5, dtype=torch.int32)  # [B, E]
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> old = torch.tensor([[[2, 2]]], dtype=torch.int32)  # [L, N, H]
    >>> new = torch.tensor([[[1, 3]]], dtype=torch.int32)  # [L, N, H]: the first head shrinks
    >>> zero = torch.zeros(1, dtype=torch.int32)  # [N]: no token is protected, and t is 1
    >>> moves = torch.tensor([True])  # [N]
    >>> repack(drop, held, (position, crf, last), at, old, new, 0, zero, zero + 1, moves, decay)
    >>> drop.tolist()
    [[[[False, True], [False, False]]]]
    >>> crf[:, :3].tolist()
    [[3.0, 2.0, 1.0]]

Layout: two launches, because a lane's new entries are other lanes' old ones.

    _leave   one program of one warp per lane. If the head shrinks, it finds the border as `retain` does. Then it goes
             over the columns: the k-th column that `drop` keeps belongs to the lane's k-th entry. Entries that stay
             are written to the lane's new place in a copy of the row's list
    _settle  one program per block of entries: the copy becomes the list

Programs of rows whose budgets do not move end at once, and do not touch their part of the copy.
Bound: the launch in most steps, for a row moves once in 128 steps. Then memory: 1 byte of `drop` for each column, and
64 bytes for each entry.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels._entries import NOWHERE
from minithink.kernels.retain import (
    LARGEST,
    WARPS,
    Decay,
    Lane,
    Powers,
    constants,
    entries_of,
    estimate,
    gone_of,
    no_border,
    ordered,
    worst,
)

ENTRIES = 1024  # of a program of _settle


@triton.jit
def _listed(p_known, p_crf, p_last, room, protected, t, powers, BLOCK: tl.constexpr):
    """Of a list's tokens: how many there are, and are protected; of the others the smallest and the largest ordered
    estimate."""
    column = tl.arange(0, BLOCK)
    held = tl.zeros((BLOCK,), tl.int32)
    fixed = tl.zeros((BLOCK,), tl.int32)
    least = tl.full((BLOCK,), LARGEST, tl.int32)
    most = tl.full((BLOCK,), -LARGEST - 1, tl.int32)
    for start in range(0, room, BLOCK):
        known = tl.load(p_known + start + column, start + column < room, other=NOWHERE)
        m = known != NOWHERE
        m_fixed = known < protected
        held += m.to(tl.int32)
        fixed += m_fixed.to(tl.int32)
        crf = tl.load(p_crf + start + column, m, other=0.0)
        last = tl.load(p_last + start + column, m, other=0)
        order = ordered(estimate(crf, last, t, powers))
        least = tl.minimum(least, tl.where(m & ~m_fixed, order, LARGEST))
        most = tl.maximum(most, tl.where(m & ~m_fixed, order, -LARGEST - 1))
    return tl.sum(held), tl.sum(fixed), tl.min(least), tl.max(most)


@triton.jit
def _remember(
    p_drop,
    columns,
    p_known,
    lane,
    fixed,
    border,
    p_new_known,
    p_new_crf,
    p_new_last,
    new_room,
    powers,
    BLOCK: tl.constexpr,
):
    """Mark the tokens that go, and write the others to their new entries."""
    column = tl.arange(0, BLOCK)
    missing = border.missing
    seen = tl.zeros((), tl.int32)
    kept = tl.zeros((), tl.int32)
    for start in range(0, columns, BLOCK):
        m_in = start + column < columns
        m = (m_in & (tl.load(p_drop + start + column, m_in, other=1) == 0)).to(tl.int32)
        own = seen + tl.cumsum(m) - 1
        m_own = (m > 0) & (own < lane.held)
        crf = tl.load(lane.p_crf + own, m_own, other=0.0)
        tau = tl.load(lane.p_last + own, m_own, other=0)
        gone, found = gone_of(crf, tau, m_own & (own >= fixed), lane.t, border, missing, powers)
        missing -= found
        tl.store(p_drop + start + column, gone.to(tl.uint8), gone > 0)
        stay = (m_own & (gone == 0)).to(tl.int32)
        to = kept + tl.cumsum(stay) - 1
        m_stay = (stay > 0) & (to < new_room)
        tl.store(p_new_known + to, tl.load(p_known + own, m_own, other=NOWHERE), m_stay)
        tl.store(p_new_crf + to, crf, m_stay)
        tl.store(p_new_last + to, tau, m_stay)
        seen += tl.sum(m)
        kept += tl.sum(stay)
    for start in range(kept, new_room, BLOCK):
        tl.store(p_new_known + start + column, tl.full((BLOCK,), NOWHERE, tl.int32), start + column < new_room)


@triton.jit(do_not_specialize=["n"])
def _leave(
    p_drop,
    p_held,
    p_known,
    p_crf,
    p_last,
    p_at,
    p_old,
    p_new,
    p_protected,
    p_t,
    p_moves,
    p_factor,
    p_exponent,
    p_new_known,
    p_new_crf,
    p_new_last,
    n,
    layers,
    heads,
    width,
    entries,
    slack,
    LAM: tl.constexpr,
    LOG_LAM: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_n = i // heads % n
    i_own = i // (n * heads) * heads + i % heads
    if tl.load(p_moves + i_n) == 0:
        return

    first, old_room = entries_of(p_old, i_n, i_own, n, layers, heads, slack, LANES)
    entry = tl.load(p_at + i_n) * entries + first
    p_known += entry
    p_crf += entry
    p_last += entry
    first, new_room = entries_of(p_new, i_n, i_own, n, layers, heads, slack, LANES)
    entry = i_n * entries + first
    p_new_known += entry
    p_new_crf += entry
    p_new_last += entry
    p_drop += i * width
    columns = tl.load(p_held + i)
    t = tl.load(p_t + i_n)
    protected = tl.load(p_protected + i_n)
    powers = Powers(p_factor, p_exponent, LAM, LOG_LAM, STEPS)

    held, fixed, least, most = _listed(p_known, p_crf, p_last, old_room, protected, t, powers, BLOCK)
    # All of these tokens have entries, so no CRF waits elsewhere.
    lane = Lane(p_crf=p_crf, p_last=p_last, p_more_crf=p_crf, p_more_last=p_last, room=held, held=held, t=t)
    border = no_border(held)
    goes = held - tl.maximum(tl.load(p_new + i), fixed)
    if goes > 0:
        border = worst(lane, fixed, goes, least, most, powers, BLOCK)
    _remember(
        p_drop=p_drop,
        columns=columns,
        p_known=p_known,
        lane=lane,
        fixed=fixed,
        border=border,
        p_new_known=p_new_known,
        p_new_crf=p_new_crf,
        p_new_last=p_new_last,
        new_room=new_room,
        powers=powers,
        BLOCK=BLOCK,
    )


@triton.jit
def _settle(
    p_known, p_crf, p_last, p_at, p_moves, p_new_known, p_new_crf, p_new_last, entries, ENTRIES: tl.constexpr
):
    i_n = tl.program_id(0).to(tl.int64)
    if tl.load(p_moves + i_n) == 0:
        return
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    m = entry < entries - 1  # the last one is not used
    to = tl.load(p_at + i_n) * entries + entry
    known = tl.load(p_new_known + i_n * entries + entry, m, other=NOWHERE)
    m_token = known != NOWHERE  # `_leave` writes no CRF and no τ of empty entries
    tl.store(p_known + to, known, m)
    tl.store(p_crf + to, tl.load(p_new_crf + i_n * entries + entry, m_token), m_token)
    tl.store(p_last + to, tl.load(p_new_last + i_n * entries + entry, m_token), m_token)


def repack(
    drop: Tensor,
    held: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
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

    Arguments as `minithink/ref/repack.py` describes them. The budgets, old and new, take all entries of a row.
    """
    layers, n, heads = held.shape
    entries = known[0].shape[1]
    if not held.numel():
        return
    copy = [torch.empty(n, entries, dtype=x.dtype, device=x.device) for x in known]
    moves = moves.contiguous().view(torch.uint8)
    _leave[(held.numel(),)](
        drop.view(torch.uint8),
        held.contiguous(),
        *known,
        at,
        old.contiguous(),
        new.contiguous(),
        protected,
        t,
        moves,
        decay.factor,
        decay.exponent,
        *copy,
        n,
        layers,
        heads,
        drop.shape[-1],
        entries,
        slack,
        **constants(decay.lam, len(decay.factor) // 2, layers * heads),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    _settle[(n, triton.cdiv(entries, ENTRIES))](*known, at, moves, *copy, entries, ENTRIES=ENTRIES)


def variants() -> Iterator[Variant]:
    types = {"p_drop": "*u8", "p_moves": "*u8", "p_at": "*i64"}
    types |= dict.fromkeys(("p_crf", "p_new_crf", "p_factor"), "*fp64")
    small = constants(0.0, 1024, 4)
    large = constants(0.6, 1024, 256)
    for kernel, constexprs in ((_leave, small), (_leave, large), (_settle, {"ENTRIES": ENTRIES})):
        names = [name for name in kernel.arg_names if name not in constexprs]
        signature = {name: types.get(name, "*i32" if name.startswith("p_") else "i32") for name in names}
        yield Variant(kernel, signature, constexprs, {"num_warps": WARPS})
