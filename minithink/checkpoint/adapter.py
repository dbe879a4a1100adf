"""LoRA adapters in PEFT's format, merged into the weights of a checkpoint while these are loaded.

    W ← W + s · B · A       s = alpha / r,  with rsLoRA alpha / √r

    adapter_config.json         r, alpha, and what else decides s
    adapter_model.safetensors   A [r, in] and B [out, r] of each linear layer; rows of the embedding

An adapter may also hold rows of the embedding, for single tokens (PEFT's `trainable_token_indices`). They take the
place of the model's.

The merged weights have a hash, which calibrations name. So they are the same bits on every machine: the products of
A and B are exact in float64, they are added up in the order of the rank, and each weight is rounded by itself. No
library decides an order of sums, as it would in a product of matrices.

The numbers of a GGUF file are merged in float32, which holds them exactly, whatever the type in which the model is
held. So the hash is that of the same numbers in a folder of float32.

PEFT multiplies in float32 instead. Where all of its sums are exact, the results are equal. Elsewhere float32 weights
differ by its rounding, and few bfloat16 weights by one step.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minithink.checkpoint.weights import (
    EMBED,
    FORMAT,
    HEAD,
    Entry,
    checkpoint_hash,
    hash_of_merged,
    header,
    load_decoder,
    tensors_of,
)
from minithink.config import ModelConfig, read_json
from minithink.errors import MinithinkError, UsageError, listed, named, quoted, reason
from minithink.model import Decoder
from minithink.results.files import open_to_others

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL = "all-linear"  # PEFT's word in target_modules for all linear layers but the output head
PREFIX = "base_model.model."  # of PEFT's names
FACTOR = regex.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
ROWS = ".token_adapter.trainable_tokens_delta"
DTYPES = ("F32", "F16", "BF16")  # of factors: products of two such numbers are exact in float64
# Fields that are read here, and fields that decide nothing about the merge of the tensors that are there.
READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_modules",
    "init_lora_weights",
}
IDLE = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Why a field that is set is refused. Every other unknown field is refused, too, unless it is off.
MEANING = {
    "use_dora": "DoRA, which scales columns as well",
    "modules_to_save": "whole layers in place of the model's",
    "bias": "biases that were trained, too",
    "lora_bias": "biases that were trained, too",
    "fan_in_fan_out": "weights of the layout of GPT-2",
    "layer_replication": "layers that are there several times",
    "target_parameters": "changes of parameters that are no linear layers",
    "alora_invocation_tokens": "an adapter that works behind certain tokens only",
}
OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
# How factors began. Other ways change the model's own weights at the start, and the file does not say how.
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
WITH_PEFT = "merge the adapter with PEFT (merge_and_unload), save the result, and give its folder as the model"
LARGEST = 2**31  # of ranks and alphas
SECONDS = 1.0  # that a pattern of a config may take for one name
BLOCK = 1 << 16  # weights that a thread merges at once: they stay in its core's cache


@dataclass(frozen=True)
class Factors:
    """What is added to one linear layer."""

    a: Entry  # [r, in]
    b: Entry  # [out, r]
    scale: float


@dataclass(frozen=True)
class Rows:
    """What takes the place of some tokens' rows."""

    tokens: tuple[int, ...]
    values: Entry  # [tokens, d]


class Adapter:
    """An adapter's folder, checked against a model."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Read the config and the header of the tensors.

        Args:
            folder: holds CONFIG and WEIGHTS.
            config: of the model.

        Raises:
            MinithinkError: a file is missing or damaged, the adapter is of another kind, or of another model.
        """
        self.folder = folder
        _check_folder(folder)
        raw = read_json(folder / CONFIG)
        _check_kind(folder / CONFIG, raw)
        with torch.device("meta"):
            views = tensors_of(Decoder(config))
        shapes = {name: (view.shape[0], view.shape[-1]) for name, view in views.items()}
        self.factors = dict[str, Factors]()  # by the names of the weights
        self.rows = dict[str, Rows]()
        self._hashes = dict[Path, str]()
        self._read(raw, shapes)

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """A weight of the model, with what the adapter changes of it.

        Args:
            name: as of `tensors_of`.
            weight: [out, in] or [vocabulary, d], as it is stored.

        Returns:
            The same shape and dtype; float32 instead of float64. The weight itself, if nothing changes.
        """
        if name in self.factors:
            found = self.factors[name]
            a = _tensor(found.a).to(weight.device)
            b = _tensor(found.b).to(weight.device)
            return added(weight, a, b, found.scale)
        if name in self.rows:
            rows = self.rows[name]
            out = weight.clone()
            out[list(rows.tokens)] = _tensor(rows.values).float().to(weight)
            return out
        return weight

    def load(self, folder: Path, **options: Any) -> Decoder:
        """A decoder with the merged weights, whose hash is known from then on: one pass over the weights gives both.

        Args:
            folder: of the model, or its GGUF file.
            options: `device`, `dtype` and `backend` of `load_decoder`.

        Raises:
            MinithinkError: as of `load_decoder`.
        """

        def remember(digits: str) -> None:
            self._hashes[folder] = digits

        return load_decoder(folder, **options, merge=self.merge, tell_hash=remember)

    def hash_over(self, folder: Path) -> str:
        """The hash of the merged weights. folder: of the model, or its GGUF file."""
        if folder not in self._hashes:
            self._hashes[folder] = hash_of_merged(folder, self.merge)
        return self._hashes[folder]

    def _read(self, raw: Mapping[str, Any], shapes: dict[str, tuple[int, int]]) -> None:
        """Find what the file changes. shapes: of the model's tensors."""
        where = self.folder / WEIGHTS
        found = dict[str, dict[str, Entry]]()  # module → A or B → its tensor
        rows = dict[str, Entry]()  # module → its rows
        for entry in header(where):
            name = entry.name.removeprefix(PREFIX)
            match = FACTOR.fullmatch(name)
            if entry.stored not in DTYPES:
                raise MinithinkError(
                    f"{entry} is stored as {named(entry.stored)}, and adapters are read as {', '.join(DTYPES)}: "
                    "store it as one of them."
                )
            if match and name != entry.name:
                found.setdefault(match["module"], {})[match["factor"]] = entry
            elif name.endswith(ROWS) and name != entry.name:
                rows[name.removesuffix(ROWS)] = entry
            else:
                raise MinithinkError(
                    f"{entry} is no factor of a linear layer (lora_A, lora_B) and no rows of the embedding, and "
                    f"nothing else is merged: {WITH_PEFT}."
                )
        layers = [name.removesuffix(".weight") for name in shapes if name.endswith("_proj.weight") or name == HEAD]
        for module in found:
            if module not in layers:
                raise MinithinkError(
                    f"{where} changes {named(module)}, which is no linear layer of this model (there are "
                    f"{listed(layers)}): give the model for which the adapter was made."
                )
        _check_targets(self.folder / CONFIG, raw, layers, found)
        for module, pair in found.items():
            name = f"{module}.weight"
            self.factors[name] = _factors(self.folder / CONFIG, raw, module, pair, shapes[name])
        self._read_rows(raw, rows, shapes)

    def _read_rows(
        self, raw: Mapping[str, Any], stored: dict[str, Entry], shapes: dict[str, tuple[int, int]]
    ) -> None:
        """Find the rows that the config names.

        Args:
            raw: the config.
            stored: the rows in the file, by module.
            shapes: of the model's tensors.
        """
        where = self.folder / CONFIG
        tokens = _tokens(where, raw.get("trainable_token_indices"))
        vocabulary, width = shapes[EMBED]
        if HEAD not in shapes and tokens.get(HEAD) == tokens.get(EMBED):
            tokens.pop(HEAD, None)  # the embedding is the head
        for name, ids in tokens.items():
            if name not in shapes:
                raise MinithinkError(
                    f"{where} trains the tokens {quoted(list(ids))} of lm_head, which is the embedding in this "
                    "model: name the same tokens for embed_tokens."
                )
            if name in self.factors:
                raise MinithinkError(f"{where} changes lm_head twice, by factors and by rows: {WITH_PEFT}.")
            largest = max(ids)
            if largest >= vocabulary:
                raise MinithinkError(
                    f"{where} names the token {largest}, and the model has {vocabulary} tokens: give the model for "
                    "which the adapter was made."
                )
            entry = stored.pop(name.removesuffix(".weight"), None)
            if entry is None:
                raise MinithinkError(
                    f"{self.folder / WEIGHTS} lacks the rows {named(PREFIX + name.removesuffix('.weight') + ROWS)} "
                    f"of the tokens {quoted(list(ids))}: download it again."
                )
            _check_shape(entry, (len(ids), width))
            self.rows[name] = Rows(ids, entry)
        for entry in stored.values():
            raise MinithinkError(
                f"{entry} holds rows of tokens, and trainable_token_indices in {CONFIG} does not say of which: "
                "download both again."
            )


def save_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    tokens: Sequence[int] = (),
    base: str = "",
) -> None:
    """Write an adapter as PEFT reads it. No file is ever half written.

    Args:
        folder: created if it does not exist.
        tensors: factors and rows, by the names of PEFT's file.
        rank, alpha: of all factors.
        tokens: whose rows there are, in their order.
        base: the name of the model; "": it is not said.

    Raises:
        MinithinkError: the folder cannot be written.
    """
    modules = {match["module"].rpartition(".")[2] for match in map(FACTOR.fullmatch, tensors) if match}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "target_modules": sorted(modules),
        "trainable_token_indices": list(tokens) or None,
        "bias": "none",
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            temp = Path(temporary)
            save_file({name: x.contiguous().cpu() for name, x in tensors.items()}, temp / WEIGHTS, metadata=FORMAT)
            (temp / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in (WEIGHTS, CONFIG):
                open_to_others(temp / name)
                os.replace(temp / name, folder / name)
    except (OSError, SafetensorError) as error:
        raise MinithinkError(f"The adapter cannot be written to {folder}: {reason(error)}.") from None


def hash_of(folder: Path, adapter: Adapter | None) -> str:
    """A name for the weights of a model, with the adapter merged into them. folder: of the model."""
    return checkpoint_hash(folder) if adapter is None else adapter.hash_over(folder)


def added(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s · B · A. Every number is a chain of the same roundings on every machine:

        sum ← 0;  sum ← float64(sum + b_i · a_i) for i = 0 … r − 1      (b_i · a_i is exact)
        W ← round(float32(float64(W + float64(s · sum))))               round: to the dtype of W

    Args:
        weight: [out, in].
        a: [r, in] float32, float16 or bfloat16.
        b: [out, r], of one of these.
        scale: s.

    Returns:
        [out, in] of the weight's dtype; float32 instead of float64.
    """
    out = torch.empty(weight.shape, dtype=_narrow(weight.dtype), device=weight.device)
    a = a.double()
    b = b.double()
    step = max(1, BLOCK * torch.get_num_threads() // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        total = torch.zeros_like(weight[rows], dtype=torch.float64)
        for i in range(len(a)):
            total.addcmul_(b[rows, i, None], a[i])  # exact products: a fused multiply-add gives the same
        total.mul_(scale)
        total.add_(weight[rows])
        out[rows] = total.float().to(out.dtype)
    return out


def _narrow(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


def _tensor(entry: Entry) -> Tensor:
    """Read a tensor of finite numbers."""
    try:
        with safe_open(entry.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(entry.name)
    except (SafetensorError, OSError) as error:
        raise MinithinkError(f"{entry.path} cannot be read ({reason(error)}): download it again.") from None
    if not tensor.isfinite().all():
        raise MinithinkError(f"{entry} holds what is no finite number: give an adapter without such numbers.")
    return tensor


def _check_folder(folder: Path) -> None:
    """Refuse a folder without an adapter's two files."""
    if not folder.is_dir():
        raise MinithinkError(f"--adapter {folder} is no folder: give that in which {CONFIG} lies.")
    if not (folder / CONFIG).exists():
        raise MinithinkError(f"{folder} has no {CONFIG}: give the folder of a LoRA adapter in PEFT's format.")
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        why = " (adapter_model.bin can run code, and is not read)" if pickled else ""
        raise MinithinkError(f"{folder} has no {WEIGHTS}{why}: save the adapter with a newer PEFT.")


def _check_kind(where: Path, raw: Mapping[str, Any]) -> None:
    """Refuse what is no LoRA, or one with fields that change more than A and B do. where: of the config."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise MinithinkError(f"{where} has the peft_type {quoted(kind)}, and only LORA is merged: {WITH_PEFT}.")
    for name, value in raw.items():
        if name in READ or name in IDLE or value in OFF:
            continue
        meaning = f" ({MEANING[name]})" if name in MEANING else ""
        raise MinithinkError(
            f"{where} has {named(name)} = {quoted(value)}{meaning}, which minithink does not merge: {WITH_PEFT}."
        )
    start = raw.get("init_lora_weights", True)
    if not any(start is one or (isinstance(one, str) and start == one) for one in STARTS):
        raise MinithinkError(
            f"{where} has init_lora_weights = {quoted(start)}, a start that changed the model's own weights: convert "
            "the adapter to plain LoRA (PEFT's path_initial_model_for_weight_conversion)."
        )


def _check_targets(where: Path, raw: Mapping[str, Any], layers: list[str], found: Mapping[str, Any]) -> None:
    """Refuse factors of layers that the config does not name, and layers that it names without factors.

    Args:
        where: of the config.
        layers: the model's linear layers.
        found: those of which the file has factors.
    """
    targets = raw.get("target_modules")
    chosen = any(raw.get(name) not in OFF for name in ("layers_to_transform", "exclude_modules"))
    for layer in layers:
        wanted = _is_target(where, targets, layer)
        if layer in found and not wanted:
            raise MinithinkError(
                f"{where.parent / WEIGHTS} has factors of {layer}, which target_modules in {CONFIG} does not name "
                f"({quoted(targets)}), so PEFT would leave them out: download both again."
            )
        if wanted and layer not in found and not chosen:
            raise MinithinkError(
                f"{where.parent / WEIGHTS} lacks the factors of {layer}, which target_modules in {CONFIG} names: "
                "download it again."
            )


def _is_target(where: Path, targets: Any, layer: str) -> bool:
    """Whether PEFT's target_modules mean a layer: names or ends of names, a pattern, or ALL."""
    if targets == ALL:
        return f"{layer}.weight" != HEAD
    if isinstance(targets, str):
        return _matches(where, targets, layer)
    if isinstance(targets, list) and all(isinstance(one, str) for one in targets):
        return any(layer == one or layer.endswith(f".{one}") for one in targets)
    raise MinithinkError(f"{where} has the target_modules {quoted(targets)}: give a list of names, or a pattern.")


def _matches(where: Path, pattern: str, name: str) -> bool:
    """Whether a pattern of the config matches a whole name."""
    try:
        return regex.fullmatch(pattern, name, timeout=SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError, OverflowError) as error:
        raise MinithinkError(
            f"{where} has the pattern {quoted(pattern)}, which cannot be used ({reason(error)}): write names instead."
        ) from None


def _factors(
    where: Path, raw: Mapping[str, Any], module: str, pair: Mapping[str, Entry], shape: tuple[int, int]
) -> Factors:
    """The two factors of a layer, and their scale.

    Args:
        where: of the config.
        module: the layer's name.
        pair: its tensors in the file, by A and B.
        shape: of its weight.
    """
    if len(pair) < 2:
        missing = "B" if "A" in pair else "A"
        raise MinithinkError(f"{where.parent / WEIGHTS} lacks lora_{missing} of {module}: download it again.")
    rank = _value(where, raw, "r", "rank_pattern", module)
    alpha = _value(where, raw, "lora_alpha", "alpha_pattern", module)
    if not isinstance(rank, int) or rank < 1:
        raise MinithinkError(f"{where} gives {module} the rank {quoted(rank)}: it must be a whole number above 0.")
    _check_shape(pair["A"], (rank, shape[1]))
    _check_shape(pair["B"], (shape[0], rank))
    below = math.sqrt(rank) if _is_on(where, raw, "use_rslora") else rank
    return Factors(pair["A"], pair["B"], alpha / below)


def _value(where: Path, raw: Mapping[str, Any], name: str, patterns: str, module: str) -> int | float:
    """A number of the config for one layer: that of the first pattern that matches it, as in PEFT, or the general."""
    value = raw.get(name, 8)  # PEFT's default of both
    special = raw.get(patterns) or {}
    if not isinstance(special, dict):
        raise MinithinkError(f"{where} has the {patterns} {quoted(special)}: it must be an object of numbers.")
    for pattern, number in special.items():
        if _matches(where, rf"(.*\.)?({pattern})", module):
            value = number
            break
    if type(value) not in (int, float) or not abs(value) <= LARGEST:  # NaN is not
        raise MinithinkError(f"{where} gives {module} the {name} {quoted(value)}: it must be a finite number.")
    return value


def _is_on(where: Path, raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if not isinstance(value, bool):
        raise MinithinkError(f"{where} has {name} = {quoted(value)}: it must be true or false.")
    return value


def _tokens(where: Path, value: Any) -> dict[str, tuple[int, ...]]:
    """Which rows are replaced: ids by the name of the weight."""
    if value in OFF:
        return {}
    by_module = {"embed_tokens": value} if isinstance(value, list) else value
    if not isinstance(by_module, dict):
        raise MinithinkError(f"{where} has the trainable_token_indices {quoted(value)}: give a list of token ids.")
    out = dict[str, tuple[int, ...]]()
    for module, ids in by_module.items():
        name = next((one for one in (EMBED, HEAD) if f".{one}".endswith(f".{module}.weight")), None)
        if name is None:
            raise MinithinkError(
                f"{where} trains tokens of {named(module)}, and only embed_tokens and lm_head have rows of tokens: "
                f"{WITH_PEFT}."
            )
        are_ids = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
        if not are_ids or not ids or len(set(ids)) < len(ids):
            raise MinithinkError(
                f"{where} trains the tokens {quoted(ids)} of {named(module)}: give token ids, none of them twice."
            )
        out[name] = tuple(ids)
    return out


def _check_shape(entry: Entry, shape: tuple[int, int]) -> None:
    if entry.shape != shape:
        raise MinithinkError(
            f"{entry} has the shape {quoted(list(entry.shape))}, and {list(shape)} is due with this {CONFIG} and "
            "this model: give the model for which the adapter was made."
        )


def adapter_of(folder: str | Path | None, config: ModelConfig) -> Adapter | None:
    """The adapter that a user names. None: there is none."""
    if folder is None:
        return None
    if str(folder) == "":
        raise UsageError("The adapter's name is empty: give a folder.")
    return Adapter(Path(folder).expanduser(), config)
