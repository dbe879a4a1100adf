"""One new token a sequence: queries and keys are rotated, keys and values quantized into their slots, in one launch.
Twin: `minithink/ref/append.py`, bit for bit.

To use it alone, copy this file, `_common.py`, `_formats.py` and `_rotation.py`. With the GPU as torch's default
device:

    >>> from types import SimpleNamespace as Part
    >>> import torch
    >>> from minithink.kernels.append import append
    >>> pool = torch.zeros(2, 1, 16, 2, 64)  # 2 pages of 16 slots, each a key and a value with D = 64 numbers
    >>> layout = Part(plain=True, slots=16)  # keys and values stay in the model's type
    >>> side = torch.zeros(2, 1, 0, dtype=torch.uint8)  # there are no scales
    >>> numbers = pool.view(torch.uint8).flatten(2)
    >>> pages = Part(layouts=[layout], pool=numbers, side=side, scale=torch.ones(1, 2, 1, 1), nowhere=lambda f: 16)
    >>> shape = Part(layers=1, rows=1, kv_heads=1, head_dim=64, scope="head", sharing=1)
    >>> store = Part(shape=shape, pages=pages, dtype=pool.dtype, ring=torch.zeros(1, 1, 1, 0, 2, 64))
    >>> base = torch.tensor([[[[3]]]])  # int64 [Lt, N, Ht, 1]: slot 3 of page 0; page 1 is trash
    >>> writer = Part(store=store, at=torch.tensor([0]), index=None, bases={0: base})
    >>> q = torch.randn(1, 4, 64)  # [N, Hq, D]
    >>> k, v = torch.randn(2, 1, 1, 64)  # [N, Hkv, D] each
    >>> cos = torch.zeros(1, 1, 64)  # [N, 1, D] float32: an angle of 90°
    >>> sin = torch.cat((-torch.ones(1, 1, 32), torch.ones(1, 1, 32)), dim=-1)  # [N, 1, D] float32
    >>> rotated = append(q, k, v, cos, sin, writer, layer=0)  # [N, Hq, D]
    >>> torch.equal(rotated, q.roll(32, dims=-1) * sin)
    True
    >>> torch.equal(pool[0, 0, 3], torch.cat((k[0].roll(32, dims=-1) * sin[0], v[0])))
    True

A program takes one token and KV head: its g query heads as a tile [g, D], its key and its value each as a tile
[groups, elements of a group], as their formats quantize them. The partner of a channel, D/2 away, is loaded a second
time, from the GPU's cache, so that the rotation fits any tile. One number says where the token goes: its slot in the
first lane of its unit, or its index in the ring (the buffer). Parameters, and codes wider than a byte, are stored
byte by byte, because they may be misaligned if the key before them has another format.

A launch serves one format. If rows have several formats, each format has a launch, and only the first one rotates the
queries. Tokens of other formats have a slot of the trash page, and the launch writes nothing for them. Offsets are
int64.

Bound: q, k and v are read once; q and the codes are written once: (2·g + 2)·2·D bytes in bfloat16 and a slot. This is
2.6 kB for each token and KV head at g = 4, D = 128, as much as attention reads for 5 plain tokens. With one sequence
the launch and latency are the limit: a program is one warp, and its loads wait only for a tensor's scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels import _formats
from minithink.kernels._common import Variant, made_once, power_of_2
from minithink.kernels._formats import (
    Format,
    encode_group,
    pack,
    round_to,
    saturate,
    sharing,
    store_bytes,
    to_fp32,
)
from minithink.kernels._rotation import is_rotated

RING = -1  # in place of a format's index


class Half(NamedTuple):
    """Keys or values of one format, as compile-time constants."""

    kind: str  # see `_formats`
    bits: int
    params: str
    groups: int  # of a token; 1 where no channels share parameters
    elements: int  # of a group
    block: int  # powers of two that hold the groups, and the elements of one
    width: int
    start: int  # of the codes in a slot; in bytes, or where the whole slot is plain in numbers
    side_start: int  # of the parameters


class Place(NamedTuple):
    """What keys and values share: the model's shape, and how slots lie."""

    kv_heads: int
    group: int  # g, query heads of a KV head
    dim: int  # D
    format: int  # its index in the store, or RING
    slots: int  # of a page, in one lane
    slot: int  # from a slot to the next, in bytes or numbers as `Half.start`
    side_slot: int
    layer_lanes: int  # which of its unit's lanes a head is: layer · layer_lanes + head · head_lanes
    head_lanes: int
    lanes: int  # of a unit
    ring: int  # places of the ring; 0: the tokens go into pages
    dtype: str  # of the model: fp32, fp16, bf16


class _Launch(NamedTuple):
    """What a launch for one format, or for the ring, has in common with those of the other layers."""

    at: Tensor  # slots of the tokens, or their places in the ring, [Lt, N, Ht]
    steps: list[int]  # its strides
    limit: int  # the trash slot's number
    codes: Tensor  # what is written to
    place: Place
    k: Half
    v: Half


@triton.jit
def _rotated(p_x, p_cos, p_sin, channel, m, dim):
    """(a, b)·(cos, cos) + (b, a)·(−sin, sin): the float32 numbers of these channels of heads that start at p_x.

    Of the two products the second is not rounded, as in torch's addcmul; the interpreter rounds both.
    """
    partner = tl.where(channel < dim // 2, channel + dim // 2, channel - dim // 2)
    x = to_fp32(tl.load(p_x + channel, m, other=0.0))
    swapped = to_fp32(tl.load(p_x + partner, m, other=0.0))
    cos = tl.load(p_cos + channel, m, other=0.0)
    sin = tl.load(p_sin + channel, m, other=0.0)
    return tl.fma(swapped, sin, x * cos)


@triton.jit
def _tile(F: tl.constexpr):
    """Groups, elements of one, the channels that these are, and which of them exist."""
    BLOCK: tl.constexpr = F.block
    WIDTH: tl.constexpr = F.width
    i_group = tl.arange(0, BLOCK)[:, None]
    element = tl.arange(0, WIDTH)[None, :]
    return i_group, i_group * F.elements + element, (i_group < F.groups) & (element < F.elements)


@triton.jit
def bits_of(x, TYPE: tl.constexpr):
    """float32 of numbers that TYPE holds → int32, their bits as TYPE in the low ones."""
    if TYPE == "fp32":
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    return bits


@triton.jit
def store(x, i_group, channel, m, m_group, p_codes, p_side, p_scale, F: tl.constexpr):
    """Groups of keys or values into their slots. x: float32 [BLOCK, WIDTH], 0 outside of m; i_group, m_group, and the
    pointers to codes and parameters, which may be one for all: [BLOCK, 1]; p_scale: of the tensor's scale."""
    KIND: tl.constexpr = F.kind
    BITS: tl.constexpr = F.bits
    PARAMS: tl.constexpr = F.params
    p_codes += F.start
    if KIND == "plain":
        if p_codes.dtype.element_ty == tl.uint8:  # beside another format
            if PARAMS != "fp32":
                x = saturate(x, PARAMS)
            store_bytes(p_codes + channel * (BITS // 8), bits_of(round_to(x, PARAMS), PARAMS), m, BITS // 8)
        else:
            tl.store(p_codes + channel, round_to(x, PARAMS), m)
    else:
        tensor_scale = 1.0
        if KIND == "fp8" or KIND == "nvfp4":
            tensor_scale = tl.load(p_scale)
        code, scale, minimum = encode_group(saturate(x, "fp32"), m, tensor_scale, KIND, BITS, PARAMS, 1)
        if BITS > 8:
            store_bytes(p_codes + channel * 2, code, m, 2)
        else:
            SHARING: tl.constexpr = sharing(BITS)
            PLACES: tl.constexpr = F.width // SHARING
            place = tl.arange(0, PLACES)[None, :]
            m_code = m_group & (place < F.elements // SHARING)
            o_code = i_group * (F.elements // SHARING) + place
            if BITS == 3:
                store_bytes(p_codes + o_code * 3, pack(code, BITS), m_code, 3)
            else:
                tl.store(p_codes + o_code, pack(code, BITS), m_code)
        p_side += F.side_start
        if KIND == "int":
            SIZE: tl.constexpr = 4 if PARAMS == "fp32" else 2
            store_bytes(p_side + i_group * (2 * SIZE), bits_of(scale, PARAMS), m_group, SIZE)
            store_bytes(p_side + i_group * (2 * SIZE) + SIZE, bits_of(minimum, PARAMS), m_group, SIZE)
        elif is_rotated(KIND):
            SIZE: tl.constexpr = 4 if PARAMS == "fp32" else 2
            store_bytes(p_side + i_group * SIZE, bits_of(scale, PARAMS), m_group, SIZE)
        elif KIND != "fp8":
            tl.store(p_side + i_group, scale, m_group)


@triton.jit(do_not_specialize=["layer", "limit", "layers", "rows"])
def _append(
    p_q,
    p_k,
    p_v,
    p_cos,
    p_sin,
    p_out,
    p_rows,
    p_at,
    p_codes,
    p_side,
    p_scale,
    layer,
    limit,
    layers,
    rows,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    cos_token,
    sin_token,
    at_layer,
    at_token,
    at_head,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    MODEL: tl.constexpr = C.dtype
    i_n = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    # Load first what the stores wait for.
    at = tl.load(p_at + layer * at_layer + i_n * at_token + i_head * at_head).to(tl.int64)
    row = tl.load(p_rows + i_n).to(tl.int64)
    p_cos += i_n * cos_token
    p_sin += i_n * sin_token
    if QUERIES:
        i = tl.arange(0, BLOCK_G)[:, None]
        i_query = i_head * C.group + i
        channel = tl.arange(0, BLOCK_D)[None, :]
        m_q = (i < C.group) & (channel < C.dim)
        q = _rotated(p_q + i_n * q_token + i_query * q_head, p_cos, p_sin, channel, m_q, C.dim)
        o_out = (i_n * (C.kv_heads * C.group) + i_query) * C.dim
        tl.store(p_out + o_out + channel, round_to(q, MODEL), m_q)
    if at < limit:
        if C.ring > 0:
            slot = ((layer * rows + row) * C.kv_heads + i_head) * C.ring + at
        else:
            slot = at + (layer * C.layer_lanes + i_head * C.head_lanes) * C.slots
        p_code = p_codes + slot * C.slot
        p_param = p_side + slot * C.side_slot
        p_own = p_scale + (2 * C.format * layers + layer) * rows + row
        i_group, k_channel, m_k = _tile(K)
        k = _rotated(p_k + i_n * k_token + i_head * k_head, p_cos, p_sin, k_channel, m_k, C.dim)
        store(to_fp32(round_to(k, MODEL)), i_group, k_channel, m_k, i_group < K.groups, p_code, p_param, p_own, K)
        i_group, v_channel, m_v = _tile(V)
        v = to_fp32(tl.load(p_v + i_n * v_token + i_head * v_head + v_channel, m_v, other=0.0))
        store(v, i_group, v_channel, m_v, i_group < V.groups, p_code, p_param, p_own + layers * rows, V)


def append(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, writer: Any, layer: int) -> Tensor:
    """Rotate one new token of each sequence, and store its keys and values in the slots that the writer has taken.

    Args:
        q: [N, Hq, D], unrotated; not copied if the last axis is dense, and neither are k and v.
        k, v: [N, Hkv, D]. The key is unrotated; it is stored rotated, and rounded to its dtype.
        cos, sin: [N, 1, D] float32, as for `rope`.
        writer: of a PagedStore, for these N rows; the kernel writes into its pages or its ring directly. If it has a
            dict `once`, the constants of the launches are kept there for the next layers.
        layer: the layer of these keys and values.

    Returns:
        The rotated queries: [N, Hq, D] in the dtype of `q`, contiguous.
    """
    store = writer.store
    pages = store.pages
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, cos, sin))
    group = heads // kv_heads
    block_g = power_of_2(group)
    block_d = power_of_2(dim)
    launches = made_once(writer, (append, group, q.dtype), partial(_launches, writer, group, q.dtype))
    for i, one in enumerate(launches):
        at_layer, at_token, at_head = one.steps
        _append[n, kv_heads](
            p_q=q,
            p_k=k,
            p_v=v,
            p_cos=cos,
            p_sin=sin,
            p_out=out,
            p_rows=writer.at,
            p_at=one.at,
            p_codes=one.codes,
            p_side=pages.side,
            p_scale=pages.scale,
            layer=layer,
            limit=one.limit,
            layers=store.shape.layers,
            rows=store.shape.rows,
            q_token=q.stride(0),
            q_head=q.stride(1),
            k_token=k.stride(0),
            k_head=k.stride(1),
            v_token=v.stride(0),
            v_head=v.stride(1),
            cos_token=cos.stride(0),
            sin_token=sin.stride(0),
            at_layer=at_layer,
            at_token=at_token,
            at_head=at_head,
            C=one.place,
            K=one.k,
            V=one.v,
            QUERIES=i == 0,
            BLOCK_G=block_g,
            BLOCK_D=block_d,
            num_warps=warps(block_g, block_d),
            enable_fp_fusion=False,
        )
    return out


def _launches(writer: Any, group: int, dtype: torch.dtype) -> list[_Launch]:
    """One launch for the ring, if there is one, and one for each format. group: g; dtype: of the model."""
    store = writer.store
    pages = store.pages
    dim = store.shape.head_dim
    name = _formats.dtype_name(dtype)
    plain = plain_halves(_formats.dtype_name(store.dtype), dim)
    launches = []
    if writer.index is not None:
        at = writer.index[None, :, None]
        ring = place(store, RING, group, name)
        launches.append(_Launch(at, steps(at), store.ring.shape[3], store.ring, ring, *plain))
    for f, base in writer.bases.items():
        lay = pages.layouts[f]
        at = base[..., 0]
        pool = pages.pool.view(store.dtype) if lay.plain else pages.pool
        own = plain if lay.plain else halves(lay.k, lay.v, dim)
        launches.append(_Launch(at, steps(at), pages.nowhere(f), pool, place(store, f, group, name), *own))
    return launches


def steps(of: Tensor) -> list[int]:
    """Of [Lt, N, Ht, …] the strides of the first three axes, 0 where tables are one for all layers or heads."""
    return [0 if size == 1 else step for size, step in zip(of.shape[:3], of.stride()[:3], strict=True)]


def place(store: Any, f: int, group: int, dtype: str) -> Place:
    """How the slots of a format lie in a store, or the places of its ring."""
    shape = store.shape
    pages = store.pages
    ring = store.ring.shape[3] if f == RING else 0
    slots = 0
    slot = 2 * shape.head_dim
    side_slot = 0
    if f != RING:
        lay = pages.layouts[f]
        size = store.dtype.itemsize if lay.plain else 1
        slots = lay.slots
        slot = pages.pool.shape[-1] // lay.slots // size
        side_slot = pages.side.shape[-1] // lay.slots
    return Place(
        kv_heads=shape.kv_heads,
        group=group,
        dim=shape.head_dim,
        format=f,
        slots=slots,
        slot=slot,
        side_slot=side_slot,
        layer_lanes=shape.kv_heads if shape.scope == "sequence" else 0,
        head_lanes=0 if shape.scope == "head" else 1,
        lanes=shape.sharing,
        ring=ring,
        dtype=dtype,
    )


def plain_halves(dtype: str, dim: int) -> tuple[Half, Half]:
    """Keys and values as the model's numbers."""
    return half("plain", 0, dtype, 0, dim), half("plain", 0, dtype, 0, dim, dim)


def halves(k: Format, v: Format, dim: int, by_token: bool = False) -> tuple[Half, Half]:
    """Keys and values of formats that are no store's plain one, side by side in a slot; keys by token have no
    parameters there."""
    start = dim * k.bits // 8
    side_start = 0 if by_token else dim // (k.group or dim) * k.param_bytes
    return half(**_constants(k), dim=dim), half(**_constants(v), dim=dim, start=start, side_start=side_start)


def half(kind: str, bits: int, params: str, group: int, dim: int, start: int = 0, side_start: int = 0) -> Half:
    """Keys or values, from what `_formats.constexprs` says of their format."""
    elements = group or dim
    groups = dim // elements
    return Half(kind, bits, params, groups, elements, power_of_2(groups), power_of_2(elements), start, side_start)


def _constants(fmt: Format) -> dict[str, Any]:
    return {name.lower(): value for name, value in _formats.constexprs(fmt).items()}


def warps(block_g: int, block_d: int) -> int:
    """One, unless a KV head has many query heads."""
    return max(1, min(4, block_g * block_d // 512))


def variants() -> Iterator[Variant]:
    """The ring, pages of the model's numbers, and formats of 2 to 32 bits, alike and apart."""
    names = "q_token q_head k_token k_head v_token v_head cos_token sin_token at_layer at_token at_head"
    common = dict.fromkeys([*names.split(), "layer", "limit", "layers", "rows"], "i32")
    common |= dict.fromkeys(("p_cos", "p_sin", "p_scale"), "*fp32")
    common |= {"p_rows": "*i64", "p_at": "*i64", "p_side": "*u8"}
    formats = {  # kind, bits, parameters, group
        "nvfp4": ("nvfp4", 4, "", 16),
        "ternary": ("ternary", 2, "", 16),
        "ternary_best": ("ternary", 2, "best", 16),
        "fp8": ("fp8", 8, "", 0),
        "int2s": ("int2s", 2, "", 32),
        "int4s": ("int4s", 4, "", 16),
        "int2": ("int", 2, "fp16", 32),
        "int4": ("int", 4, "fp16", 16),
        "int8": ("int", 8, "fp32", 32),
        "int16": ("int", 16, "fp32", 32),
        "tq1": ("tq-mse", 1, "fp16", 0),
        "tq2": ("tq-norm", 2, "fp32", 0),
        "tq3": ("tq-none", 3, "fp16", 0),
        "tq4": ("tq-unbiased", 4, "fp16", 0),
        "fp16": ("plain", 16, "fp16", 0),
        "bf16": ("plain", 16, "bf16", 0),
    }
    pairs = [
        "nvfp4/nvfp4",
        "ternary/ternary_best",
        "fp8/nvfp4",
        "int2s/int8",
        "int4s/int16",
        "int4/int2",
        "bf16/fp16",
    ]
    rotated = ["tq4/tq4", "tq3/tq1", "nvfp4/tq2"]
    for dtype, dim, group in (("bf16", 128, 4), ("fp16", 96, 6), ("fp32", 64, 1)):
        plain = ("plain", 32 if dtype == "fp32" else 16, dtype, 0)
        tile = power_of_2(group), power_of_2(dim)
        own_pairs = pairs if dim == 96 else pairs + rotated
        signature = common | dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), f"*{dtype}")
        for k, v in ((plain, plain), *([formats[name] for name in pair.split("/")] for pair in own_pairs)):
            for ring in (16, 0) if k is plain else (0,):
                own = Place(2, group, dim, RING if ring else 1, 16, 2 * dim, 8, 2, 1, 4, ring, dtype)
                constexprs = {
                    "C": own,
                    "K": half(*k, dim),
                    "V": half(*v, dim, dim, 8),
                    "QUERIES": True,
                    "BLOCK_G": tile[0],
                    "BLOCK_D": tile[1],
                }
                codes = {"p_codes": f"*{dtype}" if k is plain else "*u8"}
                options = {"num_warps": warps(*tile), "enable_fp_fusion": False}
                yield Variant(_append, signature | codes, constexprs, options)
