"""Checkpoints: find them, load them into a `Decoder`, and save a `Decoder` as one.

Only safetensors and GGUF files (`gguf_file.py`) are read: headers and raw numbers, which cannot run code. Files are
mapped into memory, and every tensor of safetensors is copied once, from the page cache to its final place. So loading
in the checkpoint's own dtype allocates only the memory of the weights. GGUF files are dequantized piece by piece.

`tensors_of` maps each name of Hugging Face to a view of the decoder's parameter, in the checkpoint's layout. Loading
copies into the views, saving copies out of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minithink.backend import REFERENCE, Backend
from minithink.checkpoint.gguf_file import GGUF, is_gguf, parts_of
from minithink.checkpoint.gguf_weights import check_tensors, copy_weights, float32_weights
from minithink.checkpoint.hub import download
from minithink.config import ModelConfig, read_json
from minithink.errors import MinithinkError, UsageError, counted, listed, named, quoted, reason
from minithink.model import Block, Decoder
from minithink.results.files import open_to_others

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"  # one file, or shards; not the copies in consolidated.safetensors
FILES = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*",
)
# Types of safetensors that weights may have. 64 bits are read as 32.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
WIDER_THAN_A_BYTE = ("I16", "I32", "I64", "U16", "U32", "U64", "C64")  # other types are quantized
MODEL, EMBED, HEAD = "model.", "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old versions of transformers saved; they follow from the config.
HARMLESS = re.compile(
    r"(.*\.)?(rotary_emb\.((original_)?inv_freq|(cos|sin)_cached)|embeddings\.position_ids|position_ids|masked_bias)"
)
# Names that tell why a tensor has no place in a decoder.
QUANTIZED = re.compile(
    r".*\.(qweight|qzeros|scales|g_idx|SCB|weight_(scale|scale_inv|scale_2|packed|zero_point|shape|format)"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state.*)|input_scale|biases)"
)
ADAPTER = re.compile(r".*\.(lora_.*|base_layer\..*|modules_to_save\..*)")
FORMAT = {"format": "pt"}  # metadata of a file of weights
ROWS = 1024  # of the vocabulary that are compared at once
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format


def tensors_of(decoder: Decoder) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its Hugging Face name, as a view of the decoder's parameter.

    The views have the checkpoint's shapes: a projection is [out, in] there and [in, out] here. So
    `view.copy_(tensor)` loads a tensor. On the meta device the views say which tensors a config calls for.
    """
    c = decoder.config
    f = c.intermediate_size
    q = c.num_heads * c.head_dim
    kv = c.num_kv_heads * c.head_dim
    out: dict[str, Tensor | None] = {EMBED: decoder.embed}
    for i, b in enumerate(decoder.blocks):
        assert isinstance(b, Block)
        layer = f"model.layers.{i}."
        attn = f"model.layers.{i}.self_attn."
        mlp = f"model.layers.{i}.mlp."
        bias = b.qkv_bias
        norm = b.qk_norm
        out |= {
            layer + "input_layernorm.weight": b.attn_norm,
            attn + "q_proj.weight": b.qkv[:, :q].t(),
            attn + "k_proj.weight": b.qkv[:, q : q + kv].t(),
            attn + "v_proj.weight": b.qkv[:, q + kv :].t(),
            attn + "q_proj.bias": None if bias is None else bias[:q],
            attn + "k_proj.bias": None if bias is None else bias[q : q + kv],
            attn + "v_proj.bias": None if bias is None else bias[q + kv :],
            attn + "q_norm.weight": None if norm is None else norm[0],
            attn + "k_norm.weight": None if norm is None else norm[1],
            attn + "o_proj.weight": b.o.t(),
            attn + "o_proj.bias": b.o_bias,
            layer + "post_attention_layernorm.weight": b.mlp_norm,
            mlp + "gate_proj.weight": b.gate_up[:, :f].t(),
            mlp + "up_proj.weight": b.gate_up[:, f:].t(),
            mlp + "down_proj.weight": b.down.t(),
        }
    out |= {"model.norm.weight": decoder.norm, HEAD: decoder.head}
    return {name: view.detach() for name, view in out.items() if view is not None}


Merge = Callable[[str, Tensor], Tensor]
"""Name and stored value of a tensor → the value that the decoder gets, of the same shape. An adapter gives one."""


def load_decoder(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: Backend = REFERENCE,
    merge: Merge | None = None,
    tell_hash: Callable[[str], object] | None = None,
) -> Decoder:
    """A decoder with the weights of a checkpoint folder; its parameters require no gradient.

    Args:
        folder: holds `config.json` and either `model.safetensors` or `model.safetensors.index.json` with its shards;
            or a GGUF file.
        device: where the parameters go.
        dtype: of the parameters; None: the checkpoint's own, the widest if its tensors differ. Of a GGUF file it is
            the type of most numbers, and bfloat16 if they are quantized.
        backend: the functions that the decoder calls.
        merge: what changes the weights on their way; None: nothing does.
        tell_hash: called with the hash of the merged weights (`hash_of_merged`), which is made in the same pass; only
            with `merge`.

    Raises:
        MinithinkError: a file is missing or damaged, or the tensors are not exactly those that the config calls for.
            If they only have another prefix than `model.`, they are read, and the config has a caution.
    """
    stored = _opened(Path(folder))
    with torch.device("meta"):
        decoder = Decoder(stored.config, backend)
    _allocate(decoder, dtype or stored.held, device)
    views = tensors_of(decoder)
    if merge is None:
        stored.copy_into(views)
        return decoder
    hashing = None if tell_hash is None else _Hash(stored)
    for name, tensor in stored.tensors(sorted(stored.shapes)):
        merged = merge(name, tensor)
        views[name].copy_(merged)
        if hashing is not None:
            hashing.add(merged)
    if hashing is not None and tell_hash is not None:
        tell_hash(hashing.digits)
    return decoder


def _allocate(decoder: Decoder, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give the parameters of a decoder on `meta` memory, not yet written.

    (`to_empty` imports sympy for that, and takes longer than reading a small model.)
    """
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))


def hash_of_merged(folder: str | Path, merge: Merge) -> str:
    """What `checkpoint_hash` says of the merged weights, once `save_checkpoint` has written them in their own dtype
    into one file; those of a GGUF file in float32. Nothing is written here: the bytes of that file are made, and
    hashed tensor by tensor.

    Args:
        folder, merge: as in `load_decoder`.
    """
    stored = _opened(Path(folder))
    hashing = _Hash(stored)
    for name, tensor in stored.tensors(sorted(stored.shapes)):
        hashing.add(merge(name, tensor))
    return hashing.digits


def save_checkpoint(
    decoder: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    extra_config: dict[str, Any] | None = None,
) -> None:
    """Write `config.json` and safetensors in the layout of Hugging Face. No file is ever half written.

    Weights of an earlier checkpoint in the folder are replaced; other files stay.

    Args:
        decoder: the model.
        folder: created if it does not exist.
        dtype: float32, float16 or bfloat16; None: that of the decoder.
        max_shard_bytes: start a new shard before a file's tensors exceed this; None: one file.
        extra_config: further fields of `config.json`; they win over the decoder's own.

    Raises:
        MinithinkError: the folder cannot be written.
    """
    folder = Path(folder)
    dtype = dtype or decoder.embed.dtype
    views = tensors_of(decoder)
    sizes = {name: view.numel() * dtype.itemsize for name, view in views.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and max_shard_bytes and sum(sizes[n] for n in shards[-1]) + size > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    of = len(shards)
    names = [SINGLE] if of == 1 else [f"model-{i:05}-of-{of:05}.safetensors" for i in range(1, of + 1)]
    config = replace(decoder.config, dtype=str(dtype).removeprefix("torch.")).to_dict() | (extra_config or {})
    weight_map = dict[str, str]()
    for file, shard in zip(names, shards, strict=True):
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            temp = Path(temporary)
            _write_json(temp / "config.json", config)
            for file, shard in zip(names, shards, strict=True):
                # safetensors refuses tensors that share memory, so the tensors of one shard at a time are copied.
                tensors = {n: _contiguous_copy(views[n], dtype) for n in shard}
                save_file(tensors, temp / file, metadata=FORMAT)
                open_to_others(temp / file)
            if of > 1:
                _write_json(temp / INDEX, index)
            # The index is removed first and written last: a reader in between finds no checkpoint, not a mixture.
            stale = [folder / INDEX, *folder.glob("model-*-of-*.safetensors"), folder / SINGLE]
            for path in stale if of > 1 else stale[:-1]:
                path.unlink(missing_ok=True)
            for file in ["config.json", *names, *([INDEX] if of > 1 else [])]:
                os.replace(temp / file, folder / file)
    except (OSError, SafetensorError) as error:
        raise MinithinkError(f"The checkpoint cannot be written to {folder}: {reason(error)}.") from None


def checkpoint_hash(folder: str | Path) -> str:
    """A name for the weights: the first 16 hex digits of a SHA-256 over all weight files, sorted by name.

    folder: of a checkpoint, or a GGUF file.
    """
    digest = hashlib.sha256()
    paths = parts_of(Path(folder)) if is_gguf(folder) else sorted(set(_weight_files(Path(folder))))
    for path in paths:
        try:
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise MinithinkError(f"{path} cannot be read: {reason(error)}.") from None
    return digest.hexdigest()[:16]


def other_value(folder: str | Path, parameters: Mapping[str, Tensor]) -> str:
    """The name of a parameter that a checkpoint stores with other numbers; "": there is none.

    Of a matrix its first row is compared, which takes no time and tells models apart: training changes all rows. What
    either side lacks or has in another shape or as no ordinary float tensor is skipped: it may be quantized, or be
    moved to the GPU only when it is needed. Rounding to a float type on the way makes no other model.

    Args:
        folder: of the checkpoint.
        parameters: of a model, by the names of `tensors_of`.

    Raises:
        MinithinkError: the folder has no weights, or they cannot be read.
    """
    entries, _ = _with_our_prefix(_entries(Path(folder)))
    for name, parameter in parameters.items():
        entry = entries.get(name)
        if entry is None or entry.stored not in DTYPES or entry.shape != parameter.shape:
            continue
        is_plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
        if not is_plain or parameter.is_meta or parameter.dtype not in DTYPES.values():
            continue
        if not _was_rounded_to(_first_row(entry), parameter.detach()):
            return name
    return ""


def _first_row(entry: Entry) -> Tensor:
    """The first row of a stored matrix, and all of a vector."""
    try:
        with safe_open(entry.path, framework="pt") as file:
            if len(entry.shape) < 2:
                return file.get_tensor(entry.name)
            return file.get_slice(entry.name)[:1]
    except (SafetensorError, OSError) as error:
        raise MinithinkError(f"{entry.path} cannot be read ({reason(error)}): download it again.") from None


def _was_rounded_to(stored: Tensor, parameter: Tensor) -> bool:
    """Whether the first row of a parameter is a stored one, perhaps by way of one float type."""
    own = parameter[: len(stored)].cpu()
    ways = (stored.dtype, torch.float32, torch.float16, torch.bfloat16)
    return any(torch.equal(stored.to(way).to(own.dtype), own) for way in ways)


def resolve(path_or_id: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: a local one, or that of a Hugging Face model, which is downloaded if necessary. A
    GGUF file is a checkpoint by itself.

    Args:
        path_or_id: a folder, a GGUF file, or a model id such as `Qwen/Qwen3-0.6B`.
        revision: branch, tag or commit of the model id; None: `main`.

    Raises:
        MinithinkError: there is no such folder or model, or it cannot be fetched. HF_HUB_OFFLINE=1 is respected.
    """
    path = Path(os.path.expanduser(path_or_id))  # Path's own raises for an unknown ~user
    is_file = os.path.isfile(path)
    if path_or_id and (os.path.isdir(path) or (is_file and is_gguf(path))):  # Path's own raises for long names
        if revision is not None:
            what = "file" if is_file else "folder"
            raise UsageError(
                f"{path_or_id} is a {what}, which has no revision {quoted(revision)}: drop the revision."
            )
        return path
    is_path = path_or_id[:1] in ("", ".", "/", "~") or path_or_id.count("/") > 1 or is_gguf(path)
    if is_path or os.path.exists(path):
        kind = "file" if is_gguf(path) else "folder"
        what = "is a file, not the folder of a checkpoint" if is_file else f"does not exist: no such {kind}"
        raise MinithinkError(
            f"{quoted(path_or_id)} {what}; give a folder, a GGUF file, or a Hugging Face id like Qwen/Qwen3-0.6B."
        )

    folder = download(path_or_id, FILES, revision)
    if not any(folder.glob(WEIGHTS)):
        raise MinithinkError(
            f"The model {path_or_id} has no {WEIGHTS} file at revision {revision or 'main'}, and minithink "
            "reads only these (pickled weights, pytorch_model.bin, can run code): use a revision that has them."
        )
    return folder


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, as its file's header describes it."""

    name: str  # in the file
    path: Path
    stored: str  # safetensors' name of its type
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.stored]

    def __str__(self) -> str:
        return f"{self.path}: {named(self.name)}"


@dataclass(frozen=True)
class _Stored:
    """The tensors of a checkpoint, which are exactly those of a decoder with its config."""

    config: ModelConfig
    entries: dict[str, Entry]  # by the names of `tensors_of`
    dtype: torch.dtype  # the widest of them, that of merged weights; float32 instead of float64

    @property
    def held(self) -> torch.dtype:
        """The type of a decoder whose user names none."""
        return self.dtype

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By the names of `tensors_of`."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def copy_into(self, views: dict[str, Tensor]) -> None:
        """Fill the parameters of a decoder. views: as of `tensors_of`."""
        for name, tensor in self.tensors():
            views[name].copy_(tensor)

    def tensors(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Names and stored values. names: the order; None: that of the files."""
        with ExitStack() as stack:
            files = dict[Path, Any]()
            for name in self.entries if names is None else names:
                entry = self.entries[name]
                try:
                    if entry.path not in files:
                        files[entry.path] = stack.enter_context(safe_open(entry.path, framework="pt"))
                    tensor = files[entry.path].get_tensor(entry.name)
                except (SafetensorError, OSError) as error:
                    raise MinithinkError(
                        f"{entry.path} cannot be read ({reason(error)}): download it again."
                    ) from None
                yield name, tensor


@dataclass(frozen=True)
class _Dequantized:
    """The tensors of a GGUF file, which are exactly those of a decoder with its config.

    An adapter is merged into their numbers in float32, which holds them exactly. So the merged weights and their hash
    are those of the same numbers in a folder of float32, and `held` rounds them once.
    """

    config: ModelConfig
    model: GGUF
    shapes: dict[str, tuple[int, ...]]  # by the names of `tensors_of`
    dtype: torch.dtype = torch.float32  # of merged weights

    @property
    def held(self) -> torch.dtype:
        """The type of a decoder whose user names none."""
        return getattr(torch, self.config.dtype)

    def copy_into(self, views: dict[str, Tensor]) -> None:
        """Fill the parameters of a decoder, piece by piece. views: as of `tensors_of`."""
        copy_weights(self.model, self.config, views)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and float32 values, in this order."""
        return float32_weights(self.model, self.config, names)


class _Hash:
    """The hash of the file in which merged weights would be saved, made tensor by tensor in the order of names."""

    def __init__(self, stored: _Stored | _Dequantized) -> None:
        """stored: the weights before the merge, which have the same names, shapes and types."""
        self._dtype = stored.dtype
        spelling = next(name for name, dtype in DTYPES.items() if dtype == stored.dtype)
        head: dict[str, Any] = {"__metadata__": FORMAT}
        end = 0
        for name, shape in sorted(stored.shapes.items()):
            begin = end
            end += math.prod(shape) * stored.dtype.itemsize
            head[name] = {"dtype": spelling, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._digest = hashlib.sha256(struct.pack("<Q", len(text)) + text)

    def add(self, tensor: Tensor) -> None:
        """The next tensor."""
        value = tensor.to("cpu", self._dtype).flatten()
        self._digest.update(value.view(torch.uint8).numpy().data)

    @property
    def digits(self) -> str:
        """As of `checkpoint_hash`, once all tensors were added."""
        return self._digest.hexdigest()[:16]


def _opened(path: Path) -> _Stored | _Dequantized:
    """The tensors of a checkpoint, checked. path: of its folder, or a GGUF file."""
    return _dequantized(path) if is_gguf(path) else _stored(path)


def _dequantized(path: Path) -> _Dequantized:
    """The tensors of a GGUF file, checked. MinithinkError: as in `load_decoder`."""
    config = ModelConfig.from_folder(path)
    model = GGUF.read(path)
    with torch.device("meta"):
        shapes = {name: view.shape for name, view in tensors_of(Decoder(config)).items()}
    check_tensors(model, config, shapes)
    return _Dequantized(config, model, {name: tuple(shape) for name, shape in shapes.items()})


def _stored(folder: Path) -> _Stored:
    """The tensors of a checkpoint folder, checked. MinithinkError: as in `load_decoder`."""
    config = ModelConfig.from_folder(folder)
    found = {name: entry for name, entry in _entries(folder).items() if not HARMLESS.fullmatch(name)}
    entries, prefix = _with_our_prefix(found)
    if prefix != MODEL:
        caution = f"{folder}: the names of the tensors begin with {quoted(prefix)}, which is read as {MODEL!r}"
        config = replace(config, cautions=(*config.cautions, caution))
    with torch.device("meta"):
        shapes = {name: view.shape for name, view in tensors_of(Decoder(config)).items()}
    if config.tie_embeddings and HEAD in entries:
        if EMBED not in entries:
            entries[EMBED] = entries.pop(HEAD)  # the one that is there is both
        else:
            shapes[HEAD] = shapes[EMBED]
    _check(entries, shapes, config)
    if config.tie_embeddings and HEAD in entries:
        if _are_equal(entries[EMBED], entries[HEAD]):
            del entries[HEAD]
        else:
            caution = (
                f"{folder}: config.json ties the output head to the embeddings, and the file has another {HEAD}, "
                "which is used, as in transformers"
            )
            config = replace(config, tie_embeddings=False, cautions=(*config.cautions, caution))
    own = reduce(torch.promote_types, [entry.dtype for entry in entries.values()])
    return _Stored(config, entries, torch.float32 if own == torch.float64 else own)


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files that hold the weights, each with the tensors that the index says it has (None: no index)."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        if (folder / SINGLE).exists():
            if not (folder / SINGLE).is_file():  # to open a pipe would wait for its writer
                raise MinithinkError(f"{folder / SINGLE} is no regular file: download it.")
            return {folder / SINGLE: None}
        pickled = any(folder.glob("pytorch_model*.bin"))
        why = "only pickled weights, which can run code and are not read" if pickled else "no weights"
        raise MinithinkError(f"{folder} has {why}: minithink reads {SINGLE} or {INDEX} with its shards.")
    where = folder / INDEX
    weight_map = read_json(where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MinithinkError(f"{where} has no weight_map from tensors to files: download it again.")
    files: dict[Path, set[str] | None] = {}
    for name, shard in weight_map.items():
        # Only the name is checked: in the hub's cache the file itself is a link to a blob elsewhere.
        if not isinstance(shard, str) or PureWindowsPath(shard).name != shard or not shard.endswith(".safetensors"):
            raise MinithinkError(
                f"{where} puts {named(name)} into {quoted(shard)}, which is no *.safetensors file beside it."
            )
        if not os.path.isfile(folder / shard):
            raise MinithinkError(
                f"{folder / named(shard)} is missing, and {where.name} puts {named(name)} into it: download it."
            )
        listed = files.setdefault(folder / shard, set())
        assert listed is not None
        listed.add(name)
    return files


def _entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint by name, from the headers of its files, which must agree with the index."""
    entries: dict[str, Entry] = {}
    for path, expected in _weight_files(folder).items():
        found = {entry.name: entry for entry in header(path)}
        if expected is not None:
            for name in sorted(expected - found.keys()):
                raise MinithinkError(f"{path} lacks {named(name)}, which {INDEX} puts into it: download it again.")
            for name in sorted(n for n in found.keys() - expected if not HARMLESS.fullmatch(n)):
                raise MinithinkError(
                    f"{path} holds {named(name)}, which {INDEX} does not put into it: download both again."
                )
        entries |= found
    return entries


def header(path: Path) -> Iterator[Entry]:
    """The tensors of one safetensors file: 8 bytes of header length, the header in JSON, then the numbers."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            begin = file.read(8)
            if len(begin) < 8:
                raise ValueError(f"the file has {size} bytes, too few for the length of its header")
            (length,) = struct.unpack("<Q", begin)
            if length > min(MAX_HEADER, size - 8):
                raise ValueError(f"the file has {size} bytes and its header claims {length}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = []
        for name, t in header.items():
            shape = tuple(map(int, t["shape"]))
            end = 8 + length + int(t["data_offsets"][1])
            tensors.append((name, str(t["dtype"]), shape, end))
    except OSError as error:
        raise MinithinkError(f"{path} cannot be read: {reason(error)}.") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise MinithinkError(f"{path} is no valid safetensors file ({reason(error)}): download it again.") from None
    for name, stored, shape, end in tensors:
        if end > size:
            raise MinithinkError(
                f"{path} is truncated: it has {size} bytes, and {named(name)} {spelled(shape)} ends at byte "
                f"{quoted(end)}: download it again."
            )
        yield Entry(name, path, stored, shape)


def _with_our_prefix(entries: dict[str, Entry]) -> tuple[dict[str, Entry], str]:
    """The tensors by the names that a decoder's have, and the prefix that they have instead of `model.`.

    A decoder that was taken out of another model or saved by a wrapper has another prefix, or none. It is found by
    the embeddings; if there are none or several, the names stay.
    """
    suffix = EMBED.removeprefix(MODEL)
    found = [name for name in entries if name.endswith(suffix)]
    prefix = found[0].removesuffix(suffix) if len(found) == 1 else MODEL
    if prefix == MODEL:
        return dict(entries), MODEL
    out = dict[str, Entry]()
    for name, entry in entries.items():
        if name == HEAD or name.endswith(f".{HEAD}"):
            ours = HEAD
        elif name.startswith(prefix):
            ours = MODEL + name.removeprefix(prefix)
        else:
            return dict(entries), MODEL  # it is a part of another model, or damaged
        if ours in out:  # two tensors would have one name
            return dict(entries), MODEL
        out[ours] = entry
    return out, prefix


def _check(entries: dict[str, Entry], shapes: dict[str, torch.Size], config: ModelConfig) -> None:
    """Refuse a checkpoint whose tensors are not exactly those that the config calls for."""
    for name, entry in entries.items():
        if name not in shapes and QUANTIZED.fullmatch(name):
            raise MinithinkError(f"{entry} belongs to quantized weights, which are not read: use the original ones.")
        if name not in shapes and ADAPTER.fullmatch(name):
            raise MinithinkError(f"{entry} belongs to an adapter: merge it into the model, and give the result.")
    for name, shape in shapes.items():
        if name not in entries:
            raise _missing(name, shape, entries)
        entry = entries[name]
        if entry.stored not in DTYPES:
            known = ", ".join(DTYPES)
            mend = "store it as one of them" if entry.stored in WIDER_THAN_A_BYTE else "use the original weights"
            kind = "" if entry.stored in WIDER_THAN_A_BYTE else ", because others are quantized"
            raise MinithinkError(
                f"{entry} is stored as {named(entry.stored)}, and minithink reads only {known}{kind}: {mend}."
            )
        if name == EMBED and entry.shape[:1] != shape[:1]:
            raise MinithinkError(
                f"{entry} has the shape {spelled(entry.shape)}, and vocab_size is {shape[0]} in config.json: the "
                "two do not belong together."
            )
        if entry.shape != shape:
            raise MinithinkError(
                f"{entry} has the shape {spelled(entry.shape)}, and config.json calls for {list(shape)}."
            )
    for name, entry in entries.items():
        if name not in shapes:
            raise MinithinkError(
                f"{entry} {spelled(entry.shape)} has no place in a {config.architecture} with this config.json."
            )


def _missing(name: str, shape: torch.Size, entries: dict[str, Entry]) -> MinithinkError:
    """The error for a tensor that is missing."""
    paths = sorted({entry.path for entry in entries.values()})
    where = str(paths[0]) if paths else "The checkpoint"
    if len(paths) > 1:
        where += f" and {counted(len(paths) - 1, 'other')}"
    if name == HEAD:
        return MinithinkError(
            f"{where}: the output head {HEAD} {list(shape)} is missing, and config.json says that it is not the "
            "embeddings: if it is, set tie_word_embeddings to true there; else the checkpoint is incomplete."
        )
    suffix = name.removeprefix(MODEL)
    names = sorted((entry.name for entry in entries.values()), key=lambda other: not other.endswith(suffix))
    there = listed([named(other) for other in names]) or "none"
    return MinithinkError(
        f"{where}: the tensor {name} {list(shape)} is missing, and there are {there}: config.json describes another "
        "model, or the checkpoint is incomplete."
    )


def spelled(shape: tuple[int, ...]) -> str:
    return quoted(list(shape))


def _are_equal(one: Entry, other: Entry) -> bool:
    """Whether two tensors of one shape hold the same numbers."""
    try:
        with safe_open(one.path, framework="pt") as first, safe_open(other.path, framework="pt") as second:
            a = first.get_slice(one.name)
            b = second.get_slice(other.name)
            for start in range(0, one.shape[0], ROWS):
                rows = slice(start, start + ROWS)
                if not torch.equal(a[rows].double(), b[rows].double()):
                    return False
    except (SafetensorError, OSError) as error:
        raise MinithinkError(f"{one.path} cannot be read ({reason(error)}): download it again.") from None
    return True


def _contiguous_copy(view: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(view.shape, dtype=dtype).copy_(view)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
