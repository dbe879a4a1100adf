"""The attention that each token got, from what `_attend` of `paged_attention.py` has noted of its logits.

    _mass       exp(logit − lse) of each query head, combined over the query heads of a KV head
    _max_logit  the same if the heads' largest logit counts: a softmax of its own, over these logits

Bound: memory. For each token 4 bytes of each query head are read (2 if noted as fp16) and 4 bytes of each KV head
written.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels._layout import Cache
from minithink.kernels._parts import PLAIN_NUMBERS, unit_of_lane

BLOCK = 256  # tokens of a program of `_mass`
AT_ONCE = 128  # tokens that `_max_logit` takes at once


@triton.jit
def _tokens(p_rows, p_count, table_layer, rows, i_lane, C: tl.constexpr):
    """The number of tokens that the i-th of the N · Hkv lanes holds."""
    i_n, i_head = i_lane // C.kv_heads, i_lane % C.kv_heads
    return tl.load(p_count + unit_of_lane(table_layer, tl.load(p_rows + i_n), rows, i_head, C))


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _mass(p_seen, p_top, p_lse, p_mass, p_rows, p_count, table_layer, width, rows, C: tl.constexpr,
          RULE: tl.constexpr, SEEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Attention of every token: exp2(logit − lse) of each query head, combined by RULE; 0 where there is no token."""
    GROUP: tl.constexpr = C.group
    i_lane, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = _tokens(p_rows, p_count, table_layer, rows, i_lane, C)
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


@triton.jit
def _largest(p_seen, i_lane, t, count, width, C: tl.constexpr):
    """The largest logit of each token over the query heads of its KV head; −∞ where there is no token."""
    GROUP: tl.constexpr = C.group
    x = tl.full([t.shape[0]], -float("inf"), tl.float32)
    for i in tl.static_range(GROUP):
        o_seen = (i_lane * C.group + i) * (width - 1) + t
        x = tl.maximum(x, tl.load(p_seen + o_seen, t < count, other=-float("inf")))
    return x


@triton.jit(do_not_specialize=PLAIN_NUMBERS)
def _max_logit(p_seen, p_mass, p_rows, p_count, table_layer, width, rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """The softmax over tokens of the query heads' largest logits; a program takes a whole lane."""
    i_lane = tl.program_id(0).to(tl.int64)
    count = _tokens(p_rows, p_count, table_layer, rows, i_lane, C)
    top, total = -float("inf"), 0.0
    for start in range(0, count, BLOCK):
        x = _largest(p_seen, i_lane, start + tl.arange(0, BLOCK), count, width, C)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new), 0)
        top = new
    for start in range(0, width - 1, BLOCK):
        t = start + tl.arange(0, BLOCK)
        x = _largest(p_seen, i_lane, t, count, width, C)
        p = tl.where(t < count, tl.exp2(x - top) / total, 0.0)
        tl.store(p_mass + i_lane * (width - 1) + t, p, t < width - 1)


def mass(
    noted: Tensor, top: Tensor, lse: Tensor, rows: Tensor, count: Tensor, table_layer: int, b: int, c: Cache,
    group: str, how: str, block: int,
) -> Tensor:  # fmt: skip
    """Launch `_mass` or `_max_logit`.

    Args:
        noted: [N, Hq, S], what `_attend` has noted of the logits in the way `how` (its SEEN).
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

    Returns:
        float32 [N, Hkv, S] ([N, Hq, S] with "none"), 0 where there is no token.
    """
    n, hq, seen = noted.shape
    out = lse.new_empty(n, hq if group == "none" else c.kv_heads, seen)
    if group == "max_logit":
        _max_logit[(n * c.kv_heads,)](noted, out, rows, count, table_layer, seen + 1, b, c, AT_ONCE)
    else:
        grid = n * c.kv_heads, -(-seen // BLOCK)
        _mass[grid](noted, top, lse, out, rows, count, table_layer, seen + 1, b, c, group, how, block, BLOCK)
    return out


def variants() -> Iterator[Variant]:
    """bfloat16 models, D = 128, one format."""
    c = Cache(2, 4, 16, 128, 1, 2, 1, 16, 0, "bf16")
    common = dict.fromkeys(("p_lse", "p_top", "p_mass"), "*fp32") | {"p_count": "*i32", "p_rows": "*i64"}
    common |= {"p_seen": "*fp16"} | dict.fromkeys(("table_layer", "width", "rows"), "i32")
    for rule in ("mean", "max", "none"):
        constexprs = {"C": c, "RULE": rule, "SEEN": "relative", "BLOCK_T": 64, "BLOCK": BLOCK}
        yield Variant(_mass, common, constexprs)
    signature = {n: common[n] for n in common if n in _max_logit.arg_names} | {"p_seen": "*fp32"}
    yield Variant(_max_logit, signature, {"C": c, "BLOCK": AT_ONCE})
