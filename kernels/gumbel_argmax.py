"""Draw a token by the Gumbel-max trick, with noise computed in registers. Twin: `minithink/ref/gumbel_argmax.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.gumbel_argmax import gumbel_argmax
    >>> logits = torch.tensor([0.0, 1.0, -torch.inf]).repeat(100, 1)  # [B, V] float32
    >>> sequence = torch.arange(100)  # [B] int64: each row is another sequence,
    >>> position = torch.full((100,), 12)  # [B] int64: which draws its token for position 12
    >>> token = gumbel_argmax(logits, 0, sequence, position)  # [B] int64; 0 is the seed
    >>> token.bincount(minlength=3).tolist()  # the probabilities are 0.27, 0.73 and 0
    [28, 72, 0]

Layout: a program takes a block of one row's vocabulary. Philox gives four words for a counter, for four neighbouring
tokens; they are interleaved into the order of the logits. The block's best value and its token go to a scratch tensor
of about a hundred numbers a row, which a second kernel reduces.
Bound: arithmetic. A logit, 4 bytes, costs about 80 operations: 15 as its share of ten rounds of Philox, the others
for two logarithms and a division. That is 20 operations for each byte; an H200 does 6 in the time of the read. A row
of 128 000 tokens takes 0.4 µs, less than the two launches.

Rounding: the words and the uniforms are those of the twin, bit for bit. The logarithms are rounded differently, so
the noise differs in its last bits. If the two best sums are nearer than 1e-5 (for |logits| up to 50), either may be
taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

BLOCK = 1024  # tokens of a program


@triton.jit
def words(seed, sequence, position, i_quad):
    """The four words of Philox4x32-10 of each block of four tokens, uint32, for int64 sequence and position."""
    low = sequence.to(tl.uint32)
    high = (sequence >> 32).to(tl.uint32)
    # Triton's has the multipliers, the constants that the key grows by and the order of the words of the definition.
    return tl.philox(seed, i_quad.to(tl.uint32), position.to(tl.uint32), low, high)


@triton.jit
def uniform(word):
    """(word + ½)·2⁻³² rounded to float32, and at most 1 − 2⁻²⁴."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def gumbel(u):
    """−log(−log(1 − u)), where small u keep their resolution."""
    # log(1 − u) = log(w)·u / (1 − w), where w is 1 − u rounded, and −u where that is 1: the rounding of w cancels.
    w = 1 - u
    exponential = tl.where(w == 1, u, -tl.log(w) * u / tl.where(w == 1, 1.0, 1 - w))
    return -tl.log(exponential)


@triton.jit
def best(value, token):
    """The largest value and its token, of equal values the smallest token. NaN counts as +∞: some token is taken."""
    value = tl.where(value != value, float("inf"), value)
    largest = tl.max(value, axis=0)
    return largest, tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0)


@triton.jit(do_not_specialize=["seed"])
def _best_of_blocks(
    p_logits, p_sequence, p_position, p_value, p_token, seed, vocab_size, stride_row, BLOCK: tl.constexpr
):
    i_row = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    sequence = tl.load(p_sequence + i_row)
    position = tl.load(p_position + i_row)
    w0, w1, w2, w3 = words(seed, sequence, position, i_block * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    # token v takes word v mod 4 of quad v div 4
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    token = i_block * BLOCK + tl.arange(0, BLOCK)
    m_in = token < vocab_size
    logit = tl.load(p_logits + i_row * stride_row + token, m_in, other=float("-inf"))
    value, token = best(logit + gumbel(uniform(word)), tl.where(m_in, token, 0x7FFFFFFF))
    o_block = i_row * tl.num_programs(1) + i_block
    tl.store(p_value + o_block, value)
    tl.store(p_token + o_block, token)


@triton.jit
def _best_of_row(p_value, p_token, p_out, blocks, BLOCKS: tl.constexpr):
    i_row = tl.program_id(0)
    i_block = tl.arange(0, BLOCKS)
    m_in = i_block < blocks
    value = tl.load(p_value + i_row * blocks + i_block, m_in, other=float("-inf"))
    token = tl.load(p_token + i_row * blocks + i_block, m_in, other=0x7FFFFFFF)
    _, token = best(value, token)
    tl.store(p_out + i_row, token.to(tl.int64))


def gumbel_argmax(logits: Tensor, seed: int, sequence: Tensor, position: Tensor) -> Tensor:
    """Draw one token of each row from softmax(logits).

    Args:
        logits: [B, V] float32; −∞ for tokens that must not be drawn.
        seed: 64 bits, unsigned.
        sequence: [B] int64, the number of each row's sequence.
        position: [B] int64, the position at which the drawn token will stand.

    Returns:
        [B] int64 token ids; of equal sums the smallest id.
    """
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = triton.cdiv(vocab_size, BLOCK)
    value = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _best_of_blocks[rows, blocks](
        p_logits=logits,
        p_sequence=sequence.contiguous(),
        p_position=position.contiguous(),
        p_value=value,
        p_token=token,
        seed=seed,
        vocab_size=vocab_size,
        stride_row=logits.stride(0),
        BLOCK=BLOCK,
    )
    _best_of_row[(rows,)](p_value=value, p_token=token, p_out=out, blocks=blocks, BLOCKS=power_of_2(blocks))
    return out


def variants() -> Iterator[Variant]:
    signature = {"p_logits": "*fp32", "p_sequence": "*i64", "p_position": "*i64", "p_value": "*fp32"}
    signature |= {"p_token": "*i32", "vocab_size": "i32", "stride_row": "i32"}
    for seed in ("i32", "i64", "u64"):  # as large as it is
        yield Variant(_best_of_blocks, signature | {"seed": seed}, {"BLOCK": BLOCK})
    signature = {"p_value": "*fp32", "p_token": "*i32", "p_out": "*i64", "blocks": "i32"}
    for blocks in (1, 128, 256):
        yield Variant(_best_of_row, signature, {"BLOCKS": blocks})
