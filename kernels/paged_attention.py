"""Attention of one new token of each sequence over its pages. Twin: `minithink/ref/paged_attention.py`.

    _attend     a program takes a part of one lane: 128 to 4096 tokens of one format, or the tokens of the ring (the
                buffer). Each format, and the ring, has its own launch over its tokens (`by_format.py`); in a CUDA
                graph the launches are parallel branches
    _merge      the parts of a query head become one (`_parts.py`, which also says how long parts are)
    _mass, _max_logit   if asked for: the attention that each token got (`_mass.py`)

First read `_attend` with one plain format (FORMATS 0), no ring and SEEN "": that is step 4 of tutorial 5. Then
`_parts.py`, `_layout.py` (where keys and values lie) and `_planes.py` (how codes become numbers).

A lane is a list of places (page · slots + slot), oldest token first; a program reads BLOCK_T of them, then gathers
the keys and values there. A slot holds a token's key and value side by side, 64 bytes each (NVFP4, D = 128) to 256
(bfloat16), so a gather by slots moves whole sectors wherever they lie. Evicted tokens are in no list, so freed slots
are never read and nothing is masked out.

The g query heads of a KV head are the rows of one block, padded to 16, so that each key is read once and the products
run on the tensor cores. The products are sums over planes (`_planes.py`) of keys and query heads.

Keys by token share their scales within a group of tokens. Blocks begin where groups do, and the scales of a group are
read and converted once (`times_rows`). If evictions have left tokens of several groups side by side, each token reads
its own scales (`_grouped_logits`).

Bound: memory, the lanes' codes and scales, once. For each token and lane these are 512 bytes in bfloat16 at D = 128,
and 4 bytes for its place. 4·16·D operations for each token and lane (16 rows, of which g are real) are far below the
rate of the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels import _mass, _parts
from minithink.kernels._common import INTERPRETED, Variant, side_by_side
from minithink.kernels._layout import Cache, cache, example, half, ring_half, words
from minithink.kernels._mass import mass
from minithink.kernels._parts import (
    PLAIN_NUMBERS,
    in_parts,
    merge,
    most_parts,
    of_format,
    part_length,
    shape_of_program,
    unit_of_lane,
)
from minithink.kernels._planes import FAST_FACTOR, load_codes, planes, times_rows

_INTERPRETED = tl.constexpr(INTERPRETED)
_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _query(p_q, head, m_head, C: tl.constexpr, H: tl.constexpr):
    """The query heads of a group by planes, and the factor of their logits: float32 [G, 1].

    For the fast path they become fp16, divided by a power of two, so that the quotient is below 2 and keeps its bits.
    """
    PLANES: tl.constexpr = H.planes
    BLOCK_G: tl.constexpr = C.block_g
    word = tl.arange(0, H.block)[None, :]
    m = m_head[:, None] & (word < H.words)
    q = ()
    for i in tl.static_range(PLANES):
        x = tl.load(p_q + head[:, None] * C.dim + word * H.planes + i, m, other=0)
        if _INTERPRETED:
            x = x.to(tl.float32)
        q = q + (x,)
    factor = tl.full([BLOCK_G, 1], 1.0, tl.float32)
    if H.fast:
        largest = tl.max(tl.abs(q[0].to(tl.float32)), 1)
        for i in tl.static_range(1, PLANES):
            largest = tl.maximum(largest, tl.max(tl.abs(q[i].to(tl.float32)), 1))
        # the power of two at or below the largest
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)[:, None]
        factor = tl.where((power > 0) & (power < 1e38), power, 1.0)
        small = ()
        for i in tl.static_range(PLANES):
            small = small + ((q[i].to(tl.float32) / factor).to(tl.float16),)
        q = small
        if H.kind != "int":
            factor = factor * FAST_FACTOR
    return q, factor


@triton.jit
def _logits(q, k, PLANES: tl.constexpr):
    """Σ over planes of q · kᵀ: float32 [G, T]."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    for i in tl.static_range(1, PLANES):
        s = tl.dot(q[i], tl.trans(k[i]), s, input_precision="ieee")
    return s


@triton.jit
def _grouped_logits(q, raw, p_rows, number, row, o_lane, m_token, H: tl.constexpr, DTYPE: tl.constexpr):
    """q · kᵀ for keys by token, float32 [G, T]: with the scales of each group, or with each token's own scales if
    evictions have left tokens of several groups in one place.

    raw: from `load_codes`. number: int32 [T], each token's row of scales, −1 without a token; row: where it begins.
    """
    numbers = number.reshape([raw.shape[0] // H.group, H.group])
    common = tl.max(numbers, 1)  # the row of scales that all tokens of a group share, if none was evicted
    strange = (numbers != common[:, None]) & (numbers >= 0)
    if tl.max(tl.max(strange.to(tl.int32), 1), 0) > 0:
        k = planes(raw, p_rows, p_rows, row, row, m_token, 1.0, H, DTYPE, True)
        s = _logits(q, k, H.planes)
    else:
        points = planes(raw, p_rows, p_rows, row, row, m_token, 1.0, H, DTYPE, False)
        k = times_rows(points, p_rows + common.to(tl.int64) * H.row + o_lane * H.row_lane, common >= 0, H)
        s = _logits(q, k, H.planes)
    return s


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _attend(
    p_q, p_parts, p_part_lse, p_seen, p_top, p_rows, p_place, p_column, p_count, p_k, p_v,
    p_k_params, p_v_params, p_k_rows, p_row_of, p_k_scale, p_v_scale, p_ring, softmax_scale, layer, table_layer,
    first_part, parts, width, listed, rows,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, FORMAT: tl.constexpr, FORMATS: tl.constexpr,
    IN_RING: tl.constexpr, SEEN: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One part of one lane.

    p_place, p_column, p_count: with FORMATS the results of `by_format`, of which the program takes the FORMAT-th;
        without FORMATS the store's whole lists and their lengths. They have `listed` columns.
    p_parts, p_part_lse: float32 [N, Hq, parts, D] and [N, Hq, parts], base 2.
    rows: B, the store's rows.
    p_seen: [N, Hq, width − 1]. SEEN "logits": base-2 logits, float32; "relative": exp2(logit − top), fp16, where
        p_top [N, Hq, (width − 1) / BLOCK_T] has the top of each block; "": neither is written.
    """
    if C.overlap:
        tl.extra.cuda.gdc_launch_dependents()  # `_merge` may start now; it waits on the GPU for the parts
    K_PLANES: tl.constexpr = K.planes
    V_PLANES: tl.constexpr = V.planes
    V_BLOCK: tl.constexpr = V.block
    BLOCK_G: tl.constexpr = C.block_g
    DTYPE: tl.constexpr = C.dtype
    GROUPED: tl.constexpr = K.fast and K.by_token and BLOCK_T % K.group == 0
    tl.static_assert(
        not (GROUPED and SEEN == "relative"), "blocks that begin early have no place of their own in p_top"
    )
    i_lane, i_part = tl.program_id(0), tl.program_id(1)
    i_n, i_head = i_lane // C.kv_heads, i_lane % C.kv_heads
    i_row = tl.load(p_rows + i_n)
    if FORMATS > 0:
        unit = unit_of_lane(table_layer, i_n, tl.num_programs(0) // C.kv_heads, i_head, C)
        begin, count = of_format(p_count, unit, FORMAT, True, FORMATS)
        p_column += unit.to(tl.int64) * listed + begin
    else:
        unit = unit_of_lane(table_layer, i_row, rows, i_head, C)
        begin, count = 0, tl.load(p_count + unit)
    p_place += unit.to(tl.int64) * listed + begin
    split = part_length(count, C)
    start = i_part * split
    end = tl.minimum(start + split, count)
    if IN_RING:  # one part
        end = count
    if start >= end:  # the same as start >= count; so the compiler knows that the loop below is run
        return
    group = tl.arange(0, BLOCK_G)
    m_head = group < C.group
    head = i_n.to(tl.int64) * (C.kv_heads * C.group) + i_head * C.group + group
    q, factor = _query(p_q, head, m_head, C, K)
    o_lane = layer * C.layer_lanes + i_head * C.head_lanes
    k_scale = tl.load(p_k_scale + layer * rows + i_row)
    v_scale = tl.load(p_v_scale + layer * rows + i_row)
    factor = factor * (softmax_scale * _LOG2E)
    if K.fast and K.kind != "ternary" and K.kind != "int":  # which have no tensor scale
        factor = factor * k_scale
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = ()
    for _ in tl.static_range(V_PLANES):
        acc = acc + (tl.zeros([BLOCK_G, V_BLOCK], tl.float32),)

    first = start
    if GROUPED:
        # Groups of keys by token have one row of scales. Begin early, so that no block cuts through a group. If
        # tokens of a group were evicted, later groups are shifted all the same.
        near = start + tl.arange(0, K.group)
        lies = tl.load(p_place + near, near < end, other=-1)
        lie_in = tl.load(p_row_of + lies, lies >= 0, other=-1)
        own = tl.max(tl.where(near == start, lie_in, -1), 0)
        start -= (K.group - tl.sum((lie_in == own).to(tl.int32), 0)) % K.group
    for t0 in range(start, end, BLOCK_T):
        # Compare with an offset in the block: an offset in the lane would be a loop counter of 64 bits.
        within = tl.arange(0, BLOCK_T)
        m_t = within < end - t0
        if GROUPED:
            m_t = m_t & (within >= first - t0)
        t = t0 + within
        place = tl.load(p_place + t, m_t, other=0)
        if IN_RING:
            # [L, B, Hkv, R, 2, D]
            index = ((layer * rows + i_row).to(tl.int64) * C.kv_heads + i_head) * C.ring + (-1 - place)
            channel = tl.arange(0, K.block)[None, :]
            m_kv = m_t[:, None] & (channel < C.dim)
            o_k = index[:, None] * (2 * C.dim) + channel
            x_k, x_v = tl.load(p_ring + o_k, m_kv, other=0), tl.load(p_ring + o_k + C.dim, m_kv, other=0)
            if _INTERPRETED:
                x_k, x_v = x_k.to(tl.float32), x_v.to(tl.float32)
            k, v = (x_k,), (x_v,)
        else:
            page, slot = (place // C.most).to(tl.int64), place % C.most
            row = page
            if K.by_token:
                number = tl.load(p_row_of + place, m_t, other=-1)
                row = number.to(tl.int64) * K.row + o_lane * K.row_lane
            raw = load_codes(p_k, page * K.page + (slot * K.slot + o_lane * K.lane + K.start), m_t, K)
            if GROUPED:
                s = _grouped_logits(q, raw, p_k_rows, number, row, o_lane, m_t, K, DTYPE)
            else:
                o_side = page * K.side_page + (slot * K.side_slot + o_lane * K.side_lane + K.side_start)
                k = planes(raw, p_k_params, p_k_rows, o_side, row, m_t, k_scale, K, DTYPE, True)
            raw = load_codes(p_v, page * V.page + (slot * V.slot + o_lane * V.lane + V.start), m_t, V)
            o_side = page * V.side_page + (slot * V.side_slot + o_lane * V.side_lane + V.side_start)
            v = planes(raw, p_v_params, p_v_params, o_side, row, m_t, v_scale, V, DTYPE, True)
        if not GROUPED:
            s = _logits(q, k, K_PLANES)
        s = tl.where(m_t[None, :], s * factor, float("-inf"))
        column = t
        if SEEN == "logits" and FORMATS > 0:
            column = tl.load(p_column + t, m_t, other=0)
        o_seen = head[:, None] * (width - 1) + column[None, :]
        if SEEN == "logits":
            tl.store(p_seen + o_seen, s, m_head[:, None] & m_t[None, :])
        # The running softmax, in base 2. The first top is −∞, so the empty sum before it gets weight 0.
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(top - shift)
        top, total = new, total * rescale + tl.sum(p, 1)
        if SEEN == "relative":
            tl.store(p_seen + o_seen, p, m_head[:, None] & m_t[None, :])
            tl.store(p_top + head * tl.cdiv(width - 1, BLOCK_T) + t0 // BLOCK_T, new, m_head)
        sums = ()
        for i in tl.static_range(V_PLANES):
            sums = sums + (tl.dot(p.to(v[i].dtype), v[i], acc[i] * rescale[:, None], input_precision="ieee"),)
        acc = sums

    scale = 1 / tl.where(total > 0, total, 1.0)
    if V.fast and V.kind != "int":
        scale = scale * FAST_FACTOR
        if V.kind != "ternary":
            scale = scale * v_scale
    word = tl.arange(0, V_BLOCK)[None, :]
    m_out = m_head[:, None] & (word < V.words)
    o_part = head * parts + first_part + i_part
    for i in tl.static_range(V_PLANES):
        o_out = o_part[:, None] * C.dim + word * V.planes + i
        tl.store(p_parts + o_out, acc[i] * scale[:, None], m_out)
    tl.store(p_part_lse + o_part, top + tl.log2(total), m_head)


def paged_attention(q: Tensor, read: Any, layer: int, group: str | None = None) -> tuple[Tensor, Tensor | None]:
    """softmax(q·kᵀ/√D)·v over the tokens that the lanes of a layer hold, and the attention that each token got.

    Args:
        q: [N, Hq, D], rotated.
        read: the store's Reading of these N rows; the kernel reads its pages directly.
        layer: the layer.
        group: how to combine the attention of a KV head's query heads: sum, mean, max, max_logit or none; None: no
            mass is wanted.

    Returns:
        out: [N, Hq, D]; 0 for a lane without tokens.
        mass: float32 [N, Hkv, S] ([N, Hq, S] with "none"), 0 where there is no token; None if `group` is None, or if
            it was written where `read.into` says.
    """
    store = read.store
    lists, pages = store.lists, store.pages
    if store.storage.lag:
        raise ValueError("values that lag behind their keys (Storage.lag) are not read here: use the reference")
    n, hq, d = q.shape
    c = in_parts(cache(store), n * store.shape.kv_heads, q.device)
    width, rows = lists.place.shape[-1], store.shape.rows
    t, seen = min(layer, lists.place.shape[0] - 1), lists.seen
    formats, ring = sorted(store.slots.used), store.ring.shape[3] > 0
    in_format = most_parts(seen, c.base, c.short)
    parts = len(formats) * in_format + ring
    several = len(formats) if len(formats) > 1 or ring else 0
    place, column, count = read.by_format if several else (lists.place, lists.place, lists.count)
    how = "" if group is None else "logits"
    if how and q.dtype != torch.float32 and not several and group != "max_logit":
        how = "relative"

    def scratch(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    q, part, part_lse = q.contiguous(), scratch(n, hq, parts, d), scratch(n, hq, parts)
    noted = top = part_lse
    if how:
        noted = scratch(n, hq, width - 1, dtype=torch.float16 if how == "relative" else torch.float32)
        top = scratch(n, hq, -(-(width - 1) // 16))

    # for each format, then for the ring: its number, format, halves and memory, its parts, tokens of a block, options
    work = list[tuple[Any, ...]]()
    for i, f in enumerate(formats):
        k, v = half(store, f, "k", q.dtype), half(store, f, "v", q.dtype)
        block, options = shape_of_program(c, k, v, n * c.kv_heads)
        work.append((i, f, k, v, words(store, f, k, v), in_format, block, options))
    if ring:
        k = ring_half(c)
        work.append((several, 0, k, k, (store.ring,) * 5, 1, 16, {"num_warps": 4}))
    launches = [
        partial(
            _attend[n * c.kv_heads, programs],
            q, part, part_lse, noted, top, read.numbers, place, column, count,
            *memory, store.slots.group_of, pages.scale[f, 0], pages.scale[f, 1], store.ring,
            d**-0.5, layer, t, i * in_format, parts, width, place.shape[-1], rows,
            c, k, v, i, several, i == len(formats), how, tokens, **options,
        )
        for i, f, k, v, memory, programs, tokens, options in work
    ]  # fmt: skip
    # The merge can be launched early only if it follows one launch, not several branches.
    side_by_side(launches, q.device, apart=not c.overlap)
    out, lse = merge(part, part_lse, read.numbers, count, t, in_format, rows, c, several, q.dtype)
    if group is None:
        return out, None
    return out, mass(noted, top, lse, read.numbers, lists.count, t, rows, c, group, how, block, seen, read.into)


def variants() -> Iterator[Variant]:
    """bfloat16 models, the formats that policies use, for many lanes and for few."""
    at = {"i32": "layer table_layer first_part parts width listed rows", "fp32": "softmax_scale", "*i64": "p_rows"}
    at |= {"*fp32": "p_parts p_part_lse p_top p_k_scale p_v_scale", "*i32": "p_place p_column p_count p_row_of"}
    at |= {"*bf16": "p_q p_ring"}
    common = {name: kind for kind, names in at.items() for name in names.split()}
    for dim, lanes in ((64, 512), (96, 8), (128, 512), (128, 8)):
        overlap = (dim, lanes) == (128, 8)
        c = Cache(2, 4, 16, dim, 1, 2, 1, 16, 32, "bf16", _parts.base(lanes), _parts.SHORT, 128, overlap)
        plain = example("plain", 16, dim, fast=False)
        for k, v, codes, params in (
            (plain, plain, "*bf16", "*u8"),
            (example("nvfp4", 4, dim), example("nvfp4", 4, dim), "*i16", "*u8"),
            (example("nvfp4", 4, dim, True), example("nvfp4", 4, dim), "*i16", "*u8"),
            (example("ternary", 2, dim), example("ternary", 2, dim), "*u8", "*u8"),
            (example("ternary", 2, dim, True), example("ternary", 2, dim), "*u8", "*u8"),
            (example("int", 4, dim), example("int", 4, dim), "*i16", "*i32"),
            (example("int", 2, dim, True), example("int", 2, dim), "*u8", "*i32"),
            (example("int", 2, dim, True, False), example("int", 2, dim, False, False), "*u8", "*fp16"),
            (example("fp8", 8, dim), example("fp8", 8, dim), "*u8", "*u8"),
        )[: None if dim == 128 else 4]:
            signature = common | dict.fromkeys(["p_k", "p_v"], codes)
            signature |= dict.fromkeys(["p_k_params", "p_v_params", "p_k_rows"], params)
            if k.fast and k.by_token:
                signature["p_k_rows"] = "*i32"
            block, chosen = shape_of_program(c, k, v, lanes)
            # (formats that lists are sorted by, whether it is the ring, SEEN); keys by token come with a ring
            ways = [(int(k.by_token), False, "")]
            if (dim, lanes, v.kind) == (128, 512, "nvfp4"):
                ways += [(2, False, "logits")] if k.by_token else [(0, False, "relative")]
            if (dim, lanes, k.kind) == (128, 512, "plain"):
                ways += [(0, False, "relative"), (2, True, "logits")]
            for formats, ring, seen in ways:
                signature["p_seen"] = "*fp16" if seen == "relative" else "*fp32"
                constexprs = {
                    "C": c, "K": k, "V": v, "FORMAT": formats if ring else 0, "FORMATS": formats, "IN_RING": ring,
                    "SEEN": seen, "BLOCK_T": 16 if ring else block,
                }  # fmt: skip
                options = {"num_warps": 4} if ring else chosen
                yield Variant(_attend, dict(signature), constexprs, options, 90 if overlap else 80)
    yield from _parts.variants()
    yield from _mass.variants()
