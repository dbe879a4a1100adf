"""Move full buffers into pages: quantize the waiting keys and values into their slots, in all layers at once.
Twin: `minithink/ref/flush.py`, byte for byte.

To use it alone, copy this file, `append.py`, `_common.py`, `_formats.py` and `_rotation.py`. With the GPU as torch's
default device:

    >>> from types import SimpleNamespace as Part
    >>> import torch
    >>> from minithink.kernels.flush import flush
    >>> ring = torch.randint(-8, 9, (1, 1, 1, 4, 2, 64)).float()  # [L, B, Hkv, R, 2, D]: 4 keys and values wait
    >>> pool = torch.zeros(2, 1, 16 * 128, dtype=torch.uint8)  # 2 pages of 16 slots, each a key and a value
    >>> fp8 = Part(name="fp8", bits=8, group=0, by="channel", param_bytes=0, tensor_scaled=True)
    >>> layout = Part(k=fp8, v=fp8, plain=False, by_token=False, slots=16)
    >>> none = torch.zeros(2, 1, 0, dtype=torch.uint8)  # fp8 has no scales of groups
    >>> memory = {"pool": pool, "side": none, "group_params": none, "scale": torch.ones(1, 2, 1, 1)}
    >>> pages = Part(layouts=[layout], nowhere=lambda f: 16, **memory)  # page 1 is trash
    >>> shape = Part(layers=1, rows=1, kv_heads=1, head_dim=64, scope="head", sharing=1)
    >>> store = Part(shape=shape, pages=pages, dtype=ring.dtype, ring=ring, storage=Part(buffer=4))
    >>> base = torch.tensor([[[[2, 3, 5, 7]]]])  # int64 [Lt, N, Ht, R]: the tokens' slots
    >>> flush(Part(store=store, at=torch.tensor([0]), bases={0: base}))
    >>> stored = pool.view(torch.float8_e4m3fn).view(2, 16, 2, 64)[0, [2, 3, 5, 7]]
    >>> torch.equal(stored.float(), ring[0, 0, 0])
    True

A program takes some tokens of one buffer and lane: a whole group of keys by token, else TOKENS tokens. Keys by token
are a tile [tokens, D], whose columns are the groups. Keys and values by channel are a tile [tokens · groups, elements
of a group], and are stored as by `append`. Tokens that were evicted while they waited have a slot of the trash page;
they are not read, and do not change the parameters of a group.

A launch serves one format; tokens of another format have slots of the trash page too.

Bound: latency and the launch, because few rows are due in a step. The buffer is read once, codes and parameters are
written once: 4·D bytes read and about D written for each token and lane in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from minithink.kernels._common import Variant, power_of_2
from minithink.kernels._formats import dtype_name, encode_group, pack, saturate, store_bytes, to_fp32
from minithink.kernels.append import Place, bits_of, half, halves, place, plain_halves, steps, store

TOKENS = 16  # of a program, where keys are quantized by channel
WARPS = 4


@triton.jit
def _by_channel(
    p_ring,
    p_at,
    p_codes,
    p_side,
    p_own,
    first,
    limit,
    lane_slots,
    C: tl.constexpr,
    F: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Keys or values of some tokens. p_ring: the buffer's first; p_at: of the slots; p_own: of a tensor's scale."""
    BLOCK: tl.constexpr = F.block
    WIDTH: tl.constexpr = F.width
    line = tl.arange(0, TOKENS * BLOCK)[:, None]
    i_token = first + line // BLOCK
    i_group = line % BLOCK
    at = tl.load(p_at + i_token, i_token < C.ring, other=limit)
    m_group = (at < limit) & (i_group < F.groups)
    element = tl.arange(0, WIDTH)[None, :]
    channel = i_group * F.elements + element
    m = m_group & (element < F.elements)
    x = to_fp32(tl.load(p_ring + i_token * (2 * C.dim) + channel, m, other=0.0))
    slot = at + lane_slots
    store(x, i_group, channel, m, m_group, p_codes + slot * C.slot, p_side + slot * C.side_slot, p_own, F)


@triton.jit
def _by_token(
    p_ring,
    p_at,
    p_codes,
    p_params,
    p_own,
    first,
    limit,
    lane_slots,
    C: tl.constexpr,
    F: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys of one group of tokens. p_params: of the group's row of scales."""
    KIND: tl.constexpr = F.kind
    BITS: tl.constexpr = F.bits
    PARAMS: tl.constexpr = F.params
    i_token = first + tl.arange(0, TOKENS)[:, None]
    at = tl.load(p_at + i_token, i_token < C.ring, other=limit)
    channel = tl.arange(0, BLOCK_D)[None, :]
    m_channel = channel < C.dim
    m = (at < limit) & m_channel
    if tl.max((at < limit).to(tl.int32)) > 0:
        x = saturate(to_fp32(tl.load(p_ring + i_token * (2 * C.dim) + channel, m, other=0.0)), "fp32")
        tensor_scale = 1.0
        if KIND == "nvfp4":
            tensor_scale = tl.load(p_own)
        code, scale, minimum = encode_group(x, m, tensor_scale, KIND, BITS, PARAMS, 0)
        p_code = p_codes + (at + lane_slots) * C.slot + F.start
        if BITS > 8:
            store_bytes(p_code + channel * 2, code, m, 2)
        else:
            SHARING: tl.constexpr = 8 // BITS  # codes of a byte
            byte = tl.arange(0, BLOCK_D // SHARING)[None, :]
            tl.store(p_code + byte, pack(code, BITS), (at < limit) & (byte < C.dim // SHARING))
        if KIND == "int":
            SIZE: tl.constexpr = 4 if PARAMS == "fp32" else 2
            store_bytes(p_params + channel * (2 * SIZE), bits_of(scale, PARAMS), m_channel, SIZE)
            store_bytes(p_params + channel * (2 * SIZE) + SIZE, bits_of(minimum, PARAMS), m_channel, SIZE)
        else:
            tl.store(p_params + channel, scale, m_channel)


@triton.jit(do_not_specialize=["limit", "rows"])
def _flush(
    p_ring,
    p_rows,
    p_at,
    p_group,
    p_codes,
    p_side,
    p_shared,
    p_scale,
    limit,
    rows,
    row_bytes,
    at_layer,
    at_token,
    at_head,
    group_layer,
    group_token,
    group_head,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n = (tl.program_id(0) // C.kv_heads).to(tl.int64)
    i_head = (tl.program_id(0) % C.kv_heads).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    i_part = tl.program_id(2)
    row = tl.load(p_rows + i_n).to(tl.int64)
    p_at += layer * at_layer + i_n * at_token + i_head * at_head
    p_ring += ((layer * rows + row) * C.kv_heads + i_head) * (C.ring * 2 * C.dim)
    lane = layer * C.layer_lanes + i_head * C.head_lanes
    layers = tl.num_programs(1)
    p_own = p_scale + (2 * C.format * layers + layer) * rows + row
    first = i_part * TOKENS
    lane_slots = lane * C.slots
    if BY_TOKEN:
        group = tl.load(p_group + layer * group_layer + i_n * group_token + i_head * group_head + i_part).to(tl.int64)
        p_params = p_shared + (group * C.lanes + lane) * row_bytes
        _by_token(p_ring, p_at, p_codes, p_params, p_own, first, limit, lane_slots, C, K, TOKENS, BLOCK_D)
    else:
        _by_channel(p_ring, p_at, p_codes, p_side, p_own, first, limit, lane_slots, C, K, TOKENS)
    p_own += layers * rows
    _by_channel(p_ring + C.dim, p_at, p_codes, p_side, p_own, first, limit, lane_slots, C, V, TOKENS)


def flush(writer: Any) -> None:
    """Quantize the keys and values that wait in the buffers of some rows, in all layers, and write them into slots.

    Args:
        writer: knows the rows, the slot of each token, and the rows of scales for groups of keys by token.
    """
    store = writer.store
    pages = store.pages
    dim = store.shape.head_dim
    n = len(writer.at)
    heads = store.shape.kv_heads
    layers = store.shape.layers
    if not n:
        return
    for f, base in writer.bases.items():
        lay = pages.layouts[f]
        dtype = dtype_name(store.dtype)
        k, v = plain_halves(dtype, dim) if lay.plain else halves(lay.k, lay.v, dim, lay.by_token)
        pool = pages.pool.view(store.dtype) if lay.plain else pages.pool
        group = writer.groups[f] if lay.by_token else base
        tokens = power_of_2(min(lay.k.group if lay.by_token else TOKENS, store.storage.buffer))
        where = place(store, f, 1, dtype)._replace(ring=store.storage.buffer)
        at_layer, at_token, at_head = steps(base)
        group_layer, group_token, group_head = steps(group)
        _flush[n * heads, layers, triton.cdiv(store.storage.buffer, tokens)](
            p_ring=store.ring,
            p_rows=writer.at,
            p_at=base,
            p_group=group,
            p_codes=pool,
            p_side=pages.side,
            p_shared=pages.group_params,
            p_scale=pages.scale,
            limit=pages.nowhere(f),
            rows=store.shape.rows,
            row_bytes=pages.group_params.shape[-1],
            at_layer=at_layer,
            at_token=at_token,
            at_head=at_head,
            group_layer=group_layer,
            group_token=group_token,
            group_head=group_head,
            C=where,
            K=k,
            V=v,
            BY_TOKEN=lay.by_token,
            TOKENS=tokens,
            BLOCK_D=power_of_2(dim),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def variants() -> Iterator[Variant]:
    """Keys by token and by channel, formats of 2 to 16 bits."""
    names = "limit rows row_bytes at_layer at_token at_head group_layer group_token group_head"
    common = dict.fromkeys(names.split(), "i32") | {"p_scale": "*fp32", "p_rows": "*i64", "p_at": "*i64"}
    common |= dict.fromkeys(("p_codes", "p_side", "p_shared"), "*u8")
    for dtype, dim in (("bf16", 128), ("fp16", 96), ("fp32", 64)):
        for by_token, tokens, k, v in (
            (True, 16, ("nvfp4", 4, "", 16), ("nvfp4", 4, "", 16)),
            (True, 32, ("int", 2, "fp16", 32), ("int", 2, "fp16", 32)),
            (True, 16, ("ternary", 2, "", 16), ("fp8", 8, "", 0)),
            (True, 16, ("ternary", 2, "best", 16), ("ternary", 2, "best", 16)),
            (True, 16, ("int", 16, "fp32", 16), ("int", 8, "fp32", 32)),
            (False, 16, ("nvfp4", 4, "", 16), ("nvfp4", 4, "", 16)),
            (False, 16, ("ternary", 2, "", 16), ("int4s", 4, "", 16)),
            (False, 16, ("tq-unbiased", 4, "fp16", 0), ("tq-norm", 3, "fp32", 0)),
        ):
            if k[0].startswith("tq") and dim == 96:
                continue
            constexprs = {
                "C": Place(2, 1, dim, 1, 16, 2 * dim, 8, 2, 1, 2, 32, dtype),
                "K": half(*k, dim),
                "V": half(*v, dim, dim, 8),
                "BY_TOKEN": by_token,
                "TOKENS": tokens,
                "BLOCK_D": power_of_2(dim),
            }
            signature = common | {"p_ring": f"*{dtype}", "p_group": "*i32" if by_token else "*i64"}
            yield Variant(_flush, signature, constexprs, {"num_warps": WARPS, "enable_fp_fusion": False})
