"""Attention of one new token of each sequence over its pages. Twin: `minithink/ref/paged_attention.py`.

To use it alone, copy this file, `_common.py`, `_formats.py`, `_layout.py`, `_mass.py`, `_parts.py`, `_planes.py` and
`_rotation.py`. With the GPU as torch's default device:

    >>> from types import SimpleNamespace as Part
    >>> import torch
    >>> from minithink.kernels.paged_attention import paged_attention
    >>> pool = torch.randn(2, 1, 16, 2, 64)  # 2 pages of 16 slots, each a key and a value with D = 64 numbers
    >>> place = torch.randperm(32).int().view(1, 1, 1, 32)  # [Lt, B, Ht, S + 1]: page · 16 + slot of 31 tokens
    >>> count = torch.full((1, 1, 1), 31, dtype=torch.int32)  # [Lt, B, Ht]
    >>> plain = Part(name="fp32", bits=32, group=0, by="channel", param_bytes=0, tensor_scaled=False)
    >>> layout = Part(k=plain, v=plain, slots=16, k_codes=256, k_side=0)
    >>> none = torch.zeros(2, 1, 0, dtype=torch.uint8)  # there are no scales
    >>> memory = {"pool": pool.view(torch.uint8).flatten(2), "side": none, "group_params": none}
    >>> pages = Part(layouts=[layout], scale=torch.ones(1, 2, 1, 1), **memory)
    >>> shape = Part(rows=1, kv_heads=1, query_heads=4, head_dim=64, scope="head", tables=(1, 1, 1), sharing=1)
    >>> slots = Part(used=[0], group_of=torch.zeros(2, 0, dtype=torch.int32), table=Part(stride=16))
    >>> lists = Part(place=place, count=count, columns_read=31)
    >>> ring = torch.zeros(1, 1, 1, 0, 2, 64)  # [L, B, Hkv, R, 2, D]: no token waits to be quantized
    >>> rest = {"dtype": pool.dtype, "storage": Part(lag=False), "ring": ring}
    >>> store = Part(shape=shape, lists=lists, slots=slots, pages=pages, **rest)
    >>> read = Part(store=store, numbers=torch.tensor([0]), into=None)  # int64 [N], the rows
    >>> q = torch.randn(1, 4, 64)  # [N, Hq, D]
    >>> out, _ = paged_attention(q, read, layer=0)  # [N, Hq, D]
    >>> k, v = pool.flatten(0, 2)[place[0, 0, 0, :31].long()].unbind(1)  # [31, D] each
    >>> torch.allclose(out, (q @ k.T / 8).softmax(-1) @ v, atol=1e-5)
    True

First read `_attend` with one plain format (FORMATS 0), no ring and SEEN "": that is step 4 of tutorial 5. Then
`_parts.py`, `_layout.py` (where keys and values lie) and `_planes.py` (how codes become numbers).

A lane is a list of places (page · slots + slot), oldest token first; a program reads BLOCK_T of them, then gathers
the keys and values there. A slot holds a token's key and value side by side, 64 bytes each (NVFP4, D = 128) to 256
(bfloat16), so a gather by slots moves whole sectors wherever they lie. Evicted tokens are in no list, so freed slots
are never read and nothing is masked out.

The g query heads of a KV head are taken together, so that each key is read once and the products run on the tensor
cores. The products are sums over planes (`_planes.py`) of keys and query heads. There are two ways to lay them out:

    query heads are the rows       S  = Q·Kᵀ [G, T]    O  = P·V   [G, W]    G is g padded to 16
    tokens are the rows (SWAPPED)  Sᵀ = K·Qᵀ [T, G]    Oᵀ = Vᵀ·Pᵀ [W, G]    G is g padded to 8

The second has less padding, so less is computed. `README.md` draws both. Logits and weights are blocks of tokens and
heads in either order: `_as_tokens` and `_as_heads` shape vectors to fit, and TOKENS is the axis of the tokens.

Keys by token share their scales within a group of tokens. Blocks begin where groups do, and the scales of a group are
read and converted once (`times_rows`). If evictions have left tokens of several groups side by side, each token reads
its own scales (`_grouped_logits`).

TurboQuant's keys and values are never rotated back. Rotations keep inner products, so the queries are rotated once
instead (`_rotation.py`). A key's scale multiplies its logit, a value's scale its weight. Values add up in the rotated
basis, and each part's sum is rotated back once, before parts are merged.

Bound: memory, the lanes' codes and scales, once. For each token and lane these are 512 bytes in bfloat16 at D = 128,
and 4 bytes for its place. 4·G·D operations for each token and lane, of which g/G are useful, are far below the rate
of the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels import _layout, _mass, _parts
from minithink.kernels._common import INTERPRETED, Variant, made_once, side_by_side
from minithink.kernels._layout import Cache, Half, Reading, Store, cache, half, ring_half, words
from minithink.kernels._mass import mass
from minithink.kernels._parts import (
    LARGEST_FP16,
    PLAIN_NUMBERS,
    Program,
    in_parts,
    merge,
    most_parts,
    of_format,
    part_length,
    program_of,
    unit_of_lane,
)
from minithink.kernels._planes import left_over, load_codes, of_tokens, planes, times_rows
from minithink.kernels._rotation import is_rotated, rotate_rows

_INTERPRETED = tl.constexpr(INTERPRETED)
_LOG2E = tl.constexpr(math.log2(math.e))
RING = Program(16, 4, 3)  # of the tokens in the ring


class Memory(NamedTuple):
    """The keys, or the values, of one format: where the store keeps them. Offsets in it count as their Half does."""

    codes: Any  # pointer to the words of codes
    params: Any  # pointer to the parameters that lie beside the codes
    rows: Any  # keys by token: pointer to the rows of scales
    row_of: Any  # keys by token: pointer to each place's row of scales
    lane: Any  # which of its unit's lanes is read
    tensor_scale: Any  # float32


class Tile(NamedTuple):
    """The tokens of one block, and where they lie: [T] each."""

    place: Any  # int32
    page: Any  # int64
    slot: Any  # int32
    held: Any  # bool: whether there is a token


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _attend(
    p_q,
    p_parts,
    p_part_lse,
    p_seen,
    p_top,
    p_rows,
    p_place,
    p_column,
    p_count,
    p_k,
    p_v,
    p_k_params,
    p_v_params,
    p_k_rows,
    p_row_of,
    p_k_scale,
    p_v_scale,
    p_ring,
    softmax_scale,
    layer,
    table_layer,
    first_part,
    parts,
    width,
    listed,
    rows,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMATS: tl.constexpr,
    IN_RING: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """One part of one lane: flash attention of the query heads of one KV head over `part_length` tokens.

    The program finds the part's tokens in the lane's list and reads the query heads. Then it takes one block of
    tokens after the other: it finds their pages, reads the keys, computes logits, updates the running softmax, and
    adds the values with their weights. At the end it writes the part's output and its log-sum-exp.

    p_q: [N, Hq, D]; rotated queries if K is TurboQuant's, float32.
    p_parts, p_part_lse: float32 [N, Hq, parts, D] and [N, Hq, parts], base 2. The first part is `first_part`.
    p_seen: [N, Hq, width − 1]. SEEN "logits": base-2 logits, float32; "relative": exp2(logit − top), fp16, where
        p_top [N, Hq, (width − 1) / BLOCK_T] has the top of each block; "": neither is written.
    p_rows: int64 [N], the rows of the store that are read.
    p_place, p_column, p_count: with FORMATS the results of `by_format`, of which the program takes the FORMAT-th;
        without FORMATS the store's whole lists and their lengths. They have `listed` columns.
    p_k, p_v, p_k_params, p_v_params, p_k_rows: from `words` of `_layout.py`.
    p_row_of: each place's row of key scales.
    p_k_scale, p_v_scale: float32 [L, B], tensor scales of this format.
    p_ring: [L, B, Hkv, R, 2, D].
    rows: B, the store's rows.
    SWAPPED: tokens are the rows of products, not query heads; never in the ring.
    """
    if C.overlap:
        tl.extra.cuda.gdc_launch_dependents()  # `_merge` may start now; it waits on the GPU for the parts
    DTYPE: tl.constexpr = C.dtype
    TOKENS: tl.constexpr = 0 if SWAPPED else 1  # the axis of tokens in logits and weights
    BLOCK_G: tl.constexpr = _padded(C.group, SWAPPED)
    # Blocks begin where groups of keys by token do.
    GROUPED: tl.constexpr = K.fast and K.by_token and BLOCK_T % K.group == 0
    tl.static_assert(
        not (GROUPED and SEEN == "relative"), "blocks that begin early have no place of their own in p_top"
    )
    i_lane = tl.program_id(0)
    i_part = tl.program_id(1)
    i_n = i_lane // C.kv_heads
    i_head = i_lane % C.kv_heads
    i_row = tl.load(p_rows + i_n)

    # The part: tokens start … end − 1 of the lane's list.
    o_list, count = _tokens_of_lane(p_count, table_layer, i_n, i_row, i_head, listed, rows, C, FORMAT, FORMATS)
    if FORMATS > 0:
        p_column += o_list
    p_place += o_list
    start, end = _tokens_of_part(i_part, count, C, IN_RING)
    if start >= end:  # the same as start >= count; so the compiler knows that the loop below is run
        return

    # The query heads of the KV head, and the factor that makes their products base-2 logits.
    group = tl.arange(0, BLOCK_G)
    m_head = group < C.group
    head = i_n.to(tl.int64) * (C.kv_heads * C.group) + i_head * C.group + group
    q, factor = _read_query(p_q, head, m_head, C, K, TOKENS)
    lane = layer * C.layer_lanes + i_head * C.head_lanes
    k_scale = tl.load(p_k_scale + layer * rows + i_row)
    v_scale = tl.load(p_v_scale + layer * rows + i_row)
    factor = factor * (softmax_scale * _LOG2E)
    if K.fast and (K.kind == "nvfp4" or K.kind == "fp8"):  # which have a tensor scale
        factor = factor * k_scale
    keys = Memory(p_k, p_k_params, p_k_rows, p_row_of, lane, k_scale)
    values = Memory(p_v, p_v_params, p_v_params, p_row_of, lane, v_scale)

    # The running softmax, in base 2: the largest logit, the sum of the weights, the sum of the weighted values.
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.full([BLOCK_G], 0.0, tl.float32)
    acc = _no_values(BLOCK_G, V, TOKENS)
    first = start
    if GROUPED:
        first = _begin_of_group(p_place, p_row_of, start, end, K)
    for t0 in range(first, end, BLOCK_T):
        # Find the pages. Compare with an offset in the block: an offset in the lane would be a loop counter of 64
        # bits.
        within = tl.arange(0, BLOCK_T)
        held = within < end - t0
        if GROUPED:
            held = held & (within >= start - t0)
        t = t0 + within
        place = tl.load(p_place + t, held, other=0)

        # Read the keys and the values, and multiply the keys with the query heads.
        if IN_RING:
            ring = ((layer * rows + i_row).to(tl.int64) * C.kv_heads + i_head) * C.ring
            k, v = _read_ring(p_ring, ring, place, held, C, K)
        else:
            tile = _find_pages(place, held, C)
            if GROUPED:
                s = _grouped_logits(q, keys, tile, K, DTYPE, TOKENS)
            else:
                k = _read_keys(keys, tile, K, DTYPE)
            v = _read_values(values, tile, V, DTYPE, 1 - TOKENS)
        if not GROUPED:
            s = _logits(q, k, K, TOKENS)
        if is_rotated(K.kind):
            scale = of_tokens(keys.params, _beside_codes(keys, tile, K), held)
            s = s * _as_tokens(scale, TOKENS)
        s = tl.where(_as_tokens(held, TOKENS), s * _as_heads(factor, TOKENS), float("-inf"))
        column = t
        if SEEN == "logits" and FORMATS > 0:
            column = tl.load(p_column + t, held, other=0)
        o_seen = _as_heads(head, TOKENS) * (width - 1) + _as_tokens(column, TOKENS)
        m_seen = _as_heads(m_head, TOKENS) & _as_tokens(held, TOKENS)
        if SEEN == "logits":
            tl.store(p_seen + o_seen, s, m_seen)

        # Update the softmax, and add the values.
        p, rescale, top = _weights(s, top, TOKENS)
        total = total * rescale + tl.sum(p, TOKENS)
        if SEEN == "relative":
            tl.store(p_seen + o_seen, p, m_seen)
            tl.store(p_top + head * tl.cdiv(width - 1, BLOCK_T) + t0 // BLOCK_T, top, m_head)
        if is_rotated(V.kind):
            p = p * _as_tokens(of_tokens(values.params, _beside_codes(values, tile, V), held), TOKENS)
            if v[0].dtype == tl.float16:
                p = tl.minimum(p, LARGEST_FP16)
        acc = _add_values(acc, rescale, p, v, V, TOKENS)

    # The part's output and its log-sum-exp.
    scale = _scale_of_output(total, v_scale, V)
    o_part = head * parts + first_part + i_part
    _write_output(p_parts, o_part, acc, scale, m_head, C, V, TOKENS)
    tl.store(p_part_lse + o_part, top + tl.log2(total), m_head)


@triton.constexpr_function
def _padded(group, swapped):
    """The query heads of a block: a tensor core multiplies at least 16 rows by 8 columns."""
    return max(8 if swapped else 16, 1 << (group - 1).bit_length())


@triton.jit
def _as_tokens(x, TOKENS: tl.constexpr):
    """A vector of tokens, [T], in the shape of a block of tokens and heads."""
    return tl.expand_dims(x, 1 - TOKENS)


@triton.jit
def _as_heads(x, TOKENS: tl.constexpr):
    """A vector of query heads, [G], in the shape of a block of tokens (or channels) and heads."""
    return tl.expand_dims(x, TOKENS)


@triton.jit
def _tokens_of_lane(
    p_count,
    table_layer,
    i_n,
    i_row,
    i_head,
    listed,
    rows,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMATS: tl.constexpr,
):
    """Where a lane's tokens of the format begin among the lists, int64, and how many they are."""
    if FORMATS > 0:
        unit = unit_of_lane(table_layer, i_n, tl.num_programs(0) // C.kv_heads, i_head, C)
        begin, count = of_format(p_count, unit, FORMAT, True, FORMATS)
    else:
        unit = unit_of_lane(table_layer, i_row, rows, i_head, C)
        begin = 0
        count = tl.load(p_count + unit)
    return unit.to(tl.int64) * listed + begin, count


@triton.jit
def _tokens_of_part(i_part, count, C: tl.constexpr, IN_RING: tl.constexpr):
    """The first token of a part, and the one behind its last. The ring has one part."""
    split = part_length(count, C)
    start = i_part * split
    end = tl.minimum(start + split, count)
    if IN_RING:
        end = count
    return start, end


@triton.jit
def _read_query(p_q, head, m_head, C: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr):
    """The query heads of a group by planes, and the factor of their logits: float32 [G]. Planes are [G, H.block], or
    [H.block, G] if tokens are the rows of products.

    For the fast path they become fp16, divided by a power of two, so that the quotient is below 2 and keeps its bits;
    so do rotated queries of 16-bit models.
    """
    HALF: tl.constexpr = H.fast or (is_rotated(H.kind) and C.dtype != "fp32" and not _INTERPRETED)
    PLANES: tl.constexpr = H.planes
    word = tl.expand_dims(tl.arange(0, H.block), 1 - TOKENS)
    m = _as_heads(m_head, TOKENS) & (word < H.words)
    q = ()
    for i in tl.static_range(PLANES):
        x = tl.load(p_q + _as_heads(head, TOKENS) * C.dim + word * H.planes + i, m, other=0)
        if _INTERPRETED:
            x = x.to(tl.float32)
        q = q + (x,)
    factor = tl.full([head.shape[0]], 1.0, tl.float32)
    if HALF:
        largest = tl.max(tl.abs(q[0].to(tl.float32)), TOKENS)
        for i in tl.static_range(1, PLANES):
            largest = tl.maximum(largest, tl.max(tl.abs(q[i].to(tl.float32)), TOKENS))
        # the power of two at or below the largest
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where((power > 0) & (power < 1e38), power, 1.0)
        small = ()
        for i in tl.static_range(PLANES):
            small = small + ((q[i].to(tl.float32) / _as_heads(factor, TOKENS)).to(tl.float16),)
        q = small
        if H.fast and H.kind != "int" and not is_rotated(H.kind):
            factor = factor * left_over(H.kind, H.converts)
    return q, factor


@triton.jit
def _begin_of_group(p_place, p_row_of, start, end, H: tl.constexpr):
    """Where the group of token `start` begins: at `start` or before.

    Groups of keys by token have one row of scales. Blocks begin early, so that none cuts through a group. If tokens
    of a group were evicted, later groups are shifted all the same.
    """
    near = start + tl.arange(0, H.group)
    place = tl.load(p_place + near, near < end, other=-1)
    row = tl.load(p_row_of + place, place >= 0, other=-1)
    own = tl.max(tl.where(near == start, row, -1), 0)
    left = tl.sum((row == own).to(tl.int32), 0)  # tokens of the group that are not before `start`
    return start - (H.group - left) % H.group


@triton.jit
def _find_pages(place, held, C: tl.constexpr):
    """The Tile of the tokens at these places."""
    page = (place // C.stride).to(tl.int64)
    return Tile(place, page, place % C.stride, held)


@triton.jit
def _read_ring(p_ring, o_lane, place, held, C: tl.constexpr, H: tl.constexpr):
    """Keys and values of a block of tokens in the ring, as one plane each: [T, H.block]. o_lane: where the lane's
    tokens begin; place: −1 for its first token, −2 for the next."""
    token = o_lane + (-1 - place)
    channel = tl.arange(0, H.block)[None, :]
    m_kv = held[:, None] & (channel < C.dim)
    o_k = token[:, None] * (2 * C.dim) + channel
    k = tl.load(p_ring + o_k, m_kv, other=0)
    v = tl.load(p_ring + o_k + C.dim, m_kv, other=0)
    if _INTERPRETED:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    return (k,), (v,)


@triton.jit
def _load_words(memory, tile, H: tl.constexpr, AXIS: tl.constexpr):
    """The words of codes of a Tile's tokens: [T, H.block], with AXIS 1 [H.block, T]."""
    o_codes = tile.page * H.page + (tile.slot * H.slot + memory.lane * H.lane + H.start)
    return load_codes(memory.codes, o_codes, tile.held, H, AXIS)


@triton.jit
def _beside_codes(memory, tile, H: tl.constexpr):
    """Where each token's parameters begin: int64 [T]."""
    return tile.page * H.side_page + (tile.slot * H.side_slot + memory.lane * H.side_lane + H.side_start)


@triton.jit
def _row_of_scales(keys, tile, H: tl.constexpr):
    """Keys by token: the number of each token's row of scales, int32 [T], −1 without a token; and where it begins."""
    number = tl.load(keys.row_of + tile.place, tile.held, other=-1)
    return number, number.to(tl.int64) * H.row + keys.lane * H.row_lane


@triton.jit
def _read_keys(keys, tile, H: tl.constexpr, DTYPE: tl.constexpr):
    """The keys of a Tile's tokens, by planes: [T, H.block] each."""
    o_row = tile.page  # is not read, unless keys are by token
    if H.by_token:
        _, o_row = _row_of_scales(keys, tile, H)
    raw = _load_words(keys, tile, H, 0)
    o_params = _beside_codes(keys, tile, H)
    return planes(raw, keys.params, keys.rows, o_params, o_row, tile.held, keys.tensor_scale, H, DTYPE, True)


@triton.jit
def _read_values(values, tile, H: tl.constexpr, DTYPE: tl.constexpr, AXIS: tl.constexpr):
    """The values of a Tile's tokens, by planes: [T, H.block] each, with AXIS 1 [H.block, T].

    They are loaded in this shape. A block that is transposed behind its load is no longer loaded ahead (`cp.async`).
    """
    raw = _load_words(values, tile, H, AXIS)
    o_params = _beside_codes(values, tile, H)
    o_row = tile.page  # is not read
    return planes(
        raw,
        values.params,
        values.rows,
        o_params,
        o_row,
        tile.held,
        values.tensor_scale,
        H,
        DTYPE,
        True,
        AXIS,
    )


@triton.jit
def _logits(q, k, H: tl.constexpr, TOKENS: tl.constexpr):
    """Σ over planes of q · kᵀ, float32 [G, T]; if tokens are the rows, of k · qᵀ, [T, G]."""
    PLANES: tl.constexpr = H.planes
    if TOKENS == 0:
        s = tl.dot(k[0], q[0], input_precision="ieee")
        for i in tl.static_range(1, PLANES):
            s = tl.dot(k[i], q[i], s, input_precision="ieee")
    else:
        s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
        for i in tl.static_range(1, PLANES):
            s = tl.dot(q[i], tl.trans(k[i]), s, input_precision="ieee")
    return s


@triton.jit
def _grouped_logits(q, keys, tile, H: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr):
    """`_logits` for keys by token: with the scales of each group, or with each token's own scales if
    evictions have left tokens of several groups in one place."""
    number, o_row = _row_of_scales(keys, tile, H)
    raw = _load_words(keys, tile, H, 0)
    numbers = number.reshape([raw.shape[0] // H.group, H.group])
    common = tl.max(numbers, 1)  # the row of scales that all tokens of a group share, if none was evicted
    strange = (numbers != common[:, None]) & (numbers >= 0)
    if tl.max(tl.max(strange.to(tl.int32), 1), 0) > 0:
        k = planes(raw, keys.rows, keys.rows, o_row, o_row, tile.held, 1.0, H, DTYPE, True)
        s = _logits(q, k, H, TOKENS)
    else:
        points = planes(raw, keys.rows, keys.rows, o_row, o_row, tile.held, 1.0, H, DTYPE, False)
        o_common = common.to(tl.int64) * H.row + keys.lane * H.row_lane
        k = times_rows(points, keys.rows + o_common, common >= 0, H)
        s = _logits(q, k, H, TOKENS)
    return s


@triton.jit
def _weights(s, top, TOKENS: tl.constexpr):
    """A step of the running softmax in base 2.

    s: logits, −∞ without a token; top: [G], the largest logit of the blocks before, −∞ before the first.

    Returns exp2(s − new top), the factor that earlier sums get [G] (0 for the empty sum), and the new top.
    """
    new = tl.maximum(top, tl.max(s, TOKENS))
    shift = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - _as_heads(shift, TOKENS))
    rescale = tl.exp2(top - shift)
    return p, rescale, new


@triton.jit
def _no_values(BLOCK_G: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr):
    """The sum of no values, by planes: float32 zeros [G, H.block] each, or [H.block, G]."""
    PLANES: tl.constexpr = H.planes
    acc = ()
    for _ in tl.static_range(PLANES):
        if TOKENS == 0:
            acc = acc + (tl.full([H.block, BLOCK_G], 0.0, tl.float32),)
        else:
            acc = acc + (tl.full([BLOCK_G, H.block], 0.0, tl.float32),)
    return acc


@triton.jit
def _add_values(acc, rescale, p, v, H: tl.constexpr, TOKENS: tl.constexpr):
    """acc · rescale + p · v, by planes: float32 [G, H.block] each. If tokens are the rows of p, channels are those of
    the sums: acc · rescale + v · p, [H.block, G]."""
    PLANES: tl.constexpr = H.planes
    sums = ()
    for i in tl.static_range(PLANES):
        weights = p.to(v[i].dtype)
        scaled = acc[i] * _as_heads(rescale, TOKENS)
        if TOKENS == 0:
            sums = sums + (tl.dot(v[i], weights, scaled, input_precision="ieee"),)
        else:
            sums = sums + (tl.dot(weights, v[i], scaled, input_precision="ieee"),)
    return sums


@triton.jit
def _scale_of_output(total, v_scale, H: tl.constexpr):
    """What the sum of the weighted values is multiplied with, float32 [G]: 1 / total, and what the fast path has left
    out of the values."""
    scale = 1 / tl.where(total > 0, total, 1.0)
    if H.fast and H.kind != "int" and not is_rotated(H.kind):
        scale = scale * left_over(H.kind, H.converts)
        if H.kind != "ternary":
            scale = scale * v_scale
    return scale


@triton.jit
def _write_output(p_parts, o_part, acc, scale, m_head, C: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr):
    """Write acc · scale, plane by plane. o_part: int64 [G], where the part of each query head lies."""
    PLANES: tl.constexpr = H.planes
    word = tl.expand_dims(tl.arange(0, H.block), 1 - TOKENS)
    m_out = _as_heads(m_head, TOKENS) & (word < H.words)
    for i in tl.static_range(PLANES):
        o_out = _as_heads(o_part, TOKENS) * C.dim + word * H.planes + i
        tl.store(p_parts + o_out, acc[i] * _as_heads(scale, TOKENS), m_out)


@dataclass(frozen=True)
class _Launch:
    """One launch of `_attend`: the tokens of one format, or of the ring."""

    number: int  # of the format among those that the lists are sorted by; the ring comes last
    format: int  # of the store; the ring has none, and reads the tensor scales of format 0
    keys: Half
    values: Half
    memory: Sequence[Tensor]  # codes of keys and values, parameters of both, rows of key scales
    scales: Sequence[Tensor]  # FP32 scales of keys and of values, [L, B] each
    parts: int  # of a lane
    program: Program


@dataclass(frozen=True)
class _Plan:
    """What is the same for all layers."""

    constants: Cache
    formats: int  # formats in use
    several: int  # formats that the lists are sorted by; 0: they are not sorted
    lists: tuple[Tensor, Tensor, Tensor]  # places, columns, and counts or where formats begin
    in_format: int  # parts that a format has room for
    work: Sequence[_Launch]


def paged_attention(
    q: Tensor,
    read: Reading,
    layer: int,
    group: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q·kᵀ/√D)·v over the tokens that the lanes of a layer hold, and the attention that each token got.

    Args:
        q: [N, Hq, D], rotated.
        read: the store's Reading of these N rows; the kernel reads its pages directly (`_layout.py` says which
            attributes). If it also has a dict `once`, the plan of the launches is kept there, and made in the first
            call instead of in every layer's. Until the last one the store's lists, formats and tensors must
            stay; what is stored in them may change.
        layer: the layer.
        group: how to combine the attention of a KV head's query heads: sum, mean, max, max_logit or none; None: no
            mass is wanted.

    Returns:
        out: [N, Hq, D]; 0 for a lane without tokens.
        mass: float32 [N, Hkv, S] ([N, Hq, S] with "none"), 0 where there is no token; None if `group` is None, or if
            it was written where `read.into` says.
    """
    store = read.store
    lists = store.lists
    if store.storage.lag:
        raise ValueError("values that lag behind their keys (Storage.lag) are not read here: use the reference")
    n, heads, dim = q.shape
    q = q.contiguous()
    lanes = n * store.shape.kv_heads
    rows = store.shape.rows
    width = lists.place.shape[-1]
    table_layer = min(layer, lists.place.shape[0] - 1)
    plan = made_once(read, (paged_attention, n, q.dtype), partial(_plan, read, q))
    constants = plan.constants
    work = plan.work
    in_format = plan.in_format
    several = plan.several
    place, column, count = plan.lists
    parts = sum(one.parts for one in work)

    # What the launches write: the parts, and what `_mass.py` needs of the logits.
    rotated = [is_rotated(one.values.kind) for one in work]
    back_at_once = rotated == [True]  # the sum of the parts; else each of these formats by itself
    # Whole formats are rotated back, also parts that nothing has written: initcheck would report those.
    new_part = q.new_zeros if any(rotated) and not back_at_once else q.new_empty
    part = new_part(n, heads, parts, dim, dtype=torch.float32)
    part_lse = q.new_empty(n, heads, parts, dtype=torch.float32)
    seen = _what_is_seen(q.dtype, several, group)
    noted = part_lse  # is not used without `seen`
    top = part_lse  # likewise
    if seen:
        noted = q.new_empty(n, heads, width - 1, dtype=torch.float16 if seen == "relative" else torch.float32)
        top = q.new_empty(n, heads, triton.cdiv(width - 1, 16), dtype=torch.float32)

    rotated_q = q  # is not used without TurboQuant's keys
    if any(is_rotated(one.keys.kind) for one in work):
        rotated_q = rotate_rows(q)
    launches = []
    for one in work:
        p_k, p_v, p_k_params, p_v_params, p_k_rows = one.memory
        launch = partial(
            _attend[lanes, one.parts],
            p_q=rotated_q if is_rotated(one.keys.kind) else q,
            p_parts=part,
            p_part_lse=part_lse,
            p_seen=noted,
            p_top=top,
            p_rows=read.numbers,
            p_place=place,
            p_column=column,
            p_count=count,
            p_k=p_k,
            p_v=p_v,
            p_k_params=p_k_params,
            p_v_params=p_v_params,
            p_k_rows=p_k_rows,
            p_row_of=store.slots.group_of,
            p_k_scale=one.scales[0],
            p_v_scale=one.scales[1],
            p_ring=store.ring,
            softmax_scale=dim**-0.5,
            layer=layer,
            table_layer=table_layer,
            first_part=one.number * in_format,
            parts=parts,
            width=width,
            listed=place.shape[-1],
            rows=rows,
            C=constants,
            K=one.keys,
            V=one.values,
            FORMAT=one.number,
            FORMATS=several,
            IN_RING=one.number == plan.formats,
            SEEN=seen,
            BLOCK_T=one.program.block,
            SWAPPED=one.program.swapped,
            **one.program.options,
        )
        if is_rotated(one.values.kind) and not back_at_once:
            own = part[:, :, one.number * in_format :][:, :, :in_format]
            launch = partial(_and_rotate_back, launch, own)
        launches.append(launch)
    # The merge can be launched early only if it follows one launch, not several branches.
    side_by_side(launches, q.device, apart=not constants.overlap)
    out, lse = merge(
        part=part,
        part_lse=part_lse,
        rows=read.numbers,
        count=count,
        table_layer=table_layer,
        in_format=in_format,
        b=rows,
        c=constants,
        formats=several,
        rotated=back_at_once,
        saturated=any(rotated),
        dtype=q.dtype,
    )
    if group is None:
        return out, None
    attention = mass(
        noted=noted,
        top=top,
        lse=lse,
        rows=read.numbers,
        count=lists.count,
        table_layer=table_layer,
        b=rows,
        c=constants,
        group=group,
        how=seen,
        block=work[plan.formats - 1].program.block,
        seen=lists.columns_read,
        into=read.into,
    )
    return out, attention


def _and_rotate_back(launch: Callable[[], object], part: Tensor) -> None:
    """Launch attention over TurboQuant's values, then rotate the parts that it wrote. part: [N, Hq, parts, D]."""
    launch()
    rows = part.flatten(0, 1)
    rotate_rows(rows, back=True, out=rows)


def _what_is_seen(dtype: torch.dtype, several: int, group: str | None) -> str:
    """What `_attend` notes of the logits for `mass`, its SEEN.

    Weights relative to the top of their block take half the bytes, but in fp16 they are too coarse for float32
    models. The softmax of the largest logits needs the logits themselves.
    """
    if group is None:
        return ""
    if dtype == torch.float32 or several or group == "max_logit":
        return "logits"
    return "relative"


def _plan(read: Reading, q: Tensor) -> _Plan:
    """How the tokens of a layer are cut into parts, and what the launches read. q: [N, Hq, D]."""
    store = read.store
    lists = store.lists
    lanes = len(q) * store.shape.kv_heads
    ring = store.ring.shape[3] > 0
    # Lanes are cut by the formats that the store has, not by those in use: the sums of a sequence must not depend on
    # what others hold. Every store has the model's own type, for prompts.
    shared = cache(store)
    names = {half.name for lay in store.pages.layouts for half in (lay.k, lay.v)}
    only_fp8 = names == {shared.dtype, "fp8"} and not ring
    constants = in_parts(shared, lanes, q.device, only_fp8)

    # The lists are sorted by format if there are several formats, or a ring.
    formats = sorted(store.slots.used)
    several = len(formats) if len(formats) > 1 or ring else 0
    in_format = most_parts(lists.columns_read, constants.base, constants.short)
    work = [_of_format(store, i, q.dtype, constants, lanes, in_format) for i in range(len(formats))]
    if ring:
        work.append(_of_ring(store, len(formats), constants))
    return _Plan(
        constants=constants,
        formats=len(formats),
        several=several,
        lists=read.by_format if several else (lists.place, lists.place, lists.count),
        in_format=in_format,
        work=work,
    )


def _of_format(store: Store, number: int, dtype: torch.dtype, c: Cache, lanes: int, parts: int) -> _Launch:
    """The launch for the tokens of the store's `number`-th used format."""
    f = sorted(store.slots.used)[number]
    keys = half(store, f, "k", dtype)
    values = half(store, f, "v", dtype)
    return _Launch(
        number=number,
        format=f,
        keys=keys,
        values=values,
        memory=words(store, f, keys, values),
        scales=store.pages.scale[f].unbind(),
        parts=parts,
        program=program_of(c, keys, values, lanes),
    )


def _of_ring(store: Store, number: int, c: Cache) -> _Launch:
    """The launch for the tokens of the ring. Codes and parameters are not read."""
    numbers = ring_half(c)
    return _Launch(
        number=number,
        format=0,
        keys=numbers,
        values=numbers,
        memory=[store.ring] * 5,
        scales=store.pages.scale[0].unbind(),
        parts=1,
        program=RING,
    )


_SIGNATURE = {
    "*bf16": ("p_q", "p_ring"),
    "*fp32": ("p_parts", "p_part_lse", "p_top", "p_k_scale", "p_v_scale"),
    "*i64": ("p_rows",),
    "*i32": ("p_place", "p_column", "p_count", "p_row_of"),
    "fp32": ("softmax_scale",),
    "i32": ("layer", "table_layer", "first_part", "parts", "width", "listed", "rows"),
}  # of all variants


def variants() -> Iterator[Variant]:
    """bfloat16 models, all formats with a fast path, for many lanes and for few."""
    shapes = (64, 512, False), (96, 8, False), (128, 512, False), (128, 512, True), (128, 8, True)
    for dim, lanes, converts in shapes:
        halves = _halves(dim, converts)
        if dim == 64:
            halves = halves[:4] + [of for of in halves if is_rotated(of[0].kind)]
        elif dim == 96:
            halves = halves[:4]
        elif converts and lanes == 512:
            halves = [of for of in halves if of[0].kind in ("nvfp4", "ternary", "fp8")]
        for k, v, codes, params in halves:
            yield from _variants_of_format(dim, lanes, k, v, codes, params)
    yield from _parts.variants()
    yield from _mass.variants()


def _halves(dim: int, converts: bool) -> list[tuple[Half, Half, str, str]]:
    """Keys, values, and the types of their codes and parameters."""
    example = partial(_layout.example, converts=converts)
    plain = example("plain", 16, dim, fast=False)
    nvfp4 = example("nvfp4", 4, dim)
    ternary = example("ternary", 2, dim)
    int8, int4, int2 = (example("int", bits, dim)._replace(group=32) for bits in (8, 4, 2))
    slow_int2 = example("int", 2, dim, fast=False)
    fp8 = example("fp8", 8, dim)
    tq4, tq3, tq2 = (example("tq-unbiased", bits, dim) for bits in (4, 3, 2))
    slow_rotated = [example("tq-unbiased", bits, dim, fast=False) for bits in (4, 3, 2, 1)]
    return [
        (plain, plain, "*bf16", "*u8"),
        (nvfp4, nvfp4, "*i16", "*u8"),
        (example("nvfp4", 4, dim, by_token=True), nvfp4, "*i16", "*u8"),
        (ternary, ternary, "*i16", "*u8"),
        (example("ternary", 2, dim, by_token=True), ternary, "*i16", "*u8"),
        (int8, int8, "*i16", "*i32"),
        (int8._replace(by_token=True), int8, "*i16", "*i32"),
        (int4, int4, "*i16", "*i32"),
        (int4._replace(by_token=True), int4, "*i16", "*i32"),
        (int2, int2, "*i16", "*i32"),
        (int2._replace(by_token=True), int2, "*i16", "*i32"),
        (example("int", 2, dim, by_token=True, fast=False), slow_int2, "*u8", "*fp16"),
        (fp8, fp8, "*i16", "*u8"),
        (tq4, tq4, "*i16", "*fp16"),
        (tq3, tq3, "*i32", "*fp16"),
        (tq2, tq2, "*i16", "*fp16"),
        *((x, x, "*u8", "*fp16") for x in slow_rotated),
    ]


def _variants_of_format(dim: int, lanes: int, k: Half, v: Half, codes: str, params: str) -> Iterator[Variant]:
    """The variants of one format: alone, and for some formats beside others, with the ring, or with mass."""
    overlap = (dim, lanes) == (128, 8)
    c = Cache(2, 4, dim, 1, 2, 1, 16, 32, "bf16", _parts.base(lanes), _parts.SHORT, 128, overlap)
    signature = {name: kind for kind, names in _SIGNATURE.items() for name in names}
    signature |= dict.fromkeys(("p_k", "p_v"), codes)
    signature |= dict.fromkeys(("p_k_params", "p_v_params", "p_k_rows"), params)
    if k.fast and k.by_token:
        signature["p_k_rows"] = "*i32"
    if is_rotated(k.kind):
        signature["p_q"] = "*fp32"
        signature["p_k_rows"] = "*u8"

    # (formats that lists are sorted by, whether it is the ring, SEEN); keys by token come with a ring
    ways = [(int(k.by_token), False, "")]
    if (dim, lanes) == (128, 512) and v.kind == "nvfp4":
        ways.append((2, False, "logits") if k.by_token else (0, False, "relative"))
    if (dim, lanes) == (128, 512) and k.kind == "plain":
        ways += [(0, False, "relative"), (2, True, "logits")]
    for formats, ring, seen in ways:
        program = RING if ring else program_of(c, k, v, lanes)
        constexprs = {
            "C": c,
            "K": k,
            "V": v,
            "FORMAT": formats if ring else 0,
            "FORMATS": formats,
            "IN_RING": ring,
            "SEEN": seen,
            "BLOCK_T": program.block,
            "SWAPPED": program.swapped,
        }
        noted = {"p_seen": "*fp16" if seen == "relative" else "*fp32"}
        yield Variant(
            kernel=_attend,
            signature=signature | noted,
            constexprs=constexprs,
            options=program.options,
            arch=90 if overlap or k.converts else 80,
        )
