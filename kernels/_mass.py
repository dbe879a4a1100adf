"""The attention that each token got, from what `_attend` of `paged_attention.py` has noted of its logits.

Used by `paged_attention.py`.

    _mass       exp(logit − lse) of each query head, combined over the query heads of a KV head
    _max_logit  the same if the heads' largest logit counts: a softmax of its own, over these logits

Either writes a new tensor, or straight into the rows where the observations of a store are kept.

Bound: memory. For each token 4 bytes of each query head are read (2 if noted as fp16) and 4 bytes of each KV head
written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels._layout import Cache
from minithink.kernels._parts import unit_of_lane

BLOCK = 512  # tokens of a program of `_mass`
AT_ONCE = 128  # tokens that `_max_logit` takes at once
# Triton must not compile anew for one of these that is 1 or a multiple of 16.
NUMBERS = ["table_layer", "width", "seen", "rows", "out_row", "out_head"]


@triton.jit
def _tokens(p_rows, p_count, table_layer, rows, i_lane, C: tl.constexpr):
    """The number of tokens that the i-th of the N · Hkv lanes holds."""
    i_n = i_lane // C.kv_heads
    i_head = i_lane % C.kv_heads
    return tl.load(p_count + unit_of_lane(table_layer, tl.load(p_rows + i_n), rows, i_head, C))


@triton.jit
def _out(p_mass, p_rows, p_active, i_lane, out_row, out_head, heads, C: tl.constexpr, IN_PLACE: tl.constexpr):
    """Where the mass of a lane's first of `heads` heads is written, and whether it is. IN_PLACE: p_mass has all rows
    of the store, and only those of active rows change."""
    i_n = i_lane // C.kv_heads
    wanted = i_n >= 0
    if IN_PLACE:
        wanted = tl.load(p_active + i_n) != 0
        i_n = tl.load(p_rows + i_n)
    return p_mass + i_n * out_row + (i_lane % C.kv_heads) * heads * out_head, wanted


@triton.jit(do_not_specialize=NUMBERS)
def _mass(
    p_seen,
    p_top,
    p_lse,
    p_mass,
    p_rows,
    p_active,
    p_count,
    table_layer,
    width,
    seen,
    rows,
    out_row,
    out_head,
    C: tl.constexpr,
    RULE: tl.constexpr,
    SEEN: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention of every token: exp2(logit − lse) of each query head, combined by RULE; 0 where there is no token."""
    GROUP: tl.constexpr = C.group
    i_lane = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    heads: tl.constexpr = C.group if RULE == "none" else 1
    p_mass, wanted = _out(p_mass, p_rows, p_active, i_lane, out_row, out_head, heads, C, IN_PLACE)
    if not wanted:
        return
    count = _tokens(p_rows, p_count, table_layer, rows, i_lane, C)
    # A block of `_attend`, which has one top, is a row: its factor is computed once for all its tokens.
    i_top = i_block * (BLOCK // BLOCK_T) + tl.arange(0, BLOCK // BLOCK_T)
    t = (i_top * BLOCK_T)[:, None] + tl.arange(0, BLOCK_T)[None, :]
    mass = tl.zeros([BLOCK // BLOCK_T, BLOCK_T], tl.float32)
    for i in tl.static_range(GROUP):
        head = i_lane * C.group + i
        x = tl.load(p_seen + head * (width - 1) + t, t < count, other=0.0).to(tl.float32)
        lse = tl.load(p_lse + head)
        if SEEN == "relative":
            p_tops = p_top + head * tl.cdiv(width - 1, BLOCK_T)
            top = tl.load(p_tops + i_top, i_top * BLOCK_T < count, other=-float("inf"))
            p = tl.where(t < count, x * tl.exp2(top - lse)[:, None], 0.0)
        else:
            p = tl.where(t < count, tl.exp2(x - lse), 0.0)
        if RULE == "none":
            tl.store(p_mass + i * out_head + t, p, t < seen)
        elif RULE == "max":
            mass = tl.maximum(mass, p)
        else:
            mass += p
    if RULE == "mean":
        mass = mass / C.group
    if RULE != "none":
        tl.store(p_mass + t, mass, t < seen)


@triton.jit
def _largest(p_seen, i_lane, t, count, width, C: tl.constexpr):
    """The largest logit of each token over the query heads of its KV head; −∞ where there is no token."""
    GROUP: tl.constexpr = C.group
    x = tl.full([t.shape[0]], -float("inf"), tl.float32)
    for i in tl.static_range(GROUP):
        o_seen = (i_lane * C.group + i) * (width - 1) + t
        x = tl.maximum(x, tl.load(p_seen + o_seen, t < count, other=-float("inf")))
    return x


@triton.jit(do_not_specialize=NUMBERS)
def _max_logit(
    p_seen,
    p_mass,
    p_rows,
    p_active,
    p_count,
    table_layer,
    width,
    seen,
    rows,
    out_row,
    out_head,
    C: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The softmax over tokens of the query heads' largest logits; a program takes a whole lane."""
    i_lane = tl.program_id(0).to(tl.int64)
    p_mass, wanted = _out(p_mass, p_rows, p_active, i_lane, out_row, out_head, 1, C, IN_PLACE)
    if not wanted:
        return
    count = _tokens(p_rows, p_count, table_layer, rows, i_lane, C)
    top = -float("inf")
    total = 0.0
    for start in range(0, count, BLOCK):
        x = _largest(p_seen, i_lane, start + tl.arange(0, BLOCK), count, width, C)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new), 0)
        top = new
    for start in range(0, seen, BLOCK):
        t = start + tl.arange(0, BLOCK)
        x = _largest(p_seen, i_lane, t, count, width, C)
        p = tl.where(t < count, tl.exp2(x - top) / total, 0.0)
        tl.store(p_mass + t, p, t < seen)


def mass(
    noted: Tensor,
    top: Tensor,
    lse: Tensor,
    rows: Tensor,
    count: Tensor,
    table_layer: int,
    b: int,
    c: Cache,
    group: str,
    how: str,
    block: int,
    seen: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Launch `_mass` or `_max_logit`.

    Args:
        noted: [N, Hq, at least S], what `_attend` has noted of the logits in the way `how` (its SEEN).
        top: float32 [N, Hq, blocks], the top of each block; read if `how` is "relative".
        lse: float32 [N, Hq], base 2.
        rows: int64 [N].
        count: int32 [Lt, B, Ht], tokens of each list.
        table_layer: the layer among those with lists of their own.
        b: B, rows of the store.
        c: the constants of the cache.
        group: sum, mean, max, max_logit or none.
        how: logits or relative.
        block: tokens of a block of `_attend`.
        seen: S.
        into: where the mass is written, float32 [B, Hkv or Hq, S] with adjacent columns, and the rows that are
            written, bool [N]; None: to a new tensor.

    Returns:
        float32 [N, Hkv, S] ([N, Hq, S] with "none"), 0 where there is no token; None with `into`.
    """
    n, hq, width = noted.shape
    out = lse.new_empty(n, hq if group == "none" else c.kv_heads, seen) if into is None else into[0]
    active = rows if into is None else into[1].view(torch.uint8)
    if group == "max_logit":
        _max_logit[(n * c.kv_heads,)](
            p_seen=noted,
            p_mass=out,
            p_rows=rows,
            p_active=active,
            p_count=count,
            table_layer=table_layer,
            width=width + 1,
            seen=seen,
            rows=b,
            out_row=out.stride(0),
            out_head=out.stride(1),
            C=c,
            IN_PLACE=into is not None,
            BLOCK=AT_ONCE,
        )
    else:
        _mass[n * c.kv_heads, triton.cdiv(seen, BLOCK)](
            p_seen=noted,
            p_top=top,
            p_lse=lse,
            p_mass=out,
            p_rows=rows,
            p_active=active,
            p_count=count,
            table_layer=table_layer,
            width=width + 1,
            seen=seen,
            rows=b,
            out_row=out.stride(0),
            out_head=out.stride(1),
            C=c,
            RULE=group,
            SEEN=how,
            IN_PLACE=into is not None,
            BLOCK_T=block,
            BLOCK=BLOCK,
        )
    return out if into is None else None


def variants() -> Iterator[Variant]:
    """bfloat16 models, D = 128, one format."""
    c = Cache(2, 4, 128, 1, 2, 1, 16, 0, "bf16")
    common = dict.fromkeys(("p_lse", "p_top", "p_mass"), "*fp32") | {"p_count": "*i32", "p_rows": "*i64"}
    common |= {"p_seen": "*fp16", "p_active": "*u8"} | dict.fromkeys(NUMBERS, "i32")
    common = {name: common[name] for name in _mass.arg_names if name in common}
    for rule, in_place in (("mean", False), ("max", True), ("none", True)):
        constexprs = {"C": c, "RULE": rule, "SEEN": "relative", "IN_PLACE": in_place, "BLOCK_T": 128, "BLOCK": BLOCK}
        yield Variant(_mass, common, constexprs)
    signature = {n: common[n] for n in common if n in _max_logit.arg_names} | {"p_seen": "*fp32"}
    yield Variant(_max_logit, signature, {"C": c, "IN_PLACE": True, "BLOCK": AT_ONCE})
