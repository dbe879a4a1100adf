"""SkipKV's score of every cached token. Twin: `minithink/ref/cumulative_score.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.cumulative_score import cumulative_score
    >>> importance = torch.tensor([[[[0.5, 0.3, 0.2]]]])  # float32 [L, N, H, S]
    >>> redundancy = torch.tensor([[[[0.2, 0.4, 0.4]]]])  # float32 [L, N, H, S]
    >>> pos = torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32)  # [L, N, H, S]
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> number = torch.tensor([[0, 1, 1]], dtype=torch.int32)  # [B, P], the sentence of each position
    >>> penalty = torch.tensor([[0.0, 0.1]])  # float32 [B, T], of each sentence
    >>> z, _ = cumulative_score(importance, redundancy, pos, at, number, penalty, sigma=0.5)
    >>> z.cpu()
    tensor([[[[ 0.1500, -0.1500, -0.2000]]]])

Layout: a program for each lane and BLOCK columns. A token's position gives the number of its sentence, and the number
gives the penalty.
Bound: memory. 28 bytes are moved for each token: importance, redundancy, position, number and penalty are read, two
results are written. The numbers and penalties of a row serve all its lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, with_dense_columns

BLOCK = 1024  # columns of a program


@triton.jit(do_not_specialize=["n"])
def _cumulative_score(
    p_importance,
    p_redundancy,
    p_pos,
    p_at,
    p_number,
    p_penalty,
    p_z,
    p_lam,
    n,
    heads,
    width,
    positions,
    sentences,
    sigma,
    pos_layer,
    pos_row,
    pos_head,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_n = i // heads % n
    i_layer = i // (n * heads)
    i_head = i % heads
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = column < width
    row = tl.load(p_at + i_n)
    p_pos += i_layer * pos_layer + i_n * pos_row + i_head * pos_head
    pos = tl.load(p_pos + column, m_in, other=-1)
    m_token = m_in & (pos >= 0)
    number = tl.load(p_number + row * positions + pos, m_token, other=0)  # of the token's sentence
    lam = tl.load(p_penalty + row * sentences + number, m_token, other=0.0)
    o_token = i * width + column
    importance = tl.load(p_importance + o_token, m_in, other=0.0)
    redundancy = tl.load(p_redundancy + o_token, m_in, other=0.0)
    # Z = σ·I − (1 − σ)·R − λ
    tl.store(p_z + o_token, sigma * importance - (1 - sigma) * redundancy - lam, m_in)
    tl.store(p_lam + o_token, lam, m_in)


def cumulative_score(
    importance: Tensor, redundancy: Tensor, pos: Tensor, at: Tensor, number: Tensor, penalty: Tensor, sigma: float
) -> tuple[Tensor, Tensor]:
    """Z and λ of every token, as `minithink/ref/cumulative_score.py` describes them: float32 [L, N, H, S]."""
    layers, n, heads, width = pos.shape
    z = torch.empty(pos.shape, dtype=torch.float32, device=pos.device)
    lam = torch.empty(pos.shape, dtype=torch.float32, device=pos.device)
    if z.numel():
        pos = with_dense_columns(pos)
        _cumulative_score[layers * n * heads, triton.cdiv(width, BLOCK)](
            importance.contiguous(),
            redundancy.contiguous(),
            pos,
            at,
            number,
            penalty,
            z,
            lam,
            n,
            heads,
            width,
            number.shape[1],
            penalty.shape[1],
            float(sigma),
            *pos.stride()[:3],
            BLOCK=BLOCK,
        )
    return z, lam


def variants() -> Iterator[Variant]:
    names = _cumulative_score.arg_names
    signature = {name: "*fp32" for name in names if name.startswith("p_")}
    signature |= {"p_pos": "*i32", "p_number": "*i32", "p_at": "*i64", "sigma": "fp32"}
    signature |= {name: "i32" for name in names if name[0].islower() and name not in signature}
    yield Variant(_cumulative_score, signature, {"BLOCK": BLOCK})
