"""Codes of tokens in pages become planes of numbers; device functions of attention and of `survivors.py`.

Used by `paged_attention.py`, `survivors.py` and `tri_score.py`.

A word holds PLANES neighbouring channels, and plane i is channel i of every word. A plane is multiplied with the same
channels of the other factor, so no number is interleaved or moved between threads.

    load_codes  loads the words of some tokens
    planes      decodes them, with their scales; TurboQuant's become levels in the rotated basis
    of_tokens   loads TurboQuant's scales, one for each token
    times_rows  keys by token: multiplies decoded points with scales that the tokens of a group share

The plain path decodes code by code with the functions of `_formats.py` and rounds to the model's type, as the twin
does; the interpreter knows only this path. 16-bit models have a faster path (`_fast_plane`, for TurboQuant's 4 bits
`_fast_levels`): inline PTX makes two numbers at a time in a 32-bit word, in fp16 whatever the model's type.
`_layout.py` says which formats take it (Half.fast). Read `planes` first and `_fast_asm` last.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from minithink.kernels import _formats
from minithink.kernels._common import INTERPRETED
from minithink.kernels._formats import decode_code, e4m3_decode, load_bytes, saturate
from minithink.kernels._rotation import LEVELS, decode_level, is_rotated

_HALVES = [struct.pack("<e", x) for x in LEVELS[4]]
# In the fast path a point is 2^−14 of its value and a scale 2^6, so that their product, in fp16, is exact.
FAST_FACTOR = tl.constexpr(2.0**8)
# TurboQuant's eight magnitudes of 4 bits in fp16: low bytes of the first four and of the others, then high bytes.
MAGNITUDES = struct.unpack("<4I", bytes(half[i] for i in (0, 1) for half in _HALVES))
_INTERPRETED = tl.constexpr(INTERPRETED)
_LARGEST_FP16 = tl.constexpr(_formats.LARGEST["fp16"])


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
    sign = 16 - bits * (plane + 1)
    left = top - bits * plane
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


@triton.constexpr_function
def _fast_registers(kind, scales):
    """The registers of `_fast_asm`: outputs (=r), then inputs, which are codes and their scales.

    With two outputs the first is written before all inputs are read. The & tells the compiler to give it none of the
    inputs' registers.
    """
    if kind == "nvfp4" or kind == "int4":
        inputs = {0: 1, 1: 2, 4: 3}[scales]
        return "=r" + ",r" * inputs
    inputs = {0: 1, 1: 3, 4: 5}[scales]
    return "=&r,=r" + ",r" * inputs


@triton.constexpr_function
def _levels_asm():
    """PTX that makes four planes, $0 to $3, of two words of four codes, $4: levels of TurboQuant's 4 bits in fp16.

    A level is a sign and one of eight magnitudes. `prmt` picks four bytes at once from eight, by the nibbles of its
    selector: once for the low bytes of the magnitudes of a word, once for the high bytes. Further ones put low and
    high bytes together, and the numbers of both words side by side.
    """
    out = "{ .reg .b32 t, v, s, a, b, c, d, e, f, l0, l1, h0, h1;"
    for i, name in enumerate(("l0", "l1", "h0", "h1")):
        out += f" mov.b32 {name}, {MAGNITUDES[i]:#010x};"
    # t: 8 in the nibbles of negative numbers, whose codes count backwards; s: the nibbles' magnitudes
    out += " not.b32 t, $4; and.b32 t, t, 0x88888888; shr.u32 v, t, 3; sub.u32 v, t, v;"
    out += " xor.b32 s, $4, v; and.b32 s, s, 0x77777777; shr.u32 v, s, 16;"
    out += " prmt.b32 a, l0, l1, s; prmt.b32 b, h0, h1, s; prmt.b32 c, l0, l1, v; prmt.b32 d, h0, h1, v;"
    # channels 0 and 1 of each word, then 2 and 3
    out += " prmt.b32 e, a, b, 0x5140; prmt.b32 a, a, b, 0x7362; prmt.b32 f, c, d, 0x5140; prmt.b32 c, c, d, 0x7362;"
    # a channel of both words
    out += " prmt.b32 b, e, f, 0x5410; prmt.b32 d, e, f, 0x7632; prmt.b32 e, a, c, 0x5410; prmt.b32 f, a, c, 0x7632;"
    for i, size in enumerate("bdef"):
        out += f" shl.b32 v, t, {12 - 4 * i}; and.b32 v, v, 0x80008000; or.b32 ${i}, {size}, v;"
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
    ASM: tl.constexpr = _fast_asm(KIND, PLANE, SCALES)
    REGISTERS: tl.constexpr = _fast_registers(KIND, SCALES)
    PACK: tl.constexpr = 2 if KIND == "nvfp4" or KIND == "int4" else 4
    if SCALES == 0:
        x = tl.inline_asm_elementwise(ASM, REGISTERS, [words], dtype=tl.float16, is_pure=True, pack=PACK)
    else:
        x = tl.inline_asm_elementwise(ASM, REGISTERS, [words, scale], dtype=tl.float16, is_pure=True, pack=PACK)
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
def load_codes(p_codes, o_codes, m_token, H: tl.constexpr):
    """The words of BLOCK_T tokens [BLOCK_T, H.block]; o_codes: int64 [BLOCK_T], where each token's codes begin."""
    word = tl.arange(0, H.block)[None, :]
    m_word = m_token[:, None]
    if H.words != H.block:
        m_word = m_word & (word < H.words)
    if H.bits == 3:
        words = load_bytes(p_codes + o_codes[:, None] + word * 3, m_word, 3)
    else:
        words = tl.load(p_codes + o_codes[:, None] + word, m_word, other=0)
    return words


@triton.jit
def of_tokens(p_params, o_params, m_token):
    """TurboQuant's scales: float32 [BLOCK_T], 0 without a token. o_params: int64 [BLOCK_T]."""
    return tl.load(p_params + o_params, m_token, other=0.0).to(tl.float32)


@triton.jit
def _of_groups(p_token, m_token, H: tl.constexpr):
    """The parameters of every word's group, [BLOCK_T, H.block]: scales as fp16 · 2^6, of integers scale and minimum
    in one int32. p_token: pointers [BLOCK_T, 1] to the parameters of each token.

    If groups are whole words and the token is whole groups, each group's are loaded and converted once and then
    repeated.
    """
    GROUPS: tl.constexpr = H.words * H.planes // H.group
    REPEATED: tl.constexpr = H.words == H.block and H.group % H.planes == 0 and H.words * H.planes % H.group == 0
    m_token = m_token[:, None]
    if REPEATED:
        x = tl.load(p_token + tl.arange(0, GROUPS)[None, :], m_token, other=0)
    else:
        word = tl.arange(0, H.block)[None, :]
        x = tl.load(p_token + word * H.planes // H.group, m_token & (word < H.words), other=0)
    if H.kind != "int":
        x = _scale_fp16(x)
    if REPEATED:
        x = tl.broadcast_to(x[:, :, None], [x.shape[0], GROUPS, H.words // GROUPS]).reshape([x.shape[0], H.block])
    return x


@triton.jit
def planes(
    raw,
    p_params,
    p_rows,
    o_params,
    o_rows,
    m_token,
    tensor_scale,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Keys or values of BLOCK_T tokens as H.planes blocks [BLOCK_T, H.block], scaled. In the fast path, keys by token
    stay without their scales. So do TurboQuant's numbers: they stay in the rotated basis, in fp16 for 16-bit models.

    raw: from `load_codes`. o_params, o_rows: int64 [BLOCK_T], where each token's parameters and row of key scales
    begin.
    """
    word = tl.arange(0, H.block)[None, :]
    m_word = m_token[:, None]
    if H.words != H.block:
        m_word = m_word & (word < H.words)
    if H.kind == "plain":
        if _INTERPRETED:
            raw = raw.to(tl.float32)
        out = (raw,)
    elif is_rotated(H.kind) and H.fast:
        out = _fast_levels(raw, word, H)
    elif is_rotated(H.kind):
        out = _levels(raw, word, H, DTYPE)
    elif H.fast and H.kind == "int":
        out = _fast_integers(raw, p_params, p_rows, o_params, o_rows, m_token, word, m_word, H, SCALED)
    elif H.fast:
        out = _fast_floats(raw, p_params, p_rows, o_params, o_rows, m_token, word, m_word, H, SCALED)
    else:
        out = one_by_one(raw, p_params, p_rows, o_params, o_rows, word, m_word, tensor_scale, H, DTYPE)
    return out


@triton.jit
def _levels(raw, word, H: tl.constexpr, DTYPE: tl.constexpr):
    """`planes` of TurboQuant's codes: their levels; 0 behind a token's last word."""
    BITS: tl.constexpr = H.bits
    PLANES: tl.constexpr = H.planes
    raw = raw.to(tl.int32) & ((1 << (BITS * PLANES)) - 1)
    out = ()
    for i in tl.static_range(PLANES):
        x = decode_level((raw >> (BITS * i)) & ((1 << BITS) - 1), BITS)
        if H.words != H.block:
            x = tl.where(word < H.words, x, 0.0)
        if DTYPE != "fp32" and not _INTERPRETED:
            x = x.to(tl.float16)
        out = out + (x,)
    return out


@triton.jit
def _fast_levels(raw, word, H: tl.constexpr):
    """`_levels` of four bits in the fast path: int16 words → four planes of fp16."""
    PLANES: tl.constexpr = H.planes
    levels = tl.inline_asm_elementwise(
        _levels_asm(),
        "=r,=r,=r,=r,r",
        [raw],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    out = ()
    for i in tl.static_range(PLANES):
        x = levels[i]
        if H.words != H.block:
            x = tl.where(word < H.words, x, tl.full([], 0.0, tl.float16))
        out = out + (x,)
    return out


@triton.jit
def _fast_integers(
    raw,
    p_params,
    p_rows,
    o_params,
    o_rows,
    m_token,
    word,
    m_word,
    H: tl.constexpr,
    SCALED: tl.constexpr,
):
    """`planes` of asymmetric integers in the fast path: code · scale + minimum in fp16, or the codes as numbers."""
    PLANES: tl.constexpr = H.planes
    BITS: tl.constexpr = H.bits
    POINTS: tl.constexpr = f"int{BITS}"
    out = ()
    if SCALED and H.by_token:
        for i in tl.static_range(PLANES):
            both = tl.load(p_rows + o_rows[:, None] + (word * PLANES + i), m_word, other=0)
            points = _fast_plane(raw, 0, POINTS, i, 0)
            out = out + (_affine(points, both),)
    elif SCALED:
        both = _of_groups(p_params + o_params[:, None], m_token, H)
        for i in tl.static_range(PLANES):
            points = _fast_plane(raw, 0, POINTS, i, 0)
            out = out + (_affine(points, both),)
    else:
        for i in tl.static_range(PLANES):
            out = out + (_fast_plane(raw, 0, POINTS, i, 0),)
    return out


@triton.jit
def _fast_floats(
    raw,
    p_params,
    p_rows,
    o_params,
    o_rows,
    m_token,
    word,
    m_word,
    H: tl.constexpr,
    SCALED: tl.constexpr,
):
    """`planes` of NVFP4, ternary and FP8 codes in the fast path: what `_fast_plane` makes of them."""
    PLANES: tl.constexpr = H.planes
    KIND: tl.constexpr = H.kind
    SCALES: tl.constexpr = 0 if H.kind == "fp8" or not SCALED else 4 if H.by_token else 1
    scale = 0
    if SCALES == 4:  # a byte each, they are one number
        scale = tl.load(p_rows + o_rows[:, None] + word, m_word, other=0)
    elif SCALES == 1:
        scale = _of_groups(p_params + o_params[:, None], m_token, H)
    out = ()
    for i in tl.static_range(PLANES):
        out = out + (_fast_plane(raw, scale, KIND, i, SCALES),)
    return out


@triton.jit
def one_by_one(
    raw,
    p_params,
    p_rows,
    o_params,
    o_rows,
    word,
    m_word,
    tensor_scale,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`planes` in the plain path: each code is decoded in float32, scaled, and rounded to the model's type."""
    KIND: tl.constexpr = H.kind
    BITS: tl.constexpr = H.bits
    PLANES: tl.constexpr = H.planes
    NUMBERS: tl.constexpr = 2 if H.kind == "int" else 1  # of a group: scale and minimum, or the scale
    raw = raw.to(tl.int32) & ((1 << (BITS * PLANES)) - 1)
    out = ()
    for i in tl.static_range(PLANES):
        x = decode_code((raw >> (BITS * i)) & ((1 << BITS) - 1), KIND, BITS, "")
        if H.group > 0:
            if H.by_token:
                p_group = p_rows + o_rows[:, None] + (word * PLANES + i) * NUMBERS
            else:
                p_group = p_params + o_params[:, None] + (word * PLANES // H.group) * NUMBERS
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
def times_rows(k, p_row, m_row, H: tl.constexpr):
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
