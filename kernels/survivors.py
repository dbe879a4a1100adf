"""Select the tokens that go when segments shrink, by K-means over keys in pages. Twin: `minithink/ref/survivors.py`.

To use it alone, copy this file, `kmeans.py`, `_common.py`, `_formats.py`, `_layout.py`, `_planes.py` and
`_rotation.py`. With the GPU as torch's default device:

    >>> from types import SimpleNamespace as Part
    >>> import torch
    >>> from minithink.kernels.survivors import survivors
    >>> pool = torch.zeros(1, 1, 16, 2, 16)  # a page of 16 slots, each a key and a value with D = 16 numbers
    >>> pool[0, 0, :6, 0, 0] = torch.tensor([0.0, 1, 2, 7, 8, 9])  # the keys of six tokens
    >>> place = torch.arange(7, dtype=torch.int32).view(1, 1, 1, 7)  # [Lt, B, Ht, S + 1]: page · 16 + slot
    >>> plain = Part(name="fp32", bits=32, group=0, by="channel", param_bytes=0, tensor_scaled=False)
    >>> layout = Part(k=plain, v=plain, slots=16, k_codes=64, k_side=0)
    >>> none = torch.zeros(1, 1, 0, dtype=torch.uint8)  # there are no scales
    >>> memory = {"pool": pool.view(torch.uint8).flatten(2), "side": none, "group_params": none}
    >>> pages = Part(layouts=[layout], scale=torch.ones(1, 2, 1, 1), **memory)
    >>> shape = Part(rows=1, kv_heads=1, query_heads=1, head_dim=16, scope="head", tables=(1, 1, 1), sharing=1)
    >>> table = Part(stride=16, format=torch.zeros(1, dtype=torch.uint8))
    >>> slots = Part(home=[0], group_of=torch.zeros(1, 0, dtype=torch.int32), table=table)
    >>> lists = Part(place=place, columns_read=6)
    >>> ring = torch.zeros(1, 1, 1, 0, 2, 16)  # [L, B, Hkv, R, 2, D]: no token waits to be quantized
    >>> store = Part(shape=shape, lists=lists, slots=slots, pages=pages, dtype=pool.dtype, ring=ring)
    >>> read = Part(store=store, numbers=torch.tensor([0]))  # int64 [N], the rows
    >>> first = torch.tensor([[[[0]]]], dtype=torch.int32)  # [Lt, N, Ht, G]: one segment
    >>> size = torch.tensor([[[[6]]]], dtype=torch.int32)  # [Lt, N, Ht, G]
    >>> goal = torch.tensor([[2]], dtype=torch.int32)  # [N, G]
    >>> survivors(read, first, size, goal, longest=6).tolist()  # the tokens that go
    [[[[True, False, True, True, False, True]]]]

Layout: the device makes two lists of the segments that shrink, with a program per unit. Narrow segments have at most
NARROW tokens, all others are wide. Each list and each format of thoughts then has a launch of its own, a branch of
the captured graph. Programs take segments of their format from their list in turn. Tokens in the ring, the newest,
belong to the format of the segment's other tokens. A program dequantizes the segment's keys as attention does
(`_planes.py`, the plain path). It multiplies all keys with all, each pair of blocks
once, and goes on from the products as `kmeans.py` does. Each program writes the products, 64 KiB for 128 tokens, to
its own memory and reads them from the GPU's cache. A wide segment that fits into half the width costs a quarter. A
narrow segment has one warp, so that many of them run at once: a hard budget shrinks thousands.

The order of the lists is arbitrary. It decides which program handles a segment, never the result.

First read `kmeans.py`, then `_survive`.

Bound: latency of K picks, one after the other. Before them the codes and scales of the segment's keys are read, once
if the segment has at most BLOCK tokens: 9 KiB for each head and 128 tokens in NVFP4. Segments that lose no token cost
nothing. The products take 4·T² bytes for each program and launch, 17 MiB for each format at T = 128.

Rounding: as in `kmeans.py`. Dequantized keys are rounded to the model's type, like the twin's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2, side_by_side
from minithink.kernels._layout import Cache, cache, example, half, words
from minithink.kernels._planes import load_codes, of_tokens, planes
from minithink.kernels._rotation import is_rotated, rotate_rows
from minithink.kernels.kmeans import ITERATIONS, at_once, chosen, warps

NARROW = 16  # tokens of a narrow segment, at most
PROGRAMS = 2112, 264  # for narrow segments, 16 for each multiprocessor of an H100, and for wide ones
BLOCK = 128  # tokens of a product, on either side
LISTED = 256  # segments of a unit at a time
HEAD = 16  # bytes before the flags, so that the flags are aligned to words
STAGES = 1  # of the loop over heads; loading keys ahead would take too many registers
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit(do_not_specialize=["n"])
def _list(p_list, p_listed, p_size, p_goal, n, heads, segments, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of a unit's segments that shrink go to the end of a list for all units: the narrow ones to the first,
    the others to the second."""
    unit = tl.program_id(0)
    most = tl.num_programs(0).to(tl.int64) * segments
    p_goal += unit // heads % n * segments
    for start in range(0, segments, BLOCK):
        g = start + tl.arange(0, BLOCK)
        i_set = unit * segments + g
        size = tl.load(p_size + i_set, g < segments, other=0)
        goal = tl.load(p_goal + g, g < segments, other=0)
        for i in tl.static_range(2):
            mine = ((size > goal) & ((size > NARROW) == (i > 0))).to(tl.int32)
            more = tl.sum(mine)
            if more > 0:
                to = tl.atomic_add(p_listed + i, more, sem="relaxed") + tl.cumsum(mine, 0) - 1
                tl.store(p_list + i * most + to, i_set, mine > 0)


@triton.jit
def _where(p_place, p_row_of, start, size, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Places and rows of scales of BLOCK tokens of a segment; 0 and none behind its last token."""
    t = start + tl.arange(0, BLOCK)
    place = tl.load(p_place + t, t < size, other=0)
    row = tl.maximum(place, 0) // C.stride
    if K.by_token:
        row = tl.load(p_row_of + place, (t < size) & (place >= 0), other=0)
    return t < size, place, row


@triton.jit
def _keys(
    there,
    p_k,
    p_k_params,
    p_k_rows,
    p_ring,
    i_head,
    o_lane,
    k_scale,
    C: tl.constexpr,
    K: tl.constexpr,
):
    """Keys of one head of BLOCK tokens, where they are (`_where`), as K.planes blocks [BLOCK, K.block]; else 0.
    TurboQuant's stay in the rotated basis, and so is the ring then: products of keys are the same in any."""
    DTYPE: tl.constexpr = C.dtype
    PLANES: tl.constexpr = K.planes
    BLOCK_W: tl.constexpr = K.block
    m_t, place, number = there
    paged = m_t & (place >= 0)
    page = (tl.maximum(place, 0) // C.stride).to(tl.int64)
    slot = tl.maximum(place, 0) % C.stride
    row = number.to(tl.int64)
    if K.by_token:
        row = row * K.row + o_lane * K.row_lane
    o_k = page * K.page + (slot * K.slot + o_lane * K.lane + K.start)
    o_side = page * K.side_page + (slot * K.side_slot + o_lane * K.side_lane + K.side_start)
    k = planes(load_codes(p_k, o_k, paged, K), p_k_params, p_k_rows, o_side, row, paged, k_scale, K, DTYPE, True)
    if is_rotated(K.kind):
        scale = of_tokens(p_k_params, o_side, paged)[:, None]
        scaled = ()
        for i in tl.static_range(PLANES):
            x = k[i].to(tl.float32) * scale
            if not _INTERPRETED:
                x = x.to(p_ring.dtype.element_ty)
            scaled = scaled + (x,)
        k = scaled
    if C.ring > 0:
        # [Hkv, R, 2, D] of the row
        waits = m_t & (place < 0)
        index = i_head * C.ring + (-1 - place)
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
def _shrink(
    p_drop,
    p_product,
    p_place,
    p_k,
    p_k_params,
    p_k_rows,
    p_row_of,
    p_ring,
    table,
    size,
    goal,
    k_scale,
    C: tl.constexpr,
    K: tl.constexpr,
    ITERATIONS: tl.constexpr,
    WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One segment, of at most WIDE tokens."""
    HEADS: tl.constexpr = C.kv_heads // C.tables
    PLANES: tl.constexpr = K.planes
    t = tl.arange(0, WIDE)
    valid = t < size
    kept = tl.zeros((WIDE,), tl.int32)
    if goal > 0:
        tl.debug_barrier()  # all threads have read the products of the segment before
        for i in range(0, WIDE, BLOCK):
            row = i + tl.arange(0, BLOCK)
            rows = _where(p_place, p_row_of, i, size, C, K, BLOCK)
            for j in range(i, WIDE, BLOCK):
                product = tl.zeros((BLOCK, BLOCK), tl.float32)
                column = j + tl.arange(0, BLOCK)
                if i == j:
                    for h in range(HEADS):
                        i_head = table * HEADS + h
                        o_lane = i_head * C.head_lanes
                        a = _keys(rows, p_k, p_k_params, p_k_rows, p_ring, i_head, o_lane, k_scale, C, K)
                        for plane in tl.static_range(PLANES):
                            product = tl.dot(a[plane], tl.trans(a[plane]), product, input_precision="ieee")
                else:
                    columns = _where(p_place, p_row_of, j, size, C, K, BLOCK)
                    for h in range(HEADS):
                        i_head = table * HEADS + h
                        o_lane = i_head * C.head_lanes
                        a = _keys(rows, p_k, p_k_params, p_k_rows, p_ring, i_head, o_lane, k_scale, C, K)
                        b = _keys(columns, p_k, p_k_params, p_k_rows, p_ring, i_head, o_lane, k_scale, C, K)
                        for plane in tl.static_range(PLANES):
                            product = tl.dot(a[plane], tl.trans(b[plane]), product, input_precision="ieee")
                    tl.store(p_product + column[None, :] * WIDE + row[:, None], product)
                tl.store(p_product + row[:, None] * WIDE + column[None, :], product)
        tl.debug_barrier()  # threads read products that other threads have written
        kept = chosen(p_product, valid, goal, ITERATIONS, WIDE, AT_ONCE)
    tl.store(p_drop + t, (kept == 0).to(tl.uint8), valid)


@triton.jit(do_not_specialize=["n", "rows", "segments"])
def _survive(
    p_drop,
    p_product,
    p_list,
    p_listed,
    p_first,
    p_size,
    p_goal,
    p_rows,
    p_place,
    p_format,
    p_k,
    p_k_params,
    p_k_rows,
    p_row_of,
    p_k_scale,
    p_ring,
    n,
    rows,
    segments,
    width,
    seen,
    C: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    WAITING: tl.constexpr,
    ITERATIONS: tl.constexpr,
    WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Segments from the list whose tokens are in FORMAT; if WAITING, also segments that lie in the ring as a whole.

    p_list, p_listed: numbers of the segments [Lt, N, Ht, G], and how many these are; n: N; rows: B. WIDE, AT_ONCE,
    BLOCK: tuples, for segments of at most so many tokens, the smallest first.
    """
    SIZES: tl.constexpr = len(WIDE)
    MOST: tl.constexpr = WIDE[SIZES - 1]
    p_product += tl.program_id(0).to(tl.int64) * MOST * MOST
    listed = tl.load(p_listed)
    for i_list in range(tl.program_id(0), listed, tl.num_programs(0)):
        i_set = tl.load(p_list + i_list)
        segment = i_set % segments
        unit = i_set // segments
        table = unit % C.tables
        i_n = unit // C.tables % n
        layer = unit // C.tables // n
        i_row = tl.load(p_rows + i_n)
        first = tl.load(p_first + i_set)
        size = tl.load(p_size + i_set)
        goal = tl.load(p_goal + i_n * segments + segment)
        p_here = p_place + ((layer * rows + i_row) * C.tables + table).to(tl.int64) * width + first
        t = tl.arange(0, MOST)
        place = tl.load(p_here + t, t < size, other=-1)
        page_format = tl.load(p_format + tl.maximum(place, 0) // C.stride, place >= 0, other=255).to(tl.int32)
        form = tl.min(page_format)  # 255: all wait
        if (form == FORMAT) | (WAITING & (form == 255)):
            k_scale = tl.load(p_k_scale + layer * rows + i_row)
            o_ring = (layer * rows + i_row).to(tl.int64) * (C.kv_heads * C.ring * 2 * C.dim)
            o_drop = ((layer * n + i_n) * C.tables + table).to(tl.int64) * seen + first
            for i in tl.static_range(SIZES):
                fits = size <= WIDE[i]
                if i > 0:
                    fits = fits & (size > WIDE[i - 1])
                if fits:
                    _shrink(
                        p_drop + o_drop,
                        p_product,
                        p_here,
                        p_k,
                        p_k_params,
                        p_k_rows,
                        p_row_of,
                        p_ring + o_ring,
                        table,
                        size,
                        goal,
                        k_scale,
                        C,
                        K,
                        ITERATIONS,
                        WIDE[i],
                        AT_ONCE[i],
                        BLOCK[i],
                    )


def survivors(read: Any, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
    """Run K-means over the keys of every segment that holds more tokens than it may keep.

    Args:
        read: the store's Reading of R rows; the tokens of a segment are in one format, or in the ring.
        first: integers [Lt, R, Ht, G], the column in which each segment begins.
        size: integers [Lt, R, Ht, G], tokens of each segment.
        goal: integers [R, G], tokens that each segment may keep.
        longest: tokens that a segment has at most.

    Returns:
        bool [Lt, R, Ht, S], the tokens that go.
    """
    store = read.store
    if store.shape.scope == "sequence":
        raise ValueError("lanes of several layers that share a table have no keys in common: use the reference")
    lt, n, ht, segments = size.shape
    seen = store.lists.columns_read
    device = size.device
    units = lt * n * ht
    # One tensor, cleared by one launch: the numbers of listed segments, then the flags of the tokens that go.
    room = torch.zeros(HEAD + units * seen, dtype=torch.uint8, device=device)
    listed = room[:8].view(torch.int32)
    drop = room[HEAD:].view(lt, n, ht, seen)
    if not size.numel():
        return drop.view(torch.bool)
    first, size, goal = (x.int().contiguous() for x in (first, size, goal))
    numbers = torch.empty(2, units * segments, dtype=torch.int32, device=device)
    block = min(LISTED, max(16, power_of_2(segments)))
    _list[(units,)](
        p_list=numbers,
        p_listed=listed,
        p_size=size,
        p_goal=goal,
        n=n,
        heads=ht,
        segments=segments,
        NARROW=NARROW,
        BLOCK=block,
        num_warps=1,
    )

    c = cache(store)
    rotated_ring = _rotated_ring(store)
    launches = list[Callable[[], object]]()
    for which, wide in reversed([*enumerate(sizes(longest))]):
        programs = min(PROGRAMS[which], units * segments)
        for i, f in enumerate(store.slots.home):
            k, v = (half(store, f, side, torch.float32) for side in ("k", "v"))
            codes, _, params, _, scales = words(store, f, k, v)
            rotates = is_rotated(k.kind) and store.ring.numel() > 0
            launches.append(
                partial(
                    _survive[(programs,)],
                    drop,
                    torch.empty(programs, wide[-1], wide[-1], dtype=torch.float32, device=device),
                    numbers[which],
                    listed[which:],
                    first,
                    size,
                    goal,
                    read.numbers,
                    store.lists.place,
                    store.slots.table.format,
                    codes,
                    params,
                    scales,
                    store.slots.group_of,
                    store.pages.scale[f, 0],
                    rotated_ring if rotates else store.ring,
                    n,
                    store.shape.rows,
                    segments,
                    store.lists.place.shape[-1],
                    seen,
                    c,
                    k,
                    f,
                    i == 0,
                    ITERATIONS,
                    wide,
                    tuple(map(at_once, wide)),
                    tuple(min(BLOCK, w) for w in wide),
                    num_warps=warps(wide[-1]),
                    num_stages=STAGES,
                )
            )
    side_by_side(launches, device)
    return drop.view(torch.bool)


def _rotated_ring(store: Any) -> Tensor:
    """The ring in the rotated basis, if there are tokens in TurboQuant's formats; else the ring itself."""
    names = [store.pages.layouts[f].k.name for f in store.slots.home]
    if not store.ring.numel() or not any(name.startswith("tq") for name in names):
        return store.ring
    rows = store.ring.flatten(0, 3)
    return rotate_rows(rows, out=torch.empty_like(rows))


def sizes(longest: int) -> tuple[tuple[int, ...], ...]:
    """Widths of the programs of each list: for narrow segments; for wide ones, half the width and the width."""
    most = power_of_2(longest)
    if most <= NARROW:
        return ((NARROW,),)
    return (NARROW,), (most // 2, most) if most // 2 > NARROW else (most,)


def variants() -> Iterator[Variant]:
    """bfloat16 models, segments of 128 and 256 tokens, groups of keys by token and by channel."""
    at = {"i32": "n rows segments width seen", "*i64": "p_rows", "*u8": "p_drop p_format", "*bf16": "p_ring"}
    at |= {"*i32": "p_list p_listed p_first p_size p_goal p_place p_row_of", "*fp32": "p_product p_k_scale"}
    common = {name: kind for kind, names in at.items() for name in names.split()}
    yield Variant(
        _list,
        dict.fromkeys(("p_list", "p_listed", "p_size", "p_goal"), "*i32")
        | dict.fromkeys(("n", "heads", "segments"), "i32"),
        {"NARROW": NARROW, "BLOCK": LISTED},
        {"num_warps": 1},
    )
    for dim in (64, 128):
        c = Cache(8, 4, dim, 1, 0, 1, 16, 16, "bf16")
        for k, codes in (
            (example("plain", 16, dim, fast=False), "*bf16"),
            (example("nvfp4", 4, dim, True, False), "*u8"),
            (example("nvfp4", 4, dim, False, False), "*u8"),
            (example("ternary", 2, dim, True, False), "*u8"),
            (example("fp8", 8, dim, False, False), "*u8"),
            (example("tq-unbiased", 4, dim, False, False), "*u8"),
            (example("tq-unbiased", 2, dim, False, False), "*u8"),
        )[: 1 if dim == 64 else None]:
            params = "*fp16" if is_rotated(k.kind) else "*u8"
            signature = common | {"p_k": codes, "p_k_params": params, "p_k_rows": "*u8"}
            for wide in dict.fromkeys((*sizes(128), *sizes(256))):
                constexprs = {
                    "C": c,
                    "K": k,
                    "FORMAT": 1,
                    "WAITING": k.by_token,
                    "ITERATIONS": ITERATIONS,
                    "WIDE": wide,
                    "AT_ONCE": tuple(map(at_once, wide)),
                    "BLOCK": tuple(min(BLOCK, w) for w in wide),
                }
                yield Variant(_survive, signature, constexprs, {"num_warps": warps(wide[-1]), "num_stages": STAGES})
