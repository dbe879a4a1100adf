# mypy: allow-untyped-defs
"""Decode attention over pages, step by step: what each step of tutorial 05 gains on a GPU.

    gather   PyTorch: copy keys and values together, then attend
    token    a program takes a query head, and goes through its lane token by token
    tile     the same with 32 tokens at a time
    group    a program takes a KV head: its query heads share what is read
    split    lanes are cut into parts, which a second kernel merges by their log-sum-exp
    flight   the same with tiles, warps and stages that keep more loads on their way

All take q [B, Hq, D], a cache [places, 2, D] with a token's key and value side by side, int32 places [B, Hkv, S] of
every lane's tokens, and counts [B, Hkv] of them; D is a power of two from 16 on. All return [B, Hq, D], 0 for a lane
without tokens. Beside them are timed `kernels/paged_attention.py`, on the same store, and torch's attention, on
contiguous keys and values. Lanes are as they are after long use, and each step is compared with the reference before
it is timed: see `bench/attention.py`. What is 100 % is the bandwidth of a kernel that only reads, in the same run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink import results
from minithink.bench import attention
from minithink.bench.attention import DIM, GENERATIONS, HEADS, KV_HEADS
from minithink.commands import positive
from minithink.errors import MinithinkError
from minithink.kernels._common import INTERPRETED, Variant, power_of_2
from minithink.kernels.paged_attention import paged_attention
from minithink.kv.contract import Storage
from minithink.kv.store import PagedStore
from minithink.ref.decode_attention import decode_attention
from minithink.ref.paged_attention import paged_attention as reference

DEFAULT = "steps"
SHAPES = ((64, 4096), (1, 16384))  # sequences, tokens of each
TOLERANCE = 2e-2  # of the largest value, in bfloat16
WIDEN = tl.constexpr(INTERPRETED)  # numpy knows no bfloat16


class Cut(NamedTuple):
    """How a program goes through its tokens."""

    tokens: int  # of a tile
    warps: int
    stages: int  # 1: a tile is loaded when it is needed; more: tiles are on their way while others are in work


TOKEN, TILE, GROUP, SPLIT = Cut(1, 1, 1), Cut(32, 4, 1), Cut(64, 4, 1), Cut(64, 4, 1)
# A key waits for its place, so that stages are shared by two loads, one after the other: of five, two have keys.
FLIGHT = Cut(64, 2, 5)
# Around it, each of the three numbers alone.
SWEEP = (
    FLIGHT, Cut(64, 2, 1), Cut(64, 2, 2), Cut(64, 2, 3), Cut(64, 2, 7), Cut(64, 1, 5), Cut(64, 4, 5), Cut(64, 8, 5),
    Cut(16, 2, 5), Cut(32, 2, 5), Cut(128, 2, 5),
)  # fmt: skip


def gather(q: Tensor, cache: Tensor, place: Tensor, count: Tensor) -> Tensor:
    """Step 0, the reference."""
    valid = torch.arange(place.shape[-1], device=q.device) < count[..., None]  # [B, Hkv, S]
    found = cache[torch.where(valid, place, 0).long()]  # [B, Hkv, S, 2, D]
    k, v = found.masked_fill(~valid[..., None, None], 0).unbind(-2)  # what is free may hold anything
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
def _merge(
    p_part, p_lse, p_count, p_out, parts, split, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_P: tl.constexpr
):
    i_head = tl.program_id(0)
    channel, part = tl.arange(0, DIM), tl.arange(0, BLOCK_P)
    m_part = part < tl.cdiv(tl.load(p_count + i_head // GROUP), split)  # the others were never written
    o_part = (i_head * parts + part).to(tl.int64)
    lse = tl.load(p_lse + o_part, m_part, other=float("-inf"))
    out = tl.load(p_part + o_part[:, None] * DIM + channel[None, :], m_part[:, None], other=0.0)
    # Σ_i 2^lse_i · out_i / Σ_i 2^lse_i, with the largest lse taken off
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    tl.store(p_out + i_head * DIM + channel, tl.sum(out * weight[:, None], 0) / tl.where(total > 0, total, 1.0))


@triton.jit
def _read(p_in, p_out, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    """Nothing but reading: what the others are measured by."""
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
    longest: int | None = None, kernel: Any = _part,
) -> Tensor:  # fmt: skip
    """Steps 3 and 4: a program for each part of a lane, and one that merges for each query head.

    Args:
        split: tokens of a part; None: by the length of the longest lane.
        longest: tokens that a lane holds at most; None: the columns of `place`.
    """
    out, heads, group, dim, scale = _sizes(q, place)
    longest = place.shape[-1] if longest is None else longest
    split = part_length(longest) if split is None else split
    number = max(1, -(-longest // split))
    part = torch.empty(heads, number, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(heads, number, dtype=torch.float32, device=q.device)
    kernel[(heads // group, number)](
        q, cache, place, count, part, lse, place.shape[-1], number, split, scale,
        group, max(16, power_of_2(group)), dim, cut.tokens, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    _merge[(heads,)](part, lse, count, out, number, split, group, dim, power_of_2(number))
    return out


def part_length(tokens: int) -> int:
    """Tokens of a part, for the longest lane: many enough parts for all of a GPU, and few enough to merge."""
    return next((split for most, split in ((1024, 128), (4096, 256), (16384, 512)) if tokens <= most), 1024)


def _sizes(q: Tensor, place: Tensor) -> tuple[Tensor, int, int, int, float]:
    """The empty result, query heads of all sequences, those of a KV head, D, and what base-2 logits are scaled by."""
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
    "tile": Step(f"the same, {TILE.tokens} tokens at a time", partial(query_heads, cut=TILE)),
    "group": Step("a program for each KV head", partial(kv_heads, cut=GROUP)),
    "split": Step("lanes cut into parts, then merged", partial(parts, cut=SPLIT)),
    "flight": Step("more loads on their way", partial(parts, cut=FLIGHT)),
}
KERNEL, PEER = "`kernels/paged_attention.py`", "torch's attention, contiguous"


def inputs(store: PagedStore, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the steps read of a store in one plain format with a table for each head: cache, places and counts."""
    numbers = store.pool.view(store.dtype).view(-1, 2, store.shape.head_dim)
    return numbers, store.place[layer], store.count[layer]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench steps`."""
    add = parser.add_argument
    add("--shapes", type=_shapes, default=list(SHAPES), metavar="NxT,NxT",
        help=f"sequences x tokens of each (default {','.join(f'{n}x{t}' for n, t in SHAPES)})")  # fmt: skip
    add("--sweep", action=argparse.BooleanOptionalAction, default=True, help="time other cuts too (default)")
    add("--repeats", type=positive, default=20, metavar="N", help="replays of each graph (default 20)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def _shapes(text: str) -> list[tuple[int, int]]:
    """For argparse: "64x4096,1x16384"."""
    out = []
    for part in text.split(","):
        sizes = part.split("x")
        if len(sizes) != 2:
            raise argparse.ArgumentTypeError(f"{part!r} is not like 64x4096, sequences x tokens")
        out.append((positive(sizes[0]), positive(sizes[1])))
    return out


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Check, measure, write, print."""
    if not torch.cuda.is_available():
        raise MinithinkError("bench steps measures kernels on an NVIDIA GPU, and torch finds none here.")
    if INTERPRETED:
        raise MinithinkError("bench steps cannot measure what is interpreted: unset TRITON_INTERPRET.")
    result = results.new(DEFAULT, list(argv), "cuda")
    properties = torch.cuda.get_device_properties(0)
    result["settings"] = {
        "query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16", "repeats": args.repeats,
        "generations": GENERATIONS, "multiprocessors": properties.multi_processor_count,
        "cuts": {name: step.run.keywords["cut"]._asdict() for name, step in STEPS.items()
                 if isinstance(step.run, partial)},
    }  # fmt: skip
    result["measurements"], result["sweep"] = [], []
    path = Path(args.output) if args.output else results.default_path(DEFAULT)
    result["read_bytes_per_second"] = limit = read_speed()
    result["copy_bytes_per_second"] = attention.copy_speed()
    print(f"read: {limit / 1e12:.2f} TB/s, copy: {result['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    result["errors"] = check()
    for batch, length in args.shapes:
        for m in shape(batch, length, args.repeats, limit, args.sweep):
            result["sweep" if "cut" in m else "measurements"].append(m)
            results.write(path, result)
            print(f"{batch:4} x {length:6}  {m['step']:8} {m['microseconds']:10.1f} us  {m['share']:6.1%}  "
                  f"{m.get('cut', '')}", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    result["complete"] = True
    results.write(path, result)
    print(f"written to {path}", file=sys.stderr)
    return 0


def shape(batch: int, length: int, repeats: int, limit: float, sweep: bool) -> Iterator[dict[str, Any]]:
    """One batch size and length: every step, the kernel, other cuts; then torch's attention."""
    plain = batch * length * KV_HEADS * DIM * 4  # bytes of keys and values
    layers = max(1, -(-attention.ROTATE // plain))
    here = {"batch": batch, "length": length, "layers": layers}
    for row in paged(batch, length, layers, repeats, sweep):
        yield here | row | {"share": row["bytes"] / row["microseconds"] * 1e6 / limit}
    torch.cuda.empty_cache()
    seconds, backend = attention.peer(batch, length, layers, repeats)
    row = {"step": "sdpa", "what": PEER, "microseconds": seconds * 1e6, "bytes": plain}
    yield here | row | {"share": plain / seconds / limit, "backend": backend}


def paged(batch: int, length: int, layers: int, repeats: int, sweep: bool) -> Iterator[dict[str, Any]]:
    """What reads pages, all from one store."""
    store = attention.used_store(Storage(), layers, batch, length)
    q = torch.randn(layers, batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    read, sources = store.reader(), [inputs(store, layer) for layer in range(layers)]
    bound = attention.bytes_read(store, length) * batch * KV_HEADS

    def row(name: str, title: str, call: Callable[[int], Any]) -> dict[str, Any]:
        microseconds = attention.timed(call, layers, repeats) * 1e6
        return {"step": name, "what": title, "microseconds": microseconds, "bytes": bound}

    def step(run: Callable[..., Tensor], **how: Any) -> Callable[[int], Any]:
        return lambda i: run(q[i], *sources[i], **how)

    for name, (title, run) in STEPS.items():
        how = {"longest": length} if name in ("split", "flight") else {}
        yield row(name, title, step(run, **how))
    yield row("kernel", KERNEL, lambda i: paged_attention(q[i], read, i))
    for cut in SWEEP if sweep else ():
        yield row("flight", STEPS["flight"].title, step(parts, cut=cut, longest=length)) | {"cut": cut._asdict()}


def check() -> dict[str, float]:
    """The largest error of each step on a small case, relative to the largest value of the reference."""
    store = attention.used_store(Storage(), 2, 3, 1500)
    store.count[1] = torch.randint(1, 1500, store.count[1].shape, device="cuda", dtype=store.count.dtype)
    store.pos.masked_fill_(torch.arange(store.pos.shape[-1], device="cuda") >= store.count[..., None], -1)
    q = torch.randn(3, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    want, _ = reference(q.float(), attention._as_float32(store), 1)
    runs: dict[str, Callable[..., Tensor]] = {name: step.run for name, step in STEPS.items()}
    runs |= {f"tokens, warps, stages {tuple(cut)}": partial(parts, cut=cut) for cut in SWEEP}
    errors = {}
    for name, run in runs.items():
        got = run(q, *inputs(store, 1)).float()
        errors[name] = float((got - want).abs().max() / want.abs().max())
        if not errors[name] < TOLERANCE:
            raise MinithinkError(f"{name} differs from the reference by {errors[name]:.3g} of its largest value.")
    return errors


def read_speed() -> float:
    """Bytes read a second by a kernel that reads 4 GiB and does nothing else."""
    block, times = 4096, 4
    x = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    programs = x.numel() // (block * times)
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    return x.nbytes / attention.timed(lambda i: _read[(programs,)](x, out, block, times, num_warps=8), 1, 10)


def variants() -> Iterator[Variant]:
    """Every kernel as it is timed, and in float32."""
    for dtype in ("bf16", "fp32"):
        data = {"p_q": f"*{dtype}", "p_cache": f"*{dtype}", "p_place": "*i32", "p_count": "*i32"}
        whole = data | {"p_out": f"*{dtype}", "width": "i32", "scale": "fp32"}
        part = data | dict.fromkeys(("p_part", "p_lse"), "*fp32") | dict.fromkeys(("width", "parts", "split"), "i32")
        part |= {"scale": "fp32"}
        sizes = {"GROUP": HEADS // KV_HEADS, "DIM": DIM}
        for kernel, signature, cut in (
            (_query_head, whole, TOKEN), (_query_head, whole, TILE), (_kv_head, whole, GROUP), (_part, part, SPLIT),
            *((_part, part, cut) for cut in (SWEEP if dtype == "bf16" else ())),
        ):  # fmt: skip
            constants = sizes | {"BLOCK_T": cut.tokens} | ({} if kernel is _query_head else {"ROWS": 16})
            yield Variant(kernel, signature, constants, {"num_warps": cut.warps, "num_stages": cut.stages})
        signature = {"p_part": "*fp32", "p_lse": "*fp32", "p_count": "*i32", "p_out": f"*{dtype}"}
        signature |= {"parts": "i32", "split": "i32"}
        yield Variant(_merge, signature, sizes | {"BLOCK_P": 32})
    yield Variant(_read, {"p_in": "*i32", "p_out": "*i32"}, {"BLOCK": 4096, "TIMES": 4}, {"num_warps": 8})
