"""The decoder: Llama, Qwen2 and Qwen3 in one file, without any knowledge of caches or policies.

Tokens of all sequences lie in one flat row of N tokens, so a batch of any lengths needs no padding. The model does
not know which token belongs to which sequence, nor at which position it stands: it hands unrotated q, k and v of
every layer to an object with `attend`, which does (a KV cache at inference, `TrainAttention` in training), and shows
it the residual stream after every layer through `tap`. The heads of q and of k stay in one tensor, qk, as long as the
same is done to both: a decoding step of a small model is bound by the number of calls.

    x = embed[token]
    for each layer:
        qk, v = split(norm(x) · W_qkv)            Qwen2: + b_qkv;  Qwen3: qk = norm(qk) per head
        x = x + attend(qk, v) · W_o               RoPE and softmax(q·kᵀ/√D)·v happen there
        x = x + swiglu(norm(x) · W_gate_up) · W_down
    logits = norm(x) · W_vocab
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from minithink.backend import REFERENCE, Backend
from minithink.config import ModelConfig
from minithink.errors import MinithinkError, quoted


class Attention(Protocol):
    """What the decoder asks of whatever holds the keys and values."""

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Rotate, append, attend.

        Args:
            layer: whose queries, keys and values these are.
            qk: [T, Hq + Hkv, D], unrotated; the heads of the queries, then those of the keys.
            v: [T, Hkv, D].

        Returns:
            [T, Hq, D].
        """

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """See, and perhaps change, the residual stream after `layer` (−1: after the final norm): [T, d].

        The next layer may overwrite `hidden`, and what this returns: whoever keeps one of them makes a copy.
        """


class Block(nn.Module):
    """One layer. Weights are stored [in, out], so that the product reads x · W and streams rows at batch 1."""

    def __init__(self, config: ModelConfig, index: int, backend: Backend) -> None:
        super().__init__()
        self.config, self.index, self.backend = config, index, backend
        c, d = config, config.hidden_size
        q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.attn_norm = nn.Parameter(torch.empty(d))
        self.qkv = nn.Parameter(torch.empty(d, q_out + 2 * kv_out))
        self.qkv_bias = nn.Parameter(torch.empty(q_out + 2 * kv_out)) if c.qkv_bias else None
        self.qk_norm = nn.Parameter(torch.empty(2, c.head_dim)) if c.qk_norm else None  # of q, of k
        self.o = nn.Parameter(torch.empty(q_out, d))
        self.o_bias = nn.Parameter(torch.empty(d)) if c.o_bias else None
        self.mlp_norm = nn.Parameter(torch.empty(d))
        self.gate_up = nn.Parameter(torch.empty(d, 2 * c.intermediate_size))
        self.down = nn.Parameter(torch.empty(c.intermediate_size, d))

    def forward(self, x: Tensor, cache: Attention) -> Tensor:
        """x: [T, d] → [T, d]."""
        c, ops, eps = self.config, self.backend, self.config.rms_norm_eps
        n, hq, hkv = x.shape[0], c.num_heads, c.num_kv_heads

        qkv = ops.linear(ops.rms_norm(x, self.attn_norm, eps), self.qkv, self.qkv_bias)
        # split_with_sizes, since `split` is Python around it that takes longer than the call
        qk, v = qkv.view(n, hq + 2 * hkv, c.head_dim).split_with_sizes((hq + hkv, hkv), dim=1)
        if self.qk_norm is not None:
            weight = self.qk_norm.repeat_interleave(hq, dim=0)[: hq + hkv]  # Hq times q's, Hkv times k's
            qk = ops.rms_norm(qk, weight, eps)
        out = cache.attend(self.index, qk, v)  # [T, Hq, D]
        x = ops.linear(out.reshape(n, hq * c.head_dim), self.o, x if self.o_bias is None else x + self.o_bias)

        h = ops.swiglu(ops.linear(ops.rms_norm(x, self.mlp_norm, eps), self.gate_up, None))
        x = ops.linear(h, self.down, x)
        return cache.tap(self.index, x)


class Decoder(nn.Module):
    """Embedding, blocks, final norm; `logits` is apart, because most prompt tokens need none."""

    def __init__(self, config: ModelConfig, backend: Backend = REFERENCE) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config, i, backend) for i in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        # [V, d], rows of the vocabulary, as the embedding with which it may be shared
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, tokens: Tensor, cache: Attention) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: [T] int64, the new tokens of all sequences, one sequence after the other.
            cache: holds every sequence's earlier keys and values, and knows whose tokens these are.

        Returns:
            [T, d].
        """
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x, cache)
        return cache.tap(-1, self.backend.rms_norm(x, self.norm, self.config.rms_norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, d] after the final norm → [n, V]."""
        return self.backend.linear(hidden, (self.embed if self.head is None else self.head).t(), None)


class Rope:
    """cos and sin of every position's angles, as `ref.rope` takes them: [max_position, 1, D] float32 each, where the
    1 stands for all heads. A prompt longer than the context is refused before it gets here."""

    rotates: bool = True  # False: queries and keys arrive rotated, and a cache may take them as they are

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        freq, scale = rope_frequencies(config)
        angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), freq)
        # yarn's temperature on the logits, put on both q and k (eq. 14 of the paper puts √t on each)
        cos, sin = angles.cos() * scale, angles.sin() * scale  # [max_position, D/2]
        self.cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device)

    def at(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """pos: [T] int64 → cos, sin: [T, 1, D]."""
        return self.cos[pos], self.sin[pos]


class Rotated(Rope):
    """No rotation, for a cache whose queries and keys arrive rotated."""

    rotates = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.dim = config.head_dim
        self.device = device

    def at(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """cos is 1 and sin is 0 at every position."""
        cos = torch.ones(len(pos), 1, self.dim, device=self.device)
        return cos, torch.zeros_like(cos)


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angular frequencies [D/2] in radians per token, and the factor on cos and sin (1 except for yarn and longrope).

    Raises:
        MinithinkError: a field of the scaling is so large or so small that they are no finite numbers.
    """
    try:
        frequencies, scale = _rope_frequencies(config)
        angles = frequencies * config.max_position
        finite = bool(angles.isfinite().all()) and math.isfinite(scale)
    except (ValueError, ArithmeticError):
        finite = False
    if not finite:
        raise MinithinkError(
            f"The RoPE fields {quoted(config.rope, 200)} with rope_theta {config.rope_theta} give frequencies that "
            "are no finite numbers: correct them in config.json."
        )
    return frequencies, scale


def _rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    r, half = config.rope, config.head_dim // 2
    index = torch.arange(half, dtype=torch.float32)
    freq = 1 / config.rope_theta ** (index / half)  # f_i = θ^(−2i/D), rounded as transformers rounds it
    if r.kind in ("default", "dynamic"):
        return freq, 1.0
    if r.kind == "linear":
        return freq / r.factor, 1.0
    if r.kind == "llama3":
        # Bands that turn more than high_freq_factor times over the original context stay, bands that turn less
        # than low_freq_factor times are interpolated, those between are mixed linearly in the number of turns.
        turns = r.original_max_position * freq / (2 * math.pi)
        keep = ((turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)).clamp(0, 1)
        return freq * (keep + (1 - keep) / r.factor), 1.0
    if r.kind == "longrope":
        assert r.attention_factor is not None
        return 1 / (torch.tensor(r.factors) * config.rope_theta ** (index / half)), r.attention_factor
    # yarn, §3.2 "NTK-by-parts": the ramp runs over dimensions, between the two that turn beta times.
    low, high = (_yarn_dimension(config, beta) for beta in (r.beta_fast, r.beta_slow))
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    interpolate = ((index - low) / (high - low)).clamp(0, 1)
    freq = freq * (1 - interpolate) + freq / r.factor * interpolate
    if r.attention_factor is not None:
        return freq, r.attention_factor
    if r.mscale and r.mscale_all_dim:
        return freq, _yarn_scale(r.factor, r.mscale) / _yarn_scale(r.factor, r.mscale_all_dim)
    return freq, _yarn_scale(r.factor, 1.0)


def _yarn_dimension(config: ModelConfig, turns: float) -> float:
    """The dimension (eq. 17's inverse) whose frequency turns that often over the original context."""
    length = config.rope.original_max_position
    return config.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
