"""Attention sparsity: the share of cached tokens with almost no attention. Twin: `minithink/ref/sparsity.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.sparsity import sparsity
    >>> p = torch.tensor([[[0.600, 0.397, 0.003], [0.990, 0.005, 0.005]]])  # float32 [N, Hkv, S], attention weights
    >>> valid = torch.ones(1, 2, 3, dtype=torch.bool)  # [N, Hkv, S], or [N, 1, S]
    >>> sparsity(p, valid).cpu()  # float32 [N]: 1/3 and 2/3 of the weights are below 1 % of the head's largest
    tensor([0.5000])

Layout: two launches.

    _shares    a program per row and head goes through the weights twice, BLOCK at a time: first for the largest, then
               to count those below its share
    _mean      a program per row: the mean over its heads

Comparisons and counts are exact, and the mean is a sum of float32 numbers in float64, so the result is the twin's,
bit for bit.
Bound: latency, because few rows are due in a step. 4 bytes for each token and head (attention has already written
these weights) and 1 byte for each token (valid); the second pass finds both in the GPU's cache. Invalid weights are
not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

BLOCK = 4096  # weights at a time
WARPS = 8


@triton.jit
def _shares(p_p, p_valid, p_share, heads, width, share, stride_v_row, stride_v_head, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    p_p += (i_row * heads + i_head) * width
    p_valid += i_row * stride_v_row + i_head * stride_v_head
    largest = tl.zeros((), tl.float32)  # weights are not negative
    for start in range(0, width, BLOCK):
        t = start + tl.arange(0, BLOCK)
        valid = tl.load(p_valid + t, t < width, other=0) != 0
        largest = tl.maximum(largest, tl.max(tl.load(p_p + t, valid, other=0.0)))
    least = share * largest
    below = tl.zeros((), tl.int32)
    held = tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        t = start + tl.arange(0, BLOCK)
        valid = tl.load(p_valid + t, t < width, other=0) != 0
        p = tl.load(p_p + t, valid, other=0.0)
        below += tl.sum((valid & (p < least)).to(tl.int32))
        held += tl.sum(valid.to(tl.int32))
    tl.store(p_share + i_row * heads + i_head, tl.div_rn(below.to(tl.float32), tl.maximum(held, 1).to(tl.float32)))


@triton.jit
def _mean(p_share, p_out, heads, HEADS: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    shares = tl.load(p_share + i_row * heads + head, head < heads, other=0.0)
    tl.store(p_out + i_row, (tl.sum(shares.to(tl.float64)) / heads).to(tl.float32))


def sparsity(p: Tensor, valid: Tensor, share: float = 0.01) -> Tensor:
    """The share of cached tokens whose weight is below 1 % of the row's largest; the mean over KV heads.

    Args:
        p: float32 [..., Hkv, S], attention weights; anything (also NaN) where not valid. ThinKV gives the mean row
            of its heads, [..., 1, S] (`mean_row` of the twin).
        valid: bool [..., Hkv, S], or [..., 1, S] for all heads.
        share: of the row's largest weight; 0.01 is the paper's 1 %.

    Returns:
        float32 [...], 0 where no token is valid.
    """
    lead = p.shape[:-2]
    heads, width = p.shape[-2:]
    out = torch.empty(lead, dtype=torch.float32, device=p.device)
    rows = out.numel()
    if rows:
        flags = valid.expand(*lead, *valid.shape[-2:]).contiguous()
        of_row = flags.shape[-2] * width
        of_head = width if flags.shape[-2] == heads else 0
        shares = torch.empty(rows, heads, dtype=torch.float32, device=p.device)
        _shares[rows, heads](
            p_p=p.contiguous(),
            p_valid=flags.view(torch.uint8),
            p_share=shares,
            heads=heads,
            width=width,
            share=float(share),
            stride_v_row=of_row,
            stride_v_head=of_head,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        _mean[(rows,)](p_share=shares, p_out=out, heads=heads, HEADS=power_of_2(heads), num_warps=1)
    return out


def variants() -> Iterator[Variant]:
    sizes = dict.fromkeys(("heads", "width", "stride_v_row", "stride_v_head"), "i32")
    signature = {"p_p": "*fp32", "p_valid": "*u8", "p_share": "*fp32", "share": "fp32", **sizes}
    yield Variant(_shares, signature, {"BLOCK": BLOCK}, {"num_warps": WARPS})
    for heads in (1, 4, 8):
        signature = {"p_share": "*fp32", "p_out": "*fp32", "heads": "i32"}
        yield Variant(_mean, signature, {"HEADS": heads}, {"num_warps": 1})
