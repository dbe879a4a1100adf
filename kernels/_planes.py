"""Codes of tokens in pages become planes of numbers; device functions of attention and of `survivors.py`.

Used by `paged_attention.py`, `survivors.py` and `tri_score.py`.

A word holds PLANES neighbouring channels, and plane i is channel i of every word. A plane is multiplied with the same
channels of the other factor, so no number is interleaved or moved between threads.

    load_codes  loads the words of some tokens
    planes      decodes them, with their scales; TurboQuant's become levels in the rotated basis
    of_tokens   loads TurboQuant's scales, one for each token
    times_rows  keys by token: multiplies decoded points with scales that the tokens of a group share

Blocks are [tokens, words], or [words, tokens] if the products need them so (AXIS, the axis of the tokens).

The plain path decodes code by code with the functions of `_formats.py` and rounds to the model's type, as the twin
does; the interpreter knows only this path. 16-bit models have a faster path (`_points`, for TurboQuant
`_fast_levels`): its words have 16 bits, and one block of inline PTX makes all planes of the two words in a 32-bit
register, in fp16 whatever the model's type. Words of TurboQuant's 3 bits have 24, and a register each. `_layout.py`
says which formats take this path (Half.fast). Read `planes` first and `_fast_asm` last.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl

from minithink.kernels import _formats
from minithink.kernels._common import INTERPRETED
from minithink.kernels._formats import decode_code, e4m3_decode, load_bytes, saturate
from minithink.kernels._rotation import LEVELS, decode_level, is_rotated


def _table(levels: Sequence[float]) -> tuple[int, ...]:
    """Eight numbers in fp16, in four registers: low bytes of the first four and of the others, then high bytes."""
    halves = [struct.pack("<e", x) for x in levels]
    return struct.unpack("<4I", bytes(half[i] for i in (0, 1) for half in halves))


# What codes of TurboQuant look up: the levels of 2 bits (twice) and of 3 bits by code, the magnitudes of 4 bits.
TABLES = {
    2: _table([*(-x for x in reversed(LEVELS[2])), *LEVELS[2]] * 2),
    3: _table([*(-x for x in reversed(LEVELS[3])), *LEVELS[3]]),
    4: _table(LEVELS[4]),
}
_TABLE = ("l0", "l1", "h0", "h1")  # the registers of a table
OR_OF_AND = "0xEA"  # the table of lop3 for (a & b) | c
_INTERPRETED = tl.constexpr(INTERPRETED)
_LARGEST_FP16 = tl.constexpr(_formats.LARGEST["fp16"])


@triton.constexpr_function
def planes_of_word(kind):
    """Channels of a word in the fast path. Its words have 16 bits."""
    return 16 // {"nvfp4": 4, "ternary": 2, "fp8": 8, "int2": 2, "int4": 4, "int8": 8}[kind]


@triton.constexpr_function
def left_over(kind, converts):
    """What the numbers of NVFP4, ternary and FP8 from the fast path must still be multiplied with.

    A point is 2^−14 of its value, and a scale 2^6 of it if it isn't converted; then a product, in fp16, is exact. FP8
    is 2^−8 of its value if it isn't converted.
    """
    if converts:
        return 1.0 if kind == "fp8" else 2.0**14
    return 2.0**8


@triton.constexpr_function
def _types(planes):
    """The types of the planes that `_fast_asm` makes."""
    return (tl.float16,) * planes


@triton.constexpr_function
def _fast_asm(kind, converts):
    """PTX that makes all planes of two neighbouring words at once, two numbers in a register: plane i is $i. Behind
    the planes comes the register of the two words."""
    codes = f"${planes_of_word(kind)}"
    if kind.startswith("int"):
        lines = _integers(int(kind[3:]), codes)
    elif kind == "fp8":
        lines = _converted(codes) if converts else _eight_bits(codes)
    else:
        lines = _few_bits(kind, codes)
    return "{ .reg .b32 h, m, s, x; .reg .b16 c, d; " + " ".join(f"{line};" for line in lines) + " }"


@triton.constexpr_function
def _fast_registers(kind):
    """The registers of `_fast_asm`. The & keeps outputs that are written early out of the register of the codes,
    which are still to be read."""
    return "=&r," * planes_of_word(kind) + "r"


@triton.constexpr_function
def _few_bits(kind, codes):
    """Floats of 4 or 2 bits, whose sign and magnitude fit into the high byte of an fp16 number.

    For the i-th code of all four bytes at once, its magnitude and its sign are moved to their places in the byte.
    Then the even and the odd bytes become the high bytes of two planes.
    """
    if kind == "nvfp4":
        bits = 4
        magnitude = "0x0E0E0E0E"
        top = 1  # how far left the highest code's magnitude moves
    else:
        bits = 2
        magnitude = "0x04040404"
        top = 2
    in_a_byte = 8 // bits
    lines = []
    for i in range(in_a_byte):
        moves, moved = _shifted(codes, top - bits * i, "m")
        lines += [*moves, f"and.b32 m, {moved}, {magnitude}"]
        moves, moved = _shifted(codes, 8 - bits * (i + 1), "s")
        lines += [*moves, f"lop3.b32 h, {moved}, 0x80808080, m, {OR_OF_AND}"]
        lines += [f"prmt.b32 ${i}, h, 0, 0x2404", f"and.b32 ${i + in_a_byte}, h, 0xFF00FF00"]
    return lines


@triton.constexpr_function
def _eight_bits(codes):
    """E4M3: as high bytes of fp16 numbers, the other fields are one bit too far left."""
    lines = []
    for i, choose in enumerate(("prmt.b32 h, {}, 0, 0x2404", "and.b32 h, {}, 0xFF00FF00")):
        lines += [choose.format(codes), "shr.u32 m, h, 1", "and.b32 m, m, 0x3F803F80"]
        lines += [f"lop3.b32 ${i}, h, 0x80008000, m, {OR_OF_AND}"]
    return lines


@triton.constexpr_function
def _converted(codes):
    """E4M3, by the instruction that converts two codes: the even bytes, then the odd ones."""
    return [
        f"prmt.b32 x, {codes}, 0, 0x3120",
        "mov.b32 {c, d}, x",
        "cvt.rn.f16x2.e4m3x2 $0, c",
        "cvt.rn.f16x2.e4m3x2 $1, d",
    ]


@triton.constexpr_function
def _integers(bits, codes):
    """Integers: an fp16 number with a code in its low bits, minus the same number without it.

    The code may begin at bit `low`, if there one is worth 1: in numbers from 2^(10 − low) on.
    """
    in_a_byte = 8 // bits
    lines = []
    for i in range(2 * in_a_byte):
        if i == in_a_byte:
            lines += [f"shr.u32 s, {codes}, 8"]
        low = i % in_a_byte * bits
        both_halves = 0x10001  # the same in both fp16 numbers of a register
        mask = (((1 << bits) - 1) << low) * both_halves
        large = ((25 - low) << 10) * both_halves  # 2^(10 − low), whose exponent is 25 − low with its bias of 15
        lines += [f"lop3.b32 x, {codes if i < in_a_byte else 's'}, {mask:#010x}, {large:#x}, {OR_OF_AND}"]
        lines += [f"mov.b32 m, {large:#x}", f"sub.rn.f16x2 ${i}, x, m"]
    return lines


@triton.constexpr_function
def _shifted(codes, left, to):
    """The instructions that shift all codes to the left (to the right if `left` is below 0) into the register `to`,
    and the register that has them then."""
    if left == 0:
        return [], codes
    return [f"shl.b32 {to}, {codes}, {left}" if left > 0 else f"shr.u32 {to}, {codes}, {-left}"], to


@triton.constexpr_function
def _scale_asm(i, converts):
    """PTX that makes fp16 numbers, $0, of the E4M3 scales of channel i of two neighbouring words.

    $1 and $2: the four scales of each word. If they aren't converted, the i-th ones become high bytes of fp16
    numbers, one bit too far left, and the results are times 2^6.
    """
    if converts:
        out = f"{{ .reg .b32 t; .reg .b16 c; prmt.b32 t, $1, $2, 0x00{i + 4}{i}; cvt.u16.u32 c, t;"
        return out + " cvt.rn.f16x2.e4m3x2 $0, c; }"
    out = f"{{ .reg .b32 t, f; prmt.b32 t, $1, $2, 0x{i + 4}0{i}0; shr.u32 t, t, 1; and.b32 t, t, 0x7F807F80;"
    return out + " mov.b32 f, 0x74007400; mul.rn.f16x2 $0, t, f; }"  # 2^14, twice


@triton.constexpr_function
def _levels_asm(bits):
    """PTX that makes the planes of two words, $0 and so on, in fp16: levels of TurboQuant. Behind the planes comes
    the register of the two words; words of 3 bits have a register each.

    `prmt` picks four bytes at once from eight, by the nibbles of its selector. The codes that two channels have in
    both words are such a selector: one `prmt` picks the low bytes of their numbers, one the high bytes, and two more
    put these together, channel by channel.
    """
    lines = [f"mov.b32 {name}, {number:#010x}" for name, number in zip(_TABLE, TABLES[bits], strict=True)]
    begin, selectors = {2: _selectors_of_2_bits, 3: _selectors_of_3_bits, 4: _selectors_of_4_bits}[bits]()
    lines += begin
    for selector, first, second in selectors:
        lines += [selector, "prmt.b32 a, l0, l1, s", "prmt.b32 b, h0, h1, s"]
        for i, choose in ((first, "0x6240"), (second, "0x7351")):
            if bits == 4:  # a magnitude, and its sign, which goes to the highest bit of either half
                lines += [f"prmt.b32 p, a, b, {choose}", f"shl.b32 v, t, {12 - 4 * i}"]
                lines += [f"lop3.b32 ${i}, v, 0x80008000, p, {OR_OF_AND}"]
            else:
                lines += [f"prmt.b32 ${i}, a, b, {choose}"]
    registers = ", ".join(("a", "b", "e", "f", "m", "o", "p", "s", "t", "v", *_TABLE))
    return f"{{ .reg .b32 {registers}; " + " ".join(f"{line};" for line in lines) + " }"


@triton.constexpr_function
def _selectors_of_4_bits():
    """What `_levels_asm` does first, and then for each selector the instruction that makes it, s, and its two
    channels.

    A code of 4 bits is a sign and one of eight magnitudes, which negative numbers count backwards. t gets an 8 in the
    nibbles of negative numbers, m the magnitudes.
    """
    begin = ["not.b32 t, $4", "and.b32 t, t, 0x88888888", "shr.u32 v, t, 3", "sub.u32 v, t, v"]
    begin += ["xor.b32 m, $4, v", "and.b32 m, m, 0x77777777"]
    return begin, [("prmt.b32 s, m, 0, 0x4420", 0, 1), ("prmt.b32 s, m, 0, 0x4431", 2, 3)]


@triton.constexpr_function
def _selectors_of_2_bits():
    """`_selectors_of_4_bits` for 2 bits. e gets the codes of even channels in its nibbles, o those of odd ones."""
    begin = ["and.b32 e, $8, 0x33333333", "shr.u32 o, $8, 2", "and.b32 o, o, 0x33333333"]
    of_four = [("0x4420", 0, 2), ("0x4431", 4, 6)]  # the low bytes of both words, then the high bytes
    even = [(f"prmt.b32 s, e, 0, {choose}", i, j) for choose, i, j in of_four]
    odd = [(f"prmt.b32 s, o, 0, {choose}", i + 1, j + 1) for choose, i, j in of_four]
    return begin, even + odd


@triton.constexpr_function
def _selectors_of_3_bits():
    """`_selectors_of_4_bits` for 3 bits. The codes of each word are moved into the nibbles of a register, e and f."""
    begin = []
    for word, to in (("$8", "e"), ("$9", "f")):
        begin += [f"and.b32 {to}, {word}, 0x3F"]  # first pairs of codes into bytes
        for i in range(1, 4):
            begin += [f"shl.b32 v, {word}, {2 * i}", f"lop3.b32 {to}, v, {0x3F << 8 * i:#010x}, {to}, {OR_OF_AND}"]
        begin += [f"and.b32 m, {to}, 0x07070707", f"shl.b32 v, {to}, 1"]
        begin += [f"lop3.b32 {to}, v, 0x70707070, m, {OR_OF_AND}"]
    return begin, [(f"prmt.b32 s, e, f, {0x40 + 0x11 * i:#06x}", 2 * i, 2 * i + 1) for i in range(4)]


@triton.constexpr_function
def _levels_registers(bits):
    """The registers of `_levels_asm`. Its words are read before the first plane is written, so none needs an &."""
    return {2: "=r," * 8 + "r", 3: "=r," * 8 + "r,r", 4: "=r," * 4 + "r"}[bits]


@triton.jit
def _points(words, KIND: tl.constexpr, PLANES: tl.constexpr, CONVERTS: tl.constexpr):
    """The points of codes as planes of fp16 numbers: of NVFP4 and ternary times 2^−14, of FP8 times 2^−8 if they
    aren't converted, integers as they are. words: int16, of any shape.

    A code's magnitude, moved to the right bits of an fp16 number, is the point times 2^−14: E2M1's exponent and
    mantissa are the low end of fp16's exponent field and the high end of its mantissa, and denormals work out too.
    """
    TYPES: tl.constexpr = _types(PLANES)
    return tl.inline_asm_elementwise(
        _fast_asm(KIND, CONVERTS),
        _fast_registers(KIND),
        [words],
        dtype=TYPES,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _times(x, scale):
    """x · scale in fp16, two numbers in an instruction."""
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;",
        "=r,r,r",
        [x, scale],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _scale_of_channel(four, CHANNEL: tl.constexpr, CONVERTS: tl.constexpr):
    """`_scale_fp16` of one of the four scales in each number, int32."""
    return tl.inline_asm_elementwise(
        _scale_asm(CHANNEL, CONVERTS),
        "=r,r,r",
        [four],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _scale_fp16(code, CONVERTS: tl.constexpr):
    """E4M3 scales (positive) → fp16. Not converted they are times 2^6: the fields move to their places, the biases
    differ by 8."""
    if CONVERTS:
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
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
def _words_of_tokens(m_token, H: tl.constexpr, AXIS: tl.constexpr):
    """The numbers of a token's words, and which words there are, both in the shape of a block.

    AXIS: the axis of the block along which tokens lie, 0 or 1; words lie along the other.
    """
    word = tl.expand_dims(tl.arange(0, H.block), AXIS)
    m_word = tl.expand_dims(m_token, 1 - AXIS)
    if H.words != H.block:
        m_word = m_word & (word < H.words)
    return word, m_word


@triton.jit
def load_codes(p_codes, o_codes, m_token, H: tl.constexpr, AXIS: tl.constexpr = 0):
    """The words of BLOCK_T tokens: [BLOCK_T, H.block], or with AXIS 1 [H.block, BLOCK_T]. o_codes: int64 [BLOCK_T],
    where each token's codes begin."""
    word, m_word = _words_of_tokens(m_token, H, AXIS)
    o_codes = tl.expand_dims(o_codes, 1 - AXIS)
    if H.bits == 3 and H.fast:
        words = _words_of_24_bits(p_codes + o_codes, word, m_word)
    elif H.bits == 3:
        words = load_bytes(p_codes + o_codes + word * 3, m_word, 3)
    else:
        words = tl.load(p_codes + o_codes + word, m_word, other=0)
    return words


@triton.jit
def _words_of_24_bits(p_token, word, m_word):
    """Words of 24 bits, four of which lie in three int32 in a row. p_token: pointers to the first int32 of tokens.

    A word begins in one int32, and may end in the next.
    """
    p_word = p_token + word * 3 // 4
    begin = word % 4 * 24 % 32  # the bit where it begins: 0, 24, 16, 8
    low = tl.load(p_word, m_word, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(p_word + 1, m_word & (begin > 8), other=0).to(tl.uint32, bitcast=True)
    return ((low >> begin) | ((high << 8) << (24 - begin))).to(tl.int32, bitcast=True)


@triton.jit
def of_tokens(p_params, o_params, m_token):
    """TurboQuant's scales: float32 [BLOCK_T], 0 without a token. o_params: int64 [BLOCK_T]."""
    return tl.load(p_params + o_params, m_token, other=0.0).to(tl.float32)


@triton.jit
def _of_groups(p_params, o_params, m_token, H: tl.constexpr, AXIS: tl.constexpr):
    """The parameters of every word's group, in the shape of a block: scales in fp16 (`_scale_fp16`), of integers
    scale and minimum in one int32. o_params: [BLOCK_T], where those of each token begin.

    If groups fill the block, each group's are loaded and converted once and then repeated.
    """
    EACH: tl.constexpr = H.group // H.planes  # words of a group
    GROUPS: tl.constexpr = H.block // EACH
    tl.static_assert(H.group % H.planes == 0, "a word has one group's parameters")
    p_token = p_params + tl.expand_dims(o_params, 1 - AXIS)
    if H.block % EACH == 0:
        group = tl.expand_dims(tl.arange(0, GROUPS), AXIS)
        m_group = tl.expand_dims(m_token, 1 - AXIS)
        if H.words != H.block:
            m_group = m_group & (group < H.words // EACH)
        x = tl.load(p_token + group, m_group, other=0)
    else:
        word, m_word = _words_of_tokens(m_token, H, AXIS)
        x = tl.load(p_token + word // EACH, m_word, other=0)
    if H.kind != "int":
        x = _scale_fp16(x, H.converts)
    if H.block % EACH == 0:
        TOKENS: tl.constexpr = m_token.shape[0]
        if AXIS == 0:
            x = tl.broadcast_to(x[:, :, None], [TOKENS, GROUPS, EACH]).reshape([TOKENS, H.block])
        else:
            x = tl.broadcast_to(x[:, None, :], [GROUPS, EACH, TOKENS]).reshape([H.block, TOKENS])
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
    AXIS: tl.constexpr = 0,
):
    """Keys or values of BLOCK_T tokens as H.planes blocks in the shape of `raw`, scaled. In the fast path, keys by
    token stay without their scales. So do TurboQuant's numbers: they stay in the rotated basis, in fp16 for 16-bit
    models.

    raw: from `load_codes`, with the same AXIS. o_params, o_rows: int64 [BLOCK_T], where each token's parameters and
    row of key scales begin.
    """
    word, m_word = _words_of_tokens(m_token, H, AXIS)
    if H.kind == "plain":
        if _INTERPRETED:
            raw = raw.to(tl.float32)
        out = (raw,)
    elif is_rotated(H.kind) and H.fast:
        out = _fast_levels(raw, word, H)
    elif is_rotated(H.kind):
        out = _levels(raw, word, H, DTYPE)
    elif H.fast and H.kind == "int":
        out = _fast_integers(raw, p_params, p_rows, o_params, o_rows, m_token, word, m_word, H, SCALED, AXIS)
    elif H.fast:
        out = _fast_floats(raw, p_params, p_rows, o_params, o_rows, m_token, word, m_word, H, SCALED, AXIS)
    else:
        out = one_by_one(raw, p_params, p_rows, o_params, o_rows, word, m_word, tensor_scale, H, DTYPE, AXIS)
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
    """`_levels` in the fast path: words of 16 bits, or of 24 in int32 → planes of fp16."""
    PLANES: tl.constexpr = H.planes
    TYPES: tl.constexpr = _types(PLANES)
    levels = tl.inline_asm_elementwise(
        _levels_asm(H.bits),
        _levels_registers(H.bits),
        [raw],
        dtype=TYPES,
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
    AXIS: tl.constexpr,
):
    """`planes` of asymmetric integers in the fast path: code · scale + minimum in fp16, or the codes as numbers."""
    PLANES: tl.constexpr = H.planes
    BITS: tl.constexpr = H.bits
    KIND: tl.constexpr = f"int{BITS}"
    out = _points(raw, KIND, PLANES, H.converts)
    if SCALED and H.by_token:
        affine = ()
        p_token = p_rows + tl.expand_dims(o_rows, 1 - AXIS)
        for i in tl.static_range(PLANES):
            both = tl.load(p_token + (word * PLANES + i), m_word, other=0)
            affine = affine + (_affine(out[i], both),)
        out = affine
    elif SCALED:
        affine = ()
        both = _of_groups(p_params, o_params, m_token, H, AXIS)
        for i in tl.static_range(PLANES):
            affine = affine + (_affine(out[i], both),)
        out = affine
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
    AXIS: tl.constexpr,
):
    """`planes` of NVFP4, ternary and FP8 codes in the fast path: value / tensor scale / `left_over` in fp16,
    exactly; of NVFP4 and ternary without scales (SCALED False) points · 2^−14."""
    PLANES: tl.constexpr = H.planes
    KIND: tl.constexpr = H.kind
    out = _points(raw, KIND, PLANES, H.converts)
    if SCALED and H.by_token:
        scaled = ()
        p_token = p_rows + tl.expand_dims(o_rows, 1 - AXIS)
        for i in tl.static_range(PLANES):
            if i % 4 == 0:  # the scales of four channels, a byte each, are one number
                four = tl.load(p_token + (word * (PLANES // 4) + i // 4), m_word, other=0)
            scaled = scaled + (_times(out[i], _scale_of_channel(four, i % 4, H.converts)),)
        out = scaled
    elif SCALED and H.kind != "fp8":
        scaled = ()
        scale = _of_groups(p_params, o_params, m_token, H, AXIS)
        for i in tl.static_range(PLANES):
            scaled = scaled + (_times(out[i], scale),)
        out = scaled
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
    AXIS: tl.constexpr = 0,
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
                p_group = p_rows + tl.expand_dims(o_rows, 1 - AXIS) + (word * PLANES + i) * NUMBERS
            else:
                p_group = p_params + tl.expand_dims(o_params, 1 - AXIS) + (word * PLANES // H.group) * NUMBERS
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
    """Planes of points, [T, W] each, times the key scales (`_scale_fp16`) of their groups; of integers, times the
    scales plus the minima. A group is GROUP tokens in a row.

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
        for i in tl.static_range(PLANES):
            if i % 4 == 0:  # the scales of four channels are one int32
                four = tl.load(p_row[:, None] + (word * (PLANES // 4) + i // 4), m_row, other=0)
            scale = _scale_fp16((four >> (8 * (i % 4))) & 0xFF, H.converts)
            x = k[i].reshape([GROUPS, GROUP, BLOCK_W]) * scale[:, None, :]
            out = out + (x.reshape([GROUPS * GROUP, BLOCK_W]),)
    return out
