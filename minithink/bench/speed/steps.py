# mypy: allow-untyped-defs
"""Decode attention over pages, step by step: what each step of tutorial 05 gains on a GPU.

    gather   PyTorch: gather keys and values, then attend
    token    a program takes a query head, and goes through its lane token by token
    tile     the same with 32 tokens at a time
    group    a program takes a KV head: its query heads share what is read
    split    lanes are cut into parts, which a second kernel merges by their log-sum-exp
    flight   the same with tiles, warps and stages that keep more loads in flight
    swap     the same with queries as the columns of the products, not as their rows

All steps take q [B, Hq, D], a cache [places, 2, D] with a token's key and value side by side, int32 places
[B, Hkv, S] of every lane's tokens, and their counts [B, Hkv]; D is a power of two from 16 on. All return [B, Hq, D],
0 for a lane without tokens. `speed/step_times.py` checks and times them.
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

from minithink.bench.speed.attention import DIM, HEADS, KV_HEADS
from minithink.kernels._common import INTERPRETED, Variant, power_of_2
from minithink.kv.store import PagedStore
from minithink.ref.decode_attention import decode_attention

SHAPES = ((64, 4096), (1, 16384))  # sequences, tokens of each
WIDEN = tl.constexpr(INTERPRETED)  # numpy knows no bfloat16


class Cut(NamedTuple):
    """How a program goes through its tokens."""

    tokens: int  # of a tile
    warps: int
    stages: int  # 1: a tile is loaded when it is needed; more: the next tiles are loaded during a tile's arithmetic


TOKEN, TILE, GROUP, SPLIT = Cut(1, 1, 1), Cut(32, 4, 1), Cut(64, 4, 1), Cut(64, 4, 1)
# A key's load waits for the load of its place, so these two loads share the stages: two of five hold keys.
FLIGHT = Cut(64, 2, 5)
# FLIGHT, and each of its three numbers varied alone.
SWEEP = (
    FLIGHT, Cut(64, 2, 1), Cut(64, 2, 2), Cut(64, 2, 3), Cut(64, 2, 7), Cut(64, 1, 5), Cut(64, 4, 5), Cut(64, 8, 5),
    Cut(16, 2, 5), Cut(32, 2, 5), Cut(128, 2, 5),
)  # fmt: skip


def gather(q: Tensor, cache: Tensor, place: Tensor, count: Tensor) -> Tensor:
    """Step 0, the reference."""
    valid = torch.arange(place.shape[-1], device=q.device) < count[..., None]  # [B, Hkv, S]
    found = cache[torch.where(valid, place, 0).long()]  # [B, Hkv, S, 2, D]
    k, v = found.masked_fill(~valid[..., None, None], 0).unbind(-2)  # a free place may hold anything
    empty = count == 0
    valid[..., 0] |= empty  # softmax over nothing is NaN
    out = decode_attention(q, k, v, valid)
    return out.masked_fill(empty.repeat_interleave(q.shape[1] // k.shape[1], 1)[..., None], 0)


@triton.jit
def _query_head(
    p_q, p_cache, p_place, p_count, p_out, width, scale, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr
):
    i_head = tl.program_id(0)  # of the query heads of all sequences
    i_lane = i_head // GROUP
    channel = tl.arange(0, DIM)
    q = tl.load(p_q + i_head * DIM + channel).to(tl.float32)
    count = tl.load(p_count + i_lane)
    p_place += i_lane.to(tl.int64) * width
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for t0 in range(0, count, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        m_t = t < count
        place = tl.load(p_place + t, m_t, other=0).to(tl.int64)
        p_token = p_cache + place[:, None] * (2 * DIM) + channel[None, :]
        k = tl.load(p_token, m_t[:, None], other=0).to(tl.float32)  # [BLOCK_T, DIM]
        v = tl.load(p_token + DIM, m_t[:, None], other=0).to(tl.float32)
        s = tl.where(m_t, tl.sum(k * q[None, :], 1) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - new)
        rescale = tl.exp2(top - new)
        top, total = new, total * rescale + tl.sum(p, 0)
        acc = acc * rescale + tl.sum(p[:, None] * v, 0)
    tl.store(p_out + i_head * DIM + channel, acc / tl.where(total > 0, total, 1.0))


@triton.jit
def _kv_head(
    p_q, p_cache, p_place, p_count, p_out, width, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    i_lane = tl.program_id(0)
    channel = tl.arange(0, DIM)
    row = tl.arange(0, ROWS)  # query heads of the group, padded to 16
    m_row = (row < GROUP)[:, None]
    head = i_lane * GROUP + row
    q = tl.load(p_q + head[:, None] * DIM + channel[None, :], m_row, other=0)  # [ROWS, DIM]
    if WIDEN:
        q = q.to(tl.float32)
    count = tl.load(p_count + i_lane)
    p_place += i_lane.to(tl.int64) * width
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for t0 in range(0, count, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        m_t = t < count
        place = tl.load(p_place + t, m_t, other=0).to(tl.int64)
        p_token = p_cache + place[:, None] * (2 * DIM) + channel[None, :]
        k = tl.load(p_token, m_t[:, None], other=0)  # [BLOCK_T, DIM]
        v = tl.load(p_token + DIM, m_t[:, None], other=0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(m_t[None, :], s, float("-inf"))  # [ROWS, BLOCK_T]
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        rescale = tl.exp2(top - new)
        top, total = new, total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(p_out + head[:, None] * DIM + channel[None, :], out, m_row)


@triton.jit
def _part(
    p_q, p_cache, p_place, p_count, p_part, p_lse, width, parts, split, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    i_lane, i_part = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, DIM)
    row = tl.arange(0, ROWS)  # query heads of the group, padded to 16
    m_row = (row < GROUP)[:, None]
    head = i_lane * GROUP + row
    count = tl.load(p_count + i_lane)
    start = i_part * split
    end = tl.minimum(start + split, count)
    if start >= count:
        return
    q = tl.load(p_q + head[:, None] * DIM + channel[None, :], m_row, other=0)  # [ROWS, DIM]
    if WIDEN:
        q = q.to(tl.float32)
    p_place += i_lane.to(tl.int64) * width
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for t0 in range(start, end, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        m_t = t < end
        place = tl.load(p_place + t, m_t, other=0).to(tl.int64)
        p_token = p_cache + place[:, None] * (2 * DIM) + channel[None, :]
        k = tl.load(p_token, m_t[:, None], other=0)  # [BLOCK_T, DIM]
        v = tl.load(p_token + DIM, m_t[:, None], other=0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(m_t[None, :], s, float("-inf"))  # [ROWS, BLOCK_T]
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        rescale = tl.exp2(top - new)
        top, total = new, total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    o_part = (head * parts + i_part).to(tl.int64)
    tl.store(p_part + o_part[:, None] * DIM + channel[None, :], acc / total[:, None], m_row)
    tl.store(p_lse + o_part, top + tl.log2(total), row < GROUP)


@triton.jit
def _part_swapped(
    p_q, p_cache, p_place, p_count, p_part, p_lse, width, parts, split, scale,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    i_lane, i_part = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, DIM)
    column = tl.arange(0, COLUMNS)  # query heads of the group, padded to 8
    m_column = (column < GROUP)[None, :]
    head = i_lane * GROUP + column
    count = tl.load(p_count + i_lane)
    start = i_part * split
    end = tl.minimum(start + split, count)
    if start >= count:
        return
    q = tl.load(p_q + head[None, :] * DIM + channel[:, None], m_column, other=0)  # [DIM, COLUMNS]
    if WIDEN:
        q = q.to(tl.float32)
    p_place += i_lane.to(tl.int64) * width
    top = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([DIM, COLUMNS], tl.float32)
    for t0 in range(start, end, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        m_t = t < end
        place = tl.load(p_place + t, m_t, other=0).to(tl.int64)
        p_token = p_cache + place * (2 * DIM)
        k = tl.load(p_token[:, None] + channel[None, :], m_t[:, None], other=0)  # [BLOCK_T, DIM]
        v = tl.load(p_token[None, :] + DIM + channel[:, None], m_t[None, :], other=0)  # [DIM, BLOCK_T]
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        s = tl.dot(k, q, input_precision="ieee") * scale
        s = tl.where(m_t[:, None], s, float("-inf"))  # [BLOCK_T, COLUMNS]
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - new[None, :])
        rescale = tl.exp2(top - new)
        top, total = new, total * rescale + tl.sum(p, 0)
        acc = tl.dot(v, p.to(v.dtype), acc * rescale[None, :], input_precision="ieee")
    o_part = (head * parts + i_part).to(tl.int64)
    tl.store(p_part + o_part[None, :] * DIM + channel[:, None], acc / total[None, :], m_column)
    tl.store(p_lse + o_part, top + tl.log2(total), column < GROUP)


@triton.jit
def _merge(
    p_part, p_lse, p_count, p_out, parts, split, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_P: tl.constexpr
):
    i_head = tl.program_id(0)
    channel, part = tl.arange(0, DIM), tl.arange(0, BLOCK_P)
    m_part = part < tl.cdiv(tl.load(p_count + i_head // GROUP), split)  # later parts were never written
    o_part = (i_head * parts + part).to(tl.int64)
    lse = tl.load(p_lse + o_part, m_part, other=float("-inf"))
    out = tl.load(p_part + o_part[:, None] * DIM + channel[None, :], m_part[:, None], other=0.0)
    # Σ_i 2^lse_i · out_i / Σ_i 2^lse_i; the largest lse is subtracted first
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    tl.store(p_out + i_head * DIM + channel, tl.sum(out * weight[:, None], 0) / tl.where(total > 0, total, 1.0))


@triton.jit
def _read(p_in, p_out, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    """Only reads: the bandwidth that the other kernels are compared with."""
    i_program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(TIMES):
        total ^= tl.load(p_in + (i_program * TIMES + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(p_out + i_program, tl.xor_sum(total, 0))


def query_heads(
    q: Tensor, cache: Tensor, place: Tensor, count: Tensor, cut: Cut = TILE, kernel: Any = _query_head
) -> Tensor:
    """Step 1: a program for each query head."""
    out, heads, group, dim, scale = _sizes(q, place)
    kernel[(heads,)](
        q, cache, place, count, out, place.shape[-1], scale, group, dim, cut.tokens,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out


def kv_heads(
    q: Tensor, cache: Tensor, place: Tensor, count: Tensor, cut: Cut = GROUP, kernel: Any = _kv_head
) -> Tensor:
    """Step 2: a program for each KV head."""
    out, heads, group, dim, scale = _sizes(q, place)
    kernel[(heads // group,)](
        q, cache, place, count, out, place.shape[-1], scale, group, max(16, power_of_2(group)), dim, cut.tokens,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out


def parts(
    q: Tensor, cache: Tensor, place: Tensor, count: Tensor, cut: Cut = FLIGHT, split: int | None = None,
    longest: int | None = None, kernel: Any = _part, heads_at_least: int = 16,
) -> Tensor:  # fmt: skip
    """Steps 3 to 5: a program for each part of a lane, and one that merges for each query head.

    Args:
        split: tokens of a part; None: by the length of the longest lane.
        longest: tokens that a lane holds at most; None: the columns of `place`.
        heads_at_least: the query heads of a group are padded to so many: 16 as rows of a product, 8 as columns.
    """
    out, heads, group, dim, scale = _sizes(q, place)
    longest = place.shape[-1] if longest is None else longest
    split = part_length(longest) if split is None else split
    number = max(1, -(-longest // split))
    part = torch.empty(heads, number, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(heads, number, dtype=torch.float32, device=q.device)
    kernel[(heads // group, number)](
        q, cache, place, count, part, lse, place.shape[-1], number, split, scale,
        group, max(heads_at_least, power_of_2(group)), dim, cut.tokens, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    _merge[(heads,)](part, lse, count, out, number, split, group, dim, power_of_2(number))
    return out


def part_length(tokens: int) -> int:
    """Tokens of a part, for the longest lane: enough parts for a whole GPU, and few enough to merge."""
    return next((split for most, split in ((1024, 128), (4096, 256), (16384, 512)) if tokens <= most), 1024)


def _sizes(q: Tensor, place: Tensor) -> tuple[Tensor, int, int, int, float]:
    """The empty result, query heads of all sequences, query heads of a KV head, D, and the scale of base-2 logits."""
    b, hq, dim = q.shape
    if dim < 16 or dim & (dim - 1):
        raise ValueError(f"D = {dim}: these kernels take powers of two from 16 on, kernels/paged_attention.py any.")
    return torch.empty_like(q), b * hq, hq // place.shape[1], dim, math.log2(math.e) / dim**0.5


class Step(NamedTuple):
    title: str
    run: Callable[..., Tensor]


STEPS: dict[str, Step] = {
    "gather": Step("PyTorch: gather, then attend", gather),
    "token": Step("a program for each query head, token by token", partial(query_heads, cut=TOKEN)),
    "tile": Step(f"a program for each query head, {TILE.tokens} tokens at a time", partial(query_heads, cut=TILE)),
    "group": Step("a program for each KV head", partial(kv_heads, cut=GROUP)),
    "split": Step("lanes cut into parts, then merged", partial(parts, cut=SPLIT)),
    "flight": Step("more loads on their way", partial(parts, cut=FLIGHT)),
    "swap": Step("queries as columns", partial(parts, cut=FLIGHT, kernel=_part_swapped, heads_at_least=8)),
}


def inputs(store: PagedStore, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cache, places and counts of a store in one plain format with a table for each head."""
    numbers = store.pages.pool.view(store.dtype).view(-1, 2, store.shape.head_dim)
    return numbers, store.lists.place[layer], store.lists.count[layer]


def variants() -> Iterator[Variant]:
    """Every kernel as it is timed, and in float32."""
    for dtype in ("bf16", "fp32"):
        data = {"p_q": f"*{dtype}", "p_cache": f"*{dtype}", "p_place": "*i32", "p_count": "*i32"}
        whole = data | {"p_out": f"*{dtype}", "width": "i32", "scale": "fp32"}
        part = data | dict.fromkeys(("p_part", "p_lse"), "*fp32") | dict.fromkeys(("width", "parts", "split"), "i32")
        part |= {"scale": "fp32"}
        sizes = {"GROUP": HEADS // KV_HEADS, "DIM": DIM}
        padded = {_kv_head: {"ROWS": 16}, _part: {"ROWS": 16}, _part_swapped: {"COLUMNS": 8}}
        for kernel, signature, cut in (
            (_query_head, whole, TOKEN), (_query_head, whole, TILE), (_kv_head, whole, GROUP), (_part, part, SPLIT),
            (_part_swapped, part, FLIGHT), *((_part, part, cut) for cut in (SWEEP if dtype == "bf16" else ())),
        ):  # fmt: skip
            constants = sizes | {"BLOCK_T": cut.tokens} | padded.get(kernel, {})
            yield Variant(kernel, signature, constants, {"num_warps": cut.warps, "num_stages": cut.stages})
        signature = {"p_part": "*fp32", "p_lse": "*fp32", "p_count": "*i32", "p_out": f"*{dtype}"}
        signature |= {"parts": "i32", "split": "i32"}
        yield Variant(_merge, signature, sizes | {"BLOCK_P": 32})
    yield Variant(_read, {"p_in": "*i32", "p_out": "*i32"}, {"BLOCK": 4096, "TIMES": 4}, {"num_warps": 8})
