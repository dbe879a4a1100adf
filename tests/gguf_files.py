"""GGUF files of small models, written with the package `gguf` as llama.cpp's converter writes them.

Nothing here calls minithink's own reading: the numbers come from `gguf.quants.dequantize`, logits from transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def name_in_gguf(name: str) -> str:
    """llama.cpp's name of one of transformers' tensors."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    number, _, inner = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[inner]}.{kind}"


def blocks(kind: GGMLQuantizationType, count: int, seed: int) -> np.ndarray:
    """Random blocks of a type whose numbers are of the size of weights: [count, bytes of a block] uint8.

    Most types cannot be quantized in Python. So random bytes are drawn, and some with reasonable numbers are kept.
    """
    generator = np.random.default_rng(seed)
    return generator.choice(_reasonable_blocks(kind), count)


@cache
def _reasonable_blocks(kind: GGMLQuantizationType) -> np.ndarray:
    """[32 or more, bytes of a block] uint8."""
    generator = np.random.default_rng(0)
    size = GGML_QUANT_SIZES[kind][1]
    kept: list[np.ndarray] = []
    while sum(map(len, kept)) < 32:
        drawn = generator.integers(0, 256, (2048, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(dequantize(drawn.reshape(1, -1), kind)).reshape(len(drawn), -1).max(axis=1)
        kept.append(drawn[(largest > 0.01) & (largest < 0.2)])
    return np.concatenate(kept)


def stored(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """A random matrix of a type: its bytes, row by row, and its numbers."""
    block = GGML_QUANT_SIZES[kind][0]
    raw = blocks(kind, math.prod(shape) // block, seed).reshape(shape[0], -1)
    return raw, torch.from_numpy(dequantize(raw, kind).copy()).view(shape)


def in_order_of_llama_cpp(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of W_q or W_k as llama.cpp's converter puts them (`LlamaModel.permute`)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """The tensor rope_freqs.weight as the converter computes it from the fields of config.json."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for pair in range(head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wave < high:
            factors.append(1.0)
        elif wave > low:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def transformers_model(architecture: str, rope: dict[str, Any], **fields: Any) -> Any:
    """transformers' model with the published fields of config.json; its weights are drawn by transformers."""
    import transformers

    config = getattr(transformers, CONFIGS[architecture])(
        **SHAPE | fields, rope_parameters=rope, bos_token_id=1, eos_token_id=2, pad_token_id=None
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def write_gguf(
    path: Path,
    architecture: str,
    rope: dict[str, Any] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    add: Callable[[GGUFWriter], None] | None = None,
    split_max_tensors: int = 0,
    **fields: Any,
) -> Any:
    """Write the GGUF file of a random model, and give transformers' model with the same numbers.

    Args:
        architecture: llama, qwen2 or qwen3.
        rope: `rope_parameters` of config.json.
        kind: the type of all matrices.
        add: writes further fields; None: there is no tokenizer.
        fields: of config.json, which differ from SHAPE.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0} if rope is None else rope
    model = transformers_model(architecture, rope, **fields)
    config = model.config
    writer = GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    writer.add_type("model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{architecture}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(llama3_factors(rope, config.head_dim), np.float32))
    if add is not None:
        add(writer)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    generator = torch.Generator().manual_seed(1)
    for number, (name, tensor) in enumerate(state.items()):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        turned = heads.get(name.split(".")[-2]) if architecture == "llama" else None
        if tensor.dim() == 1:
            numbers = torch.randn(tensor.shape, generator=generator) * 0.3 + ("norm" in name)
            tensor.copy_(numbers)
            raw = numbers.numpy()
            raw_kind = GGMLQuantizationType.F32
        else:
            raw, numbers = stored(tuple(tensor.shape), kind, number)
            tensor.copy_(numbers)
            raw_kind = kind
        raw = raw if turned is None else in_order_of_llama_cpp(raw, turned)
        if raw_kind == GGMLQuantizationType.F32:
            writer.add_tensor(name_in_gguf(name), np.ascontiguousarray(raw).view(np.float32))
        else:
            writer.add_tensor(name_in_gguf(name), np.ascontiguousarray(raw), raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tokenizer(writer: GGUFWriter, spec: dict[str, Any], pre: str) -> None:
    """The fields of a tokenizer.

    Args:
        spec: the parsed tokenizer.json.
        pre: the name of its pre-tokenizer in GGUF files.
    """
    added = {token["content"]: token for token in spec["added_tokens"]}
    ids = spec["model"]["vocab"] | {content: token["id"] for content, token in added.items()}
    tokens = [f"[PAD{id}]" for id in range(max(ids.values()) + 1)]
    kinds = [5] * len(tokens)  # unused
    for content, id in ids.items():
        tokens[id] = content
        kinds[id] = 1
        if content in added:
            kinds[id] = 3 if added[content]["special"] else 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    )
