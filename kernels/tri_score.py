"""TriAttention's scores of keys in pages, without a dense copy of the keys. Twin: `minithink/ref/tri_score.py`.

To use it alone, copy this file, `_common.py`, `_formats.py`, `_layout.py`, `_parts.py`, `_planes.py` and
`_rotation.py`. With the GPU as torch's default device:

    >>> from types import SimpleNamespace as Part
    >>> import torch
    >>> from minithink.kernels.tri_score import tri_score
    >>> pool = torch.randn(2, 1, 16, 2, 64)  # 2 pages of 16 slots, each a key and a value with D = 64 numbers
    >>> place = torch.randperm(32).int().view(1, 1, 1, 32)  # [Lt, B, Ht, S + 1]: page · 16 + slot of 31 tokens
    >>> count = torch.full((1, 1, 1), 31, dtype=torch.int32)  # [Lt, B, Ht]
    >>> plain = Part(name="fp32", bits=32, group=0, by="channel", param_bytes=0, tensor_scaled=False)
    >>> layout = Part(k=plain, v=plain, slots=16, k_codes=256, k_side=0)
    >>> none = torch.zeros(2, 1, 0, dtype=torch.uint8)  # there are no scales
    >>> memory = {"pool": pool.view(torch.uint8).flatten(2), "side": none, "group_params": none}
    >>> pages = Part(layouts=[layout], scale=torch.ones(1, 2, 1, 1), **memory)
    >>> shape = Part(rows=1, kv_heads=1, query_heads=1, head_dim=64, scope="head", tables=(1, 1, 1), sharing=1)
    >>> table = Part(stride=16, format=torch.zeros(2, dtype=torch.uint8))
    >>> slots = Part(used=[0], group_of=torch.zeros(2, 0, dtype=torch.int32), table=table)
    >>> lists = Part(place=place, count=count)
    >>> ring = torch.zeros(1, 1, 1, 0, 2, 64)  # [L, B, Hkv, R, 2, D]: no token waits to be quantized
    >>> store = Part(shape=shape, lists=lists, slots=slots, pages=pages, dtype=pool.dtype, ring=ring)
    >>> query = torch.randn(1, 1, 64)  # float32 [N, Hq, D]
    >>> weight = torch.zeros(1, 32)  # float32 [Hq, D/2]: the lengths of the bands do not count
    >>> candidates = torch.ones(1, 1, 31, dtype=torch.bool)  # [N, Ht, S]
    >>> read = Part(store=store, numbers=torch.tensor([0]))  # int64 [N], the rows
    >>> z = tri_score(read, 0, query, weight, candidates)  # float32 [N, Hkv, S], of layer 0
    >>> k = pool.flatten(0, 2)[place[0, 0, 0, :31].long(), 0]  # [31, D]
    >>> score = query @ k.T
    >>> torch.allclose(z, (score - score.mean()) / score.std(correction=0), atol=1e-4)
    True

A key's bands are pairs of channels f and f + D/2. The words of a key (`_planes.py`) are read in two halves side by
side, so that both channels of a band stand at the same place of their halves, and |k_f|² is a sum over the halves.
Keys in the formats of TurboQuant are stored rotated. For ⟨ũ, k⟩ it would be enough to rotate ũ, once, as attention
does with its queries. But |k_f| is a length in the original basis: each rotated channel has a part of every band. So
`_turned_back` reads the key as stored, by codes, and rotates it back in registers. Its words are single channels.

Bound: memory. For each candidate and lane, its key is read once (2·D bytes in bfloat16, or its codes), with 4 bytes
for its place and 1 for the mask. 4·g bytes of scores are written, and read three times, mostly from the GPU's cache;
then 4 bytes are written. Arithmetic comes close: 3·g·D/2 multiply-adds and D/2 square roots for a key, in float32. To
rotate a key back takes D·log₂(D) additions, and moves its numbers between threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2
from minithink.kernels._formats import load_bytes, round_to, saturate, sharing, to_fp32, unpack
from minithink.kernels._layout import Cache, Half, cache, example, half, key_words
from minithink.kernels._parts import unit_of_lane
from minithink.kernels._planes import of_tokens, one_by_one
from minithink.kernels._rotation import decode_level, is_rotated, rotate_back

BLOCK_T = 64  # columns of a program of `_scores`
TILE = 2048  # numbers of the keys that such a program rotates back
BLOCK = 512  # columns at a time in `_best`
LEAST = 1e-6  # the smallest deviation that scores are divided by
WARPS = 4
# Triton must not compile anew for one of these that is 1 or a multiple of 16.
NUMBERS = ["layer", "table_layer", "rows", "listed", "seen"]
_INTERPRETED = tl.constexpr(INTERPRETED)
_LEAST = tl.constexpr(LEAST)


@triton.jit
def _mask(p_candidate, i_n, i_head, t, seen, C: tl.constexpr, SHARED: tl.constexpr):
    """Which columns of a lane hold a candidate. SHARED: all heads of a row have the same."""
    i_mask = i_n
    if not SHARED:
        i_mask = i_n * C.kv_heads + i_head
    return tl.load(p_candidate + i_mask.to(tl.int64) * seen + t, t < seen, other=0) != 0


@triton.jit
def _words_in_halves(H: tl.constexpr, HALF: tl.constexpr):
    """Numbers of the words of a key, and which of them exist: [1, 2·HALF]. The first HALF have the first D/2
    channels."""
    i = tl.arange(0, 2 * HALF)
    word = (i // HALF) * (H.words // 2) + i % HALF
    return word[None, :], (i % HALF < H.words // 2)[None, :]


@triton.jit
def _paged_keys(
    p_k,
    p_params,
    p_k_rows,
    p_row_of,
    place,
    mine,
    o_lane,
    k_scale,
    C: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
):
    """Keys in pages, in the original basis, by planes: K.planes blocks [BLOCK_T, 2·HALF], 0 where not `mine`."""
    DTYPE: tl.constexpr = C.dtype
    page = (place // C.stride).to(tl.int64)
    slot = place % C.stride
    row = page
    if K.by_token:
        row = tl.load(p_row_of + place, mine, other=0).to(tl.int64)
        row = row * K.row + o_lane * K.row_lane
    o_k = page * K.page + (slot * K.slot + o_lane * K.lane + K.start)
    o_side = page * K.side_page + (slot * K.side_slot + o_lane * K.side_lane + K.side_start)
    if is_rotated(K.kind):
        k = (_turned_back(p_k, p_params, o_k, o_side, mine, C, K),)
    else:
        word, m_word = _words_in_halves(K, HALF)
        m = mine[:, None] & m_word
        raw = tl.load(p_k + o_k[:, None] + word, m, other=0)
        if K.kind == "plain":
            if _INTERPRETED:
                raw = raw.to(tl.float32)
            k = (raw,)
        else:
            k = one_by_one(raw, p_params, p_k_rows, o_side, row, word, m, k_scale, K, DTYPE)
    return k


@triton.jit
def _turned_back(p_k, p_params, o_k, o_side, mine, C: tl.constexpr, K: tl.constexpr):
    """TurboQuant's keys in the original basis: float32 [BLOCK_T, D], 0 where not `mine`. o_k, o_side: where the codes
    and the scale of each begin."""
    BITS: tl.constexpr = K.bits
    DTYPE: tl.constexpr = C.dtype
    place = tl.arange(0, C.dim // sharing(BITS))[None, :]  # of the bytes, or three bytes, that codes share
    if BITS == 3:
        packed = load_bytes(p_k + o_k[:, None] + place * 3, mine[:, None], 3)
    else:
        packed = tl.load(p_k + o_k[:, None] + place, mine[:, None], other=0).to(tl.int32)
    c = decode_level(unpack(packed, BITS), BITS)
    scale = of_tokens(p_params, o_side, mine)
    # x̂ = s·Rᵀ(c), rounded to the model's type, as the twin reads it
    x = scale[:, None] * rotate_back(c)
    return to_fp32(round_to(saturate(x, DTYPE), DTYPE))


@triton.jit(do_not_specialize=NUMBERS)
def _scores(
    p_score,
    p_query,
    p_weight,
    p_candidate,
    p_rows,
    p_place,
    p_format,
    p_k,
    p_params,
    p_k_rows,
    p_row_of,
    p_k_scale,
    p_ring,
    layer,
    table_layer,
    rows,
    listed,
    seen,
    C: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    ALONE: tl.constexpr,
    IN_RING: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """S_h = ⟨ũ_h, k⟩ + Σ_f e_hf·|k_f| of the candidates in FORMAT and, with IN_RING, of those in the ring.

    p_score: float32 [N, Hq, S]; p_query: float32 [N, Hq, D]; p_weight: float32 [Hq, D/2].
    p_candidate: [N, Hkv or 1, S]; p_rows: int64 [N]; p_place: the store's lists, of `listed` columns.
    p_format: the format of each page. ALONE: all candidates are in FORMAT.
    p_k, p_params, p_k_rows: from `key_words` of `_layout.py`.
    p_ring: [L, B, Hkv, R, 2, D]; rows: B, the store's rows.
    """
    GROUP: tl.constexpr = C.group
    PLANES: tl.constexpr = K.planes
    i_lane = tl.program_id(0)
    i_n = i_lane // C.kv_heads
    i_head = i_lane % C.kv_heads
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    held = _mask(p_candidate, i_n, i_head, t, seen, C, SHARED)
    if tl.max(held.to(tl.int32), 0) == 0:
        return
    i_row = tl.load(p_rows + i_n)
    word, m_word = _words_in_halves(K, HALF)
    unit = unit_of_lane(table_layer, i_row, rows, i_head, C)
    place = tl.load(p_place + unit.to(tl.int64) * listed + t, held, other=0)
    mine = held & (place >= 0)
    paged = tl.maximum(place, 0)
    if not ALONE:
        of_page = tl.load(p_format + paged // C.stride, mine, other=255).to(tl.int32)
        mine = mine & (of_page == FORMAT)
    o_lane = layer * C.layer_lanes + i_head * C.head_lanes
    k_scale = tl.load(p_k_scale + layer * rows + i_row)
    k = _paged_keys(p_k, p_params, p_k_rows, p_row_of, paged, mine, o_lane, k_scale, C, K, HALF)
    if IN_RING:
        waits = held & (place < 0)
        token = ((layer * rows + i_row).to(tl.int64) * C.kv_heads + i_head) * C.ring + (-1 - place)
        m_ring = waits[:, None] & m_word
        both = ()
        for i in tl.static_range(PLANES):
            x = tl.load(p_ring + token[:, None] * (2 * C.dim) + word * PLANES + i, m_ring, other=0)
            both = both + (tl.where(m_ring, x.to(tl.float32), k[i].to(tl.float32)),)
        k = both
        mine = mine | waits

    # |k_f| of each plane's bands
    lengths = ()
    for i in tl.static_range(PLANES):
        x = k[i].to(tl.float32)
        lengths = lengths + (tl.sqrt(tl.sum((x * x).reshape([BLOCK_T, 2, HALF]), 1)),)
    i_word = tl.arange(0, HALF)[None, :]
    for h in tl.static_range(GROUP):
        head = i_head * C.group + h
        i_query = i_n.to(tl.int64) * (C.kv_heads * C.group) + head
        score = tl.zeros([BLOCK_T], tl.float32)
        for i in tl.static_range(PLANES):
            query = tl.load(p_query + i_query * C.dim + word * PLANES + i, m_word, other=0.0)
            p_band = p_weight + head * (C.dim // 2) + i_word * PLANES + i
            weight = tl.load(p_band, i_word < K.words // 2, other=0.0)
            score += tl.sum(k[i].to(tl.float32) * query, 1)
            score += tl.sum(lengths[i] * weight, 1)
        tl.store(p_score + i_query * seen + t, score, mine)


@triton.jit(do_not_specialize=["seen"])
def _best(p_z, p_score, p_candidate, seen, C: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    """Z = max_h (S_h − mean) / max(std, 1e−6) of a lane's candidates; 0 elsewhere. The order of sums over columns is
    the same whatever other lanes hold."""
    GROUP: tl.constexpr = C.group
    i_lane = tl.program_id(0)
    i_n = i_lane // C.kv_heads
    i_head = i_lane % C.kv_heads
    p_score += i_lane.to(tl.int64) * C.group * seen
    p_z += i_lane.to(tl.int64) * seen
    number = tl.zeros([BLOCK], tl.int32)
    for start in range(0, seen, BLOCK):
        t = start + tl.arange(0, BLOCK)
        number += _mask(p_candidate, i_n, i_head, t, seen, C, SHARED).to(tl.int32)
    count = tl.maximum(tl.sum(number, 0), 1).to(tl.float32)
    means = ()
    deviations = ()
    for h in tl.static_range(GROUP):
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, seen, BLOCK):
            t = start + tl.arange(0, BLOCK)
            m = _mask(p_candidate, i_n, i_head, t, seen, C, SHARED)
            total += tl.load(p_score + h * seen + t, m, other=0.0)
        mean = tl.sum(total, 0) / count
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, seen, BLOCK):
            t = start + tl.arange(0, BLOCK)
            m = _mask(p_candidate, i_n, i_head, t, seen, C, SHARED)
            x = tl.where(m, tl.load(p_score + h * seen + t, m, other=0.0) - mean, 0.0)
            squares += x * x
        means = means + (mean,)
        deviations = deviations + (tl.maximum(tl.sqrt(tl.sum(squares, 0) / count), _LEAST),)
    for start in range(0, seen, BLOCK):
        t = start + tl.arange(0, BLOCK)
        m = _mask(p_candidate, i_n, i_head, t, seen, C, SHARED)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        for h in tl.static_range(GROUP):
            x = tl.load(p_score + h * seen + t, m, other=0.0)
            best = tl.maximum(best, (x - means[h]) / deviations[h])
        tl.store(p_z + t, tl.where(m, best, 0.0), t < seen)


def tri_score(read: Any, layer: int, query: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
    """Scores of the keys of a layer, comparable between query heads, and the best of the heads that share a KV head.

    Args:
        read: the store's Reading of N rows.
        layer: the layer.
        query: float32 [N, Hq, D].
        weight: float32 [Hq, D/2].
        candidates: bool [N, Ht, S].

    Returns:
        float32 [N, Hkv, S], 0 where there is no candidate.

    Raises:
        ValueError: the channels of a band do not lie in the same plane of a format.
    """
    store = read.store
    c = cache(store)
    n, tables, seen = candidates.shape
    z = query.new_empty(n, c.kv_heads, seen)
    if not z.numel():
        return z
    query, weight, candidates = (x.contiguous() for x in (query, weight, candidates.view(torch.uint8)))
    score = query.new_empty(n, c.kv_heads * c.group, seen)
    shared = tables < c.kv_heads
    formats = sorted(store.slots.used)
    for i, f in enumerate(formats):
        k = _readable(half(store, f, "k", torch.float32), c)
        if c.dim // 2 % k.planes:
            raise ValueError(
                f"{c.dim} channels are no bands in words of {k.planes} channels: choose --backend reference"
            )
        block = block_of(k)
        codes, params, scales = key_words(store, f, k)
        _scores[n * c.kv_heads, triton.cdiv(seen, block)](
            p_score=score,
            p_query=query,
            p_weight=weight,
            p_candidate=candidates,
            p_rows=read.numbers,
            p_place=store.lists.place,
            p_format=store.slots.table.format,
            p_k=codes,
            p_params=params,
            p_k_rows=scales,
            p_row_of=store.slots.group_of,
            p_k_scale=store.pages.scale[f, 0],
            p_ring=store.ring,
            layer=layer,
            table_layer=min(layer, store.lists.count.shape[0] - 1),
            rows=store.shape.rows,
            listed=store.lists.place.shape[-1],
            seen=seen,
            C=c,
            K=k,
            FORMAT=f,
            ALONE=len(formats) == 1,
            IN_RING=i == 0 and c.ring > 0,
            SHARED=shared,
            HALF=half_block(k),
            BLOCK_T=block,
            num_warps=WARPS,
            enable_fp_fusion=False,  # all threads that hold a sum hold the same bits: README.md, Conventions
        )
    _best[(n * c.kv_heads,)](
        p_z=z,
        p_score=score,
        p_candidate=candidates,
        seen=seen,
        C=c,
        SHARED=shared,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return z


def _readable(k: Half, c: Cache) -> Half:
    """The same keys in words of one channel, if they are TurboQuant's: `_turned_back` makes no planes."""
    return k._replace(planes=1, words=c.dim) if is_rotated(k.kind) else k


def half_block(k: Half) -> int:
    """The power of two that is at least the words of half a key. A key that is rotated back has no more than its
    channels."""
    return k.words // 2 if is_rotated(k.kind) else max(8, power_of_2(k.words // 2))


def block_of(k: Half) -> int:
    """Columns of a program of `_scores`."""
    return min(BLOCK_T, max(1, TILE // k.words)) if is_rotated(k.kind) else BLOCK_T


def variants() -> Iterator[Variant]:
    """bfloat16 models with one format and several, without a ring and with one."""
    at = {"i32": " ".join(NUMBERS), "*i64": "p_rows", "*u8": "p_candidate p_format", "*bf16": "p_ring"}
    at |= {"*i32": "p_place p_row_of", "*fp32": "p_score p_query p_weight p_k_scale"}
    common = {name: kind for kind, names in at.items() for name in names.split()}
    for dim in (64, 128):
        c = Cache(8, 4, dim, 1, 0, 1, 16, 16, "bf16")
        for k, codes, params in (
            (example("plain", 16, dim, fast=False), "*bf16", "*u8"),
            (example("nvfp4", 4, dim, True, False), "*u8", "*u8"),
            (example("nvfp4", 4, dim, False, False), "*u8", "*u8"),
            (example("ternary", 2, dim, False, False), "*u8", "*u8"),
            (example("fp8", 8, dim, False, False), "*u8", "*u8"),
            (example("int", 4, dim, False, False), "*u8", "*fp16"),
            (example("tq-unbiased", 4, dim, False, False), "*u8", "*fp16"),
            (example("tq-unbiased", 3, dim, False, False), "*u8", "*fp16"),
            (example("tq-unbiased", 2, dim, False, False), "*u8", "*fp16"),
            (example("tq-unbiased", 1, dim, False, False), "*u8", "*fp16"),
        ):
            k = _readable(k, c)
            signature = common | {"p_k": codes, "p_params": params, "p_k_rows": params}
            constexprs = {
                "C": c,
                "K": k,
                "FORMAT": 1,
                "ALONE": k.kind == "plain",
                "IN_RING": k.kind != "plain",
                "SHARED": k.by_token,
                "HALF": half_block(k),
                "BLOCK_T": block_of(k),
            }
            yield Variant(_scores, signature, constexprs, {"num_warps": WARPS, "enable_fp_fusion": False})
    signature = {"p_z": "*fp32", "p_score": "*fp32", "p_candidate": "*u8", "seen": "i32"}
    for shared in (False, True):
        constexprs = {"C": c, "SHARED": shared, "BLOCK": BLOCK}
        yield Variant(_best, signature, constexprs, {"num_warps": WARPS})
