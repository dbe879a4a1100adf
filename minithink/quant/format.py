"""What every number format of the cache can do: count the bytes of a token, encode it and decode it.

A token's row of D channels becomes `code_bytes` bytes of codes. Formats with groups also store parameters (a scale,
or a scale and a minimum) that the elements of a group share; in TurboQuant a whole row shares one scale. The format's
axis says which elements form a group:

    by="channel": `group` consecutive channels of one token; a token is self-contained
    by="token":   one channel of up to `group` tokens that are quantized together; they share one row of parameters

The papers write "per token" for the first and "per channel" for the second: they name what has a scale of its own.
Here `by` names the axis that a group runs along.

Nothing is stored but codes and parameters. Encoding uses the parameters as stored, after their rounding. Finite input
gives finite output; ±∞ counts as the largest finite number; NaN may give anything.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.quant.pack import pack, unpack

F = TypeVar("F", bound="Format")


@dataclass(frozen=True)
class Format(ABC):
    """One number format. Formats with equal fields are equal, and `parse` reads what `str` gives."""

    name: str = field(init=False)
    bits: int = field(init=False)  # bits of one code
    group: int = 0  # elements that share parameters; 0: a whole row does, or there are no parameters
    by: str = "channel"  # the axis that a group runs along: "channel" or "token"
    param_bytes: int = field(init=False, default=0)  # bytes of the parameters of one group; 0: there are none
    tensor_scaled: bool = field(init=False, default=False)  # needs one FP32 scale for a whole tensor

    def __str__(self) -> str:
        return self.name

    def code_bytes(self, dim: int) -> int:
        """Bytes of the codes of one token of `dim` channels."""
        return dim * self.bits // 8

    def params_bytes(self, dim: int) -> int:
        """Bytes of the parameters of one token; by token: of one row, which up to `group` tokens share."""
        if not self.group:
            return self.param_bytes
        return self.param_bytes * (dim if self.by == "token" else dim // self.group)

    def bytes_per_token(self, dim: int) -> float:
        """Bytes of the codes and parameters of one token; by token: a full group's parameters / tokens of a group."""
        share = self.group if self.by == "token" else 1
        return self.code_bytes(dim) + self.params_bytes(dim) / share

    def fit(self: F, dim: int) -> F:
        """The format for rows of `dim` channels: a group that is longer than a row becomes the row.

        Raises:
            UsageError: groups do not divide a row, or its codes do not fill whole bytes.
        """
        if dim * self.bits % 8:
            raise UsageError(
                f"{self.name} stores {self.bits} bits a channel, and {dim} channels do not fill whole bytes: "
                f"choose a format of 8 bits or more for this model."
            )
        if not self.group or self.by == "token":
            return self
        group = min(self.group, dim)
        if dim % group:
            raise UsageError(
                f"{self.name} in groups of {group} channels does not divide a head of {dim} channels: choose a group "
                f"that does, or one that is longer than the head, which becomes the head."
            )
        return replace(self, group=group)

    def tensor_scale(self, amax: Tensor) -> Tensor:
        """The FP32 scale of a tensor, with headroom for twice the magnitude that was seen.

        Args:
            amax: largest magnitudes, float32 of any shape.

        Returns:
            float32 of that shape, positive, finite and normal; 1 where `amax` is 0, and for formats that are not
            `tensor_scaled`.
        """
        return torch.ones_like(amax, dtype=torch.float32)

    @abstractmethod
    def quantize(self, x: Tensor, tensor_scale: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode rows of numbers.

        Args:
            x: [..., D] by channel, [..., T, D] by token with 1 ≤ T ≤ `group`; any float dtype.
            tensor_scale: float32 that broadcasts to [...]; read if the format is `tensor_scaled`.
            valid: [..., T] bool, by token only: the tokens that count; None: all. Other tokens may be NaN; they do
                not change the parameters, and get codes 0.

        Returns:
            codes: uint8, [..., code_bytes] by channel, [..., T, code_bytes] by token.
            params: [..., params_bytes] uint8.

        Raises:
            ValueError: by token, more tokens than a group has.
        """

    @abstractmethod
    def dequantize(self, codes: Tensor, params: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode, in float32; numbers that `dtype` cannot hold saturate.

        Args:
            codes: [..., code_bytes] uint8.
            params: [..., params_bytes] uint8; also by token one row for every token.
            tensor_scale: float32 that broadcasts to [...].
            dtype: of the result.

        Returns:
            [..., D].
        """


@dataclass(frozen=True)
class Grouped(Format):
    """A format with groups. A subclass encodes and decodes one group; this class does the axes and the packing."""

    group: int = 16

    def __post_init__(self) -> None:
        if self.group < 1 or self.by not in ("channel", "token"):
            raise ValueError(f"group={self.group}, by={self.by!r}: groups hold 1 or more, by 'channel' or 'token'")

    def __str__(self) -> str:
        return f"{self.name}:group={self.group}" + (",by=token" if self.by == "token" else "")

    @abstractmethod
    def encode(self, x: Tensor, tensor_scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Encode groups.

        Args:
            x: float32 [..., n, m], n groups of m elements; 0 where not valid.
            tensor_scale: float32 [..., 1, 1].
            valid: bool [..., n, m].

        Returns:
            codes: [..., n, m], any integer dtype.
            params: uint8 [..., n, param_bytes].
        """

    @abstractmethod
    def decode(self, codes: Tensor, params: Tensor, tensor_scale: Tensor) -> Tensor:
        """Decode groups. codes: [..., n, m] as `read` gives them; the others as in `encode` → float32 [..., n, m]."""

    def read(self, packed: Tensor) -> Tensor:
        """Unpack bytes, uint8 [..., D·bits/8], to [..., D] codes, or to whatever the subclass's `decode` takes."""
        return unpack(packed, self.bits)

    def quantize(self, x: Tensor, tensor_scale: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = saturate(x.float(), torch.float32)
        scale = tensor_scale[..., None, None]
        if self.by == "channel":
            groups = x.unflatten(-1, (x.shape[-1] // self.group, self.group))  # [..., n, group]
            codes, params = self.encode(groups, scale, torch.ones_like(groups, dtype=torch.bool))
            return pack(codes.flatten(-2), self.bits), params.flatten(-2)
        if x.shape[-2] > self.group:
            raise ValueError(f"{x.shape[-2]} tokens were given to quantize as one group of at most {self.group}.")
        if valid is None:
            valid = torch.ones(x.shape[-2], dtype=torch.bool, device=x.device)
        columns = valid.unsqueeze(-2)  # [..., 1, T]
        # Invalid tokens may be NaN, and NaN · 0 is NaN: replace them, do not multiply.
        groups = x.transpose(-1, -2).where(columns, 0.0)  # [..., D, T]: a group is a channel
        codes, params = self.encode(groups, scale, columns.expand_as(groups))
        codes = codes.where(columns, 0).transpose(-1, -2)
        return pack(codes, self.bits), params.flatten(-2)

    def dequantize(self, codes: Tensor, params: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
        q = self.read(codes)  # [..., D]
        n = params.shape[-1] // self.param_bytes  # groups of a token: D / group; by token D, one for each channel
        q = q.unflatten(-1, (n, q.shape[-1] // n))
        x = self.decode(q, params.unflatten(-1, (n, self.param_bytes)), tensor_scale[..., None, None])
        return saturate(x.flatten(-2), dtype)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`; magnitudes above the largest finite number of `dtype`, also ∞, become that number."""
    limit = torch.finfo(dtype).max
    if limit > torch.finfo(x.dtype).max:
        return x.to(dtype)
    return x.float().clamp(-limit, limit).to(dtype)  # in float32, because 65504 as bfloat16 is 65536


def scale_with_headroom(amax: Tensor, largest: float) -> Tensor:
    """2·amax / largest, at least the smallest normal float32; 1 where amax is 0. amax: any shape → float32.

    The 2 is headroom: the prompt sets the scale once, and generated tokens may exceed the prompt's magnitudes.
    """
    float32 = torch.finfo(torch.float32)
    # Compute the factor first, because 2·amax may overflow.
    scale = amax.float().clamp(max=float32.max) * (2 / largest)
    return scale.clamp(min=float32.smallest_normal).where(amax > 0, 1.0)


def divide(x: Tensor, step: Tensor) -> Tensor:
    """x / step; 0 where the step is 0, because there a scale has underflowed and 0 / 0 would be NaN."""
    return x / step.where(step > 0, math.inf)


def divide_by(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once on every device: by a Python number, torch on GPUs multiplies by 1 / number."""
    return x / torch.full_like(x, number)


def view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers. data: [..., n·itemsize] uint8, any strides and offset → [..., n] of `dtype`."""
    # torch calls one row of a wider tensor contiguous, though its stride may be no multiple of the item size.
    whole = data.is_contiguous() and not any(n % dtype.itemsize for n in (data.storage_offset(), *data.stride()[:-1]))
    return (data if whole else data.clone(memory_format=torch.contiguous_format)).view(dtype)
