"""Stamps of the tokens that are hit, and the longest times between hits. Twin: `minithink/ref/stamp.py`.

Layout: one launch, a program per lane, which goes over the lane's entries BLOCK at a time. Usually the token of
column s is in entry s. If tokens before it were evicted since, a binary search finds the entries of the block. They
are in or behind the block, so no entry is read that an earlier block has written.
Bound: memory, by a count of bytes (not measured). For each token 13 bytes are read and 8 written (flag and position;
position and TS of its entry), with MRI 17 and 12. A search reads about log2(E) more positions, from the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, unit_of

BLOCK = 512  # entries at a time
WARPS = 4
NOWHERE = 2**31 - 1  # the position in an empty entry


@triton.jit
def _stamp(
    p_hit, p_pos, p_held, p_known, p_last, p_gap, p_at, p_prompt, p_t, p_active, n, rows, heads, entries, width,
    pos_layer, pos_row, pos_head, NOWHERE: tl.constexpr, GAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    i_layer, i_n, i_head = i // (n * heads), i // heads % n, i % heads
    if tl.load(p_active + i_n) != 0:
        _, unit = unit_of(i, n, rows, heads, p_at)
        p_hit += i * width
        p_pos += i_layer * pos_layer + i_n * pos_row + i_head * pos_head
        p_known += unit * entries
        p_last += unit * entries
        p_gap += unit * entries
        held, prompt, t = tl.load(p_held + i), tl.load(p_prompt + i_n), tl.load(p_t + i_n)
        for start in range(0, entries, BLOCK):
            own = start + tl.arange(0, BLOCK)
            m_entry = own < entries
            m_in = m_entry & (own < held)
            pos = tl.load(p_pos + own, m_in, other=NOWHERE)
            known, at = tl.load(p_known + own, m_entry, other=NOWHERE), own
            if tl.max(((known != pos) & m_in).to(tl.int32)) > 0:
                end, left = tl.zeros_like(own) + entries, entries - start
                at = tl.zeros_like(own) + start
                while left > 0:
                    middle = (at + end) // 2
                    m_less = (tl.load(p_known + middle, at < end, other=NOWHERE) < pos) & (at < end)
                    at, end = tl.where(m_less, middle + 1, at), tl.where(m_less, end, middle)
                    left //= 2
                known = tl.load(p_known + at, at < entries, other=NOWHERE)
            m_found = m_in & (known == pos)
            hit = tl.load(p_hit + own, m_in, other=0) != 0
            last = tl.where(m_found, tl.load(p_last + at, m_found, other=0), tl.maximum(pos - prompt, 0))
            gap = tl.zeros_like(last)
            if GAPS:
                gap = tl.load(p_gap + at, m_found, other=0)
                gap = tl.where(hit, tl.maximum(gap, t - last), gap)
            last = tl.where(hit, t, last)
            tl.debug_barrier()  # all threads have read, and write now
            tl.store(p_known + own, pos, m_entry)
            tl.store(p_last + own, tl.where(m_in, last, 0), m_entry)
            if GAPS:
                tl.store(p_gap + own, gap, m_entry)
            tl.debug_barrier()


def stamp(
    hit: Tensor, pos: Tensor, held: Tensor, known: tuple[Tensor, ...], at: Tensor, prompt: Tensor, t: Tensor,
    active: Tensor,
) -> None:  # fmt: skip
    """Stamp the tokens that are hit at time t, as `minithink/ref/stamp.py` describes it."""
    entries, width = known[0].shape[-1], pos.shape[-1]
    if held.numel() and entries:
        pos = pos if pos.stride(-1) == 1 or width < 2 else pos.contiguous()
        _stamp[(held.numel(),)](
            hit.contiguous().view(torch.uint8), pos, held.contiguous(), *known[:2], known[-1], at, prompt, t,
            active.view(torch.uint8), len(at), known[0].shape[1], held.shape[2], entries, width, *pos.stride()[:3],
            NOWHERE=NOWHERE, GAPS=len(known) == 3, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    names = _stamp.arg_names
    signature = {name: "*i32" for name in names if name.startswith("p_")}
    signature |= {"p_hit": "*u8", "p_active": "*u8", "p_at": "*i64"}
    signature |= {name: "i32" for name in names if name[0].islower() and name not in signature}
    for gaps in (False, True):
        values = {"NOWHERE": NOWHERE, "GAPS": gaps, "BLOCK": BLOCK}
        yield Variant(_stamp, signature, values, {"num_warps": WARPS})
