"""config.json is read exactly, or refused with a sentence that names the field."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.config import ModelConfig, RopeScaling, as_ids, read_json
from minithink.errors import MinithinkError
from minithink.model import rope_frequencies
from tests.compare import assert_close, rope_tolerance
from tests.strategies import configs

R1_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
R1_QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
REAL = {"R1-Llama-8B": R1_LLAMA_8B, "R1-Qwen-7B": R1_QWEN_7B, "Qwen3-8B": QWEN3_8B}


def test_r1_distill_llama_8b() -> None:
    c = ModelConfig.from_dict(R1_LLAMA_8B)
    assert (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers) == (128256, 4096, 14336, 32)
    assert (c.num_heads, c.num_kv_heads, c.head_dim) == (32, 8, 128)
    assert (c.rms_norm_eps, c.rope_theta, c.max_position) == (1e-5, 500000.0, 131072)
    assert c.rope == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert (c.qkv_bias, c.o_bias, c.qk_norm, c.tie_embeddings) == (False, False, False, False)
    assert (c.bos_token_id, c.eos_token_ids, c.dtype) == (128000, (128001,), "bfloat16")
    assert c.kv_bytes_per_token(2) == 131072  # 128 KiB a token, as its papers quote


def test_r1_distill_qwen_7b() -> None:
    """use_sliding_window is false, so the sliding_window of 4096 that the file also gives means nothing."""
    c = ModelConfig.from_dict(R1_QWEN_7B)
    assert (c.num_heads, c.num_kv_heads, c.head_dim) == (28, 4, 128)
    assert (c.qkv_bias, c.o_bias, c.qk_norm) == (True, False, False)
    assert (c.rope_theta, c.rope.kind, c.vocab_size) == (10000.0, "default", 152064)


def test_qwen3_8b() -> None:
    c = ModelConfig.from_dict(QWEN3_8B)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.num_layers) == (32, 8, 128, 36)
    assert (c.qkv_bias, c.o_bias, c.qk_norm) == (False, False, True)
    assert (c.rope_theta, c.rope.kind, c.max_position) == (1e6, "default", 40960)


@pytest.mark.parametrize("raw", REAL.values(), ids=REAL)
def test_transformers_understands_the_same(raw: dict[str, Any]) -> None:
    """transformers' reading of a real config, written in its new file shape, is read as the same model."""
    import transformers

    hf = transformers.AutoConfig.for_model(**copy.deepcopy(raw))  # it writes into the tables that it is given
    assert ModelConfig.from_dict(json.loads(hf.to_json_string())) == ModelConfig.from_dict(raw)


@given(config=configs())
def test_to_dict_is_read_back(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(config=configs())
def test_transformers_reads_to_dict(config: ModelConfig) -> None:
    import transformers

    raw = config.to_dict()
    hf = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    written = json.loads(hf.to_json_string())
    for name in raw.keys() - {"rope_parameters", "rope_scaling", "rope_theta", "eos_token_id"}:
        assert written[name] == raw[name], name
    assert {k: v for k, v in written["rope_parameters"].items() if k in raw["rope_parameters"]} == (
        raw["rope_parameters"]
    )


@st.composite
def rope_fields(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of RoPE of a config.json, spelled in every way that files have been seen to spell them."""

    def some(fields: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: draw(st.sampled_from(values)) for name, values in fields.items() if draw(st.booleans())}

    kind = draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]))
    table: dict[str, Any] = {draw(st.sampled_from(["rope_type", "type"])): kind}
    if kind != "default":
        table["factor"] = draw(st.sampled_from([1, 1.5, 4.0, 40, *([None] if kind == "yarn" else [])]))
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([1.5, 4]))}
    if kind == "yarn":
        table |= some(
            {
                "attention_factor": [None, 0.7],
                "beta_fast": [None, 0, 4, 32.0],
                "beta_slow": [None, 0, 0.5],
                "mscale": [None, 0, 0.707],
                "mscale_all_dim": [None, 0.0, 1.0],
                "truncate": [None, True, False],
            }
        )
    table |= some({"original_max_position_embeddings": [8, 16, 31.0]})
    table |= some(
        {
            "attn_factor": [0.8782488562869419],
            "mrope_section": [[2, 3, 3]],
            "finetuned": [True],
            "type": ["mrope"] if "rope_type" in table else [kind],
            "attention_factor": [None],
            "rope_theta": [50.0, 10000],
        }
    )
    fields: dict[str, Any] = {draw(st.sampled_from(["rope_scaling", "rope_parameters"])): table}
    fields |= some({"rope_theta": [1e6, 500], "original_max_position_embeddings": [12]})
    if "rope_scaling" in fields and ("rope_theta" in fields or "rope_theta" in table) and draw(st.booleans()):
        theta = table.get("rope_theta") or fields["rope_theta"]
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    return fields


@given(fields=rope_fields(), base=st.sampled_from(["llama", "qwen2", "qwen3"]))
@example(
    fields={
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attn_factor": 0.8782488562869419,
        }
    },
    base="qwen3",
)
@example(
    fields={
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 31,
            "beta_fast": 2.0,
            "truncate": None,
        },
        "rope_theta": 50.0,
    },
    base="llama",
)
@example(
    fields={
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 31,
            "beta_fast": 1.5,
        },
        "original_max_position_embeddings": 12,
        "rope_theta": 50.0,
    },
    base="llama",
)
@example(
    fields={
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 31,
        },
        "original_max_position_embeddings": 12,
    },
    base="llama",
)
def test_rope_is_read_as_transformers_computes_it(fields: dict[str, Any], base: str) -> None:
    """Whatever the fields are, frequencies and the factor on cos and sin are those of transformers."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    transformers.utils.logging.set_verbosity_error()
    raw = {
        "model_type": base,
        "architectures": [f"{base.capitalize()}ForCausalLM"],
        "vocab_size": 9,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    } | fields
    rotary = LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**copy.deepcopy(raw)))
    config = ModelConfig.from_dict(raw)
    frequencies, scale = rope_frequencies(config)
    assert_close(f"frequencies of {fields}", frequencies, rotary.inv_freq, atol=0, rtol=rope_tolerance(config.rope))
    assert scale == pytest.approx(rotary.attention_scaling, rel=1e-12)


def test_rope_fields_without_effect_are_named() -> None:
    """DeepSeek-R1-0528-Qwen3-8B's table: what transformers leaves out is said, and nothing else."""
    table = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attn_factor": 0.8782488562869419,
    }
    config = ModelConfig.from_dict(QWEN3_8B | {"rope_scaling": table, "max_position_embeddings": 131072}, "there")
    without = {name: value for name, value in table.items() if name != "attn_factor"}
    assert config == ModelConfig.from_dict(QWEN3_8B | {"rope_scaling": without, "max_position_embeddings": 131072})
    assert config.cautions == (
        "there: attn_factor = 0.8782488562869419 has no effect on RoPE of type yarn, as in transformers",
    )
    many = table | {f"x{i}": i for i in range(50)}
    [caution] = ModelConfig.from_dict(QWEN3_8B | {"rope_scaling": many}).cautions
    assert "attn_factor = 0.8782488562869419, x0 = 0, x1 = 1 and 48 more" in caution


@pytest.mark.parametrize(
    ("change", "caution"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic stretches only texts of more than 131,072"),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "rope_type 'default' counts, and type 'mrope'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_scaling counts, and"),
        ({}, None),
    ],
)
def test_doubtful_rope_fields_get_a_caution(change: dict[str, Any], caution: str | None) -> None:
    cautions = ModelConfig.from_dict(R1_LLAMA_8B | change).cautions
    assert len(cautions) == (caution is not None)
    assert caution is None or caution in cautions[0]


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "default"])
def test_old_and_new_rope_shapes_are_equal(kind: str) -> None:
    scaling: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.0},
        "llama3": R1_LLAMA_8B["rope_scaling"],  # type: ignore[dict-item]
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    }
    fields = {k: v for k, v in scaling[kind].items() if k != "rope_type"}
    bare = {k: v for k, v in QWEN3_8B.items() if k not in ("rope_theta", "rope_scaling")}
    oldest = ModelConfig.from_dict(bare | {"rope_theta": 5e5, "rope_scaling": {"type": kind} | fields})
    old = ModelConfig.from_dict(bare | {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind} | fields})
    new = {"rope_type": kind, "rope_theta": 5e5} | fields
    assert oldest == old == ModelConfig.from_dict(bare | {"rope_parameters": new})
    both = bare | {"rope_parameters": new, "rope_scaling": {"type": kind} | fields}
    assert old == ModelConfig.from_dict(both)
    assert (old.rope.kind, old.rope_theta) == (kind, 5e5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"long_factor": [1.0] * 63 + [2.0]}, "short_factor and long_factor of RoPE differ"),
        ({"short_factor": [0.0] * 64, "long_factor": [0.0] * 64}, "must be positive numbers"),
        ({"short_factor": "x", "long_factor": "x"}, "the RoPE factors are 'x'"),
        ({"short_factor": [1.0], "long_factor": [1.0]}, "has 1 RoPE factors, and heads of 128 channels need 64"),
        ({"attention_factor": None}, "RoPE type longrope lacks the field attention_factor"),
    ],
)
def test_longrope_has_the_same_factors_for_all_lengths(change: dict[str, Any], said: str) -> None:
    factors = [1.0 + pair for pair in range(64)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.5}
    bare = {k: v for k, v in QWEN3_8B.items() if k != "rope_scaling"}
    config = ModelConfig.from_dict(bare | {"rope_parameters": rope | {"rope_theta": 1e6}})
    assert config.rope.factors == tuple(factors)
    assert config.rope.attention_factor == 1.5
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(MinithinkError, match=said):
        ModelConfig.from_dict(bare | {"rope_parameters": rope | change})


def test_defaults_of_absent_fields_are_those_of_transformers() -> None:
    import transformers

    required = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 7,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 99,
    }
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        config_class = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
        raw = required if architecture == "LlamaForCausalLM" else required | {"num_key_value_heads": 2}
        hf = config_class(**raw)
        c = ModelConfig.from_dict(raw | {"architectures": [architecture]})
        assert c.num_kv_heads == hf.num_key_value_heads
        assert c.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
        assert c.rms_norm_eps == hf.rms_norm_eps
        assert (c.rope_theta, c.rope.kind) == (hf.rope_parameters["rope_theta"], hf.rope_parameters["rope_type"])
        assert c.tie_embeddings == hf.tie_word_embeddings
        assert c.o_bias == getattr(hf, "attention_bias", False)


# Where transformers' default is that of one particular 7B model, an absent field is an error instead.
@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ],
)
def test_required_fields(name: str) -> None:
    with pytest.raises(MinithinkError, match=f"{name} is missing"):
        ModelConfig.from_dict({k: v for k, v in QWEN3_8B.items() if k != name})


LLAMA, QWEN2, QWEN3 = R1_LLAMA_8B, R1_QWEN_7B, QWEN3_8B
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*mixture-of-experts"),
    (LLAMA, {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    (LLAMA, {"architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM"),
    (LLAMA, {"architectures": ["Phi3ForCausalLM"]}, "Phi3ForCausalLM"),
    (LLAMA, {"architectures": []}, "not given"),
    (LLAMA, {"architectures": None}, "not given"),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "LlamaForCausalLM"),
    (LLAMA, {"architectures": [["x"]]}, r"the architecture is \['x'\]"),
    (QWEN3, {"num_experts": 128}, "num_experts"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window"),
    (LLAMA, {"sliding_window": "4096"}, "sliding_window is '4096'"),
    (LLAMA, {"layer_types": ["sliding_attention"] * 32}, "layer_types.*sliding_attention"),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 20}, "use_sliding_window.*from 20 on see only 4096"),
    (QWEN2 | {"num_hidden_layers": 29}, {"use_sliding_window": True, "max_window_layers": None}, "from 28 on"),
    (LLAMA, {"model_type": "qwen2"}, "architecture is LlamaForCausalLM and model_type is qwen2"),
    (LLAMA, {"qk_norm": True}, "qk_norm = True is not known"),
    (QWEN3, {"use_qk_norm": False}, "use_qk_norm = False is not known"),
    (LLAMA, {"quantization": {"bits": 4}}, "quantization is given.*original checkpoint"),
    (LLAMA, {"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
    (LLAMA, {"pruned_heads": {"1": [0]}}, "pruned_heads is"),
    (LLAMA, {"num_experts_per_token": 2}, "num_experts_per_token = 2 is not known"),
    (LLAMA, {"x" * 999: ["y" * 9999]}, r"the field x{79}… = \['y{50,58}… is not known"),
    (LLAMA, {"a\x1b\u202e": 1}, r"the field a\\x1b\\u202e = 1"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
    (QWEN3, {"layer_types": "sliding_attention"}, "layer_types.*sliding_attention"),
    (LLAMA, {"rope_scaling": {"rope_type": "dynamic"}}, "RoPE type dynamic lacks the field factor"),
    (LLAMA, {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "RoPE type is 'proportional'"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}, "rope_scaling": None}, "full_attention"),
    (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"original_max_position_embeddings": 8.5}}, "is 8.5"),  # type: ignore[operator]
    (LLAMA, {"original_max_position_embeddings": 10**400}, "original_max_position_embeddings is 10{70,}…; it must"),
    (LLAMA, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
    (LLAMA, {"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, "RoPE type"),
    (LLAMA, {"rope_scaling": {"type": "yarn"}}, "lacks the field factor"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4'"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 0}}, "factor is 0"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 3}}, "truncate is 3"),
    (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks the field high_freq_factor"),
    (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": 4.0}}, "low_freq_factor must be below"),  # type: ignore[operator]
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
    (LLAMA, {"rope_scaling": [2.0]}, r"\[2.0\]"),
    (LLAMA, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 500000.0 beside.*10000.0 in rope_parameters"),
    (LLAMA, {"rope_theta": -1.0}, "rope_theta is -1.0"),
    (LLAMA, {"rope_theta": 1}, "rope_theta is 1"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (QWEN3, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias is True"),
    (QWEN2, {"use_mrope": True}, "use_mrope is True"),
    (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not known"),
    (LLAMA, {"auto_map": {"AutoModel": "modeling.py"}}, "auto_map"),
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*original checkpoint"),
    (LLAMA, {"hidden_size": 4096.0}, "hidden_size is 4096.0, not a whole number"),
    (LLAMA, {"hidden_size": "4096"}, "hidden_size is '4096'"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True"),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads is 0"),
    (LLAMA, {"vocab_size": 0}, "vocab_size is 0"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps is 0.0; it must be positive"),
    (LLAMA, {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; it must be positive"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be positive"),
    (LLAMA, {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, not a finite number"),
    (LLAMA, {"rms_norm_eps": 1e39}, "rms_norm_eps is 1e[+]39; it must be positive and at most"),
    (LLAMA, {"rms_norm_eps": 10**400}, "rms_norm_eps is 10*…, not a finite number"),
    (LLAMA, {"rope_theta": 10**400}, "rope_theta is 10*…; it must be a positive number"),
    (LLAMA, {"vocab_size": 10**20}, "vocab_size is 10{20}; it must be at most 134217728"),
    (LLAMA, {"hidden_size": 2**40}, "hidden_size is 1099511627776; it must be at most"),
    (LLAMA, {"num_hidden_layers": 10**8}, "num_layers is 10{8}; it must be at most 10000"),
    (LLAMA, {"max_position_embeddings": 10**12}, "max_position is 10{12}; it must be at most"),
    (LLAMA, {"num_key_value_heads": 5}, "32 query heads.*5 KV heads"),
    (LLAMA, {"hidden_size": 4095}, "hidden_size 4095 is not a multiple of 32"),
    (LLAMA, {"head_dim": 127}, "head dimension is 127"),
    (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    (LLAMA, {"attention_bias": 1}, "attention_bias is 1"),
    (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    (LLAMA, {"bos_token_id": [1.5]}, "bos_token_id"),
    (LLAMA, {"eos_token_id": [2, None]}, "eos_token_id"),
]


@pytest.mark.parametrize(("base", "change", "message"), REFUSED, ids=[f"{c}"[:60] for _, c, _ in REFUSED])
def test_what_is_not_supported_is_named(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(MinithinkError, match=message) as caught:
        ModelConfig.from_dict(base | change, "there/config.json")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"sliding_window": None, "hidden_act": "swish", "_name_or_path": "x", "unsloth_fixed": True}),
    (QWEN2, {"attention_bias": False, "layer_types": ["full_attention"] * 28, "eos_token_id": [1, 2]}),
    (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    (QWEN3, {"num_experts": None, "eos_token_id": None, "is_decoder": False, "partial_rotary_factor": 1.0}),
    (LLAMA, {"hidden_dropout": 0.1, "resid_pdrop": 0.1, "classifier_dropout": None, "ffn_dropout_prob": 0.5}),
    (LLAMA, {"loss_type": "ForCausalLM", "attn_implementation": "sdpa", "model_max_length": 4096}),
    (LLAMA, {"max_length": 20, "do_sample": False, "top_p": 0.9, "repetition_penalty": 1.1}),
    (LLAMA, {"pruned_heads": {}, "num_experts": 0, "rope_traditional": False, "residual_multiplier": 1.0}),
    (LLAMA, {"bos_token_id": -1, "eos_token_id": [-1, 2], "image_token_id": 7, "pad_token": "<pad>"}),
    (QWEN3, {"use_sliding_window": False, "quantization_config": {}, "original_max_position_embeddings": 4096}),
    (LLAMA, {"sliding_window": 131072}),
    (QWEN2, {"use_sliding_window": True}),  # of 28 layers those from 28 on would slide
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 131072}),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}),
    (QWEN3, {"qk_norm": True, "use_qk_norm": True, "num_nextn_predict_layers": 0}),
    (LLAMA, {"use_bias": False, "auto_map": {}, "qk_layernorm": False}),
]


@pytest.mark.parametrize(("base", "change"), ACCEPTED)
def test_what_changes_no_logit_is_accepted(base: dict[str, Any], change: dict[str, Any]) -> None:
    config, plain = ModelConfig.from_dict(base | change), ModelConfig.from_dict(base)
    assert (config.rope.kind == "yarn") or replace(
        config, bos_token_id=plain.bos_token_id, eos_token_ids=plain.eos_token_ids
    ) == plain


def test_a_sliding_window_of_transformers_default_is_refused() -> None:
    """A file that says use_sliding_window and gives no size means 4096 tokens."""
    raw = QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}
    del raw["sliding_window"]
    with pytest.raises(MinithinkError, match="layers from 0 on see only 4096 tokens"):
        ModelConfig.from_dict(raw)


def test_the_largest_vocabulary_is_read() -> None:
    assert ModelConfig.from_dict(LLAMA | {"vocab_size": 2**27}).vocab_size == 2**27


def test_the_token_0_is_a_token() -> None:
    config = ModelConfig.from_dict(LLAMA | {"bos_token_id": 0, "eos_token_id": [0, -1]})
    assert (config.bos_token_id, config.eos_token_ids) == (0, (0,))


def test_negative_token_ids_stand_for_none() -> None:
    config = ModelConfig.from_dict(LLAMA | {"bos_token_id": -1, "eos_token_id": [-1, 2]})
    assert (config.bos_token_id, config.eos_token_ids) == (None, (2,))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
rope_names = st.sampled_from(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "beta_fast",
        "mscale",
        "truncate",
        "low_freq_factor",
        "original_max_position_embeddings",
    ]
)


@given(
    base=st.sampled_from(list(REAL.values())),
    name=st.sampled_from(sorted(LLAMA.keys() | QWEN2.keys() | QWEN3.keys() | {"rope_parameters", "layer_types"})),
    value=json_values | st.dictionaries(rope_names, json_values | st.sampled_from(["yarn", "llama3", "linear"])),
)
def test_any_damage_is_a_clear_error_or_harmless(base: dict[str, Any], name: str, value: Any) -> None:
    try:
        config = ModelConfig.from_dict(base | {name: value})
    except MinithinkError:
        return
    assert all(type(x) is int for x in config.eos_token_ids)
    assert all(type(x) is not str for x in vars(config.rope).values() if x != config.rope.kind)


def test_token_ids() -> None:
    assert as_ids(None) == ()
    assert as_ids(7) == (7,)
    assert as_ids([7, 8]) == (7, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b'{"a": 1', "not valid JSON"),
        (b"[1]", "a list"),
        (b"\xff\xfe{}", "cannot be read"),
        (b'{"a": ' * 200_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=range(6),
)
def test_files_that_are_no_config(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(MinithinkError, match=message) as caught:
        ModelConfig.from_folder(tmp_path)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_from_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(QWEN3_8B)
    assert read_json(tmp_path / "config.json") == QWEN3_8B
