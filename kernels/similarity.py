"""Similarity of sentences, one token of each row. Twin: `minithink/ref/similarity.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.similarity import similarity
    >>> total = torch.zeros(1, 4)  # float32 [B, d]; this and the next four are changed in place
    >>> vector = torch.zeros(1, 8, 4)  # float32 [B, M, d]
    >>> penalty = torch.zeros(1, 4)  # float32 [B, T]
    >>> number = torch.zeros(1, 16, dtype=torch.int32)  # [B, P]
    >>> count = torch.tensor([[1, 0]], dtype=torch.int32)  # [B, 2]: sentence 1 is open
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> yes = torch.tensor([True])  # [N]: the row is active, and each of its tokens ends a sentence
    >>> for i, hidden in enumerate(torch.tensor([[[1.0, 0, 0, 0]], [[0.8, 0.6, 0, 0]], [[0, 0, 1.0, 0]]])):  # [N, d]
    ...     similarity(hidden, at, yes, torch.tensor([i]), yes, (total, vector, penalty, number, count), tau=0.5)
    >>> penalty.cpu()  # sentence 2 is like sentence 1
    tensor([[0.0000, 0.8000, 0.0000, 0.0000]])

Layout: two launches.

    _compare   a program for each row and BLOCK kept vectors: their products with the sentence that has just ended.
               The program ends at once if no sentence has ended, or if its part of the ring is still empty
    _add       a program for each row: an ended sentence's vector goes into the ring, the newest state is added

Only _add changes what both read, so no program of _compare sees a row half changed.
Bound: the launch. A row reads its sum and the token's hidden state and writes the sum, 12·d bytes in float32. If its
sentence has ended, it also reads its kept vectors, 4·d bytes each: 8 MiB for 512 of them at d = 4,096. Then memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

BLOCK = 16  # vectors of a program
DEPTH = 256  # numbers of a vector at a time
TINY = tl.constexpr(1e-30)


@triton.jit
def _norm(p_total, d, DEPTH: tl.constexpr):
    """The length of a row's sum."""
    square = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, d, DEPTH):
        dim = start + tl.arange(0, DEPTH)
        x = tl.load(p_total + dim, dim < d, other=0.0)
        square += x * x
    return tl.maximum(tl.sqrt(tl.sum(square)), TINY)


@triton.jit
def _compare(
    p_at,
    p_active,
    p_total,
    p_vector,
    p_penalty,
    p_count,
    d,
    most,
    sentences,
    tau,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    row = tl.load(p_at + i_n)
    n = tl.load(p_count + row * 2)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The ring fills from slot 0 on, so a block of empty slots begins behind all earlier sentences.
    if (tl.load(p_active + i_n) == 0) | (tl.load(p_count + row * 2 + 1) == 0) | (tl.program_id(1) * BLOCK >= n - 1):
        return
    # The number of each slot's sentence. Triton divides towards zero: a multiple of `most` keeps this positive.
    other = n - 1 - (n - 2 - slot + most) % most
    m_there = (slot < most) & (other >= 1)
    p_total += row * d
    p_vector += (row * most + slot.to(tl.int64)) * d
    lam = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, d, DEPTH):
        dim = start + tl.arange(0, DEPTH)
        own = tl.load(p_total + dim, dim < d, other=0.0)
        v = tl.load(p_vector[:, None] + dim[None, :], m_there[:, None] & (dim < d)[None, :], other=0.0)
        lam += tl.sum(v * own[None, :], 1)
    lam /= _norm(p_total, d, DEPTH)
    p_penalty += row * sentences + other
    m_more = m_there & (lam > tau)
    tl.store(p_penalty, tl.maximum(tl.load(p_penalty, m_more, other=0.0), lam), m_more)


@triton.jit
def _add(
    p_hidden,
    p_at,
    p_active,
    p_position,
    p_ends,
    p_total,
    p_vector,
    p_number,
    p_count,
    d,
    most,
    positions,
    DEPTH: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    row = tl.load(p_at + i_n)
    if tl.load(p_active + i_n) == 0:
        return
    n = tl.load(p_count + row * 2)
    ended = tl.load(p_count + row * 2 + 1)
    p_hidden += i_n * d
    p_total += row * d
    p_vector += (row * most + (n - 1) % most) * d
    norm = _norm(p_total, d, DEPTH)
    for start in range(0, d, DEPTH):
        dim = start + tl.arange(0, DEPTH)
        own = tl.load(p_total + dim, dim < d, other=0.0)
        new = tl.load(p_hidden + dim, dim < d, other=0.0).to(tl.float32)
        tl.store(p_vector + dim, own / norm, dim < tl.where(ended > 0, d, 0))
        tl.store(p_total + dim, tl.where(ended > 0, 0.0, own) + new, dim < d)
    n += ended
    tl.store(p_number + row * positions + tl.load(p_position + i_n), n)
    tl.store(p_count + row * 2, n)
    tl.store(p_count + row * 2 + 1, tl.load(p_ends + i_n).to(tl.int32))


def similarity(
    hidden: Tensor,
    at: Tensor,
    active: Tensor,
    position: Tensor,
    ends: Tensor,
    known: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    tau: float,
) -> None:
    """Add the newest token of each row to its sentence, as `minithink/ref/similarity.py` describes it.

    If the similarity of two sentences is so near τ that rounding decides, the penalty may differ from the twin's.
    """
    total, vector, penalty, number, count = known
    rows, d = hidden.shape
    if not hidden.numel():
        return
    hidden = hidden.contiguous()
    most = vector.shape[1]
    active = active.contiguous().view(torch.uint8)
    ends = ends.contiguous().view(torch.uint8)
    depth = min(DEPTH, power_of_2(d))
    _compare[rows, triton.cdiv(most, BLOCK)](
        p_at=at,
        p_active=active,
        p_total=total,
        p_vector=vector,
        p_penalty=penalty,
        p_count=count,
        d=d,
        most=most,
        sentences=penalty.shape[1],
        tau=float(tau),
        BLOCK=BLOCK,
        DEPTH=depth,
    )
    _add[(rows,)](
        p_hidden=hidden,
        p_at=at,
        p_active=active,
        p_position=position,
        p_ends=ends,
        p_total=total,
        p_vector=vector,
        p_number=number,
        p_count=count,
        d=d,
        most=most,
        positions=number.shape[1],
        DEPTH=depth,
    )


def variants() -> Iterator[Variant]:
    state = {"p_total": "*fp32", "p_vector": "*fp32", "p_count": "*i32", "p_at": "*i64", "p_active": "*u8"}
    state |= {"d": "i32", "most": "i32"}
    compare = {"p_penalty": "*fp32", "sentences": "i32", "tau": "fp32"}
    yield Variant(_compare, state | compare, {"BLOCK": BLOCK, "DEPTH": DEPTH})
    for dtype in ("fp32", "fp16", "bf16"):
        add = {"p_hidden": f"*{dtype}", "p_position": "*i64", "p_ends": "*u8", "p_number": "*i32", "positions": "i32"}
        yield Variant(_add, state | add, {"DEPTH": DEPTH})
