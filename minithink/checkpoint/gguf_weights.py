"""The weights of a GGUF file, which the package `gguf` dequantizes, piece by piece.

llama.cpp rotates pairs of channels that stand side by side, and Hugging Face pairs that stand half a head apart. So
the rows of W_q and W_k have another order in files of the architecture `llama`, and get Hugging Face's here. Each row
is quantized by itself, so the rows are ordered before they are dequantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minithink.checkpoint.gguf_config import EMBED, HEAD, ROPE_FACTORS
from minithink.checkpoint.gguf_file import GGUF, StoredTensor, bytes_at
from minithink.config import ModelConfig
from minithink.errors import MinithinkError, listed, named, quoted

PIECE = 2**18  # numbers that are dequantized at once: few calls, and what they make fits into a cache
OUTSIDE = {
    EMBED: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", re.ASCII)
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
THEIRS = {ours: theirs for theirs, ours in (OUTSIDE | IN_LAYER).items()}


def copy_weights(model: GGUF, config: ModelConfig, views: Mapping[str, Tensor]) -> None:
    """Fill a decoder's parameters.

    Args:
        model: the headers, which `check_tensors` has found right.
        config: of the decoder.
        views: Hugging Face's name of a tensor → where it goes, in the shape that it has in a checkpoint.

    Raises:
        MinithinkError: a file is truncated or cannot be read.
    """
    for name, tensor in _by_our_names(model).items():
        _copy(tensor, views[name], _order(name, config))


def float32_weights(model: GGUF, config: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Names and values of some tensors, one after the other, as float32 in the shape that they have in a checkpoint.

    Args:
        model, config: as of `copy_weights`.
        names: Hugging Face's.

    Raises:
        MinithinkError: a file is truncated or cannot be read.
    """
    stored = _by_our_names(model)
    for name in names:
        numbers = torch.empty(stored[name].shape, dtype=torch.float32)
        _copy(stored[name], numbers, _order(name, config))
        yield name, numbers


def _order(name: str, config: ModelConfig) -> np.ndarray | None:
    """For every row of a tensor its place in the file; None: the same. name: Hugging Face's."""
    if config.architecture != "LlamaForCausalLM":
        return None
    if ".q_proj." in name:
        return halves_apart(config.num_heads, config.head_dim)
    if ".k_proj." in name:
        return halves_apart(config.num_kv_heads, config.head_dim)
    return None


def halves_apart(heads: int, head_dim: int) -> np.ndarray:
    """For every row of Hugging Face's order its place in llama.cpp's: [heads · D] int64."""
    places = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return places.swapaxes(1, 2).reshape(-1)


def check_tensors(model: GGUF, config: ModelConfig, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a file whose tensors are not exactly those that a decoder needs, or are of a type that cannot be read.

    Args:
        shapes: Hugging Face's name of a tensor → its shape.

    Raises:
        MinithinkError: see above; or the package gguf is missing.
    """
    stored = _by_our_names(model)
    for name, shape in shapes.items():
        if name not in stored:
            there = listed([named(other) for other in sorted(model.tensors)]) or "none"
            raise MinithinkError(
                f"{model.path}: the tensor {_their_name(name)} {list(shape)} is missing, and there are {there}: the "
                "file is incomplete, or describes another model."
            )
        if stored[name].shape != shape:
            raise MinithinkError(
                f"{stored[name]} has the shape {quoted(list(stored[name].shape))}, and the file's fields call for "
                f"{list(shape)}."
            )
    for name, tensor in stored.items():
        if name not in shapes:
            raise MinithinkError(
                f"{tensor} {quoted(list(tensor.shape))} has no place in a {config.architecture} with these fields."
            )
    _check_types(stored.values())
    for tensor in stored.values():
        _bytes_of(tensor)


def _by_our_names(model: GGUF) -> dict[str, StoredTensor]:
    """The tensors of a decoder by Hugging Face's names. Unknown ones keep their own."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in model.tensors.items():
        if name == ROPE_FACTORS:
            continue  # it is a part of the config
        layer = LAYER.fullmatch(name)
        if layer is not None and layer[2] in IN_LAYER:
            name = f"model.layers.{int(layer[1])}.{IN_LAYER[layer[2]]}.{layer[3]}"
        found[OUTSIDE.get(name, name)] = tensor
    return found


def _their_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    if name in THEIRS:
        return THEIRS[name]
    _, _, number, *middle, kind = name.split(".")
    return f"blk.{number}.{THEIRS['.'.join(middle)]}.{kind}"


# Types of numbers ------------------------------------------------------------------------------------------------


def package() -> Any:
    """The package gguf. MinithinkError: it is not installed."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise MinithinkError(
            "A GGUF file needs the package gguf, which is not installed: pip install 'gguf>=0.18'."
        ) from None
    return gguf


def _check_types(tensors: Iterable[StoredTensor]) -> None:
    """Refuse types that the package does not dequantize, and rows that are no whole number of blocks."""
    gguf = package()
    known = set[int]()
    for tensor in tensors:
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if tensor.kind not in known:
                gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
                known.add(tensor.kind)
        except (ValueError, KeyError):
            raise MinithinkError(
                f"{tensor} is stored in the type {tensor.kind}, which this version of the package gguf does not "
                "know: update it."
            ) from None
        except NotImplementedError:
            raise MinithinkError(
                f"{tensor} is stored as {kind.name}, which the package gguf does not dequantize: use another file."
            ) from None
        if tensor.shape[-1] % block:
            raise MinithinkError(
                f"{tensor} has rows of {tensor.shape[-1]} numbers, which are no whole blocks of {block} of the type "
                f"{kind.name}: download it again."
            )


def _bytes_of(tensor: StoredTensor) -> np.ndarray:
    """The bytes of a tensor, row by row: [rows, bytes of a row] uint8. A vector has one number a row."""
    gguf = package()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    numbers = prod(tensor.shape)
    content = bytes_at(tensor, numbers // block * size)
    rows = tensor.shape[0] if len(tensor.shape) > 1 or block == 1 else 1
    return content.reshape(rows, -1)


def _copy(tensor: StoredTensor, view: Tensor, order: np.ndarray | None) -> None:
    """Dequantize a tensor into its place.

    Args:
        view: where it goes, in the tensor's shape.
        order: row of the view → row of the tensor; None: the same.
    """
    gguf = package()
    kind = gguf.GGMLQuantizationType(tensor.kind)
    content = _bytes_of(tensor)
    rows = len(content)
    step = max(1, PIECE * rows // max(1, prod(tensor.shape)))
    places = np.arange(rows) if order is None else order
    with np.errstate(all="ignore"):  # a damaged scale may be infinite
        for start in range(0, rows, step):
            piece = content[places[start : start + step]]
            row = piece.reshape(1, -1)  # the package takes 16 rows at a time, and one long row is faster
            numbers = torch.from_numpy(gguf.quants.dequantize(row, kind))
            target = view if rows == 1 else view[start : start + step]
            target.copy_(numbers.view(target.shape))
