"""Lists of tokens, sorted by format. Twin: `minithink/ref/by_format.py`.

A program writes the tokens of one block of one list. To know where they go it counts the kinds (the formats, and the
ring as the last) in the whole list and before its block: programs do not wait for each other, and all but the longest
lists are one or two blocks. Where a token stands among those of its kind is a running sum over the block.

Bound: 5 bytes read a token (its place, its page's format) and 8 written (place, column): memory, and for few units
the launch. It is done once a step, and attention reads what it writes in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

BLOCK = 1024  # tokens of a list at a time


@triton.jit
def _kinds(p_place, p_format, t, m, FORMATS: tl.constexpr, MOST: tl.constexpr, KINDS: tl.constexpr):
    """Places of some tokens, and which kind each is of: int32 [KINDS, BLOCK], one 1 a token; m: which are there."""
    place = tl.load(p_place + t, m, other=-1)
    found = tl.load(p_format + tl.maximum(place, 0) // MOST, place >= 0, other=0)
    kind = tl.where(m, len(FORMATS), -1)
    for i in tl.static_range(len(FORMATS)):
        kind = tl.where((place >= 0) & (found == FORMATS[i]), i, kind)
    return place, (kind[None, :] == tl.arange(0, KINDS)[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=["n", "rows"])
def _by_format(
    p_sorted, p_column, p_first, p_place, p_count, p_rows, p_format, n, rows, tables, width, seen,
    FORMATS: tl.constexpr, MOST: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_unit, own = tl.program_id(0), tl.program_id(1) * BLOCK
    row = tl.load(p_rows + i_unit // tables % n)
    i_list = (i_unit // (tables * n) * rows + row) * tables + i_unit % tables  # int64
    count = tl.load(p_count + i_list)
    if (own >= count) & (own > 0):
        return
    p_place += i_list * width
    t = tl.arange(0, BLOCK)
    total, before = tl.zeros([KINDS], tl.int32), tl.zeros([KINDS], tl.int32)
    for start in range(0, count, BLOCK):
        _, one = _kinds(p_place, p_format, start + t, start + t < count, FORMATS, MOST, KINDS)
        in_block = tl.sum(one, 1)
        total += in_block
        before += tl.where(start < own, in_block, 0)
    first = tl.cumsum(total, 0) - total
    kinds = tl.arange(0, KINDS)
    p_first += i_unit * (len(FORMATS) + 2) + kinds
    tl.store(p_first, first, (kinds < len(FORMATS) + 2) & (own == 0))

    t += own
    m = t < count
    place, one = _kinds(p_place, p_format, t, m, FORMATS, MOST, KINDS)
    to = tl.sum(one * ((first + before)[:, None] + tl.cumsum(one, 1) - 1), 0)
    o_to = i_unit.to(tl.int64) * seen + to
    tl.store(p_sorted + o_to, place, m)
    tl.store(p_column + o_to, t, m)


def by_format(
    place: Tensor, count: Tensor, rows: Tensor, page_format: Tensor, formats: Sequence[int], most: int, seen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the lists of some rows by how their tokens are stored: one format after the other, then those in the ring,
    each oldest first.

    Args:
        place: int32 [Lt, B, Ht, W], contiguous: page · most + slot of every token; negative for those in the ring;
            anything behind the last token.
        count: int32 [Lt, B, Ht], contiguous: tokens of each list.
        rows: int64 [N], those whose lists are sorted.
        page_format: uint8 [pages], the index of each page's format.
        formats: the F indexes that tokens in pages may have, in the order wanted.
        most: slots that places count for a page.
        seen: S, at least the tokens of the longest list, at most W.

    Returns:
        place: int32 [Lt, N, Ht, S], sorted; anything behind the last token.
        column: int32 [Lt, N, Ht, S], where in its list each of them stands; anything behind the last token.
        first: int32 [Lt, N, Ht, F + 2], where each format begins, then the ring, then how many there are.
    """
    (layers, b, tables), n = count.shape, len(rows)
    by_kind, column = (place.new_empty(layers, n, tables, seen) for _ in range(2))
    first = place.new_empty(layers, n, tables, len(formats) + 2)
    if first.numel():
        _by_format[layers * n * tables, max(1, triton.cdiv(seen, BLOCK))](
            by_kind, column, first, place, count, rows.contiguous(), page_format, n, b, tables, place.shape[-1], seen,
            tuple(formats), most, power_of_2(len(formats) + 2), BLOCK,
        )  # fmt: skip
    return by_kind, column, first


def variants() -> Iterator[Variant]:
    """ThinKV's formats, and one beside a ring."""
    pointers = dict.fromkeys(("p_sorted", "p_column", "p_first", "p_place", "p_count"), "*i32")
    pointers |= {"p_rows": "*i64", "p_format": "*u8"}
    pointers |= dict.fromkeys(("n", "rows", "tables", "width", "seen"), "i32")
    for formats in ((1, 2), (0,)):
        constexprs = {"FORMATS": formats, "MOST": 64, "KINDS": power_of_2(len(formats) + 2), "BLOCK": BLOCK}
        yield Variant(_by_format, pointers, constexprs)
