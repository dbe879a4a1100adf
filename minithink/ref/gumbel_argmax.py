"""Draw a token by the Gumbel-max trick, with noise that depends only on a counter.

    token = argmax_v (logit_v + g_v),   g_v = −log(−log(1 − u_v)),   u_v uniform in (0, 1)

draws from softmax(logits) exactly (Gumbel 1954; Maddison et al. 2014). The uniforms come from Philox4x32-10 (Salmon
et al. 2011), a bijection of a counter under a key. No state advances: u is a pure function of (seed, sequence,
position, token id). So a sequence draws the same tokens whatever the other sequences of the batch do, and a GPU
kernel can compute the same numbers wherever it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # increments of the key in every round: from the golden ratio, and √3 − 1


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
    noise = gumbel(seed, sequence, position, logits.shape[-1])
    return (logits + noise).argmax(-1)


def gumbel(seed: int, sequence: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise. sequence, position: [B] int64 → [B, V] float32, all finite (−2.9 to 22.9)."""
    # The large g decide, and they come from small u, where float32 is finest: log1p keeps this resolution.
    u = uniform(seed, sequence, position, vocab_size)
    inner = -torch.log1p(-u)  # −log(1 − u)
    return -inner.log()


def uniform(seed: int, sequence: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Uniforms keyed by (seed, sequence, position, token id). sequence, position: [B] int64.

    Token v takes word v mod 4 of Philox(counter = (v div 4, position, sequence low, sequence high), key = (seed low,
    seed high)), as (word + ½)·2⁻³² rounded to float32, and at most 1 − 2⁻²⁴: never 0, never 1.

    Returns:
        [B, V] float32.
    """
    quads = -(-vocab_size // 4)
    quad = torch.arange(quads, device=position.device)
    column = sequence[:, None]  # [B, 1]
    low = column & MASK
    high = column >> 32 & MASK
    counter = (quad[None], position[:, None], low, high)
    key = (seed & MASK, seed >> 32)
    words = torch.stack(philox(counter, key), dim=-1)  # [B, quads, 4]
    words = words.flatten(1)
    x = words[:, :vocab_size].float()
    x = x.add_(0.5).mul_(2.0**-32)
    return x.clamp_(max=1 - 2.0**-24)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10. counter: four int64 tensors that broadcast, each word below 2³²; key: two such numbers.

    Returns:
        four int64 tensors of the broadcast shape, each word below 2³².
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # An int64 product wraps modulo 2⁶⁴, so it has the 64 bits of the product of two unsigned words. Only c0 and
        # c2 are multiplied, so only they must be masked in every round.
        a = c0 * MULTIPLIERS[0]
        b = c2 * MULTIPLIERS[1]
        c0 = (b >> 32) ^ c1
        c0 = c0.bitwise_xor_(k0).bitwise_and_(MASK)
        c1 = b
        c2 = (a >> 32) ^ c3
        c2 = c2.bitwise_xor_(k1).bitwise_and_(MASK)
        c3 = a
        k0 = k0 + WEYL[0] & MASK
        k1 = k1 + WEYL[1] & MASK
    return list(torch.broadcast_tensors(c0, c1 & MASK, c2, c3 & MASK))
