"""LRFU, Least Recently/Frequently Used: attention counts as use. Twin: `minithink/ref/lrfu.py`.

Layout: two launches.

    _hit_set   one program per lane, which reads its columns BLOCK at a time. It finds the smallest set that holds the
               share p, without sorting. v is the largest mass such that the masses ≥ v together reach p of the total.
               Masses are not negative, so their bits are in the same order as the masses: each pass finds two bits of
               v. The last pass takes the masses above v. Of those equal to v it takes the oldest, until p is reached
    _update    one program per lane and block of columns: elementwise, in float64

λ and p are constants of the compiled kernels, in double precision: arguments would be rounded to float32.
Bound: memory. 32 bytes are moved for each token, 16 of them results; later passes find the lane in the GPU's cache.
Lanes without a token whose hits count are not searched.

Rounding: masses are summed in float64, in another order than the twin's. Sums of dyadic masses are exact. Otherwise a
token may be in or out if the sum before it is within about 10⁻¹⁶·S of the share. λ^age is 2^(age·log2 λ), exact for
λ = ½. CRF can differ from the twin's in the last bit of float32, for one hit in about 10⁷.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

BLOCK = 1024  # columns at a time
FLOATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def _mass(p_mass, p_valid, column, m):
    """Mass as float32, 0 where not valid."""
    valid = tl.load(p_valid + column, m, other=0) != 0
    mass = tl.load(p_mass + column, valid, other=0.0).to(tl.float32)
    return tl.where(mass > 0, mass, 0.0)  # −0 too, whose bits are not 0's


@triton.jit
def _hit_set(p_mass, p_valid, p_counted, p_hit, width, P: tl.constexpr, BLOCK: tl.constexpr):
    i_lane = tl.program_id(0).to(tl.int64)
    p_mass += i_lane * width
    p_valid += i_lane * width
    p_counted += i_lane * width
    p_hit += i_lane * width
    column = tl.arange(0, BLOCK)

    total = tl.zeros((), tl.float64)
    counted = tl.zeros((), tl.int32)  # tokens that can be hit
    for start in range(0, width, BLOCK):
        m_in = start + column < width
        mass = _mass(p_mass + start, p_valid + start, column, m_in)
        total += tl.sum(mass.to(tl.float64))
        count = tl.load(p_counted + start + column, m_in, other=0) != 0
        counted += tl.sum((count & (mass > 0)).to(tl.int32))
    if counted == 0:
        for start in range(0, width, BLOCK):
            tl.store(p_hit + start + column, tl.zeros((BLOCK,), tl.uint8), start + column < width)
        return

    share = tl.full((), P, tl.float64) * total
    least = tl.zeros((), tl.uint32)  # the bits of v, as far as they are known
    digit = tl.arange(0, 4)
    for i_pass in range(16):
        shift = 30 - 2 * i_pass
        candidate = least + (digit.to(tl.uint32) << shift)  # [4]
        reached = tl.zeros((4,), tl.float64)  # sum of the masses that are not less
        for start in range(0, width, BLOCK):
            mass = _mass(p_mass + start, p_valid + start, column, start + column < width)
            m_counts = mass.to(tl.uint32, bitcast=True)[:, None] >= candidate[None, :]
            reached += tl.sum(tl.where(m_counts, mass.to(tl.float64)[:, None], 0.0), 0)
        # Digit 0 reaches the share: that was so before this pass.
        i_digit = tl.sum(((digit > 0) & (reached >= share)).to(tl.int32))
        least += i_digit.to(tl.uint32) << shift

    more = tl.zeros((), tl.float64)  # sum of the masses that are more than v
    for start in range(0, width, BLOCK):
        mass = _mass(p_mass + start, p_valid + start, column, start + column < width)
        m_more = mass.to(tl.uint32, bitcast=True) > least
        more += tl.sum(tl.where(m_more, mass, 0.0).to(tl.float64))
    older = tl.zeros((), tl.int32)  # tokens of mass v seen before
    for start in range(0, width, BLOCK):
        m_in = start + column < width
        mass = _mass(p_mass + start, p_valid + start, column, m_in)
        bits = mass.to(tl.uint32, bitcast=True)
        equal = (bits == least).to(tl.int32)
        before = more + (older + tl.cumsum(equal) - equal).to(tl.float64) * mass.to(tl.float64)
        hit = (bits > least) | ((equal > 0) & (before < share))
        count = tl.load(p_counted + start + column, m_in, other=0) != 0
        tl.store(p_hit + start + column, (hit & count).to(tl.uint8), m_in)
        older += tl.sum(equal)


@triton.jit
def _update(
    p_hit, p_crf, p_last, p_t, p_new_crf, p_new_last, p_score, width, stride_t_lane, stride_t_column,
    LAM: tl.constexpr, LOG_LAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = column < width
    token = i_lane * width + column
    hit = tl.load(p_hit + token, m_in, other=0) != 0
    crf = tl.load(p_crf + token, m_in, other=1.0)
    last = tl.load(p_last + token, m_in, other=0)
    t = tl.load(p_t + i_lane * stride_t_lane + column * stride_t_column, m_in, other=0)
    log_lam = tl.full((), LOG_LAM, tl.float64)  # log2 λ; 0 for λ = 0

    # CRF_i(t) = λ^(t − τ_i)·CRF_i(τ_i) + 1
    age = tl.maximum(t - last, 0).to(tl.float64)
    decay = tl.exp2(age * log_lam)
    if LAM == 0:
        decay = tl.where(age > 0, 0.0, decay)
    crf = tl.where(hit, (crf.to(tl.float64) * decay + 1).to(tl.float32), crf)
    last = tl.where(hit, t, last)
    tl.store(p_new_crf + token, crf, m_in)
    tl.store(p_new_last + token, last, m_in)

    age = tl.maximum(t - last, 0).to(tl.float64)
    score = tl.log2(crf.to(tl.float64)) + age * log_lam
    if LAM == 0:
        score = tl.where(age > 0, tl.full((), float("-inf"), tl.float64), score)
    # Round to multiples of 2^−30, ties to even: a number plus 2^52 has no bits for fractions. Larger numbers have no
    # fractions anyway.
    fine = score * 1073741824.0
    size = tl.abs(fine)
    whole = tl.where(size < 4503599627370496.0, (size + 4503599627370496.0) - 4503599627370496.0, size)
    tl.store(p_score + token, tl.where(fine < 0, -whole, whole) / 1073741824.0, m_in)


def lrfu(
    mass: Tensor, valid: Tensor, counted: Tensor, crf: Tensor, last: Tensor, t: Tensor, lam: float, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of CRF, the combined recency and frequency of every token.

    Args:
        mass: [..., S], attention probability of every token; anything (also NaN) where not valid.
        valid: bool [..., S].
        counted: bool [..., S], the tokens whose hits count at this step.
        crf: float32 [..., S], CRF_i(τ_i).
        last: int32 [..., S], τ_i, not after t.
        t: int32, broadcast to [..., S]: the time.
        lam: λ in [0, 1].
        p: share of the attention that the hit set holds, in (0, 1].

    Returns:
        crf, last: after this step.
        score: float64 [..., S], log2 of the decayed CRF, −∞ where CRF is 0; rounded to multiples of 2^−30.
    """
    shape = mass.shape
    hit = _hits(mass, valid, counted, p)
    crf, last = crf.expand(shape).contiguous(), last.expand(shape).contiguous()
    # If all tokens of a lane have one time, do not write it out for each of them.
    for_all = t.dim() == 0 or t.shape[-1] == 1
    t = t.to(torch.int32).expand(*shape[:-1], 1 if for_all else shape[-1]).contiguous()
    new_crf, new_last = torch.empty_like(crf), torch.empty_like(last)
    score = torch.empty(shape, dtype=torch.float64, device=mass.device)
    if hit.numel():
        grid = hit.numel() // shape[-1], triton.cdiv(shape[-1], BLOCK)
        strides = (1, 0) if for_all else (shape[-1], 1)
        tensors = hit.view(torch.uint8), crf, last, t, new_crf, new_last, score
        _update[grid](*tensors, shape[-1], *strides, LAM=float(lam), LOG_LAM=_log2(lam), BLOCK=BLOCK)
    return new_crf, new_last, score


def hit_set(mass: Tensor, valid: Tensor, p: float) -> Tensor:
    """The smallest set of tokens that together got the share p of the attention: the most attended ones.

    Of equally attended tokens the older comes first.

    Args:
        mass: [..., S], not negative; anything (also NaN) where not valid.
        valid: bool [..., S].

    Returns:
        bool [..., S].
    """
    return _hits(mass, valid, valid, p)


def _hits(mass: Tensor, valid: Tensor, counted: Tensor, p: float) -> Tensor:
    """The tokens of the hit set whose hits count."""
    shape = mass.shape
    mass = (mass if mass.dtype in FLOATS else mass.float()).contiguous()
    flags = (x.expand(shape).contiguous().view(torch.uint8) for x in (valid, counted))
    hit = torch.empty(shape, dtype=torch.bool, device=mass.device)
    if hit.numel():
        lanes = hit.numel() // shape[-1]
        _hit_set[(lanes,)](mass, *flags, hit.view(torch.uint8), shape[-1], P=float(p), BLOCK=BLOCK)
    return hit


def _log2(lam: float) -> float:
    return math.log2(lam) if lam > 0 else 0.0


def variants() -> Iterator[Variant]:
    flags = {"p_valid": "*u8", "p_counted": "*u8", "p_hit": "*u8", "width": "i32"}
    for dtype in FLOATS.values():
        yield Variant(_hit_set, {**flags, "p_mass": f"*{dtype}"}, {"P": 0.9, "BLOCK": BLOCK})
    for lam in (0.0, 0.6, 1.0):
        tensors = {"p_hit": "*u8", "p_crf": "*fp32", "p_last": "*i32", "p_t": "*i32", "width": "i32"}
        out = {"p_new_crf": "*fp32", "p_new_last": "*i32", "p_score": "*fp64"}
        signature = {**tensors, **out, "stride_t_lane": "i32", "stride_t_column": "i32"}
        yield Variant(_update, signature, {"LAM": lam, "LOG_LAM": _log2(lam), "BLOCK": BLOCK})
