"""Sort lists of tokens by format. Twin: `minithink/ref/by_format.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.by_format import by_format
    >>> place = torch.tensor([[[[0, 16, 1, -1, 17]]]], dtype=torch.int32)  # [Lt, B, Ht, W]; −1: in the ring
    >>> count = torch.tensor([[[5]]], dtype=torch.int32)  # [Lt, B, Ht]
    >>> rows = torch.tensor([0])  # [N] int64
    >>> page_format = torch.tensor([0, 1], dtype=torch.uint8)  # [pages]
    >>> by_kind, column, first = by_format(place, count, rows, page_format, formats=(0, 1), stride=16, seen=5)
    >>> by_kind.tolist()
    [[[[0, 1, 16, 17, -1]]]]
    >>> first.tolist()  # where format 0, format 1 and the ring begin, and the number of tokens
    [[[[0, 2, 4, 5]]]]

Lists of one block, as budgets leave them, need no counts of other blocks, and so only one launch.

Bound: memory, and for few units the launch. 5 bytes are read for each token (its place, its page's format; twice in
longer lists) and 8 written (place, column). It is done once in a step for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2, unit_of

BLOCK = 1024  # tokens of a list at a time
BLOCKS = 32  # whose counts are added up at once


@triton.jit
def _kinds(p_place, p_format, t, m, FORMATS: tl.constexpr, STRIDE: tl.constexpr, KINDS: tl.constexpr):
    """Places of some tokens, and which kind each is of: int32 [KINDS, BLOCK], one 1 a token; m: which are there."""
    place = tl.load(p_place + t, m, other=-1)
    found = tl.load(p_format + tl.maximum(place, 0) // STRIDE, place >= 0, other=0)
    kind = tl.where(m, len(FORMATS), -1)
    for i in tl.static_range(len(FORMATS)):
        kind = tl.where((place >= 0) & (found == FORMATS[i]), i, kind)
    return place, (kind[None, :] == tl.arange(0, KINDS)[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=["n", "rows", "blocks"])
def _count(
    p_counts,
    p_place,
    p_count,
    p_rows,
    p_format,
    n,
    rows,
    tables,
    width,
    blocks,
    FORMATS: tl.constexpr,
    STRIDE: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_unit = tl.program_id(0)
    i_block = tl.program_id(1)
    _, i_list = unit_of(i_unit, n, rows, tables, p_rows)
    count = tl.load(p_count + i_list)
    t = i_block * BLOCK + tl.arange(0, BLOCK)
    _, one = _kinds(p_place + i_list * width, p_format, t, t < count, FORMATS, STRIDE, KINDS)
    tl.store(p_counts + (i_unit * blocks + i_block) * KINDS + tl.arange(0, KINDS), tl.sum(one, 1))


@triton.jit(do_not_specialize=["n", "rows", "blocks"])
def _by_format(
    p_sorted,
    p_column,
    p_first,
    p_counts,
    p_place,
    p_count,
    p_rows,
    p_format,
    n,
    rows,
    tables,
    width,
    seen,
    blocks,
    FORMATS: tl.constexpr,
    STRIDE: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """p_counts: of `_count`; BLOCKS: that are added up at once, 0 if there is but one."""
    i_unit = tl.program_id(0)
    i_block = tl.program_id(1)
    _, i_list = unit_of(i_unit, n, rows, tables, p_rows)
    count = tl.load(p_count + i_list)
    if (i_block * BLOCK >= count) & (i_block > 0):
        return
    t = i_block * BLOCK + tl.arange(0, BLOCK)
    m = t < count
    place, one = _kinds(p_place + i_list * width, p_format, t, m, FORMATS, STRIDE, KINDS)
    kinds = tl.arange(0, KINDS)
    before = tl.zeros([KINDS], tl.int32)
    if BLOCKS > 0:
        total = tl.zeros([KINDS], tl.int32)
        p_counts += i_unit * blocks * KINDS
        for start in range(0, blocks, BLOCKS):
            block = start + tl.arange(0, BLOCKS)[:, None]
            here = tl.load(p_counts + block * KINDS + kinds[None, :], block < blocks, other=0)
            total += tl.sum(here, 0)
            before += tl.sum(tl.where(block < i_block, here, 0), 0)
    else:
        total = tl.sum(one, 1)
    first = tl.cumsum(total, 0) - total
    if i_block == 0:
        tl.store(p_first + i_unit * (len(FORMATS) + 2) + kinds, first, kinds < len(FORMATS) + 2)
    to = tl.sum(one * ((first + before)[:, None] + tl.cumsum(one, 1) - 1), 0)
    o_to = i_unit.to(tl.int64) * seen + to
    tl.store(p_sorted + o_to, place, m)
    tl.store(p_column + o_to, t, m)


def by_format(
    place: Tensor, count: Tensor, rows: Tensor, page_format: Tensor, formats: Sequence[int], stride: int, seen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the lists of some rows: the tokens of one format after the other, then those in the ring (the buffer),
    each oldest first.

    Args:
        place: int32 [Lt, B, Ht, W], contiguous: page · stride + slot of every token; negative for tokens in the ring;
            anything behind the last token.
        count: int32 [Lt, B, Ht], contiguous: tokens of each list.
        rows: int64 [N], the rows whose lists are sorted.
        page_format: uint8 [pages], the index of each page's format.
        formats: the F indexes that tokens in pages may have, in the order wanted.
        stride: slots that places count for a page.
        seen: S, at least the tokens of the longest list, at most W.

    Returns:
        place: int32 [Lt, N, Ht, S], sorted; anything behind the last token.
        column: int32 [Lt, N, Ht, S], the column of each of these tokens in its list; anything behind the last token.
        first: int32 [Lt, N, Ht, F + 2], where each format begins, then where the ring begins, then the number of
            tokens.
    """
    layers, b, tables = count.shape
    n = len(rows)
    by_kind, column = (place.new_empty(layers, n, tables, seen) for _ in range(2))
    first = place.new_empty(layers, n, tables, len(formats) + 2)
    blocks = max(1, triton.cdiv(seen, BLOCK))
    kinds = power_of_2(len(formats) + 2)
    rows = rows.contiguous()
    counts = first
    several = blocks > 1
    grid = (layers * n * tables, blocks)
    if first.numel() and several:
        counts = place.new_empty(*grid, kinds)
        _count[grid](
            p_counts=counts,
            p_place=place,
            p_count=count,
            p_rows=rows,
            p_format=page_format,
            n=n,
            rows=b,
            tables=tables,
            width=place.shape[-1],
            blocks=blocks,
            FORMATS=tuple(formats),
            STRIDE=stride,
            KINDS=kinds,
            BLOCK=BLOCK,
        )
    if first.numel():
        _by_format[grid](
            p_sorted=by_kind,
            p_column=column,
            p_first=first,
            p_counts=counts,
            p_place=place,
            p_count=count,
            p_rows=rows,
            p_format=page_format,
            n=n,
            rows=b,
            tables=tables,
            width=place.shape[-1],
            seen=seen,
            blocks=blocks,
            FORMATS=tuple(formats),
            STRIDE=stride,
            KINDS=kinds,
            BLOCK=BLOCK,
            BLOCKS=BLOCKS if several else 0,
        )
    return by_kind, column, first


def variants() -> Iterator[Variant]:
    """ThinKV's formats, and one beside a ring."""
    common = dict.fromkeys(("p_sorted", "p_column", "p_first", "p_counts", "p_place", "p_count"), "*i32")
    common |= {"p_rows": "*i64", "p_format": "*u8"}
    common |= dict.fromkeys(("n", "rows", "tables", "width", "seen", "blocks"), "i32")
    for formats in ((1, 2), (0,)):
        constexprs = {"FORMATS": formats, "STRIDE": 64, "KINDS": power_of_2(len(formats) + 2), "BLOCK": BLOCK}
        yield Variant(_count, {n: common[n] for n in common if n in _count.arg_names}, constexprs)
        for blocks in (0, BLOCKS):
            yield Variant(_by_format, common, constexprs | {"BLOCKS": blocks})
