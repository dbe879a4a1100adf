"""ModelConfig: the shape of a decoder, read from a Hugging Face `config.json`.

Three architectures are read: LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM. A field that would change the
computation and is not supported is an error, which names the field. So is an unknown field: without it, the results
might be wrong and nobody would notice.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minithink.errors import MinithinkError, reason
from minithink.files import read_bytes

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

# Fields that describe training, bookkeeping or tokens, and change no logit.
HARMLESS = frozenset(
    """
    architectures model_type bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    torch_dtype dtype transformers_version use_cache initializer_range attention_dropout pretraining_tp
    return_dict output_attentions output_hidden_states id2label label2id chunk_size_feed_forward
    name_or_path problem_type finetuning_task task_specific_params tokenizer_class prefix
    max_window_layers rope_theta rope_scaling rope_parameters use_sliding_window sliding_window
    layer_types torchscript is_llama_config transformers.js_config unsloth_fixed unsloth_version
    """.split()  # noqa: SIM905
)
# Fields that are understood only at these values.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (True, False),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "partial_rotary_factor": (1, 1.0),
    "use_mrope": (False,),  # written into Qwen2.5 and R1-Distill-Qwen checkpoints
    "rope_interleaved": (False,),  # written into SmolLM checkpoints
}
ROPE_FIELDS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"}
    ),
}
ROPE_REQUIRED = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": ROPE_FIELDS["llama3"],
    "yarn": frozenset({"factor"}),
}

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
    yarn: Peng et al. 2023, NTK-by-parts with a temperature on the attention logits.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0  # tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a band is kept
    beta_slow: float = 1.0  # yarn: rotations below which a band is interpolated fully
    attention_factor: float | None = None  # yarn; None: from `factor`, `mscale`, `mscale_all_dim`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the band edges to whole dimensions


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

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            if (value := getattr(self, name)) < 1:
                raise MinithinkError(f"The model's {name} is {value}; it must be at least 1.")
            if value > limit:
                raise MinithinkError(f"The model's {name} is {value}; it must be at most {limit}.")
        if not 0 < self.rms_norm_eps < math.inf:
            raise MinithinkError(f"The model's rms_norm_eps is {self.rms_norm_eps}; it must be positive and finite.")
        if self.num_heads % self.num_kv_heads:
            raise MinithinkError(
                f"The model has {self.num_heads} query heads, which do not divide into groups for "
                f"{self.num_kv_heads} KV heads."
            )
        if self.head_dim % 2:
            raise MinithinkError(f"The head dimension is {self.head_dim}; rotary embedding needs an even one.")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes that keys and values of one token occupy, over all layers, uncompressed."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint folder."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read the fields of a Hugging Face config; `where` names the file in errors."""
        architecture = _architecture(raw, where)
        kind = ARCHITECTURES[architecture]
        field = _Fields(raw, where)
        d, heads = field.integer("hidden_size"), field.integer("num_attention_heads")
        if heads < 1:
            raise MinithinkError(f"{where}: num_attention_heads is {heads}; it must be at least 1.")
        if kind != "qwen3" and raw.get("head_dim") is None and d % heads:
            raise MinithinkError(f"{where}: hidden_size {d} is not a multiple of {heads} heads: give head_dim.")
        # Where a field is absent, each architecture has its own default in transformers.
        bias = field.flag("attention_bias") if kind != "qwen2" else False
        max_position = field.integer("max_position_embeddings")
        theta, rope = _rope(raw, max_position, where)
        config = cls(
            architecture=architecture,
            vocab_size=field.integer("vocab_size"),
            hidden_size=d,
            intermediate_size=field.integer("intermediate_size"),
            num_layers=field.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=field.integer("num_key_value_heads", heads if kind == "llama" else None),
            head_dim=field.integer("head_dim", 128 if kind == "qwen3" else d // heads),
            max_position=max_position,
            rms_norm_eps=field.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope=rope,
            tie_embeddings=field.flag("tie_word_embeddings"),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            qk_norm=kind == "qwen3",
            bos_token_id=next(iter(field.ids("bos_token_id")), None),
            eos_token_ids=field.ids("eos_token_id"),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        )
        _refuse_what_is_not_supported(raw, kind, field.read, where)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The fields of a Hugging Face `config.json` that describes this model."""
        rope = {"rope_type": self.rope.kind, "rope_theta": self.rope_theta}
        for name in sorted(ROPE_FIELDS[self.rope.kind]):
            value = asdict(self.rope)[name.replace("_embeddings", "")]
            if value is not None:
                rope[name] = value
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
    """Typed access to the fields of a config. It remembers which fields were read."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            what = "is missing" if value is None else f"is {value!r}, not a whole number"
            raise MinithinkError(f"{self.where}: the field {name} {what}.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > sys.float_info.max:
            raise MinithinkError(f"{self.where}: the field {name} is {value!r}, not a finite number.")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise MinithinkError(f"{self.where}: the field {name} is {value!r}, neither true nor false.")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise MinithinkError(f"{self.where}: the field {name} is {value!r}, no token id or list of them.")
        return as_ids(value)


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    named = raw.get("architectures") or []
    known = ", ".join(ARCHITECTURES)
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in ARCHITECTURES:
        found = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
        raise MinithinkError(
            f"{where}: the architecture is {found or 'not given'}, and minithink reads only {known} "
            "(dense decoders; mixture-of-experts models are not read)."
        )
    return str(named[0])


def _rope(raw: Mapping[str, Any], max_position: int, where: str) -> tuple[float, RopeScaling]:
    """The base θ of the rotary frequencies and their scaling, from `rope_parameters` (transformers 5) or from
    `rope_theta` and `rope_scaling` (older versions)."""
    tables = [_rope_table(raw[name], where) for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    fields = dict(tables[0]) if tables else {}
    if len(tables) == 2:
        second = dict(tables[1])
        if "rope_theta" in fields:
            second.setdefault("rope_theta", fields["rope_theta"])  # rope_scaling need not repeat it
        if second != fields:
            # A user who adds rope_scaling to a new file means that one; transformers would also drop the other's
            # theta.
            raise MinithinkError(
                f"{where}: rope_parameters and rope_scaling contradict each other: delete one of them."
            )
    theta = fields.pop("rope_theta", raw.get("rope_theta") or 10000.0)
    kind = fields.pop("rope_type", "default")
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise MinithinkError(f"{where}: partial_rotary_factor other than 1 is not supported.")
    if str(kind) not in ROPE_FIELDS:
        raise MinithinkError(
            f"{where}: the RoPE type is {kind!r}, and minithink knows only {', '.join(ROPE_FIELDS)}."
        )
    # transformers writes fields of yarn into scalings of other kinds, where they have no effect.
    fields = {k: v for k, v in fields.items() if k in ROPE_FIELDS[kind] or k not in ROPE_FIELDS["yarn"]}
    if unknown := sorted(fields.keys() - ROPE_FIELDS[kind]):
        raise MinithinkError(f"{where}: RoPE type {kind} has the unsupported field {unknown[0]}.")
    if missing := sorted(ROPE_REQUIRED[kind] - fields.keys()):
        raise MinithinkError(f"{where}: RoPE type {kind} lacks the field {missing[0]}.")
    for name, value in [("rope_theta", theta), *fields.items()]:
        if not isinstance(value, (int, float)) or isinstance(value, bool) != (name == "truncate"):
            raise MinithinkError(f"{where}: the RoPE field {name} is {value!r}, not a number.")
        if name not in ("truncate", "mscale", "mscale_all_dim") and not 0 < value <= sys.float_info.max:
            raise MinithinkError(f"{where}: the RoPE field {name} is {value!r}; it must be a positive number.")
    if kind == "llama3" and fields["low_freq_factor"] >= fields["high_freq_factor"]:
        raise MinithinkError(f"{where}: the RoPE field low_freq_factor must be below high_freq_factor.")
    if theta == 1:
        raise MinithinkError(f"{where}: rope_theta is 1, with which every dimension turns alike; it must differ.")
    original = int(fields.pop("original_max_position_embeddings", max_position))
    return float(theta), RopeScaling(kind=kind, original_max_position=original, **fields)


def _rope_table(given: Any, where: str) -> dict[str, Any]:
    """The fields of one table that are not null, with the old name of `rope_type` replaced."""
    if not isinstance(given, Mapping):
        raise MinithinkError(f"{where}: the RoPE parameters are {given!r}, not a table of fields.")
    fields = {k: v for k, v in given.items() if v is not None}
    old = fields.pop("type", "default")
    fields.setdefault("rope_type", old)
    return fields


def _refuse_what_is_not_supported(raw: Mapping[str, Any], kind: str, read: set[str], where: str) -> None:
    if raw.get("quantization_config"):
        raise MinithinkError(
            f"{where}: quantization_config is given, and quantized weights are not read: use the original checkpoint."
        )
    if raw.get("use_sliding_window"):
        raise MinithinkError(f"{where}: use_sliding_window is true; sliding-window attention is not supported.")
    if kind == "llama" and raw.get("sliding_window") is not None:
        raise MinithinkError(f"{where}: sliding_window is {raw['sliding_window']}, which is not supported.")
    layer_types = raw.get("layer_types") or []
    for layer_type in layer_types if isinstance(layer_types, list) else [layer_types]:
        if layer_type != "full_attention":
            raise MinithinkError(
                f"{where}: layer_types has {layer_type!r}; only full_attention layers are supported."
            )
    for name, value in raw.items():
        if name in read or name in HARMLESS or name.startswith("_") or value is None:
            continue
        if name in FIXED:
            if value not in FIXED[name]:
                raise MinithinkError(f"{where}: {name} is {value!r}, and minithink supports only {FIXED[name][0]!r}.")
        elif kind == "qwen2" and name == "attention_bias":
            continue  # Qwen2 has QKV bias whatever this says
        else:
            raise MinithinkError(
                f"{where}: the field {name} = {json.dumps(value)[:60]} is not known to minithink and may change "
                "the computation; delete it from the file if you know that it does not."
            )


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
