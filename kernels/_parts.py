"""Lanes are cut into parts for `paged_attention.py`, and the parts' results become one.

Used by `paged_attention.py`, `tri_score.py` and `_mass.py`.

    in_parts, part_length   how long the parts of a lane are
    Program, program_of     how the program is compiled that takes a part: tokens of a block, warps, and so on
    merge                   the parts of a query head become one by their log-sum-exp (`minithink/ref/merge.py`)

One program for each lane would leave most of the GPU idle when there are few lanes, so long lanes have several parts.
The length of a part depends on the lane's length and on the batch's shape. So a sequence gets the same sums whatever
the other sequences hold.

Bound of the merge: latency. It reads 4·D bytes for each part of a query head. On compute capability 9 its launch
overlaps with attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2
from minithink.kernels._layout import Cache, Half
from minithink.kernels._rotation import is_rotated, rotate_back

# At least so many lanes, tokens of a part in a short lane, the same where a cache holds FP8 alone. With 768, lanes of
# 4,096 tokens have three parts and those of 16,384 have six. With 3 programs at a time, as in bfloat16, 132
# multiprocessors run 512 lanes of three parts in four rounds, and 3 of 100 places stay empty; of four parts in six
# rounds, and 14 stay empty. Two parts took FP8 the least time of those that were tried.
PARTS = (256, 768, 1024), (64, 256, 256), (0, 128, 128)
SHORT = 1024  # tokens of a short lane, at most
MANY_LANES = 64  # from here on small blocks are enough to fill the GPU, and overlapping the merge gains nothing


class Program(NamedTuple):
    """How the programs of attention that take a part each are compiled."""

    block: int  # tokens of a block; a part is whole blocks
    warps: int
    stages: int
    registers: int = 0  # of a thread, at most; 0: as many as it takes
    swapped: bool = False  # in products tokens are the rows and query heads the columns

    @property
    def options(self) -> dict[str, int]:
        """Triton's."""
        most = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages} | most


_CODES = Program(32, 1, 5, registers=128, swapped=True)  # for many lanes
# `program_of` chooses one; `bench attention` measures what is written here.
PROGRAMS = {
    "plain": Program(128, 4, 2),  # numbers of 16-bit models
    "slow": Program(64, 2, 3),  # formats that are float32, are decoded to float32 or have no fast path
    # codes of the fast path, for many lanes
    "many": _CODES,
    "many nvfp4": _CODES._replace(registers=0),  # it gains more by registers than by more programs at a time
    # Where scales, masks or tables take more registers; and int8, whose shared memory has no room for more than 12
    # programs at a time anyway. FP8 is faster with 128 registers, as most codes.
    "many wide": _CODES._replace(registers=168),
    "many widest": _CODES._replace(registers=224),  # 8 bits, keys by token: shared memory has room for 9
    # the same for few lanes
    "few": Program(128, 4, 2),
    # Words of eight codes: blocks of 128 take longer. Registers have no limit: with 128 of them a thread spilled up
    # to 944 bytes (int2, keys by token, Triton 3.6), and few lanes seldom need more programs at a time.
    "few of eight": Program(64, 2, 5, swapped=True),
    # Words of 24 bits are not loaded ahead: each lies in two int32, and would take 35 KiB of shared memory.
    "24 bits": _CODES._replace(stages=1, registers=168),
}
LARGEST_FP16 = tl.constexpr(65504.0)
MERGED = 4, 16  # parts that `_merge` takes at once, in lanes with few parts and with many
MERGING = 4, 1  # its warps, for few lanes and for many
# These arguments are offsets and counts. Triton must not compile anew for one that is 1 or a multiple of 16.
PLAIN_NUMBERS = ["layer", "table_layer", "first_part", "parts", "width", "rows"]


def in_parts(c: Cache, lanes: int, device: torch.device, only_fp8: bool = False) -> Cache:
    """The same cache, for attention over so many lanes: how they are cut, and whether the merge is launched early.

    only_fp8: whether FP8 is the only format that the store has beside the model's own type, and it has no ring.
    """
    early = not INTERPRETED and lanes < MANY_LANES and torch.cuda.get_device_capability(device)[0] >= 9
    even = max(program.block for program in PROGRAMS.values())
    return c._replace(base=base(lanes, only_fp8), short=SHORT, even=even, overlap=early)


def program_of(c: Cache, k: Half, v: Half, lanes: int) -> Program:
    """The program for keys and values of one format."""
    return PROGRAMS[_program_name(c, k, v, lanes)]


def _program_name(c: Cache, k: Half, v: Half, lanes: int) -> str:
    if not (k.fast and v.fast):
        return "plain" if c.dtype != "fp32" and (k.fast or k.kind == "plain") else "slow"
    if k.bits == 3 or v.bits == 3:
        return "24 bits"
    if lanes < MANY_LANES:
        return "few of eight" if k.planes == 8 else "few"
    if k.by_token and k.bits == 8:
        return "many widest"
    # Keys by token have a scale for each channel, words behind a token's last one have masks, TurboQuant has tables.
    masked = k.words != k.block or v.words != v.block
    rotated = is_rotated(k.kind) or is_rotated(v.kind)
    eight = 8 in (k.bits, v.bits) and not k.kind == v.kind == "fp8"
    if k.by_token or masked or rotated or eight:
        return "many wide"
    return "many nvfp4" if k.kind == "nvfp4" else "many"


def most_parts(tokens: int, base: int, short: int) -> int:
    """The most parts that a lane of at most so many tokens can have."""
    steps = ((short, 1), (4 * short, 2), (16 * short, 4), (tokens, 8))  # as in `part_length`
    return max(-(-min(tokens, most) // (base * times)) for most, times in steps)


def base(lanes: int, only_fp8: bool = False) -> int:
    """Tokens of a part in short lanes. Many lanes make enough programs without small parts."""
    return next(fp8 if only_fp8 else size for least, size, fp8 in PARTS if lanes >= least)


@triton.jit
def part_length(count, C: tl.constexpr):
    """Tokens of a part. It depends on the lane's tokens of this format and on the batch's number of lanes (with idle
    rows), but not on what other lanes hold. All parts are about equally long: a short one would only be another
    program."""
    SHORT: tl.constexpr = C.short
    most = C.base * tl.where(count <= SHORT, 1, tl.where(count <= 4 * SHORT, 2, tl.where(count <= 16 * SHORT, 4, 8)))
    count = tl.maximum(count, 1)  # avoids a division by 0
    return tl.minimum(tl.cdiv(tl.cdiv(count, tl.cdiv(count, most)), C.even) * C.even, most)


@triton.jit
def unit_of_lane(table_layer, row, rows, i_head, C: tl.constexpr):
    """The number of a lane's list; rows: B, rows that have lists."""
    unit = (table_layer * rows + row) * C.tables
    if C.tables > 1:
        unit += i_head
    return unit


@triton.jit
def of_format(p_first, unit, i_format, m, FORMATS: tl.constexpr):
    """The first token of a format in sorted lists (`by_format.py`), and the number of its tokens; m: a mask."""
    p_first += unit * (FORMATS + 2) + i_format
    begin = tl.load(p_first, m, other=0)
    return begin, tl.load(p_first + 1, m, other=0) - begin


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
def _merge(
    p_parts,
    p_part_lse,
    p_out,
    p_lse,
    p_rows,
    p_count,
    table_layer,
    parts,
    in_format,
    rows,
    C: tl.constexpr,
    FORMATS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    ROTATED: tl.constexpr,
    SATURATED: tl.constexpr,
):
    """out = Σ_i exp2(lse_i − lse)·out_i, lse = log2 Σ_i exp2(lse_i), over the used parts of a query head; 0 for a
    lane without tokens.

    A format has room for `in_format` parts, and uses as many as its tokens fill. The ring comes last and has one.
    p_count, FORMATS: as in `_attend`. FEW, MANY: parts that are taken at once, of any format; FEW if this is enough.
    ROTATED: the parts are TurboQuant's, and their sum is rotated back. SATURATED: numbers that float16 cannot hold
    become its largest, because TurboQuant's may be larger than those that it was given; NaN stays NaN.
    The order of the sum depends on the lane's own length, never on the lengths of other lanes.
    """
    i_head = tl.program_id(0).to(tl.int64)
    i_n = i_head // (C.kv_heads * C.group)
    i_query = i_head % (C.kv_heads * C.group)
    i_kv = i_query // C.group
    used, before = _used_parts(p_rows, p_count, table_layer, i_n, i_kv, rows, C, FORMATS)
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
    out = acc / tl.where(total > 0, total, 1.0)
    if ROTATED:
        out = tl.reshape(rotate_back(tl.reshape(out, (1, BLOCK_D))), (BLOCK_D,))
    if SATURATED:
        out = tl.maximum(out, -LARGEST_FP16, propagate_nan=tl.PropagateNan.ALL)
        out = tl.minimum(out, LARGEST_FP16, propagate_nan=tl.PropagateNan.ALL)
    tl.store(p_out + i_head * C.dim + channel, out, channel < C.dim)
    tl.store(p_lse + i_head, top + tl.log2(total))


@triton.jit
def _used_parts(p_rows, p_count, table_layer, i_n, i_kv, rows, C: tl.constexpr, FORMATS: tl.constexpr):
    """How many parts of a lane are used; and for each kind, a format or the ring, how many those of the kinds before
    it use."""
    KINDS: tl.constexpr = FORMATS + 1 if FORMATS > 0 else 1
    used = tl.full([], 0, tl.int32)
    before = ()
    if FORMATS > 0:
        unit = unit_of_lane(table_layer, i_n, tl.num_programs(0) // (C.kv_heads * C.group), i_kv, C)
        for kind in tl.static_range(KINDS):  # unrolled, so that no load waits for another
            _, count = of_format(p_count, unit, kind, True, FORMATS)
            before = before + (used,)
            if kind < FORMATS:
                used += tl.cdiv(count, part_length(count, C))
            else:
                used += (count > 0).to(tl.int32)
    else:
        count = tl.load(p_count + unit_of_lane(table_layer, tl.load(p_rows + i_n), rows, i_kv, C))
        before = (used,)
        used = tl.cdiv(count, part_length(count, C))
    return used, before


@triton.jit
def _part(i, before, in_format):
    """The index of the i-th used part; before: for each kind the number of used parts of the kinds before."""
    out = i
    for kind in tl.static_range(1, len(before)):
        out = tl.where(i >= before[kind], kind * in_format + i - before[kind], out)
    return out


def merge(
    part: Tensor,
    part_lse: Tensor,
    rows: Tensor,
    count: Tensor,
    table_layer: int,
    in_format: int,
    b: int,
    c: Cache,
    formats: int,
    rotated: bool,
    saturated: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launch `_merge`.

    Args:
        part: float32 [N, Hq, parts, D], from `_attend`.
        part_lse: float32 [N, Hq, parts], base 2.
        rows: int64 [N].
        count: where formats begin in sorted lists, or the lengths of whole lists, as `_attend` got them.
        table_layer: the layer among those with lists of their own.
        in_format: parts that a format has room for.
        b: B, rows of the store.
        c: from `in_parts`.
        formats: formats that lists are sorted by, 0 without.
        rotated: whether the parts are to be rotated back. D is then a power of two.
        saturated: whether numbers that `dtype` cannot hold become its largest, where it is float16.
        dtype: of `out`.

    Returns:
        out: [N, Hq, D]; 0 for a lane without tokens.
        lse: float32 [N, Hq], base 2.
    """
    n, hq, parts, d = part.shape
    out = part.new_empty(n, hq, d, dtype=dtype)
    lse = part.new_empty(n, hq)
    _merge[(n * hq,)](
        p_parts=part,
        p_part_lse=part_lse,
        p_out=out,
        p_lse=lse,
        p_rows=rows,
        p_count=count,
        table_layer=table_layer,
        parts=parts,
        in_format=in_format,
        rows=b,
        C=c,
        FORMATS=formats,
        BLOCK_D=power_of_2(d),
        FEW=MERGED[0],
        MANY=MERGED[1],
        ROTATED=rotated,
        SATURATED=saturated and dtype == torch.float16,
        num_warps=MERGING[n * c.kv_heads >= MANY_LANES],
        **({"launch_pdl": True} if c.overlap else {}),
    )
    return out, lse


def variants() -> Iterator[Variant]:
    """bfloat16 models, D = 128: one format, TurboQuant's, several formats, and a merge that is launched early."""
    c = Cache(2, 4, 128, 1, 2, 1, 16, 0, "bf16", base(8), SHORT, PROGRAMS["plain"].block)
    signature = dict.fromkeys(("p_parts", "p_part_lse", "p_lse"), "*fp32") | {"p_out": "*bf16"}
    signature |= {"p_rows": "*i64", "p_count": "*i32"}
    signature |= dict.fromkeys(("table_layer", "parts", "in_format", "rows"), "i32")
    constexprs = {"C": c, "FORMATS": 0, "BLOCK_D": 128, "FEW": MERGED[0], "MANY": MERGED[1]}
    constexprs |= {"ROTATED": False, "SATURATED": False}
    yield Variant(_merge, signature, constexprs)
    for warps in MERGING:
        yield Variant(_merge, signature, constexprs | {"ROTATED": True}, {"num_warps": warps})
    half = {**signature, "p_out": "*fp16"}
    yield Variant(_merge, half, constexprs | {"ROTATED": True, "SATURATED": True})
    yield Variant(_merge, signature, constexprs | {"FORMATS": 2}, {"num_warps": MERGING[1]})
    yield Variant(_merge, signature, constexprs | {"C": c._replace(overlap=True)}, {"launch_pdl": True}, 90)
