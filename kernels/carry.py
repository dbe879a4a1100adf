"""Keep the positions and scores of the tokens that stay, without gaps. Twin: `minithink/ref/carry.py`.

To use it alone, copy this file, `_common.py` and `_entries.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.carry import carry
    >>> score = torch.tensor([[[[0.5, 0.2, 0.3]]]])  # float32 [L, N, H, S]
    >>> pos = torch.tensor([[[[0, 4, 5]]]], dtype=torch.int32)  # [L, N, H, S]
    >>> stay = torch.tensor([[[[True, False, True]]]])  # [L, N, H, S]
    >>> position = torch.zeros(1, 1, 1, 2, dtype=torch.int32)  # [L, B, H, E], changed in place
    >>> scores = torch.zeros(1, 1, 1, 2)  # float32 [L, B, H, E], changed in place
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> active = torch.tensor([True])  # [N]
    >>> carry(score, pos, stay, (position, scores), at, active)
    >>> position.tolist()
    [[[[0, 5]]]]

Layout: one launch, a program per lane, which goes over the lane's columns BLOCK at a time. A prefix sum over the
flags gives each token that stays its entry, behind the entries that earlier blocks have written.
Bound: memory, by a count of bytes. For each token 9 bytes are read (flag, position, score) and 8
written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, unit_of, with_dense_columns
from minithink.kernels._entries import NOWHERE

BLOCK = 512  # columns at a time
WARPS = 4


@triton.jit
def _carry(
    p_score,
    p_pos,
    p_stay,
    p_known,
    p_kept,
    p_at,
    p_active,
    n,
    rows,
    heads,
    entries,
    width,
    pos_layer,
    pos_row,
    pos_head,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_layer = i // (n * heads)
    i_n = i // heads % n
    i_head = i % heads
    if tl.load(p_active + i_n) != 0:
        _, unit = unit_of(i, n, rows, heads, p_at)
        p_pos += i_layer * pos_layer + i_n * pos_row + i_head * pos_head
        p_score += i * width
        p_stay += i * width
        p_known += unit * entries
        p_kept += unit * entries
        written = tl.zeros([], tl.int32)
        for start in range(0, width, BLOCK):
            own = start + tl.arange(0, BLOCK)
            stay = (tl.load(p_stay + own, own < width, other=0) != 0).to(tl.int32)
            entry = written + tl.cumsum(stay) - stay
            m_stay = (stay != 0) & (entry < entries)
            tl.store(p_known + entry, tl.load(p_pos + own, m_stay, other=NOWHERE), m_stay)
            tl.store(p_kept + entry, tl.load(p_score + own, m_stay, other=0.0), m_stay)
            written += tl.sum(stay)
        # The entries behind the last token become empty.
        for start in range(0, entries, BLOCK):
            own = start + tl.arange(0, BLOCK)
            m_behind = (own >= written) & (own < entries)
            tl.store(p_known + own, tl.zeros_like(own) + NOWHERE, m_behind)
            tl.store(p_kept + own, tl.zeros([BLOCK], tl.float32), m_behind)


def carry(score: Tensor, pos: Tensor, stay: Tensor, known: tuple[Tensor, Tensor], at: Tensor, active: Tensor) -> None:
    """Keep positions and scores of the tokens that stay, as `minithink/ref/carry.py` describes it."""
    rows, heads, entries = known[0].shape[1:]
    width = pos.shape[-1]
    lanes = pos.shape[0] * pos.shape[1] * pos.shape[2]
    if lanes and entries:
        pos = with_dense_columns(pos)
        _carry[(lanes,)](
            score.contiguous(),
            pos,
            stay.contiguous().view(torch.uint8),
            *known,
            at,
            active.view(torch.uint8),
            len(at),
            rows,
            heads,
            entries,
            width,
            *pos.stride()[:3],
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def variants() -> Iterator[Variant]:
    names = _carry.arg_names
    signature = {name: "*i32" for name in names if name.startswith("p_")}
    signature |= {"p_score": "*fp32", "p_kept": "*fp32", "p_stay": "*u8", "p_active": "*u8", "p_at": "*i64"}
    signature |= {name: "i32" for name in names if name[0].islower() and name not in signature}
    yield Variant(_carry, signature, {"BLOCK": BLOCK}, {"num_warps": WARPS})
