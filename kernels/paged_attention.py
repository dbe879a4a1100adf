"""Attention of one new token of each sequence over its pages. Twin: `minithink/ref/paged_attention.py`.

    _attend     a program takes a part of one lane: 128 to 4096 tokens of one format, or the tokens of the ring (the
                buffer). Each format, and the ring, has its own launch over its tokens (`by_format.py`); in a CUDA
                graph the launches are parallel branches
    _merge      the parts of a query head become one by their log-sum-exp (`minithink/ref/merge.py`)
    _mass       (if asked for) the attention that each token got: exp(logit − lse), over its KV head's query heads
    _max_logit  the same if the heads' largest logit counts

First read `_attend` with one plain format (FORMATS 0), no ring and SEEN "": that is step 4 of tutorial 5. Then
`_merge` and `_planes`, and last `_fast_asm`.

A lane is a list of places (page · slots + slot), oldest token first; a program reads BLOCK_T of them, then gathers
the keys and values there. A slot holds a token's key and value side by side, 64 bytes each (NVFP4, D = 128) to 256
(bfloat16), so a gather by slots moves whole sectors wherever they lie. Evicted tokens are in no list, so freed slots
are never read and nothing is masked out. The split of a lane depends on its length and on the batch's shape
(`_split`). So a sequence gets the same sums whatever the other sequences hold.

The g query heads of a KV head are the rows of one block, padded to 16, so that each key is read once and the products
run on the tensor cores. Quantized codes become planes: a word holds PLANES neighbouring channels, and plane i is
channel i of every word. It is multiplied with the same channels of q, so nothing is interleaved or moved between
threads. 16-bit models have a faster path (`_fast_plane`): two codes at a time in 32-bit words, in fp16 whatever the
model's type. The interpreter tests the plain path, which rounds decoded numbers to the model's type, as the twin
does.

Keys by token share their scales within a group of tokens. Blocks begin where groups do, and the scales of a group are
read and converted once (`_times_rows`). If evictions have left tokens of several groups side by side, each token
reads its own scales (`_grouped_logits`).

Bound: memory, the lanes' codes and scales, once. For each token and lane these are 512 bytes in bfloat16 at D = 128,
and 4 bytes for its place. 4·16·D operations for each token and lane (16 rows, of which g are real) are far below the
rate of the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels import _formats
from minithink.kernels._common import INTERPRETED, Variant, power_of_2, side_by_side
from minithink.kernels._formats import decode_code, e4m3_decode, saturate

PARTS = (256, 512), (64, 256), (0, 128)  # (at least so many lanes, tokens of a part in a short lane)
SHORT = 1024  # tokens of a short lane, at most
MANY_LANES = 64  # from here on small blocks are enough to fill the GPU, and overlapping the merge gains nothing
# Tokens of a block (a part is whole blocks), warps, stages; tuned on an H200. `shape_of_program` chooses one.
LARGE, MEDIUM, SMALL = (128, 4, 2), (64, 2, 3), (32, 1, 3)
MERGED = 4, 16  # parts that `_merge` takes at once, in lanes with few parts and with many
MERGING = 4, 1  # its warps, for few lanes and for many
FAST = ("nvfp4", "ternary", "fp8", "int2", "int4", "int8")
_INTERPRETED = tl.constexpr(INTERPRETED)
_LOG2E = tl.constexpr(math.log2(math.e))
_LARGEST_FP16 = tl.constexpr(_formats.LARGEST["fp16"])
# In the fast path a point is 2^−14 of its value and a scale 2^6, so that their product, in fp16, is exact.
_FAST_FACTOR = tl.constexpr(2.0**8)


class Half(NamedTuple):
    """Keys or values of one format, as compile-time constants. Offsets count words and numbers, not bytes."""

    kind: str  # see `_formats`
    bits: int
    group: int
    by_token: bool
    fast: bool
    planes: int
    words: int  # of a token
    block: int  # the power of two above, at least 16
    page: int  # from a page to the next
    lane: int
    slot: int
    start: int
    side_page: int  # the same among the parameters
    side_lane: int
    side_slot: int
    side_start: int
    row: int  # from a row of key scales to the next
    row_lane: int


class Cache(NamedTuple):
    """What all formats share."""

    kv_heads: int
    group: int  # g, query heads of a KV head
    block_g: int
    dim: int  # D
    tables: int  # Ht
    layer_lanes: int  # which of its unit's lanes a head is: layer · layer_lanes + head · head_lanes
    head_lanes: int
    most: int  # slots that places count for a page
    ring: int  # tokens of the full-precision buffer
    base: int  # tokens of a part in lanes of at most `short` tokens
    short: int
    even: int  # parts are whole blocks of so many tokens
    dtype: str  # of the model: fp32, fp16, bf16
    overlap: bool = False  # the merge is launched while attention still runs (compute capability 9)


@triton.constexpr_function
def _fast_asm(kind, plane, scales):
    """PTX that makes plane `plane` of neighbouring words, two numbers in a register.

    fp8:      $2 four bytes
    nvfp4:    $1 two words of four codes; with one scale a word $2 has both, with four $2 and $3 have four bytes each
    ternary:  $2 four bytes of four codes; with one scale a word $3 and $4 have two each, with four $3 to $6
    int4:     $1 two words of four codes;  int2: $2 four bytes of four codes;  int8: $2 four bytes
    """
    if kind.startswith("int"):  # 1024 + code is the number with these low bits
        bits = int(kind[3:])
        code = f"shr.u32 c, c, {bits * plane}; and.b32 c, c, {(1 << bits) - 1:#06x}{(1 << bits) - 1:04x};"
        code += " or.b32 c, c, 0x64006400; sub.rn.f16x2"
        if bits == 4:
            return f"{{ .reg .b32 c, b; mov.b32 b, 0x64006400; mov.b32 c, $1; {code} $0, c, b; }}"
        out = "{ .reg .b32 c, b; mov.b32 b, 0x64006400;"
        for i, spread in enumerate(("0x4140", "0x4342")):
            out += f" prmt.b32 c, $2, 0, {spread}; {code} ${i}, c, b;"
        return out + " }"
    if kind == "fp8":
        out = "{ .reg .b32 c, s;"
        for i, spread in enumerate(("0x4140", "0x4342")):
            out += f" prmt.b32 c, $2, 0, {spread}; shl.b32 s, c, 8; and.b32 s, s, 0x80008000; shl.b32 c, c, 7;"
            out += f" lop3.b32 ${i}, c, 0x3F803F80, s, 0xEA;"
        return out + " }"
    # sign and magnitude to their places in fp16: so far left of where the codes stand
    bits, magnitude, top = (4, 0x0E000E00, 9) if kind == "nvfp4" else (2, 0x04000400, 10)
    sign, left = 16 - bits * (plane + 1), top - bits * plane
    move = f"shl.b32 m, c, {left};" if left >= 0 else f"shr.u32 m, c, {-left};"
    decode = f"shl.b32 s, c, {sign}; and.b32 s, s, 0x80008000; {move} lop3.b32 m, m, {magnitude:#x}, s, 0xEA;"
    # byte `plane` of two registers of scales as two fp16 numbers, times 2^6
    widen = "shr.u32 t, t, 1; and.b32 t, t, 0x7F807F80; mul.rn.f16x2 t, t, f;"
    select = f"{plane + 4}0{plane}0"
    out = "{ .reg .b32 c, s, m, t, f; mov.b32 f, 0x74007400;"  # 2^14, twice
    if kind == "nvfp4":
        out += f" mov.b32 c, $1; {decode}"
        if scales == 0:
            return out + " mov.b32 $0, m; }"
        if scales == 4:
            return out + f" prmt.b32 t, $2, $3, 0x{select}; {widen} mul.rn.f16x2 $0, m, t; }}"
        return out + " mul.rn.f16x2 $0, m, $2; }"
    for i, spread in enumerate(("0x4140", "0x4342")):
        out += f" prmt.b32 c, $2, 0, {spread}; {decode}"
        if scales == 0:
            out += f" mov.b32 ${i}, m;"
        elif scales == 4:
            out += f" prmt.b32 t, ${3 + 2 * i}, ${4 + 2 * i}, 0x{select}; {widen} mul.rn.f16x2 ${i}, m, t;"
        else:
            out += f" mul.rn.f16x2 ${i}, m, ${3 + i};"
    return out + " }"


@triton.jit
def _fast_plane(words, scale, KIND: tl.constexpr, PLANE: tl.constexpr, SCALES: tl.constexpr):
    """NVFP4, ternary or FP8 codes as fp16 numbers: value · 2^−8 / tensor scale, exactly; without scales (SCALES 0)
    NVFP4 and ternary points · 2^−14, and integers as they are.

    A code's magnitude, moved to the right bits of an fp16 number, is the point times 2^−14: E2M1's exponent and
    mantissa are the low end of fp16's exponent field and the high end of its mantissa, and denormals work out too.
    A 32-bit register holds the codes of neighbouring words, so shifts and masks make two numbers at a time.

    words: int16 (NVFP4) or uint8 [T, W], four codes each (FP8: one, and no scale); scale: one of each word, fp16
    [T, W], E4M3 scale · 2^6, or four, int32 [T, W], the E4M3 scales of its channels → fp16 [T, W].
    """
    if KIND == "fp8":
        x = tl.inline_asm_elementwise(
            _fast_asm(KIND, PLANE, SCALES), "=r,=r,r", [words], dtype=tl.float16, is_pure=True, pack=4
        )
    elif SCALES == 0:
        x = tl.inline_asm_elementwise(
            _fast_asm(KIND, PLANE, SCALES), "=r,r" if KIND == "nvfp4" or KIND == "int4" else "=r,=r,r", [words],
            dtype=tl.float16, is_pure=True, pack=2 if KIND == "nvfp4" or KIND == "int4" else 4,
        )  # fmt: skip
    elif KIND == "nvfp4":
        x = tl.inline_asm_elementwise(
            _fast_asm(KIND, PLANE, SCALES), "=r,r,r,r" if SCALES == 4 else "=r,r,r", [words, scale],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = tl.inline_asm_elementwise(
            _fast_asm(KIND, PLANE, SCALES), "=r,=r,r,r,r,r,r" if SCALES == 4 else "=r,=r,r,r,r", [words, scale],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return x


@triton.jit
def _scale_fp16(code):
    """E4M3 scales (uint8, positive) → fp16, times 2^6: the fields move to their places, the biases differ by 8."""
    return (code.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _affine(code, both):
    """code · scale + minimum in fp16, rounded once. both: int32, the minimum in the high half, the scale in the low.

    A sum that is too large saturates. No sum is too small, because none is below the minimum.
    """
    scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    x = tl.fma(code, scale, (both >> 16).to(tl.int16).to(tl.float16, bitcast=True))
    return tl.minimum(x, tl.full([], _LARGEST_FP16, tl.float16))


@triton.jit
def _codes(p_codes, o_codes, m_token, H: tl.constexpr):
    """The words of BLOCK_T tokens [BLOCK_T, H.block]; o_codes: int64 [BLOCK_T], where each token's codes begin."""
    word = tl.arange(0, H.block)[None, :]
    m_word = m_token[:, None]
    if H.words != H.block:
        m_word = m_word & (word < H.words)
    return tl.load(p_codes + o_codes[:, None] + word, m_word, other=0)


@triton.jit
def _planes(raw, p_params, p_rows, o_params, o_rows, m_token, tensor_scale,
            H: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Keys or values of BLOCK_T tokens as H.planes blocks [BLOCK_T, H.block], scaled. In the fast path, keys by token
    stay without their scales.

    raw: from `_codes`. o_params, o_rows: int64 [BLOCK_T], where each token's parameters and row of key scales begin.
    """
    KIND: tl.constexpr = H.kind
    BITS: tl.constexpr = H.bits
    GROUP: tl.constexpr = H.group
    BY_TOKEN: tl.constexpr = H.by_token
    PLANES: tl.constexpr = H.planes
    WORDS: tl.constexpr = H.words
    BLOCK_W: tl.constexpr = H.block
    word = tl.arange(0, BLOCK_W)[None, :]
    m_word = m_token[:, None]
    if WORDS != BLOCK_W:
        m_word = m_word & (word < WORDS)
    out = ()
    if KIND == "plain":
        if _INTERPRETED:
            raw = raw.to(tl.float32)
        out = (raw,)
    elif H.fast and KIND == "int":
        POINTS: tl.constexpr = f"int{BITS}"
        if SCALED and BY_TOKEN:
            for i in tl.static_range(PLANES):
                both = tl.load(p_rows + o_rows[:, None] + (word * PLANES + i), m_word, other=0)
                out = out + (_affine(_fast_plane(raw, 0, POINTS, i, 0), both),)
        elif SCALED:
            GROUPS: tl.constexpr = WORDS * PLANES // GROUP
            if WORDS == BLOCK_W and GROUPS * GROUP == WORDS * PLANES and BLOCK_W % GROUPS == 0:
                p_group = p_params + o_params[:, None] + tl.arange(0, GROUPS)[None, :]
                both = tl.load(p_group, m_token[:, None], other=0)
                both = tl.broadcast_to(both[:, :, None], [both.shape[0], GROUPS, WORDS // GROUPS])
                both = both.reshape([raw.shape[0], BLOCK_W])
            else:
                both = tl.load(p_params + o_params[:, None] + word * PLANES // GROUP, m_word, other=0)
            for i in tl.static_range(PLANES):
                out = out + (_affine(_fast_plane(raw, 0, POINTS, i, 0), both),)
        else:
            for i in tl.static_range(PLANES):
                out = out + (_fast_plane(raw, 0, POINTS, i, 0),)
    elif H.fast:
        SCALES: tl.constexpr = 0 if KIND == "fp8" or not SCALED else 4 if BY_TOKEN else 1
        scale = 0
        if SCALES == 4:  # a byte each, they are one number
            scale = tl.load(p_rows + o_rows[:, None] + word, m_word, other=0)
        elif SCALES == 1:
            if WORDS == BLOCK_W and BLOCK_W % (WORDS * PLANES // GROUP) == 0:
                GROUPS: tl.constexpr = WORDS * PLANES // GROUP
                p_group = p_params + o_params[:, None] + tl.arange(0, GROUPS)[None, :]
                code = tl.load(p_group, m_token[:, None], other=0)
                wide = tl.broadcast_to(_scale_fp16(code)[:, :, None], [code.shape[0], GROUPS, WORDS // GROUPS])
                scale = wide.reshape([code.shape[0], BLOCK_W])
            else:
                scale = _scale_fp16(tl.load(p_params + o_params[:, None] + word * PLANES // GROUP, m_word, other=0))
        for i in tl.static_range(PLANES):
            out = out + (_fast_plane(raw, scale, KIND, i, SCALES),)
    else:
        raw = raw.to(tl.int32) & ((1 << (BITS * PLANES)) - 1)
        for i in tl.static_range(PLANES):
            x = decode_code((raw >> (BITS * i)) & ((1 << BITS) - 1), KIND, BITS, "")
            if GROUP > 0:
                if BY_TOKEN:
                    p_group = p_rows + o_rows[:, None] + (word * PLANES + i) * (2 if KIND == "int" else 1)
                else:
                    p_group = p_params + o_params[:, None] + (word * PLANES // GROUP) * (2 if KIND == "int" else 1)
                if KIND == "int":
                    x = x * tl.load(p_group, m_word, other=0).to(tl.float32)
                    x = x + tl.load(p_group + 1, m_word, other=0).to(tl.float32)
                else:
                    x = x * e4m3_decode(tl.load(p_group, m_word, other=0))
            x = saturate(x * tensor_scale, DTYPE)
            if not _INTERPRETED:
                x = x.to(tl.bfloat16 if DTYPE == "bf16" else (tl.float16 if DTYPE == "fp16" else tl.float32))
            out = out + (x,)
    return out


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
            factor = factor * _FAST_FACTOR
    return q, factor


@triton.jit
def _times_rows(k, p_row, m_row, H: tl.constexpr):
    """Planes of points, [T, W] each, times the key scales · 2^6 of their groups (of integers: times the scales, plus
    the minima); a group is GROUP tokens in a row.

    Scales are converted once for all tokens of a group. p_row: pointers [T / GROUP] to the groups' rows of scales,
    m_row: True for groups that exist.
    """
    PLANES: tl.constexpr = H.planes
    GROUP: tl.constexpr = H.group
    GROUPS: tl.constexpr = k[0].shape[0] // GROUP
    BLOCK_W: tl.constexpr = H.block
    word = tl.arange(0, BLOCK_W)[None, :]
    m_row = (word < H.words) & m_row[:, None]
    out = ()
    if H.kind == "int":
        for i in tl.static_range(PLANES):
            both = tl.load(p_row[:, None] + (word * PLANES + i), m_row, other=0)  # int32, scale and minimum
            both = tl.broadcast_to(both[:, None, :], [GROUPS, GROUP, BLOCK_W])
            out = out + (_affine(k[i].reshape([GROUPS, GROUP, BLOCK_W]), both).reshape([GROUPS * GROUP, BLOCK_W]),)
    else:
        scales = tl.load(p_row[:, None] + word, m_row, other=0)  # int32, four of them
        for i in tl.static_range(PLANES):
            x = k[i].reshape([GROUPS, GROUP, BLOCK_W]) * _scale_fp16((scales >> (8 * i)) & 0xFF)[:, None, :]
            out = out + (x.reshape([GROUPS * GROUP, BLOCK_W]),)
    return out


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

    raw: from `_codes`. number: int32 [T], each token's row of scales, −1 without a token; row: where it begins.
    """
    numbers = number.reshape([raw.shape[0] // H.group, H.group])
    common = tl.max(numbers, 1)  # the row of scales that all tokens of a group share, if none was evicted
    strange = (numbers != common[:, None]) & (numbers >= 0)
    if tl.max(tl.max(strange.to(tl.int32), 1), 0) > 0:
        k = _planes(raw, p_rows, p_rows, row, row, m_token, 1.0, H, DTYPE, True)
        s = _logits(q, k, H.planes)
    else:
        points = _planes(raw, p_rows, p_rows, row, row, m_token, 1.0, H, DTYPE, False)
        k = _times_rows(points, p_rows + common.to(tl.int64) * H.row + o_lane * H.row_lane, common >= 0, H)
        s = _logits(q, k, H.planes)
    return s


@triton.jit
def _unit(table_layer, row, rows, i_head, C: tl.constexpr):
    """The number of a lane's list; rows: B, rows that have lists."""
    unit = (table_layer * rows + row) * C.tables
    if C.tables > 1:
        unit += i_head
    return unit


@triton.jit
def _of_format(p_first, unit, i_format, m, FORMATS: tl.constexpr):
    """The first token of a format in sorted lists (`by_format.py`), and the number of its tokens; m: a mask."""
    p_first += unit * (FORMATS + 2) + i_format
    begin = tl.load(p_first, m, other=0)
    return begin, tl.load(p_first + 1, m, other=0) - begin


@triton.jit
def _split(count, C: tl.constexpr):
    """Tokens of a part. It depends on the lane's tokens of this format and on the batch's number of lanes (with idle
    rows), but not on what other lanes hold. All parts are about equally long: a short one would only be another
    program."""
    SHORT: tl.constexpr = C.short
    most = C.base * tl.where(count <= SHORT, 1, tl.where(count <= 4 * SHORT, 2, tl.where(count <= 16 * SHORT, 4, 8)))
    count = tl.maximum(count, 1)  # avoids a division by 0
    return tl.minimum(tl.cdiv(tl.cdiv(count, tl.cdiv(count, most)), C.even) * C.even, most)


# These arguments are offsets and counts. Triton must not compile anew for one that is 1 or a multiple of 16.
PLAIN_NUMBERS = ["layer", "table_layer", "first_part", "parts", "width", "rows"]


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
        unit = _unit(table_layer, i_n, tl.num_programs(0) // C.kv_heads, i_head, C)
        begin, count = _of_format(p_count, unit, FORMAT, True, FORMATS)
        p_column += unit.to(tl.int64) * listed + begin
    else:
        unit = _unit(table_layer, i_row, rows, i_head, C)
        begin, count = 0, tl.load(p_count + unit)
    p_place += unit.to(tl.int64) * listed + begin
    split = _split(count, C)
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
            raw = _codes(p_k, page * K.page + (slot * K.slot + o_lane * K.lane + K.start), m_t, K)
            if GROUPED:
                s = _grouped_logits(q, raw, p_k_rows, number, row, o_lane, m_t, K, DTYPE)
            else:
                o_side = page * K.side_page + (slot * K.side_slot + o_lane * K.side_lane + K.side_start)
                k = _planes(raw, p_k_params, p_k_rows, o_side, row, m_t, k_scale, K, DTYPE, True)
            raw = _codes(p_v, page * V.page + (slot * V.slot + o_lane * V.lane + V.start), m_t, V)
            o_side = page * V.side_page + (slot * V.side_slot + o_lane * V.side_lane + V.side_start)
            v = _planes(raw, p_v_params, p_v_params, o_side, row, m_t, v_scale, V, DTYPE, True)
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
        scale = scale * _FAST_FACTOR
        if V.kind != "ternary":
            scale = scale * v_scale
    word = tl.arange(0, V_BLOCK)[None, :]
    m_out = m_head[:, None] & (word < V.words)
    o_part = head * parts + first_part + i_part
    for i in tl.static_range(V_PLANES):
        o_out = o_part[:, None] * C.dim + word * V.planes + i
        tl.store(p_parts + o_out, acc[i] * scale[:, None], m_out)
    tl.store(p_part_lse + o_part, top + tl.log2(total), m_head)


@triton.jit
def _add_parts(acc, top, total, p_parts, p_part_lse, o_part, m, C: tl.constexpr):
    """Add further parts to the sums Σ_i exp2(lse_i − top)·out_i [D] and Σ_i exp2(lse_i − top).

    o_part: [P], where the parts lie; m: [P], the parts that count. Other parts were never written, and are not read.
    """
    channel = tl.arange(0, acc.shape[0])
    lse = tl.load(p_part_lse + o_part, m, other=float("-inf"))
    o_x = o_part[:, None] * C.dim + channel[None, :]
    x = tl.load(p_parts + o_x, m[:, None] & (channel < C.dim)[None, :], other=0.0)
    new = tl.maximum(top, tl.max(lse, 0))
    shift = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(lse - shift)
    rescale = tl.exp2(top - shift)
    return acc * rescale + tl.sum(x * weight[:, None], 0), new, total * rescale + tl.sum(weight, 0)


@triton.jit(do_not_specialize=[*PLAIN_NUMBERS, "in_format"])
def _merge(p_parts, p_part_lse, p_out, p_lse, p_rows, p_count, table_layer, parts, in_format, rows, C: tl.constexpr,
           FORMATS: tl.constexpr, BLOCK_D: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """out = Σ_i exp2(lse_i − lse)·out_i, lse = log2 Σ_i exp2(lse_i), over the used parts of a query head; 0 for a
    lane without tokens.

    A format has room for `in_format` parts, and uses as many as its tokens fill. The ring comes last and has one.
    p_count, FORMATS: as in `_attend`. FEW, MANY: parts that are taken at once, of any format; FEW if this is enough.
    The order of the sum depends on the lane's own length, never on the lengths of other lanes.
    """
    i_head = tl.program_id(0).to(tl.int64)
    i_n, i_query = i_head // (C.kv_heads * C.group), i_head % (C.kv_heads * C.group)
    i_kv = i_query // C.group
    KINDS: tl.constexpr = FORMATS + 1 if FORMATS > 0 else 1  # formats and ring
    used = tl.full([], 0, tl.int32)
    before = ()  # used parts of the kinds before each kind
    if FORMATS > 0:
        unit = _unit(table_layer, i_n, tl.num_programs(0) // (C.kv_heads * C.group), i_kv, C)
        for kind in tl.static_range(KINDS):  # unrolled, so that no load waits for another
            _, count = _of_format(p_count, unit, kind, True, FORMATS)
            before = before + (used,)
            if kind < FORMATS:
                used += tl.cdiv(count, _split(count, C))
            else:
                used += (count > 0).to(tl.int32)
    else:
        count = tl.load(p_count + _unit(table_layer, tl.load(p_rows + i_n), rows, i_kv, C))
        before, used = (used,), tl.cdiv(count, _split(count, C))
    channel = tl.arange(0, BLOCK_D)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    if C.overlap:
        tl.extra.cuda.gdc_wait()  # for the parts
    if used <= FEW:
        o_part = i_head * parts + _part(tl.arange(0, FEW), before, in_format)
        m = tl.arange(0, FEW) < used
        acc, top, total = _add_parts(acc, top, total, p_parts, p_part_lse, o_part, m, C)
    else:
        for start in range(0, used, MANY):
            i = start + tl.arange(0, MANY)
            o_part = i_head * parts + _part(i, before, in_format)
            acc, top, total = _add_parts(acc, top, total, p_parts, p_part_lse, o_part, i < used, C)
    tl.store(p_out + i_head * C.dim + channel, acc / tl.where(total > 0, total, 1.0), channel < C.dim)
    tl.store(p_lse + i_head, top + tl.log2(total))


@triton.jit
def _part(i, before, in_format):
    """The index of the i-th used part; before: for each kind the number of used parts of the kinds before."""
    out = i
    for kind in tl.static_range(1, len(before)):
        out = tl.where(i >= before[kind], kind * in_format + i - before[kind], out)
    return out


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _mass(p_seen, p_top, p_lse, p_mass, p_rows, p_count, table_layer, width, rows, C: tl.constexpr,
          RULE: tl.constexpr, SEEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Attention of every token: exp2(logit − lse) of each query head, combined by RULE; 0 where there is no token."""
    GROUP: tl.constexpr = C.group
    i_lane, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_n, i_head = i_lane // C.kv_heads, i_lane % C.kv_heads
    count = tl.load(p_count + _unit(table_layer, tl.load(p_rows + i_n), rows, i_head, C))
    t = i_block * BLOCK + tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(GROUP):
        head = i_lane * C.group + i
        x = tl.load(p_seen + head * (width - 1) + t, t < count, other=0.0).to(tl.float32)
        lse = tl.load(p_lse + head)
        if SEEN == "relative":
            top = tl.load(p_top + head * tl.cdiv(width - 1, BLOCK_T) + t // BLOCK_T, t < count, other=-float("inf"))
            p = tl.where(t < count, x * tl.exp2(top - lse), 0.0)
        else:
            p = tl.where(t < count, tl.exp2(x - lse), 0.0)
        if RULE == "none":
            tl.store(p_mass + head * (width - 1) + t, p, t < width - 1)
        elif RULE == "max":
            mass = tl.maximum(mass, p)
        else:
            mass += p
    if RULE == "mean":
        mass = mass / C.group
    if RULE != "none":
        tl.store(p_mass + i_lane * (width - 1) + t, mass, t < width - 1)


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _max_logit(p_seen, p_mass, p_rows, p_count, table_layer, width, rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """The softmax over tokens of the query heads' largest logits; a program takes a whole lane."""
    GROUP: tl.constexpr = C.group
    i_lane = tl.program_id(0).to(tl.int64)
    i_n, i_head = i_lane // C.kv_heads, i_lane % C.kv_heads
    count = tl.load(p_count + _unit(table_layer, tl.load(p_rows + i_n), rows, i_head, C))
    top, total = -float("inf"), 0.0
    for start in range(0, count, BLOCK):
        t = start + tl.arange(0, BLOCK)
        x = tl.full([BLOCK], -float("inf"), tl.float32)
        for i in tl.static_range(GROUP):
            o_seen = (i_lane * C.group + i) * (width - 1) + t
            x = tl.maximum(x, tl.load(p_seen + o_seen, t < count, other=-float("inf")))
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new), 0)
        top = new
    for start in range(0, width - 1, BLOCK):
        t = start + tl.arange(0, BLOCK)
        x = tl.full([BLOCK], -float("inf"), tl.float32)
        for i in tl.static_range(GROUP):
            o_seen = (i_lane * C.group + i) * (width - 1) + t
            x = tl.maximum(x, tl.load(p_seen + o_seen, t < count, other=-float("inf")))
        p = tl.where(t < count, tl.exp2(x - top) / total, 0.0)
        tl.store(p_mass + i_lane * (width - 1) + t, p, t < width - 1)


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
        mass: float32 [N, Hkv, S] ([N, Hq, S] with "none"), 0 where there is no token; None if `group` is None.
    """
    pages = read.pages
    if pages.storage.lag:
        raise ValueError("values that lag behind their keys (Storage.lag) are not read here: use the reference")
    n, hq, d = q.shape
    c, width, rows = cache(pages, n), pages.place.shape[-1], pages.shape.rows
    t, seen = min(layer, pages.place.shape[0] - 1), pages.seen
    formats, ring = sorted(pages.used), pages.ring.shape[3] > 0
    in_format = _most_parts(seen, c.base, c.short)
    parts = len(formats) * in_format + ring
    several = len(formats) if len(formats) > 1 or ring else 0
    place, column, count = read.by_format if several else (pages.place, pages.place, pages.count)
    how = "" if group is None else "logits"
    if how and q.dtype != torch.float32 and not several and group != "max_logit":
        how = "relative"

    def scratch(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    q, out, lse = q.contiguous(), torch.empty_like(q), scratch(n, hq)
    part, part_lse = scratch(n, hq, parts, d), scratch(n, hq, parts)
    noted = top = lse
    if how:
        noted = scratch(n, hq, width - 1, dtype=torch.float16 if how == "relative" else torch.float32)
        top = scratch(n, hq, -(-(width - 1) // 16))
    launches = list[Callable[[], object]]()
    for i, f in enumerate(formats):
        k, v = half(pages, f, "k", q.dtype), half(pages, f, "v", q.dtype)
        block, options = shape_of_program(c, k, v, n * c.kv_heads)
        launches.append(partial(
            _attend[n * c.kv_heads, in_format],
            q, part, part_lse, noted, top, read.numbers, place, column, count,
            *words(pages, f, k, v), pages.row_of, pages.scale[f, 0], pages.scale[f, 1], pages.ring,
            d**-0.5, layer, t, i * in_format, parts, width, place.shape[-1], rows,
            c, k, v, i, several, False, how, block, **options,
        ))  # fmt: skip
    if ring:
        k = ring_half(c)
        launches.append(partial(
            _attend[n * c.kv_heads, 1],
            q, part, part_lse, noted, top, read.numbers, place, column, count,
            *[pages.ring] * 5, pages.row_of, pages.scale[0, 0], pages.scale[0, 1], pages.ring,
            d**-0.5, layer, t, parts - 1, parts, width, place.shape[-1], rows,
            c, k, k, several, several, True, how, 16, num_warps=4,
        ))  # fmt: skip
    # The merge can be launched early only if it follows one launch, not several branches.
    side_by_side(launches, q.device, apart=not c.overlap)
    _merge[(n * hq,)](
        part, part_lse, out, lse, read.numbers, count, t, parts, in_format, rows,
        c, several, power_of_2(d), *MERGED, num_warps=MERGING[n * c.kv_heads >= MANY_LANES],
        **({"launch_pdl": True} if c.overlap else {}),
    )  # fmt: skip
    if not how:
        return out, None
    heads = hq if group == "none" else c.kv_heads
    mass = torch.empty(n, heads, width - 1, dtype=torch.float32, device=q.device)
    if group == "max_logit":
        _max_logit[(n * c.kv_heads,)](noted, mass, read.numbers, pages.count, t, width, rows, c, 128)
    else:
        _mass[n * c.kv_heads, -(-(width - 1) // 256)](
            noted, top, lse, mass, read.numbers, pages.count, t, width, rows, c, group, how, block, 256
        )
    return out, mass[..., :seen]


def shape_of_program(c: Cache, k: Half, v: Half, lanes: int) -> tuple[int, dict[str, int]]:
    """Tokens of a block, and Triton's options. SMALL for fewer than 8 bits and many lanes; MEDIUM for formats that
    are float32, are decoded to float32 or have no fast path; else LARGE."""
    if k.fast and v.fast and k.bits < 8:
        block, warps, stages = SMALL if lanes >= MANY_LANES else LARGE
    else:
        block, warps, stages = LARGE if c.dtype != "fp32" and (k.fast or k.kind == "plain") else MEDIUM
    # Without a limit fp8 takes more registers, and one program fewer runs on a multiprocessor.
    most = {"maxnreg": 168} if "fp8" in (k.kind, v.kind) and warps == LARGE[1] else {}
    return block, {"num_warps": warps, "num_stages": stages, **most}


def _most_parts(tokens: int, base: int, short: int) -> int:
    """The most parts that a lane of at most so many tokens can have."""
    steps = ((short, 1), (4 * short, 2), (16 * short, 4), (tokens, 8))  # as in `_split`
    return max(-(-min(tokens, most) // (base * times)) for most, times in steps)


def base(lanes: int) -> int:
    """Tokens of a part in short lanes. Many lanes make enough programs without small parts."""
    return next(size for least, size in PARTS if lanes >= least)


def cache(pages: Any, rows: int) -> Cache:
    """The part of a store's layout that does not depend on the format; rows: N."""
    shape = pages.shape
    group = shape.query_heads // shape.kv_heads
    return Cache(
        kv_heads=shape.kv_heads, group=group, block_g=max(16, power_of_2(group)), dim=shape.head_dim,
        tables=shape.tables[2], layer_lanes=shape.kv_heads if shape.scope == "sequence" else 0,
        head_lanes=0 if shape.scope == "head" else 1, most=pages.table.most,
        ring=pages.ring.shape[3], base=base(rows * shape.kv_heads), short=SHORT,
        even=max(LARGE[0], MEDIUM[0], SMALL[0]),
        dtype=_formats.dtype_name(pages.dtype),
        overlap=not INTERPRETED and rows * shape.kv_heads < MANY_LANES
        and torch.cuda.get_device_capability(pages.place.device)[0] >= 9,
    )  # fmt: skip


def half(pages: Any, f: int, which: str, dtype: torch.dtype) -> Half:
    """Where the keys ("k") or values ("v") of format f lie."""
    lay, lanes, dim = pages.layouts[f], pages.shape.sharing, pages.shape.head_dim
    fmt, start = (lay.k, 0) if which == "k" else (lay.v, lay.k_codes)
    side, side_slot = pages.side.shape[-1], pages.side.shape[-1] // lay.slots
    side_start, by_token = 0 if which == "k" else lay.k_side, fmt.by == "token"
    names = _formats.constexprs(fmt)
    fast = fmt.name in FAST and not INTERPRETED and dtype != torch.float32
    size = max(1, _formats.params_dtype(fmt).itemsize) if fmt.group else 1
    if fast and names["KIND"] == "int":
        fast = names["PARAMS"] == "fp16" and (by_token or not (side % 4 or side_slot % 4 or side_start % 4))
        size = 4 if fast else size  # scale and minimum at once
    plain = names["KIND"] == "plain"
    planes = 1 if plain or fmt.bits >= 8 else 4 if fast else 8 // fmt.bits
    word = fmt.bits // 8 if planes == 1 else planes * fmt.bits // 8  # bytes
    count = dim // planes
    page, slot = pages.pool.shape[-1], pages.pool.shape[-1] // lay.slots
    row = pages.scale_rows.shape[-1]
    if not by_token and (side_slot % size or side_start % size):
        raise ValueError(f"the parameters of {fmt} are not aligned beside those of {lay.k}: choose other groups")
    of = 4 if fast else size
    return Half(
        kind=names["KIND"], bits=fmt.bits, group=fmt.group, by_token=by_token, fast=fast, planes=planes,
        words=count, block=max(16, power_of_2(count)),
        page=lanes * page // word, lane=page // word, slot=slot // word, start=start // word,
        side_page=lanes * side // size, side_lane=side // size, side_slot=side_slot // size,
        side_start=side_start // size, row=lanes * row // of if by_token else 0, row_lane=row // of,
    )  # fmt: skip


def ring_half(c: Cache) -> Half:
    """The layout of keys or values in the ring: D numbers for each token."""
    block = max(16, power_of_2(c.dim))
    return Half("plain", 0, 0, False, False, 1, c.dim, block, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def words(pages: Any, f: int, k: Half, v: Half) -> tuple[Tensor, ...]:
    """The pool and the parameters, as the words and numbers of a format: codes of K and V, parameters of K and V,
    rows of key scales."""
    lay = pages.layouts[f]

    def codes(fmt: Any, h: Half) -> Tensor:
        if h.kind == "plain":
            return pages.pool.view(_formats.DTYPES[fmt.name])
        return pages.pool.view(torch.int16) if h.bits * h.planes == 16 else pages.pool

    def params(fmt: Any, h: Half) -> Tensor:
        dtype = torch.int32 if h.fast and h.kind == "int" else _formats.params_dtype(fmt)
        return pages.side.view(dtype) if fmt.group else pages.side

    rows = pages.scale_rows
    if k.by_token:
        rows = rows.view(torch.int32 if k.fast else _formats.params_dtype(lay.k))
    return codes(lay.k, k), codes(lay.v, v), pages.side if k.by_token else params(lay.k, k), params(lay.v, v), rows


def variants() -> Iterator[Variant]:
    """bfloat16 models, the formats that policies use, for many lanes and for few."""
    at = {"i32": "layer table_layer first_part parts width listed rows", "fp32": "softmax_scale", "*i64": "p_rows"}
    at |= {"*fp32": "p_parts p_part_lse p_top p_k_scale p_v_scale", "*i32": "p_place p_column p_count p_row_of"}
    at |= {"*bf16": "p_q p_ring"}
    common = {name: kind for kind, names in at.items() for name in names.split()}
    for dim, lanes in ((64, 512), (96, 8), (128, 512), (128, 8)):
        overlap = (dim, lanes) == (128, 8)
        c = Cache(2, 4, 16, dim, 1, 2, 1, 16, 32, base(lanes), SHORT, 128, "bf16", overlap)
        plain = Half("plain", 16, 0, False, False, 1, dim, power_of_2(dim), 64, 64, 64, dim, 0, 0, 0, 0, 0, 0)
        for k, v, codes, params in (
            (plain, plain, "*bf16", "*u8"),
            (_variant("nvfp4", 4, dim), _variant("nvfp4", 4, dim), "*i16", "*u8"),
            (_variant("nvfp4", 4, dim, True), _variant("nvfp4", 4, dim), "*i16", "*u8"),
            (_variant("ternary", 2, dim), _variant("ternary", 2, dim), "*u8", "*u8"),
            (_variant("ternary", 2, dim, True), _variant("ternary", 2, dim), "*u8", "*u8"),
            (_variant("int", 4, dim), _variant("int", 4, dim), "*i16", "*i32"),
            (_variant("int", 2, dim, True), _variant("int", 2, dim), "*u8", "*i32"),
            (_variant("int", 2, dim, True, False), _variant("int", 2, dim, False, False), "*u8", "*fp16"),
            (_variant("fp8", 8, dim), _variant("fp8", 8, dim), "*u8", "*u8"),
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
    c = Cache(2, 4, 16, 128, 1, 2, 1, 16, 0, 128, SHORT, 128, "bf16")
    at = {"*fp32": "p_parts p_part_lse p_lse p_top p_mass", "*bf16": "p_out", "*i32": "p_count", "*i64": "p_rows"}
    at |= {"*fp16": "p_seen", "i32": "table_layer parts in_format width rows"}
    common = {name: kind for kind, names in at.items() for name in names.split()}
    constexprs = {"C": c, "FORMATS": 0, "BLOCK_D": 128, "FEW": MERGED[0], "MANY": MERGED[1]}
    signature = {n: common[n] for n in common if n in _merge.arg_names}
    yield Variant(_merge, signature, constexprs)
    yield Variant(_merge, signature, constexprs | {"FORMATS": 2}, {"num_warps": MERGING[1]})
    yield Variant(_merge, signature, constexprs | {"C": c._replace(overlap=True)}, {"launch_pdl": True}, 90)
    for rule in ("mean", "max", "none"):
        constexprs = {"C": c, "RULE": rule, "SEEN": "relative", "BLOCK_T": 64, "BLOCK": 256}
        yield Variant(_mass, {n: common[n] for n in common if n in _mass.arg_names}, constexprs)
    signature = {n: common[n] for n in common if n in _max_logit.arg_names} | {"p_seen": "*fp32"}
    yield Variant(_max_logit, signature, {"C": c, "BLOCK": 128})


def _variant(kind: str, bits: int, dim: int, by_token: bool = False, fast: bool = True) -> Half:
    """A page of 16 tokens and 2 lanes."""
    planes = 1 if bits == 8 else 4 if fast else 8 // bits
    count, side = dim // planes, dim // 16
    slot, row = count * 2, dim // (4 if fast else 1)
    return Half(
        kind, bits, 0 if kind == "fp8" else 16, by_token, fast, planes, count, max(16, power_of_2(count)), 32 * slot,
        16 * slot, slot, 0, 64 * side, 32 * side, 2 * side, 0, 2 * row, row,
    )  # fmt: skip
