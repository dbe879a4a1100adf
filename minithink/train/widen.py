"""Make every attention head twice as wide, so that the model still computes the same.

Training that continues from such weights loses no skill. `python -m minithink.train --init FOLDER --head-dim 2D`
calls `widened`. A head with D channels gets 2D, and its channel c becomes channel 2c:

    rotary     Channels c and c + D/2 are a pair that turns by θ^(−2c/D) a token. Channels 2c and 2c + D are a pair of
               the wide head, which turns by θ^(−2·2c/2D): the same. Pairs of odd channels turn at the speeds between.
    q          The new channels are 0, so they add nothing to a score. Their gradient is not 0, because k's are not.
    k and v    The new channels are a turned copy: every pair of channels, turned by 45°. The copy is as long as the
               original. A plain copy would be quantized to the same numbers, with the same error.
    o          The rows of v's new channels are 0. Their gradient is not 0, because these channels of v are not.
    1/√(2D)    Scores shrink by √2, so the weights make q and k 2^¼ times as large: the weights of the two norms where
               q and k are normed, W_q and W_k elsewhere.
    norms      A norm divides by √(mean square + eps). The mean is now over 2D channels. For k it stays the same:
               the copy is as long as the original. For q half of the channels are 0, so W_q grows by √2.

The logits are equal in exact arithmetic, eps included; in float32 they differ by rounding. In the first step the new
columns of W_q and the new rows of W_o learn, and from the second step on those of W_k and W_v, too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.model import Block, Decoder, rope_frequencies


def widened(decoder: Decoder, head_dim: int) -> Decoder:
    """A decoder that computes the same with heads of `head_dim` channels: as many as now (the same object), or twice.

    Raises:
        UsageError: `head_dim` is another number, or YaRN bends the rotary frequencies of the wide heads differently.
    """
    old = decoder.config
    new = replace(decoder.config, head_dim=head_dim)
    if head_dim == old.head_dim:
        return decoder
    if head_dim != 2 * old.head_dim:
        raise UsageError(f"Heads of {old.head_dim} channels cannot get {head_dim}: give {2 * old.head_dim}.")
    if not torch.allclose(rope_frequencies(new)[0][::2], rope_frequencies(old)[0], rtol=1e-6, atol=0.0):
        raise UsageError(f"The {old.rope.kind} frequencies of wide heads are others: these heads cannot be widened.")
    wide = Decoder(new, decoder.backend).to(decoder.embed.device, decoder.embed.dtype).requires_grad_(False)
    state = decoder.state_dict()
    for i, block in enumerate(decoder.blocks):
        assert isinstance(block, Block)
        state |= {f"blocks.{i}.{name}": value for name, value in _attention(block).items()}
    wide.load_state_dict(state)
    return wide


def _attention(b: Block) -> dict[str, Tensor]:
    """The wide parameters of a block, by name."""
    hq = b.config.num_heads
    hkv = b.config.num_kv_heads
    width = b.config.head_dim
    for_q, for_k = (2**0.25, 2**0.25) if b.qk_norm is None else (2**0.5, 1.0)

    def columns(x: Tensor) -> Tensor:
        """[..., (Hq + 2 Hkv)·D] → [..., (Hq + 2 Hkv)·2D]"""
        q, k, v = x.unflatten(-1, (-1, width)).split((hq, hkv, hkv), dim=-2)
        q = q * for_q
        k = k * for_k
        heads = [torch.stack(pair, -1).flatten(-2) for pair in ((q, q * 0), (k, turned(k)), (v, turned(v)))]
        return torch.cat(heads, dim=-2).flatten(-2)

    o = b.o.unflatten(0, (hq, width))  # [Hq, D, d]
    wide = {"qkv": columns(b.qkv), "o": torch.stack((o, o * 0), 2).flatten(0, 2)}
    if b.qkv_bias is not None:
        wide["qkv_bias"] = columns(b.qkv_bias)
    if b.qk_norm is not None:  # in all √2 · 2^−¼ = 2^¼ for q, and 2^¼ for k
        wide["qk_norm"] = (b.qk_norm * b.qk_norm.new_tensor([[2**-0.25], [2**0.25]])).repeat_interleave(2, dim=1)
    return wide


def turned(x: Tensor) -> Tensor:
    """The pairs (a, b) = (x_i, x_{i + D/2}) of every head, turned by 45°: (a − b, a + b) / √2. x: [..., D]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a - b, a + b), dim=-1) / 2**0.5
