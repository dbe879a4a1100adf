"""What the tests draw: small decoders of every architecture and every kind of rotary embedding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from minithink.config import ARCHITECTURES, ROPE_FIELDS, ModelConfig, RopeScaling
from minithink.model import Decoder

# What is drawn. The factors of longrope depend on the width of the heads: tests/checkpoint/test_gguf.py has them.
ROPES = sorted(ROPE_FIELDS.keys() - {"longrope"})
MAX_POSITION = 64  # tokens: long enough for every band of the scaled rotary embeddings to matter


@st.composite
def rope_scalings(draw: st.DrawFn, kind: str | None = None, max_position: int = MAX_POSITION) -> RopeScaling:
    """Any kind of scaling; the original context is shorter than the tests' sequences, so that scaling shows."""
    kind = kind or draw(st.sampled_from(ROPES))
    factor = draw(st.sampled_from([1.0, 1.5, 2.0, 4.0, 8.0, 40.0]))
    original = draw(st.sampled_from([8, 16, 31, MAX_POSITION]))
    if kind == "default":
        return RopeScaling(original_max_position=max_position)
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, factor, original_max_position=max_position)
    if kind == "llama3":
        low = draw(st.sampled_from([0.5, 1.0, 2.0]))
        high = low * draw(st.sampled_from([1.5, 4.0]))
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=draw(st.sampled_from([4.0, 32.0])),
        beta_slow=draw(st.sampled_from([0.5, 1.0])),
        attention_factor=draw(st.sampled_from([None, None, 0.7, 1.3])),
        mscale=draw(st.sampled_from([None, 0.707, 1.0])),
        mscale_all_dim=draw(st.sampled_from([None, 0.5, 1.0])),
        truncate=draw(st.booleans()),
    )


@st.composite
def configs(draw: st.DrawFn, architecture: str | None = None, rope: str | None = None) -> ModelConfig:
    """Small decoders: odd sizes, every group ratio, heads that are not hidden_size / num_heads wide."""
    architecture = architecture or draw(st.sampled_from(sorted(ARCHITECTURES)))
    kind = ARCHITECTURES[architecture]
    groups, kv_heads = draw(st.sampled_from([1, 2, 3, 7])), draw(st.integers(1, 3))
    heads = groups * kv_heads
    # At least 8 wide: the few numbers of a narrower residual stream may nearly cancel, and the norm then magnifies
    # their rounding. transformers insists that Llama's heads divide the hidden size, even where head_dim is given.
    hidden = heads * draw(st.integers(-(-8 // heads), 8)) if kind == "llama" else draw(st.integers(8, 41))
    bias = kind != "qwen2" and draw(st.booleans())
    scaling = draw(rope_scalings(rope))
    narrowest = 2 if scaling.kind == "dynamic" else 1  # transformers divides by head_dim − 2
    return ModelConfig(
        architecture=architecture,
        vocab_size=draw(st.integers(5, 97)),
        hidden_size=hidden,
        intermediate_size=draw(st.integers(1, 45)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(narrowest, 10)),
        max_position=MAX_POSITION,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_theta=draw(st.sampled_from([50.0, 10000.0, 1e6])),
        rope=scaling,
        tie_embeddings=draw(st.booleans()),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        qk_norm=kind == "qwen3",
        bos_token_id=draw(st.sampled_from([None, 1])),
        eos_token_ids=draw(st.sampled_from([(), (2,), (2, 4)])),
        dtype="float32",
    )


def example_config(architecture: str = "Qwen3ForCausalLM", rope: str = "default", **changes: Any) -> ModelConfig:
    """One plain small config, for tests that need no variety; fields by keyword."""
    kind = ARCHITECTURES[architecture]
    scaling = {
        "default": RopeScaling(original_max_position=512),
        "linear": RopeScaling("linear", 4.0, 512),
        "dynamic": RopeScaling("dynamic", 4.0, 512),
        "llama3": RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
        "yarn": RopeScaling("yarn", 4.0, 64),
    }[rope]
    plain = ModelConfig(
        architecture=architecture,
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        max_position=512,
        rope=scaling,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )
    return replace(plain, **changes)


def random_weights(shapes: dict[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, of a scale at which attention is sharp and logits are far from flat."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in sorted(shapes.items()):
        x = torch.randn(shape, generator=generator)
        if "norm" in name:
            x = 1 + 0.3 * x
        elif name.endswith("bias"):
            x = 0.5 * x
        elif name.startswith(("lm_head", "model.embed_tokens")):
            x = x * 2 / math.sqrt(shape[-1])
        else:
            x = x * (1.5 if "q_proj" in name or "k_proj" in name else 1.0) / math.sqrt(shape[-1])
        out[name] = x
    return out


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder with `random_weights`."""
    from minithink.checkpoint.weights import tensors_of

    decoder = Decoder(config).requires_grad_(False)
    views = tensors_of(decoder)
    for name, tensor in random_weights({n: v.shape for n, v in views.items()}, seed).items():
        views[name].copy_(tensor)
    return decoder
