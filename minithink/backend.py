"""A backend is a set of functions for the hot paths, chosen once and passed explicitly.

REFERENCE holds the readable PyTorch of `minithink/ref/`. Triton twins with the same signatures join it as TRITON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minithink.errors import UsageError
from minithink.ref.attention import attention
from minithink.ref.decode_attention import decode_attention
from minithink.ref.linear import linear
from minithink.ref.lrfu import lrfu
from minithink.ref.redundancy import redundancy
from minithink.ref.rms_norm import rms_norm
from minithink.ref.rope import rope
from minithink.ref.swiglu import swiglu
from minithink.ref.window_importance import window_importance


@dataclass(frozen=True)
class Backend:
    """The functions of one backend; their signatures are those of the functions in `minithink/ref/`."""

    name: str
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    decode_attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    window_importance: Callable[..., Tensor]
    redundancy: Callable[[Tensor, Tensor, float], Tensor]
    lrfu: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor, Tensor]]


REFERENCE = Backend(
    "reference", linear, rms_norm, rope, swiglu, attention, decode_attention, window_importance, redundancy, lrfu
)

NAMES = ("auto", "reference", "triton")


def choose(name: str) -> Backend:
    """The backend of that name; `auto` takes the fastest one that runs here."""
    if name in ("auto", "reference"):
        return REFERENCE
    if name == "triton":
        raise UsageError("--backend triton: this version has no Triton kernels yet; use auto or reference.")
    raise UsageError(f"The backend {name!r} is unknown; there are {', '.join(NAMES)}.")
