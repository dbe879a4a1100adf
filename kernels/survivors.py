"""Which tokens of shrinking segments go, by K-means over the keys where they lie. Twin: `minithink/ref/survivors.py`.

Layout: a list of the segments that shrink is made on the device, then one launch for every format that thoughts are
stored in. PROGRAMS programs take segments from the list in turn, those whose tokens are in their format; tokens in
the ring, the newest, count to whichever format the others are in. A program dequantizes the segment's keys as
attention does (`_planes` of `paged_attention.py`, the path without inline PTX), multiplies all with all, and goes on
from the products as `kmeans.py` does. The products, 64 KiB for 128 tokens, are written to memory of the program's own
and read from the cache.

First read `kmeans.py`, then `_survive`.

Bound: the codes and scales of the segments' keys, read twice, 18 KiB a head for 128 tokens in NVFP4; then the latency
of K picks, one after the other. Segments that keep all they have cost nothing.

Rounding: as of `kmeans.py`; dequantized keys are rounded to the model's type, as the twin's are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2
from minithink.kernels.kmeans import ITERATIONS, at_once, chosen, warps
from minithink.kernels.paged_attention import Cache, Half, _codes, _planes, _variant, cache, half, words

PROGRAMS = 264  # two for each multiprocessor of an H100
BLOCK = 64  # tokens of a product, on either side
STAGES = 2  # of the loop over heads: keys that are on their way
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _keys(
    p_place, p_k, p_k_params, p_k_rows, p_row_of, p_ring, i_row, i_head, layer, o_lane, start, size, k_scale,
    C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of BLOCK tokens of a segment, of those it has, as K.planes blocks [BLOCK, K.block]; 0 elsewhere."""
    DTYPE: tl.constexpr = C.dtype
    PLANES: tl.constexpr = K.planes
    BLOCK_W: tl.constexpr = K.block
    t = start + tl.arange(0, BLOCK)
    m_t = t < size
    place = tl.load(p_place + t, m_t, other=0)
    paged = m_t & (place >= 0)
    page = (tl.maximum(place, 0) // C.most).to(tl.int64)
    slot = tl.maximum(place, 0) % C.most
    row = page
    if K.by_token:
        row = tl.load(p_row_of + place, paged, other=0).to(tl.int64) * K.row + o_lane * K.row_lane
    o_k = page * K.page + (slot * K.slot + o_lane * K.lane + K.start)
    o_side = page * K.side_page + (slot * K.side_slot + o_lane * K.side_lane + K.side_start)
    k = _planes(_codes(p_k, o_k, paged, K), p_k_params, p_k_rows, o_side, row, paged, k_scale, K, DTYPE, True)
    if C.ring > 0:
        # [L, B, Hkv, R, 2, D]
        waits = m_t & (place < 0)
        index = ((layer * C.rows + i_row).to(tl.int64) * C.kv_heads + i_head) * C.ring + (-1 - place)
        word = tl.arange(0, BLOCK_W)[None, :]
        m_ring = waits[:, None] & (word < K.words)
        both = ()
        for i in tl.static_range(PLANES):
            x = tl.load(p_ring + index[:, None] * (2 * C.dim) + word * PLANES + i, m_ring, other=0)
            if _INTERPRETED:
                x = x.to(tl.float32)
            both = both + (tl.where(m_ring, x, k[i]),)
        k = both
    return k


@triton.jit
def _survive(
    p_drop, p_product, p_list, p_listed, p_first, p_size, p_goal, p_rows, p_place, p_format, p_k, p_k_params,
    p_k_rows, p_row_of, p_k_scale, p_ring, n, segments, width, seen,
    C: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, WAITING: tl.constexpr, ITERATIONS: tl.constexpr,
    WIDE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Segments from the list, whose tokens are in FORMAT; if WAITING, also those of which all are in the ring.

    p_list, p_listed: numbers of the segments [Lt, N, Ht, G], and how many these are; n: N.
    """
    HEADS: tl.constexpr = C.kv_heads // C.tables
    PLANES: tl.constexpr = K.planes
    t = tl.arange(0, WIDE)
    p_product += tl.program_id(0).to(tl.int64) * WIDE * WIDE
    listed = tl.load(p_listed)
    for i_list in range(tl.program_id(0), listed, tl.num_programs(0)):
        i_set = tl.load(p_list + i_list)
        segment, unit = i_set % segments, i_set // segments
        table, i_n, layer = unit % C.tables, unit // C.tables % n, unit // C.tables // n
        i_row = tl.load(p_rows + i_n)
        first, size = tl.load(p_first + i_set), tl.load(p_size + i_set)
        goal = tl.load(p_goal + i_n * segments + segment)
        p_here = p_place + ((layer * C.rows + i_row) * C.tables + table).to(tl.int64) * width + first
        place = tl.load(p_here + t, t < size, other=-1)
        page_format = tl.load(p_format + tl.maximum(place, 0) // C.most, place >= 0, other=255).to(tl.int32)
        form = tl.min(page_format)  # 255: all wait
        if (form == FORMAT) | (WAITING & (form == 255)):
            k_scale = tl.load(p_k_scale + layer * C.rows + i_row)
            tl.debug_barrier()  # the products of the segment before are read
            for i in range(0, WIDE, BLOCK):
                for j in range(0, WIDE, BLOCK):
                    product = tl.zeros((BLOCK, BLOCK), tl.float32)
                    for h in range(HEADS):
                        i_head = table * HEADS + h
                        o_lane = i_head * C.head_lanes
                        a = _keys(
                            p_here, p_k, p_k_params, p_k_rows, p_row_of, p_ring, i_row, i_head, layer, o_lane, i,
                            size, k_scale, C, K, BLOCK,
                        )  # fmt: skip
                        b = _keys(
                            p_here, p_k, p_k_params, p_k_rows, p_row_of, p_ring, i_row, i_head, layer, o_lane, j,
                            size, k_scale, C, K, BLOCK,
                        )  # fmt: skip
                        for plane in tl.static_range(PLANES):
                            product = tl.dot(a[plane], tl.trans(b[plane]), product, input_precision="ieee")
                    row, column = i + tl.arange(0, BLOCK), j + tl.arange(0, BLOCK)
                    tl.store(p_product + row[:, None] * WIDE + column[None, :], product)
            tl.debug_barrier()  # what others have written is read
            valid = t < size
            kept = tl.zeros((WIDE,), tl.int32)
            if goal > 0:
                kept = chosen(p_product, valid, goal, ITERATIONS, WIDE, AT_ONCE)
            o_drop = ((layer * n + i_n) * C.tables + table).to(tl.int64) * seen + first
            tl.store(p_drop + o_drop + t, (kept == 0).to(tl.uint8), valid)


def survivors(read: Any, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
    """K-means over the keys of every segment that holds more tokens than it may keep.

    Args:
        read: the store's Reading of R rows; tokens of one segment are in one format, or wait.
        first: integers [Lt, R, Ht, G], the column in which each segment begins.
        size: integers [Lt, R, Ht, G], its tokens.
        goal: integers [R, G], how many may stay.
        longest: tokens that a segment has at most.

    Returns:
        bool [Lt, R, Ht, S], those that go.
    """
    pages = read.pages
    if pages.shape.scope == "sequence":
        raise ValueError("lanes of several layers that share a table have no keys in common: use the reference")
    lt, n, ht, segments = size.shape
    seen, device = pages.seen, size.device
    drop = torch.zeros(lt, n, ht, seen, dtype=torch.bool, device=device)
    if not size.numel():
        return drop
    first, size, goal = (x.int().contiguous() for x in (first, size, goal))
    # numbers of the segments that shrink, and how many these are
    shrinks = (size > goal[:, None]).flatten()
    number = shrinks.cumsum(0, dtype=torch.int64)
    listed = torch.empty(len(shrinks) + 1, dtype=torch.int32, device=device)
    every = torch.arange(len(shrinks), dtype=torch.int32, device=device)
    listed.scatter_(0, torch.where(shrinks, number - 1, len(shrinks)), every)

    c, rows = cache(pages, n), read.numbers
    wide = max(16, power_of_2(longest))
    programs, block = min(PROGRAMS, len(shrinks)), min(BLOCK, wide)
    product = torch.empty(programs, wide, wide, dtype=torch.float32, device=device)
    for i, f in enumerate(pages.home):
        k, v = (half(pages, f, which, torch.float32) for which in ("k", "v"))
        codes, _, params, _, scales = words(pages, f, k, v)
        _survive[(programs,)](
            drop.view(torch.uint8), product, listed, number[-1:], first, size, goal, rows, pages.place,
            pages.table.format, codes, params, scales, pages.row_of, pages.scale[f, 0], pages.ring,
            n, segments, pages.place.shape[-1], seen,
            c, k, f, i == 0, ITERATIONS, wide, at_once(wide), block, num_warps=warps(wide), num_stages=STAGES,
        )  # fmt: skip
    return drop


def variants() -> Iterator[Variant]:
    """bfloat16 models, segments of 128 tokens, groups of keys by token and by channel."""
    at = {"i32": "n segments width seen", "*i64": "p_rows p_listed", "*u8": "p_drop p_format", "*bf16": "p_ring"}
    at |= {"*i32": "p_list p_first p_size p_goal p_place p_row_of", "*fp32": "p_product p_k_scale"}
    common = {name: kind for kind, names in at.items() for name in names.split()}
    for dim in (64, 128):
        c = Cache(2, 8, 4, 16, dim, 1, 0, 1, 16, 2, 16, 128, 1024, 128, "bf16")
        plain = Half("plain", 16, 0, False, False, 1, dim, dim, 64 * dim, 32 * dim, 2 * dim, 0, 0, 0, 0, 0, 0, 0)
        for k, codes in (
            (plain, "*bf16"), (_variant("nvfp4", 4, dim, True, False), "*u8"),
            (_variant("nvfp4", 4, dim, False, False), "*u8"), (_variant("ternary", 2, dim, True, False), "*u8"),
            (_variant("fp8", 8, dim, False, False), "*u8"),
        ):  # fmt: skip
            signature = common | {"p_k": codes, "p_k_params": "*u8", "p_k_rows": "*u8"}
            constexprs = {
                "C": c, "K": k, "FORMAT": 1, "WAITING": k.by_token, "ITERATIONS": ITERATIONS, "WIDE": 128,
                "AT_ONCE": at_once(128), "BLOCK": BLOCK,
            }  # fmt: skip
            yield Variant(_survive, signature, constexprs, {"num_warps": warps(128), "num_stages": STAGES})
