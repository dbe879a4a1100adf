"""R-KV's redundancy of keys whose newest similar keys are remembered. Twin: `minithink/ref/running_redundancy.py`.

To use it alone, copy this file, `redundancy.py`, `_common.py` and `_entries.py`. With the GPU as torch's default
device:

    >>> import torch
    >>> from minithink.kernels.running_redundancy import running_redundancy
    >>> k = torch.zeros(1, 1, 4, 16)  # [B, Hkv, S, D]
    >>> k[0, 0, :3, 0] = 1  # three equal keys,
    >>> k[0, 0, 3, 1] = 1  # and another one
    >>> valid = torch.ones(1, 1, 4, dtype=torch.bool)  # [B, Hkv, S]
    >>> pos = torch.tensor([[[0, 1, 5, 6]]], dtype=torch.int32)  # [B, Hkv, S]
    >>> position = torch.full((1, 1, 5), 2**31 - 1, dtype=torch.int32)  # [rows, Hkv, E], changed in place
    >>> match = torch.full((1, 1, 5), -1, dtype=torch.int32)  # [rows, Hkv, E], changed in place
    >>> at = torch.tensor([0])  # [B] int64, the rows
    >>> running_redundancy(k, valid, pos, (position, match), at, threshold=0.5).cpu()  # float32 [B, Hkv, S]
    tensor([[[0.3342, 0.2603, 0.2027, 0.2027]]])
    >>> match.tolist()  # for each key the position of the newest one that resembles it
    [[[5, 5, 1, -1, -1]]]

Layout: six launches. Two are those of `redundancy.py`.

    _unit      as there, with a program per lane and block of BLOCK keys
    _recall    a program per lane finds what is known of its tokens, and lists the rows that must be searched
    _search    their j*: a program per lane and ROWS listed rows, from the newest keys backwards
    _match     a program per lane and block of BLOCK keys: j* where a new key replaces it, then C_ij* and the row's
               own column sum. New keys are the last ones of a lane, NEW at a time
    _softmax   as there
    _remember  a program per lane writes the positions of its tokens and of their j*

`_search` and `_match` differ by the side from which they see a new key. The first asks which keys the new key
resembles, which takes one row; the second, which keys resemble it, which takes one column of all rows.
Bound: memory, where few tokens came and left. K is read four times and a row of it for each j*. When nothing is
known, as after a prompt, S²·D multiply-adds, as in `redundancy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2, with_dense_columns
from minithink.kernels._entries import NOWHERE, find, search
from minithink.kernels.redundancy import (
    DEPTH,
    _cosines,
    _keys,
    _softmax,
    _spare,
    _sum_of_units,
    _unit,
)

NONE = tl.constexpr(-1)  # in place of the position of j*: the key resembles none
BLOCK = 64  # keys of a program
LISTED = 512  # tokens at a time, where no key is read
ROWS = 16  # rows of a program that searches: as few as tensor cores take
COLUMNS = 64  # keys at a time, in a search
NEW = 16  # new keys at a time
SOFTMAX_BLOCK = 1024  # keys at a time
WARPS = 4


@triton.jit
def _recall(
    p_valid,
    p_pos,
    p_position,
    p_match,
    p_at,
    p_newest,
    p_rows,
    p_plan,
    heads,
    width,
    entries,
    stride_v_b,
    stride_v_h,
    pos_row,
    pos_head,
    LISTED: tl.constexpr,
):
    """The columns of the j* that are known, and the plan of each lane: rows to search, first new column, tokens."""
    i_lane = tl.program_id(0).to(tl.int64)
    i_row = i_lane // heads
    i_head = i_lane % heads
    i_list = tl.load(p_at + i_row).to(tl.int64) * heads + i_head
    p_valid += i_row * stride_v_b + i_head * stride_v_h
    p_pos += i_row * pos_row + i_head * pos_head
    p_position += i_list * entries
    p_match += i_list * entries
    p_newest += i_lane * width
    p_rows += i_lane * width

    held = tl.zeros((), tl.int32)
    for start in range(0, width, LISTED):
        column = start + tl.arange(0, LISTED)
        held += tl.sum((tl.load(p_valid + column, column < width, other=0) != 0).to(tl.int32))

    listed = tl.zeros((), tl.int32)
    first = held  # the first new token
    for start in range(0, width, LISTED):
        column = start + tl.arange(0, LISTED)
        m_held = column < held
        pos = tl.load(p_pos + column, m_held, other=NOWHERE)
        entry, there = find(p_position, pos, column, m_held & (column < entries), m_held, 0, entries)
        m_known = m_held & (entry < entries) & (there == pos)
        match = tl.load(p_match + entry, m_known, other=NONE)
        m_match = match != NONE
        newest = tl.zeros_like(column) - 1
        m_left = m_match
        if tl.max(m_match.to(tl.int32)) > 0:
            place = search(p_pos, match, 0, held)
            m_stays = m_match & (tl.load(p_pos + place, m_match & (place < held), other=NOWHERE) == match)
            newest = tl.where(m_stays, place, -1)
            m_left = m_match & ~m_stays
        tl.store(p_newest + column, newest, m_held)
        m_new = m_held & ~m_known
        unknown = (m_new | m_left).to(tl.int32)
        tl.store(p_rows + listed + tl.cumsum(unknown) - unknown, column, unknown != 0)
        listed += tl.sum(unknown)
        first = tl.minimum(first, tl.min(tl.where(m_new, column, width)))
    tl.store(p_plan + 3 * i_lane, listed)
    tl.store(p_plan + 3 * i_lane + 1, first)
    tl.store(p_plan + 3 * i_lane + 2, held)


@triton.jit
def _search(
    p_k,
    p_scale,
    p_newest,
    p_rows,
    p_plan,
    heads,
    width,
    threshold,
    stride_k_b,
    stride_k_h,
    stride_k_s,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """j* of the rows that are listed, −1 if there is none."""
    i_lane = tl.program_id(0).to(tl.int64)
    o_list = tl.program_id(1) * ROWS
    listed = tl.load(p_plan + 3 * i_lane)
    if o_list >= listed:
        return
    held = tl.load(p_plan + 3 * i_lane + 2)
    p_k += i_lane // heads * stride_k_b + i_lane % heads * stride_k_h
    p_scale += i_lane * width
    place = o_list + tl.arange(0, ROWS)
    m_row = place < listed
    row = tl.load(p_rows + i_lane * width + place, m_row, other=0)
    scale = tl.load(p_scale + row, m_row, other=0.0)
    newest = _newest_similar(
        p_k,
        p_scale,
        row,
        m_row,
        scale,
        tl.where(m_row, -1, 0),
        0,
        held,
        threshold,
        stride_k_s,
        D,
        WIDE,
        ROWS,
        COLUMNS,
        FULL,
        DEPTH,
    )
    tl.store(p_newest + i_lane * width + row, newest, m_row)


@triton.jit
def _newest_similar(
    p_k,
    p_scale,
    row,
    m_row,
    scale,
    newest,
    first,
    held,
    threshold,
    stride_k_s,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The newest of the columns from `first` that each row resembles: −1 if there is none, and `newest` of rows where
    that is not negative."""
    start = first + ((held - first + COLUMNS - 1) // COLUMNS - 1) * COLUMNS
    while (start >= first) & (tl.min(newest) < 0):
        column = start + tl.arange(0, COLUMNS)
        m_column = column < held
        c = _cosines(
            p_k,
            p_scale,
            row,
            m_row,
            scale,
            column,
            m_column,
            stride_k_s,
            D,
            WIDE,
            ROWS,
            COLUMNS,
            FULL,
            DEPTH,
        )
        similar = tl.max(tl.where((c > threshold) & m_column[None, :], column[None, :], -1), 1)
        newest = tl.where(newest < 0, similar, newest)
        start -= COLUMNS
    return newest


@triton.jit
def _match(
    p_k,
    p_pos,
    p_scale,
    p_partial,
    p_newest,
    p_found,
    p_spared,
    p_total,
    p_plan,
    heads,
    width,
    threshold,
    stride_k_b,
    stride_k_h,
    stride_k_s,
    pos_row,
    pos_head,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    FULL: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The position of all rows' j* (`p_found`); what the columns spare; the sums without sparing."""
    i_lane = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    held = tl.load(p_plan + 3 * i_lane + 2)
    if i_block * BLOCK >= held:
        return
    first = tl.load(p_plan + 3 * i_lane + 1)
    p_k += i_lane // heads * stride_k_b + i_lane % heads * stride_k_h
    p_pos += i_lane // heads * pos_row + i_lane % heads * pos_head
    p_scale += i_lane * width
    row = i_block * BLOCK + tl.arange(0, BLOCK)
    m_row = row < held
    o_row = i_lane * width + row
    scale = tl.load(p_scale + row, m_row, other=0.0)
    newest = tl.load(p_newest + o_row, m_row, other=0)

    # A new key is newer than what is known of older rows. Rows of new keys were searched.
    late = _newest_similar(
        p_k,
        p_scale,
        row,
        m_row,
        scale,
        tl.where(row < first, -1, 0),
        first,
        held,
        threshold,
        stride_k_s,
        D,
        WIDE,
        BLOCK,
        NEW,
        FULL,
        DEPTH,
    )
    newest = tl.where(row < first, tl.maximum(newest, late), newest)

    m_found = m_row & (newest >= 0)
    tl.store(p_found + o_row, tl.load(p_pos + newest, m_found, other=NONE), m_row)
    newest = tl.maximum(newest, 0)  # a row that resembles no key spares C_i0

    dim = tl.arange(0, WIDE)
    unit = _keys(p_k, row, m_row, dim, stride_k_s, D, True) * scale[:, None]
    other = _keys(p_k, newest, m_row, dim, stride_k_s, D, True)
    c = tl.sum(unit * other, 1) * tl.load(p_scale + newest, m_row, other=0.0)
    _spare(p_spared + i_lane * width, newest, tl.where(newest == row, 0.0, c), m_row)
    everything = _sum_of_units(p_partial + i_lane * tl.num_programs(1) * WIDE, WIDE)
    tl.store(p_total + o_row, tl.sum(unit * (everything[None, :] - unit), 1), m_row)


@triton.jit
def _remember(
    p_pos,
    p_found,
    p_position,
    p_match,
    p_at,
    p_plan,
    heads,
    width,
    entries,
    pos_row,
    pos_head,
    LISTED: tl.constexpr,
):
    """Write the positions of a lane's tokens and of their j* into its list; nothing, if it holds more than fit."""
    i_lane = tl.program_id(0).to(tl.int64)
    held = tl.load(p_plan + 3 * i_lane + 2)
    if held == 0:
        return
    i_row = i_lane // heads
    i_head = i_lane % heads
    i_list = tl.load(p_at + i_row).to(tl.int64) * heads + i_head
    p_pos += i_row * pos_row + i_head * pos_head
    for start in range(0, entries, LISTED):
        entry = start + tl.arange(0, LISTED)
        m_in = entry < entries
        m_held = entry < tl.where(held <= entries, held, 0)
        pos = tl.load(p_pos + entry, m_held, other=NOWHERE)
        match = tl.load(p_found + i_lane * width + entry, m_held, other=NONE)
        tl.store(p_position + i_list * entries + entry, pos, m_in)
        tl.store(p_match + i_list * entries + entry, match, m_in)


def running_redundancy(
    k: Tensor,
    valid: Tensor,
    pos: Tensor,
    known: tuple[Tensor, Tensor],
    at: Tensor,
    threshold: float = 0.5,
) -> Tensor:
    """R-KV's redundancy, as `minithink/ref/running_redundancy.py` describes it.

    If the cosine of two keys is so near the threshold that rounding decides, the result may differ from the twin's.
    """
    b, heads, width, dim = k.shape
    out = torch.empty(b, heads, width, dtype=torch.float32, device=k.device)
    if not out.numel():
        return out
    lanes = b * heads
    blocks = triton.cdiv(width, BLOCK)
    wide = max(16, power_of_2(dim))
    entries = known[0].shape[-1]
    k = with_dense_columns(k)
    valid = with_dense_columns(valid)
    pos = with_dense_columns(pos)
    flags = valid.view(torch.uint8)
    scale, total = (torch.empty_like(out) for _ in range(2))
    spared = torch.empty_like(out, dtype=torch.int64)
    newest, found, rows = (torch.empty_like(out, dtype=torch.int32) for _ in range(3))
    partial = torch.empty(lanes, blocks, wide, dtype=torch.float32, device=k.device)
    plan = torch.empty(lanes, 3, dtype=torch.int32, device=k.device)
    full = INTERPRETED or k.dtype == torch.float32
    size = {"heads": heads, "width": width}
    of_keys = {"stride_k_b": k.stride(0), "stride_k_h": k.stride(1), "stride_k_s": k.stride(2)}
    of_flags = {"stride_v_b": flags.stride(0), "stride_v_h": flags.stride(1)}
    of_pos = {"pos_row": pos.stride(0), "pos_head": pos.stride(1)}
    dims = {"D": dim, "WIDE": wide}
    product = {**dims, "FULL": full, "DEPTH": min(wide, DEPTH) if full else wide, "num_warps": WARPS}
    _unit[lanes, blocks](
        p_k=k,
        p_valid=flags,
        p_scale=scale,
        p_spared=spared,
        p_partial=partial,
        BLOCK=BLOCK,
        **size,
        **of_keys,
        **of_flags,
        **dims,
        enable_fp_fusion=False,  # all threads that hold a sum hold the same bits: README.md, Conventions
    )
    _recall[(lanes,)](
        p_valid=flags,
        p_pos=pos,
        p_position=known[0],
        p_match=known[1],
        p_at=at,
        p_newest=newest,
        p_rows=rows,
        p_plan=plan,
        entries=entries,
        LISTED=LISTED,
        **size,
        **of_flags,
        **of_pos,
    )
    _search[lanes, triton.cdiv(width, ROWS)](
        p_k=k,
        p_scale=scale,
        p_newest=newest,
        p_rows=rows,
        p_plan=plan,
        threshold=float(threshold),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        **size,
        **of_keys,
        **product,
        enable_fp_fusion=False,  # cosines are those of `redundancy.py`, bit for bit
    )
    _match[lanes, blocks](
        p_k=k,
        p_pos=pos,
        p_scale=scale,
        p_partial=partial,
        p_newest=newest,
        p_found=found,
        p_spared=spared,
        p_total=total,
        p_plan=plan,
        threshold=float(threshold),
        BLOCK=BLOCK,
        NEW=NEW,
        **size,
        **of_keys,
        **of_pos,
        **product,
        enable_fp_fusion=False,  # all threads that hold a sum hold the same bits: README.md, Conventions
    )
    _softmax[(lanes,)](
        p_valid=flags,
        p_total=total,
        p_spared=spared,
        p_out=out,
        BLOCK=SOFTMAX_BLOCK,
        **size,
        **of_flags,
    )
    _remember[(lanes,)](
        p_pos=pos,
        p_found=found,
        p_position=known[0],
        p_match=known[1],
        p_at=at,
        p_plan=plan,
        entries=entries,
        LISTED=LISTED,
        **size,
        **of_pos,
    )
    return out


def variants() -> Iterator[Variant]:
    """Those of the kernels above; `redundancy.py` has its own."""
    scratch = {"p_newest": "*i32", "p_plan": "*i32"}
    size = {"heads": "i32", "width": "i32"}
    lists = dict.fromkeys(("p_pos", "p_position", "p_match"), "*i32") | {"p_at": "*i64", "entries": "i32"}
    of_pos = {"pos_row": "i32", "pos_head": "i32"}
    flags = {"p_valid": "*u8", "stride_v_b": "i32", "stride_v_h": "i32"}
    yield Variant(_recall, {**scratch, **size, **lists, **of_pos, **flags, "p_rows": "*i32"}, {"LISTED": LISTED})
    of_found = {"p_found": "*i32", "p_plan": "*i32"}
    yield Variant(_remember, {**size, **lists, **of_pos, **of_found}, {"LISTED": LISTED})
    keys = {"p_scale": "*fp32", "stride_k_b": "i64", "stride_k_h": "i32", "stride_k_s": "i32", "threshold": "fp32"}
    sums = dict.fromkeys(("p_partial", "p_total"), "*fp32") | {"p_spared": "*i64"}
    for dtype, dims in (("fp32", (64, 128)), ("fp16", (64, 128)), ("bf16", (64, 96, 128))):
        for dim in dims:
            full = dtype == "fp32"
            wide = power_of_2(dim)
            product = {"D": dim, "WIDE": wide, "FULL": full, "DEPTH": DEPTH if full else wide}
            own = {"p_k": f"*{dtype}", **keys, **scratch, **size}
            blocks = {"ROWS": ROWS, "COLUMNS": COLUMNS}
            options = {"num_warps": WARPS, "enable_fp_fusion": False}
            yield Variant(_search, {**own, "p_rows": "*i32"}, {**product, **blocks}, options)
            matched = {**own, **sums, **of_pos, "p_pos": "*i32", "p_found": "*i32"}
            options = {"num_warps": WARPS, "enable_fp_fusion": False}
            yield Variant(_match, matched, {**product, "BLOCK": BLOCK, "NEW": NEW}, options)
