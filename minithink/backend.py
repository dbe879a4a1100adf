"""A backend is a set of functions that take most of the time. It is chosen once and passed explicitly.

REFERENCE has the readable PyTorch of `minithink/ref/`, `triton_backend()` the kernels of `kernels/`. The functions
are documented in `minithink/ref/`; a kernel has the same signature.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from minithink.errors import UsageError, alternatives, quoted
from minithink.ref.accumulate import accumulate
from minithink.ref.allocate import allocate
from minithink.ref.anneal import anneal
from minithink.ref.append import append
from minithink.ref.attention import attention
from minithink.ref.by_format import by_format
from minithink.ref.carry import carry
from minithink.ref.close_ranks import close_ranks
from minithink.ref.cumulative_score import cumulative_score
from minithink.ref.decode_attention import decode_attention
from minithink.ref.dequantize import dequantize
from minithink.ref.draw import draw
from minithink.ref.enlist import enlist
from minithink.ref.evict import evict
from minithink.ref.flush import flush
from minithink.ref.gather import gather
from minithink.ref.gumbel_argmax import gumbel_argmax
from minithink.ref.keep_best import keep_best
from minithink.ref.keep_shared import keep_shared
from minithink.ref.kmeans import kmeans
from minithink.ref.linear import linear
from minithink.ref.paged_attention import paged_attention
from minithink.ref.predict import predict
from minithink.ref.quantize import quantize
from minithink.ref.reallocate import reallocate
from minithink.ref.redundancy import redundancy
from minithink.ref.repack import repack
from minithink.ref.retain import retain
from minithink.ref.rms_norm import rms_norm
from minithink.ref.rope import rope
from minithink.ref.running_redundancy import running_redundancy
from minithink.ref.segments import segments
from minithink.ref.select import select
from minithink.ref.sentences import sentences
from minithink.ref.shrink import shrink
from minithink.ref.similarity import similarity
from minithink.ref.sparsity import sparsity
from minithink.ref.stamp import stamp
from minithink.ref.survivors import survivors
from minithink.ref.swiglu import swiglu
from minithink.ref.tri_score import tri_score
from minithink.ref.window_importance import window_importance
from minithink.ref.window_peak import window_peak


@dataclass(frozen=True)
class Backend:
    """The functions of one backend."""

    name: str
    capturable: bool  # its functions can be captured as CUDA graphs: the host reads nothing from the device
    # the decoder
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = rope
    swiglu: Callable[[Tensor], Tensor] = swiglu
    gumbel_argmax: Callable[[Tensor, int, Tensor, Tensor], Tensor] = gumbel_argmax
    # attention: of prompts, over dense keys and values, over pages
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] = attention
    decode_attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = decode_attention
    paged_attention: Callable[[Tensor, Any, int, str | None], tuple[Tensor, Tensor | None]] = paged_attention
    by_format: Callable[..., tuple[Tensor, Tensor, Tensor]] = by_format
    # the store
    append: Callable[..., Tensor] = append
    enlist: Callable[..., None] = enlist
    allocate: Callable[..., Tensor] = allocate
    flush: Callable[[Any], None] = flush
    evict: Callable[..., None] = evict
    close_ranks: Callable[..., Tensor] = close_ranks
    gather: Callable[[Tensor, Tensor, Tensor, Tensor, int], None] = gather
    quantize: Callable[..., tuple[Tensor, Tensor]] = quantize
    dequantize: Callable[[Any, Tensor, Tensor, Tensor, torch.dtype], Tensor] = dequantize
    shrink: Callable[[Any, Any, Tensor, Tensor], tuple[Tensor, Tensor]] = shrink
    # what policies choose with
    keep_best: Callable[[Tensor, Tensor, Tensor], Tensor] = keep_best
    keep_shared: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = keep_shared
    draw: Callable[[Tensor, Tensor, Tensor | None], Tensor] = draw
    window_importance: Callable[..., Tensor] = window_importance
    window_peak: Callable[..., Tensor] = window_peak
    redundancy: Callable[[Tensor, Tensor, float], Tensor] = redundancy
    running_redundancy: Callable[..., Tensor] = running_redundancy
    retain: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]] = retain
    repack: Callable[..., None] = repack
    predict: Callable[[Tensor, Sequence[Tensor]], Tensor] = predict
    select: Callable[..., Tensor] = select
    reallocate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor] = reallocate
    sparsity: Callable[[Tensor, Tensor], Tensor] = sparsity
    kmeans: Callable[[Tensor, Tensor, Tensor], Tensor] = kmeans
    segments: Callable[..., tuple[Tensor, Tensor]] = segments
    anneal: Callable[..., Tensor] = anneal
    survivors: Callable[[Any, Tensor, Tensor, Tensor, int], Tensor] = survivors
    tri_score: Callable[[Any, int, Tensor, Tensor, Tensor], Tensor] = tri_score
    sentences: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = sentences
    similarity: Callable[..., None] = similarity
    cumulative_score: Callable[..., tuple[Tensor, Tensor]] = cumulative_score
    stamp: Callable[..., None] = stamp
    accumulate: Callable[..., Tensor] = accumulate
    carry: Callable[..., None] = carry


REFERENCE = Backend("reference", capturable=False)

NAMES = ("auto", "reference", "triton")
# Functions without a kernel: torch's attention over prompts is at the hardware's limit already, and no fast path uses
# attention over dense keys and values.
TORCH = ("attention", "decode_attention")


@cache
def triton_backend() -> Backend:
    """The kernels: of each function the one with its name in `kernels/`. They are imported when they are first asked
    for, since only then Triton must be there."""
    names = {field.name for field in fields(Backend)} - {"name", "capturable", *TORCH}
    kernels = {name: getattr(import_module(f"minithink.kernels.{name}"), name) for name in names}
    return Backend("triton", capturable=True, **kernels)


def choose(name: str, device: torch.device | str = "cpu") -> Backend:
    """The backend of that name; `auto` takes the fastest one for the device.

    Raises:
        UsageError: there is no such backend, or it does not run there.
    """
    kind = torch.device(device).type
    if name not in NAMES:
        raise UsageError(f"The backend {quoted(name)} is unknown; {alternatives(name, NAMES)}.")
    if name == "reference" or (name == "auto" and kind != "cuda"):
        return REFERENCE
    try:
        import triton  # noqa: F401  (is it installed?)
    except ImportError:
        if name == "auto":
            return REFERENCE
        raise UsageError("--backend triton: Triton is not installed (it exists for Linux only); use auto.") from None
    from minithink.kernels._common import INTERPRETED

    if kind != "cuda" and not INTERPRETED:
        raise UsageError(
            f"--backend triton runs on NVIDIA GPUs and this is {kind}: use auto, or set TRITON_INTERPRET=1 to let "
            "Triton's interpreter run the kernels, very slowly."
        )
    return triton_backend()


def device_of(name: str) -> torch.device:
    """The device of a --device: auto takes a GPU if there is one. UsageError: it is unknown, or not here."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,2})?", str(name)):  # torch knows more devices, which cannot run this
        raise UsageError(f"The device {quoted(name)} is unknown; use auto, cpu, cuda, cuda:1 or mps.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu or auto.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError(f"--device {name}: torch finds no Apple GPU here; use cpu or auto.")
    return device
