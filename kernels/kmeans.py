"""Select the tokens that represent thoughts: K-means on the keys of segments. Twin: `minithink/ref/kmeans.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.kmeans import kmeans
    >>> x = torch.tensor([[[0.0], [1.0], [2.0], [7.0], [8.0], [9.0]]])  # [P, T, F]: one set of six members
    >>> valid = torch.ones(1, 6, dtype=torch.bool)  # [P, T]
    >>> count = torch.tensor([2])  # [P], the clusters of each set
    >>> kmeans(x, valid, count).tolist()  # of each cluster the member nearest to its mean
    [[False, True, False, False, True, False]]

Layout: two launches for all sets; a set is a segment of any sequence and layer.

    _products   a program per set and BLOCK × BLOCK members: x_i·x_j, by tl.dot
    _cluster    a program per set: everything else, from |x_i − x_j|² = x_i·x_i + x_j·x_j − 2·x_i·x_j and the
                distances to means that follow from these. Sums over the members of AT_ONCE clusters are a product
                with a matrix of zeros and ones. K is read on the device, and only bounds loops

Products of 16-bit keys are exact, on tensor cores, and summed in float32. Sets that lose no member are not read.
Bound: memory, and with few sets latency. T·F numbers of a set are read once: 256 KiB for 128 tokens and 8 heads of
128 channels. T² products, 64 KiB, are written and read again, in the GPU's cache. The farthest-point loop makes K
picks, one after the other; then come at most 10 rounds of T²·K multiply-adds.

Rounding: if x has whole numbers (times a power of two), everything is exact while distances stay below 2²², and sums
of products and of distances times members below 2²⁴. (Two numbers of 11 bits, all that tensor cores take, hold
22 bits.) The choice is then the twin's, also in ties. Otherwise distances have errors of about 10⁻⁷ of the squared
norms |x_i|² + |x_j|². The twin subtracts first, so its errors are 10⁻⁷ of the distances themselves. If the distances
of two members differ by less, either may be taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant, power_of_2

BLOCK = 64  # members of a product, on either side
DEPTH = {True: 32, False: 64}  # features at a time: in float32, in 16 bits
AT_ONCE = 32  # clusters, and rows of distances, at most
ITERATIONS = 10  # of Lloyd's algorithm, at most


@triton.jit
def _products(
    p_x,
    p_valid,
    p_count,
    p_product,
    width,
    features,
    stride_x_set,
    stride_x_t,
    stride_v_set,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    FULL: tl.constexpr,
):
    """x_i·x_j of a block of members with another: float32 [P, WIDE, WIDE], 0 where no member is."""
    i_set = tl.program_id(0).to(tl.int64)
    p_valid += i_set * stride_v_set
    t = tl.arange(0, WIDE)
    members = tl.sum((tl.load(p_valid + t, t < width, other=0) != 0).to(tl.int32))
    k = tl.load(p_count + i_set)
    if (members <= k) | (k <= 0):
        return
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_row = tl.load(p_valid + row, row < width, other=0) != 0
    m_column = tl.load(p_valid + column, column < width, other=0) != 0
    p_x += i_set * stride_x_set
    p_row = p_x + row[:, None] * stride_x_t
    p_column = p_x + column[:, None] * stride_x_t
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, features, DEPTH):
        feature = start + tl.arange(0, DEPTH)
        a = tl.load(p_row + feature, m_row[:, None] & (feature < features), other=0.0)
        b = tl.load(p_column + feature, m_column[:, None] & (feature < features), other=0.0)
        if FULL:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        product = tl.dot(a, tl.trans(b), product, input_precision="ieee")
    o_row = (i_set * WIDE + row[:, None]) * WIDE
    tl.store(p_product + o_row + column, product)


@triton.jit
def _distances(p_product, norm, row, WIDE: tl.constexpr):
    """Squared distances of some members to all: [rows, WIDE]."""
    product = tl.load(p_product + row[:, None] * WIDE + tl.arange(0, WIDE))
    own = tl.load(p_product + row * (WIDE + 1))
    return (own[:, None] + norm[None, :]) - 2 * product


@triton.jit
def _totals(p_product, norm, label, cluster, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Distances of all members to those of some clusters, summed: [clusters, WIDE]."""
    total = tl.zeros((AT_ONCE, WIDE), tl.float32)
    for start in range(0, WIDE, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        member = cluster[:, None] == tl.gather(label, row, 0)[None, :]
        distance = _distances(p_product, norm, row, WIDE)
        total = tl.dot(member.to(tl.float32), distance, total, input_precision="tf32x3")
    return total


@triton.jit
def _fill(label, own, k, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Give every empty cluster, in their order, the member farthest from its centroid that is not alone."""
    t = tl.arange(0, WIDE)
    size = tl.zeros((WIDE,), tl.int32)  # of each member's cluster
    empty = tl.zeros((), tl.int32)  # clusters
    for start in range(0, k, AT_ONCE):
        cluster = start + tl.arange(0, AT_ONCE)
        member = (cluster[:, None] == label[None, :]).to(tl.int32)
        count = tl.sum(member, 1)
        size += tl.sum(member * count[:, None], 0)
        empty += tl.sum(((count == 0) & (cluster < k)).to(tl.int32))
    if empty > 0:
        for i in range(k):
            if tl.sum((label == i).to(tl.int32)) == 0:
                here = t == tl.argmax(tl.where(size > 1, own, -float("inf")), 0)
                left = tl.sum(tl.where(here, label, 0))
                size = tl.where(here, 1, tl.where(label == left, size - 1, size))
                label = tl.where(here, i, label)
    return label


@triton.jit
def chosen(p_product, valid, k, ITERATIONS: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """The survivors of one set, fewer than its members: 1 or 0, int32 [WIDE].

    If one member has to go, it is found at once. Otherwise centroids are picked, Lloyd's rounds follow until no
    member moves, and the nearest member of each cluster survives.

    p_product: products of the members, float32 [WIDE, WIDE]; valid: bool [WIDE]; k: how many survive.
    """
    t = tl.arange(0, WIDE)
    norm = tl.load(p_product + t * (WIDE + 1))
    one = tl.full((), 0, tl.int32)
    later = tl.full((), -1, tl.int32)
    if tl.sum(valid.to(tl.int32)) == k + 1:
        one, later = _nearest_pair(p_product, norm, valid, WIDE, AT_ONCE)
    k = tl.where(one > 0, 0, k)

    near, label = _pick(p_product, norm, valid, k, WIDE, AT_ONCE)
    label = _fill(label, near, k, WIDE, AT_ONCE)
    i_round = 1
    moved = 1 - one
    while (i_round < ITERATIONS) & (moved > 0):
        near, now = _join(p_product, norm, valid, label, k, WIDE, AT_ONCE)
        now = _fill(now, near, k, WIDE, AT_ONCE)
        moved = tl.sum((now != label).to(tl.int32))
        label = now
        i_round += 1
    kept = _survivors(p_product, norm, label, k, WIDE, AT_ONCE)
    return tl.where(one > 0, (valid & (t != later)).to(tl.int32), (kept > 0).to(tl.int32))


@triton.jit
def _nearest_pair(p_product, norm, valid, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Whether exactly one pair of members is nearest to each other, 1 or 0, and the later one of the pair.

    If one member has to go, it is this one. Whichever of the two is picked first, the other is nearer to this pick
    than any other member to its nearest pick. So it would be picked last, and is not picked. Lloyd's rounds then move
    no member. The two are equally far from their mean, so the earlier one stays. If several pairs are equally near,
    the order of the picks decides.
    """
    t = tl.arange(0, WIDE)
    near = tl.full((WIDE,), float("inf"), tl.float32)
    for start in range(0, WIDE, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        other = (tl.gather(valid.to(tl.int32), row, 0)[:, None] > 0) & (row[:, None] != t[None, :])
        distance = _distances(p_product, norm, row, WIDE)
        near = tl.minimum(near, tl.min(tl.where(other, distance, float("inf")), 0))
    least = tl.min(tl.where(valid, near, float("inf")), 0)
    pair = valid & (near == least)
    return (tl.sum(pair.to(tl.int32)) == 2).to(tl.int32), tl.max(tl.where(pair, t, -1), 0)


@triton.jit
def _pick(p_product, norm, valid, k, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """The first K centroids: the member nearest to the mean, then the farthest ones. Members nearer to it join it.

    Returns each member's distance to its centroid, float32 [WIDE], and its cluster, int32 [WIDE], −1 without one.
    """
    t = tl.arange(0, WIDE)
    far = tl.zeros((WIDE,), tl.float32)
    for start in range(0, WIDE, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        member = tl.gather(valid.to(tl.int32), row, 0)[:, None] > 0
        far -= tl.sum(tl.where(member, _distances(p_product, norm, row, WIDE), 0.0), 0)
    near = tl.full((WIDE,), float("inf"), tl.float32)  # to the nearest centroid
    label = tl.full((WIDE,), -1, tl.int32)
    for i in range(k):
        pick = tl.argmax(tl.where(valid, far, -float("inf")), 0)
        own = tl.load(p_product + pick * (WIDE + 1))
        new = (own + norm) - 2 * tl.load(p_product + pick * WIDE + t)
        label = tl.where(valid & (new < near), i, label)
        near = tl.minimum(near, new)
        far = near
    return near, label


@triton.jit
def _join(p_product, norm, valid, label, k, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """One of Lloyd's rounds: each member's distance to the nearest mean of a cluster, and this cluster."""
    near = tl.full((WIDE,), float("inf"), tl.float32)
    now = tl.full((WIDE,), -1, tl.int32)
    for start in range(0, k, AT_ONCE):
        cluster = start + tl.arange(0, AT_ONCE)
        member = (cluster[:, None] == label[None, :]).to(tl.float32)
        total = _totals(p_product, norm, label, cluster, WIDE, AT_ONCE)
        size = tl.sum(member, 1)[:, None]
        spread = tl.sum(total * member, 1)[:, None]
        d = tl.div_rn(size * total - spread / 2, tl.maximum(size * size, 1.0))
        d = tl.where(size > 0, d, float("inf"))  # of K clusters none is empty
        least = tl.min(d, 0)
        now = tl.where(valid & (least < near), start + tl.argmin(d, 0), now)
        near = tl.minimum(near, least)
    return near, now


@triton.jit
def _survivors(p_product, norm, label, k, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """The member of each cluster that is nearest to the centroid: above 0, int32 [WIDE]."""
    t = tl.arange(0, WIDE)
    kept = tl.zeros((WIDE,), tl.int32)
    for start in range(0, k, AT_ONCE):
        cluster = start + tl.arange(0, AT_ONCE)
        member = cluster[:, None] == label[None, :]
        size = tl.sum(member.to(tl.int32), 1)
        total = tl.zeros((AT_ONCE, WIDE), tl.float32)
        # In a cluster of two, both members are equally far from the mean, and rounding must not choose between them.
        if tl.max(size, 0) > 2:
            total = _totals(p_product, norm, label, cluster, WIDE, AT_ONCE)
            total = tl.where(size[:, None] == 2, 0.0, total)
        nearest = tl.argmin(tl.where(member, total, float("inf")), 1)
        kept += tl.sum((member & (nearest[:, None] == t[None, :])).to(tl.int32), 0)
    return kept


@triton.jit
def _cluster(
    p_product,
    p_valid,
    p_count,
    p_kept,
    width,
    stride_v_set,
    ITERATIONS: tl.constexpr,
    WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    i_set = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, WIDE)
    p_valid += i_set * stride_v_set
    p_kept += i_set * width
    valid = tl.load(p_valid + t, t < width, other=0) != 0
    k = tl.load(p_count + i_set)
    if (tl.sum(valid.to(tl.int32)) <= k) | (k <= 0):
        tl.store(p_kept + t, tl.where(k > 0, valid.to(tl.uint8), 0), t < width)
        return
    kept = chosen(p_product + i_set * WIDE * WIDE, valid, k, ITERATIONS, WIDE, AT_ONCE)
    tl.store(p_kept + t, kept.to(tl.uint8), t < width)


def kmeans(x: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Cluster P sets by K-means, and select from each cluster the member nearest to the centroid. Each set has its K.

    Args:
        x: [P, T, F], anything (also NaN) where not valid.
        valid: bool [P, T], the members.
        count: integers [P], K of each set; if a set has no more members than K, all survive.

    Returns:
        bool [P, T], the survivors.
    """
    sets, width, features = x.shape
    kept = torch.empty(sets, width, dtype=torch.bool, device=x.device)
    if not kept.numel():
        return kept
    x, valid = (y if y.stride(-1) == 1 else y.contiguous() for y in (x, valid))
    flags = valid.view(torch.uint8)
    count = count.to(torch.int32).contiguous()
    wide = max(16, power_of_2(width))
    product = torch.empty(sets, wide, wide, dtype=torch.float32, device=x.device)
    block = min(BLOCK, wide)
    full = INTERPRETED or x.dtype == torch.float32
    _products[sets, wide // block, wide // block](
        p_x=x,
        p_valid=flags,
        p_count=count,
        p_product=product,
        width=width,
        features=features,
        stride_x_set=x.stride(0),
        stride_x_t=x.stride(1),
        stride_v_set=flags.stride(0),
        WIDE=wide,
        BLOCK=block,
        DEPTH=DEPTH[x.dtype == torch.float32],
        FULL=full,
    )
    _cluster[(sets,)](
        p_product=product,
        p_valid=flags,
        p_count=count,
        p_kept=kept.view(torch.uint8),
        width=width,
        stride_v_set=flags.stride(0),
        ITERATIONS=ITERATIONS,
        WIDE=wide,
        AT_ONCE=at_once(wide),
        num_warps=warps(wide),
    )
    return kept


def at_once(wide: int) -> int:
    """Clusters at a time: registers must hold several numbers for each member and cluster."""
    return min(AT_ONCE, wide, 4096 // wide)


def warps(wide: int) -> int:
    return 1 if wide <= 16 else 4 if wide <= 64 else 8


def variants() -> Iterator[Variant]:
    sets = {"p_valid": "*u8", "p_count": "*i32", "p_product": "*fp32", "width": "i32", "stride_v_set": "i32"}
    x = {"features": "i32", "stride_x_set": "i64", "stride_x_t": "i32"}
    for wide in (16, 64, 128, 256):
        for dtype in ("fp32", "fp16", "bf16"):
            full = dtype == "fp32"
            shape = {"WIDE": wide, "BLOCK": min(BLOCK, wide), "DEPTH": DEPTH[full], "FULL": full}
            yield Variant(_products, {**sets, **x, "p_x": f"*{dtype}"}, shape)
        shape = {"ITERATIONS": ITERATIONS, "WIDE": wide, "AT_ONCE": at_once(wide)}
        yield Variant(_cluster, {**sets, "p_kept": "*u8"}, shape, {"num_warps": warps(wide)})
