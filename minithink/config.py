"""ModelConfig: the shape of a decoder, read from a Hugging Face `config.json` or from a GGUF file.

Three architectures are read: LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM. A field that would change the
computation and is not supported is an error, which names the field. So is an unknown field: without it, the results
might be wrong and nobody would notice.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minithink.checkpoint.gguf_config import config_fields
from minithink.checkpoint.gguf_file import GGUF, is_gguf
from minithink.errors import MinithinkError, listed, named, quoted, reason
from minithink.results.files import read_bytes

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

# Fields that change no logit, whatever they hold. A field is on this list only if transformers' model, in inference,
# does not read it, and no other engine takes another computation from it.
_TRAINING = """
    initializer_range initializer_cutoff_factor init_std init_method embedding_initializer_range loss_type
    ignore_index label_smoothing z_loss_coefficient router_aux_loss_coef router_z_loss_coef router_jitter_noise
    aux_loss_alpha output_router_logits neftune_noise_alpha gradient_checkpointing use_reentrant pretraining_tp
    problem_type finetuning_task task_specific_params num_labels id2label label2id
"""
_SOFTWARE = """
    torch_dtype dtype params_dtype bf16 fp16 fp32 use_bfloat16 transformers_version unsloth_version unsloth_fixed
    transformers.js_config is_llama_config use_cache attn_implementation attention_implementation flash_attention
    use_flash_attn use_flash_attention use_flash_attention_2 flash_attn_2_enabled sdpa torchscript torch_compile
    return_dict use_return_dict output_attentions output_hidden_states output_past keys_to_ignore_at_inference
    chunk_size_feed_forward num_logits_to_keep logits_to_keep tensor_parallel_size ep_size
"""
_NAMES = """
    architectures model_type name_or_path model_name base_model base_model_name_or_path tokenizer_class chat_template
    prefix license language tags pipeline_tag library_name datasets author version
"""
_LENGTHS = """
    model_max_length max_model_len max_model_length max_seq_len max_seq_length max_sequence_length seq_length
    sequence_length context_length n_ctx training_sequence_length tokenizer_model_max_length max_window_layers
"""
# What transformers keeps in generation_config.json; old versions kept it in config.json.
GENERATION = frozenset(
    """
    max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams
    num_beam_groups diversity_penalty penalty_alpha temperature top_k top_p min_p top_h typical_p epsilon_cutoff
    eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids force_words_ids renormalize_logits remove_invalid_values constraints
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias guidance_scale
    watermarking_config num_return_sequences output_scores output_logits return_dict_in_generate
    """.split()  # noqa: SIM905
)
HARMLESS = GENERATION.union(" ".join((_TRAINING, _SOFTWARE, _NAMES, _LENGTHS)).split())
# … and fields whose names say it: nothing is dropped in inference, and tokens are the tokenizer's.
HARMLESS_NAMES = re.compile(
    r"_.*|.*(dropout|dropout_p|dropout_prob|dropout_rate|pdrop|layerdrop)|.*_token_ids?|(bos|eos|pad|unk|sep)_token"
)
# Fields that may change the computation, but not at these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (True, False),
    "tie_encoder_decoder": (False,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rotary_percent": (1,),
    "use_mrope": (False,),  # written into Qwen2.5 and R1-Distill-Qwen checkpoints
    "rope_interleaved": (False,),  # written into SmolLM checkpoints
    "rope_traditional": (False,),
    "use_sliding_window": (False,),
    "pruned_heads": ({}, []),
    "auto_map": ({},),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "num_experts_per_tok": (0,),
    "n_shared_experts": (0,),
    "mlp_only_layers": ([],),
    "num_nextn_predict_layers": (0,),
    "attention_chunk_size": (0,),
    "no_rope_layers": ([],),
    "use_alibi": (False,),
    "alibi": (False,),
    "use_bias": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "use_sinks": (False,),
}
# … and fields that only repeat what the architecture is.
_QK_NORM = ("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm")
QUANTIZED = ("quantization_config", "quantization", "compression_config", "dfloat11_config")

ROPE_FIELDS = {
    "default": frozenset(),
    "dynamic": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"}
    ),
    "longrope": frozenset(
        {"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"}
    ),
}
ROPE_REQUIRED = {
    "default": frozenset(),
    "dynamic": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "llama3": ROPE_FIELDS["llama3"] - {"original_max_position_embeddings"},
    "yarn": frozenset({"factor"}),
    "longrope": frozenset({"short_factor", "long_factor", "attention_factor"}),
}
_FACTORS = ("short_factor", "long_factor")  # lists; the other fields are numbers
LARGEST_FLOAT32 = 3.4e38
THETA = 10000.0  # of a file that gives none

# The largest values that are accepted: far beyond every model, and small enough that a number of bytes fits int64.
LIMITS = {
    "vocab_size": 2**27,
    "hidden_size": 2**27,
    "intermediate_size": 2**27,
    "num_layers": 10_000,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "max_position": 2**27,  # tokens
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts; `kind` decides which other fields are used.

    linear: Chen et al. 2023, position interpolation. llama3: Llama 3.1's per-band interpolation.
    yarn: Peng et al. 2023, NTK-by-parts with a temperature on the attention logits. dynamic: stretches only what is
    longer than `max_position` of the model, and nothing longer is read here; up to there it is the default. longrope:
    every frequency has a factor of its own, the same for short and for long texts, as in GGUF files of Llama 3.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0  # tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a band is kept
    beta_slow: float = 1.0  # yarn: rotations below which a band is interpolated fully
    attention_factor: float | None = None  # longrope, yarn; None: from `factor`, `mscale`, `mscale_all_dim`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the band edges to whole dimensions
    factors: tuple[float, ...] = ()  # longrope: by which the frequencies are divided, one for each pair of channels


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Symbols in brackets are those that the comments of this project use."""

    architecture: str  # LlamaForCausalLM | Qwen2ForCausalLM | Qwen3ForCausalLM
    vocab_size: int  # [V]
    hidden_size: int  # [d]
    intermediate_size: int  # [F]
    num_layers: int  # [L]
    num_heads: int  # [Hq] query heads
    num_kv_heads: int  # [Hkv] key and value heads, each shared by Hq / Hkv query heads
    head_dim: int  # [D]
    max_position: int  # tokens
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: RopeScaling = RopeScaling()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the checkpoint
    cautions: tuple[str, ...] = field(default=(), compare=False)  # sentences about the file, without a full stop

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if value < 1:
                raise MinithinkError(f"The model's {name} is {quoted(value)}; it must be at least 1.")
            if value > limit:
                raise MinithinkError(f"The model's {name} is {quoted(value)}; it must be at most {limit}.")
        if not 0 < self.rms_norm_eps <= LARGEST_FLOAT32:
            raise MinithinkError(
                f"The model's rms_norm_eps is {self.rms_norm_eps}; it must be positive and at most "
                f"{LARGEST_FLOAT32:g}."
            )
        if self.num_heads % self.num_kv_heads:
            raise MinithinkError(
                f"The model has {self.num_heads} query heads, which do not divide into groups for "
                f"{self.num_kv_heads} KV heads."
            )
        if self.head_dim % 2:
            raise MinithinkError(f"The head dimension is {self.head_dim}; rotary embedding needs an even one.")
        if self.rope.kind == "longrope" and len(self.rope.factors) != self.head_dim // 2:
            raise MinithinkError(
                f"The model has {len(self.rope.factors)} RoPE factors, and heads of {self.head_dim} channels need "
                f"{self.head_dim // 2}."
            )

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that keys and values of one token occupy, over all layers, uncompressed."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint folder, or the fields of a GGUF file."""
        if is_gguf(folder):
            return cls.from_dict(config_fields(GGUF.read(folder)), str(folder))
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the fields of a Hugging Face config; `where` names the file in errors."""
        architecture = _architecture(raw, where)
        kind = ARCHITECTURES[architecture]
        fields = _Fields(raw, where)
        hidden_size = fields.integer("hidden_size")
        heads = fields.integer("num_attention_heads")
        if heads < 1:
            raise MinithinkError(f"{where}: num_attention_heads is {quoted(heads)}; it must be at least 1.")
        if kind != "qwen3" and raw.get("head_dim") is None and hidden_size % heads:
            raise MinithinkError(
                f"{where}: hidden_size {quoted(hidden_size)} is not a multiple of {quoted(heads)} heads: give "
                "head_dim."
            )
        # Where a field is absent, each architecture has its own default in transformers.
        bias = fields.flag("attention_bias") if kind != "qwen2" else False
        max_position = fields.integer("max_position_embeddings")
        theta, rope = _rope(fields, max_position)
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads if kind == "llama" else None),
            head_dim=fields.integer("head_dim", 128 if kind == "qwen3" else hidden_size // heads),
            max_position=max_position,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope=rope,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            qk_norm=kind == "qwen3",
            bos_token_id=next(iter(fields.ids("bos_token_id")), None),
            eos_token_ids=fields.ids("eos_token_id"),
            dtype=_dtype(raw),
            cautions=tuple(fields.cautions),
        )
        _refuse_sliding_windows(fields, kind, config)
        _refuse_other_computations(fields, kind)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The fields of a Hugging Face `config.json` that describes this model."""
        rope = {"rope_type": self.rope.kind, "rope_theta": self.rope_theta}
        for name in sorted(ROPE_FIELDS[self.rope.kind]):
            field_name = "factors" if name in _FACTORS else name.replace("_embeddings", "")
            value = asdict(self.rope)[field_name]
            if value is not None:
                rope[name] = list(value) if name in _FACTORS else value
        kind = ARCHITECTURES[self.architecture]
        out: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_theta": self.rope_theta,  # for readers older than transformers 5
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids),
            "dtype": self.dtype,
        }
        if self.rope.kind != "default":
            out["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        if kind != "qwen2":
            out["attention_bias"] = self.qkv_bias
        return out


class _Fields:
    """Typed access to the fields of a config. It remembers which fields were read, and collects cautions."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.read = set[str]()
        self.cautions = list[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            what = "is missing" if value is None else f"is {quoted(value)}, not a whole number"
            raise MinithinkError(f"{self.where}: the field {name} {what}.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > sys.float_info.max:
            raise MinithinkError(f"{self.where}: the field {name} is {quoted(value)}, not a finite number.")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise MinithinkError(f"{self.where}: the field {name} is {quoted(value)}, neither true nor false.")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids. A negative one stands for none, as in files that switch a token off."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise MinithinkError(
                    f"{self.where}: the field {name} is {quoted(value)}, no token id or list of them."
                )
        return tuple(token for token in ids if token >= 0)


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    given = raw.get("architectures") or []
    architectures = given if isinstance(given, list) else [given]
    if given != architectures or len(given) != 1 or not isinstance(given[0], str) or given[0] not in ARCHITECTURES:
        found = listed([name if isinstance(name, str) else quoted(name) for name in architectures])
        raise MinithinkError(
            f"{where}: the architecture is {named(found) or 'not given'}, and minithink reads only "
            f"{', '.join(ARCHITECTURES)} (dense decoders; mixture-of-experts models are not read)."
        )
    architecture: str = given[0]
    model_type = raw.get("model_type")
    if model_type in ARCHITECTURES.values() and model_type != ARCHITECTURES[architecture]:
        raise MinithinkError(
            f"{where}: the architecture is {architecture} and model_type is {model_type}: correct what is wrong."
        )
    return architecture


def _dtype(raw: Mapping[str, Any]) -> str:
    """The type of the checkpoint's numbers, as far as the file knows it."""
    for name in ("dtype", "torch_dtype"):
        if raw.get(name) and isinstance(raw[name], str):
            return str(raw[name]).removeprefix("torch.")
    return "float32"


def _rope(fields: _Fields, max_position: int) -> tuple[float, RopeScaling]:
    """The base θ of the rotary frequencies and their scaling, as transformers 5 computes with them.

    They are in the table `rope_parameters`, or, in older files, in the table `rope_scaling` and in `rope_theta`.
    Fields that transformers does not compute with are left out, with a caution.
    """
    where = fields.where
    given, theta = _rope_table(fields)
    table = {name: value for name, value in given.items() if value is not None}
    kind = _rope_kind(fields, table)
    if table.pop("partial_rotary_factor", 1) != 1:
        raise MinithinkError(f"{where}: partial_rotary_factor other than 1 is not supported.")
    nested = [name for name, value in table.items() if isinstance(value, Mapping)]
    if nested:
        raise MinithinkError(
            f"{where}: the RoPE parameters hold a table {quoted(nested[0])}, and minithink reads only one for all "
            "layers."
        )
    unused = sorted(table.keys() - ROPE_FIELDS[kind])
    if unused:
        values = listed([f"{named(name, 40)} = {quoted(table.pop(name), 40)}" for name in unused])
        fields.cautions.append(f"{where}: {values} has no effect on RoPE of type {kind}, as in transformers")

    # Whether a field is absent or null is not the same to transformers in these two.
    if kind == "yarn" and "factor" in given and given["factor"] is None:
        table["factor"] = max_position / _original(fields, table, max_position)
    if kind == "yarn" and "truncate" in given and given["truncate"] is None:
        table["truncate"] = False
    for name in ("beta_fast", "beta_slow"):
        if table.get(name) == 0:
            del table[name]  # the default is used
    missing = sorted(ROPE_REQUIRED[kind] - table.keys())
    if missing:
        raise MinithinkError(f"{where}: RoPE type {kind} lacks the field {missing[0]}.")
    factors = _factors(fields, table) if kind == "longrope" else ()
    for name, value in [("rope_theta", theta), *table.items()]:
        if not isinstance(value, (int, float)) or isinstance(value, bool) != (name == "truncate"):
            raise MinithinkError(f"{where}: the RoPE field {name} is {quoted(value)}, not a number.")
        if name not in ("truncate", "mscale", "mscale_all_dim") and not 0 < value <= sys.float_info.max:
            raise MinithinkError(f"{where}: the RoPE field {name} is {quoted(value)}; it must be a positive number.")
    if kind == "llama3" and table["low_freq_factor"] >= table["high_freq_factor"]:
        raise MinithinkError(f"{where}: the RoPE field low_freq_factor must be below high_freq_factor.")
    if theta == 1:
        raise MinithinkError(f"{where}: rope_theta is 1, with which every dimension turns alike; it must differ.")
    if kind == "dynamic":
        fields.cautions.append(
            f"{where}: RoPE of type dynamic stretches only texts of more than {max_position:,} tokens "
            "(max_position_embeddings), and minithink reads none longer"
        )
    original = max_position
    if "original_max_position_embeddings" in ROPE_FIELDS[kind]:
        original = _original(fields, table, max_position)
    table.pop("original_max_position_embeddings", None)
    return float(theta), RopeScaling(kind=kind, original_max_position=original, factors=factors, **table)


def _factors(fields: _Fields, table: dict[str, Any]) -> tuple[float, ...]:
    """Take the factors of longrope out of a table. Texts of all lengths must have the same."""
    short = table.pop("short_factor")
    long = table.pop("long_factor")
    if short != long:
        raise MinithinkError(
            f"{fields.where}: short_factor and long_factor of RoPE differ, so the frequencies would depend on the "
            "length of a text, which is not supported."
        )
    if not isinstance(short, list) or not all(type(x) in (int, float) and 0 < x <= LARGEST_FLOAT32 for x in short):
        raise MinithinkError(f"{fields.where}: the RoPE factors are {quoted(short)}; they must be positive numbers.")
    return tuple(map(float, short))


def _rope_table(fields: _Fields) -> tuple[dict[str, Any], Any]:
    """The table of RoPE fields that counts, and θ. Of two tables the older one counts, as in transformers."""
    raw = fields.raw
    where = fields.where
    tables = {name: fields.get(name) for name in ("rope_scaling", "rope_parameters") if raw.get(name)}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise MinithinkError(f"{where}: {name} is {quoted(table)}, not a table of fields.")
    found: Mapping[str, Any] = next(iter(tables.values()), {})
    thetas = [found.get("rope_theta"), fields.get("rope_theta")]
    if len(tables) == 2:
        other = tables["rope_parameters"]
        thetas.append(other.get("rope_theta"))  # a user who adds rope_scaling to a new file need not repeat it
        known = [theta for theta in thetas if theta is not None]
        if thetas[2] is not None and thetas[2] != known[0]:
            raise MinithinkError(
                f"{where}: rope_theta is {quoted(known[0])} beside rope_scaling and {quoted(thetas[2])} in "
                "rope_parameters: delete one of the two tables."
            )
        if _without_theta(found) != _without_theta(other):
            fields.cautions.append(f"{where}: rope_scaling counts, and rope_parameters, which differs, does not")
    theta = next((theta for theta in thetas if theta is not None), THETA)
    return {name: value for name, value in found.items() if name != "rope_theta"}, theta


def _without_theta(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a table but for θ, with the old name of `rope_type` replaced and without those that are null."""
    out = {name: value for name, value in table.items() if value is not None and name not in ("rope_theta", "type")}
    out.setdefault("rope_type", table.get("type") or "default")
    return out


def _rope_kind(fields: _Fields, table: dict[str, Any]) -> str:
    """Take the type of RoPE out of a table. `type` is the name that older versions gave to `rope_type`."""
    old = table.pop("type", None)
    kind = table.pop("rope_type", old)
    if old is not None and kind != old:
        fields.cautions.append(
            f"{fields.where}: rope_type {quoted(kind, 40)} counts, and type {quoted(old, 40)} beside it does not"
        )
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        known = ", ".join(ROPE_FIELDS)
        raise MinithinkError(f"{fields.where}: the RoPE type is {quoted(kind)}, and minithink knows only {known}.")
    return kind


def _original(fields: _Fields, table: Mapping[str, Any], max_position: int) -> int:
    """Tokens of the context before it was stretched. Beside the table this length wins over the one within."""
    name = "original_max_position_embeddings"
    length = fields.get(name, table.get(name, max_position))
    longest = LIMITS["max_position"]
    is_number = isinstance(length, (int, float)) and not isinstance(length, bool)
    if not is_number or not 1 <= length <= longest or length != int(length):
        raise MinithinkError(
            f"{fields.where}: the RoPE field {name} is {quoted(length)}; it must be a whole number from 1 to "
            f"{longest}."
        )
    return int(length)


def _refuse_sliding_windows(fields: _Fields, kind: str, config: ModelConfig) -> None:
    """Refuse layers that attend to the newest tokens only. A window as long as the context is none."""
    where = fields.where
    window = fields.get("sliding_window")
    types = fields.get("layer_types", [])
    types = types if isinstance(types, list) else [types]
    other = [layer_type for layer_type in types if layer_type not in ("full_attention", "sliding_attention")]
    if other:
        raise MinithinkError(
            f"{where}: layer_types has {quoted(other[0])}; only full_attention layers are supported."
        )
    use = kind == "llama" or fields.flag("use_sliding_window")
    if kind != "llama" and use and window is None and "sliding_window" not in fields.raw:
        window = 4096  # transformers' default
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise MinithinkError(f"{where}: sliding_window is {quoted(window)}, not a number of tokens.")
    if window is not None and window >= config.max_position:
        return
    if "sliding_attention" in types:
        raise MinithinkError(
            f"{where}: layer_types has 'sliding_attention'; only full_attention layers are supported."
        )
    if window is None or not use:
        return
    if kind == "llama":
        raise MinithinkError(f"{where}: sliding_window is {window}, which is not supported.")
    first = fields.integer("max_window_layers", 28)  # transformers' default
    if first < config.num_layers and not types:
        raise MinithinkError(
            f"{where}: use_sliding_window is true, and layers from {first} on see only {window} tokens, which is not "
            "supported."
        )


def _refuse_other_computations(fields: _Fields, kind: str) -> None:
    """Refuse every field that may change the computation, or that is not known."""
    where = fields.where
    for name in QUANTIZED:
        if fields.get(name):
            raise MinithinkError(
                f"{where}: {name} is given, and quantized weights are not read: use the original checkpoint."
            )
    for name, value in fields.raw.items():
        if name in fields.read or name in HARMLESS or HARMLESS_NAMES.fullmatch(name) or value is None:
            continue
        if name in _QK_NORM and value is (kind == "qwen3"):
            continue
        if kind == "qwen2" and name == "attention_bias":
            continue  # Qwen2 has QKV bias whatever this says
        if name == "original_max_position_embeddings":
            continue  # it belongs to scalings that this model does not have
        if name not in NEUTRAL:
            raise MinithinkError(
                f"{where}: the field {named(name)} = {quoted(value, 60)} is not known to minithink and may "
                "change the computation; delete it from the file if you know that it does not."
            )
        if value not in NEUTRAL[name]:
            only = quoted(NEUTRAL[name][0])
            raise MinithinkError(f"{where}: {name} is {quoted(value)}, and minithink supports only {only}.")


def as_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them, or None, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one sentence that says why not."""
    try:
        value = json.loads(read_bytes(path).decode())
    except FileNotFoundError:
        raise MinithinkError(f"{path} does not exist: is this the folder of a checkpoint?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MinithinkError(f"{path} cannot be read: {reason(error)}.") from None
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: deep nesting, integers of 5000 digits
        raise MinithinkError(f"{path} is not valid JSON (truncated?): {reason(error)}.") from None
    if not isinstance(value, dict):
        raise MinithinkError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value
