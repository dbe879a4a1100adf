"""What a GGUF file says of a model's shape and of generation, as config.json and generation_config.json say it.

Llama, Qwen2 and Qwen3 are read. As with config.json, a field that may change the computation and is not supported is
an error, and so is a field that is not known.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import numpy as np

from minithink.checkpoint.gguf_file import GGUF, bytes_at
from minithink.errors import MinithinkError, alternatives, named, quoted

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBED, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
Q_BIAS = "blk.0.attn_q.bias"
F32 = 0  # the type of numbers of 32 bits
MOST_FACTORS = 2**15  # the largest head has 2¹⁶ channels
# Types of numbers that are a checkpoint's own. The quantized ones were made of bfloat16, mostly.
OWN = {F32: "float32", 1: "float16"}
QUANTIZED = "bfloat16"
MODEL_TYPES = ("model", None)  # general.type; others are adapters, projectors and matrices of importance
# Fields of the architecture that may change the computation, but not at these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0, 1.0),
    "pooling_type": (0,),
}
# … and fields that change nothing, whatever they hold.
HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned"})
# Tokens that end a turn or a text, whatever their ids: llama.cpp stops at them, too.
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")
CONTROL = 3  # the type of a token that is no text
# What files since the end of 2025 recommend for generation, and what generation_config.json calls it.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def config_fields(model: GGUF) -> dict[str, Any]:
    """The fields of config.json.

    Raises:
        MinithinkError: the model is of another architecture, or a field is missing or not supported.
    """
    _refuse_other_files(model)
    fields = _Fields(model)
    embed = model.tensors.get(EMBED)
    if embed is None:
        raise MinithinkError(f"{model.path}: the tensor {EMBED} is missing: the file is incomplete.")
    hidden_size = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // max(heads, 1))
    context = fields.integer("context_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[fields.architecture]],
        "model_type": fields.architecture,
        "vocab_size": embed.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": _rope(fields, context),
        "tie_word_embeddings": HEAD not in model.tensors,
        "bos_token_id": model.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": own_dtype(model),
    }
    if fields.architecture != "qwen2":
        config["attention_bias"] = Q_BIAS in model.tensors
    fields.must_be("attention.value_length", head_dim)
    fields.must_be("rope.dimension_count", head_dim)
    window = fields.integer("attention.sliding_window", 0)
    if 0 < window < context:
        raise MinithinkError(f"{fields.named('attention.sliding_window')} is {window}, which is not supported.")
    fields.refuse_others()
    return config


def generation_fields(model: GGUF) -> dict[str, Any]:
    """The fields of generation_config.json. The file itself has no such list of tokens that end a text, so it is
    made of those that it names and of those with a text in ENDS."""
    ends = [model.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = model.fields.get("tokenizer.ggml.tokens")
    kinds = model.fields.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
            if kind == CONTROL and token in ENDS:
                ends.append(id)
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(id for id in ends if type(id) is int))}
    for theirs, ours in SAMPLING.items():
        value = model.fields.get(f"general.sampling.{theirs}")
        if value is not None:
            found[ours] = value
    if "temperature" in found:
        found["do_sample"] = True
    return found


def _refuse_other_files(model: GGUF) -> None:
    kind = model.fields.get("general.type")
    if kind not in MODEL_TYPES:
        raise MinithinkError(f"{model.path} holds no model but a {quoted(kind)}: give the model's own file.")
    architecture = model.fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise MinithinkError(
            f"{model.path}: the architecture is {quoted(architecture)}; {alternatives(architecture, ARCHITECTURES)} "
            "(dense decoders) in minithink."
        )


class _Fields:
    """Typed access to the fields of the architecture. It remembers which ones were read."""

    def __init__(self, model: GGUF) -> None:
        self.model = model
        self.architecture: str = model.fields["general.architecture"]
        self.read = set[str]()

    def named(self, name: str) -> str:
        """A field with its file, for errors."""
        return f"{self.model.path}: the field {self.architecture}.{named(name)}"

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field. A list of equal values, one a layer, is one value."""
        self.read.add(name)
        value = self.model.fields.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, list):
            return value
        if not value or any(other != value[0] for other in value):
            raise MinithinkError(f"{self.named(name)} is {quoted(value)}: layers that differ are not supported.")
        return value[0]

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int:
            what = "is missing" if value is None else f"is {quoted(value)}, not a whole number"
            raise MinithinkError(f"{self.named(name)} {what}.")
        return value

    def must_be(self, name: str, value: int) -> None:
        """Refuse a field that has another value."""
        found = self.get(name, value)
        if found != value:
            raise MinithinkError(f"{self.named(name)} is {quoted(found)}, and minithink supports only {value}.")

    def refuse_others(self) -> None:
        """Refuse fields that were not read and may change the computation."""
        prefix = f"{self.architecture}."
        for whole, value in self.model.fields.items():
            name = whole.removeprefix(prefix)
            if whole == name or name in self.read or name in HARMLESS:
                continue
            if name not in NEUTRAL:
                raise MinithinkError(
                    f"{self.named(name)} = {quoted(value, 60)} is not known to minithink and may change the "
                    "computation."
                )
            if value not in NEUTRAL[name]:
                only = quoted(NEUTRAL[name][0])
                raise MinithinkError(f"{self.named(name)} is {quoted(value)}, and minithink supports only {only}.")


def own_dtype(model: GGUF) -> str:
    """The number type of a model: that of most of its numbers."""
    counts = Counter[str]()
    for tensor in model.tensors.values():
        counts[OWN.get(tensor.kind, QUANTIZED)] += prod(tensor.shape)
    return counts.most_common(1)[0][0]


def _rope_factors(model: GGUF) -> list[float] | None:
    """The numbers by which RoPE's frequencies are divided; None: there are none."""
    tensor = model.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.kind != F32 or len(tensor.shape) != 1 or tensor.shape[0] > MOST_FACTORS:
        raise MinithinkError(f"{tensor} must be a row of at most {MOST_FACTORS:,} numbers of type F32.")
    return np.frombuffer(bytes_at(tensor, 4 * tensor.shape[0]), "<f4").tolist()


def _rope(fields: _Fields, context: int) -> dict[str, Any]:
    """The field `rope_parameters` of config.json."""
    factors = _rope_factors(fields.model)
    # As in llama.cpp: without a type the scaling is linear, the old name stands in for the new one, and 0 means 1.
    kind = fields.get("rope.scaling.type", "linear")
    old_factor = fields.get("rope.scale_linear", 1.0)
    factor = fields.get("rope.scaling.factor", old_factor)
    if factor == 0:
        factor = 1.0
    original = fields.get("rope.scaling.original_context_length", context)
    fast = fields.get("rope.scaling.yarn_beta_fast", 32.0)
    slow = fields.get("rope.scaling.yarn_beta_slow", 1.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 10000.0)}
    if kind == "linear" and factor == 1.0:
        kind = "none"
    if kind not in ("none", "linear", "yarn"):
        raise MinithinkError(
            f"{fields.named('rope.scaling.type')} is {quoted(kind)}, and minithink reads none, linear and yarn."
        )
    if factors is not None:
        if kind != "none":
            raise MinithinkError(
                f"{fields.model.path} has RoPE factors in {ROPE_FACTORS} and scaling of type {kind}, which is not "
                "supported: only one of the two is."
            )
        # transformers' name for a factor of every frequency; what it does beyond some length is the same here.
        rope["rope_type"] = "longrope"
        rope["short_factor"] = rope["long_factor"] = factors
        rope["attention_factor"] = 1.0
        rope["original_max_position_embeddings"] = context
    elif kind == "linear":
        rope["rope_type"] = "linear"
        rope["factor"] = factor
    elif kind == "yarn":
        rope["rope_type"] = "yarn"
        rope["factor"] = factor
        rope["original_max_position_embeddings"] = original
        rope["beta_fast"] = fast
        rope["beta_slow"] = slow
    return rope
