"""Quant: every token stays, stored in another number format (`minithink/quant/`).

The plainest quantized cache, for comparing formats. New tokens are quantized as they come. If keys share their scales
across tokens, new tokens wait in full precision and are quantized in blocks of `buffer` tokens. The prompt is
quantized when it is read, its last, shorter block too.
"""

from __future__ import annotations

from dataclasses import dataclass

from minithink.errors import UsageError
from minithink.kv.contract import Model, Policy, Shape, Storage
from minithink.quant import options_of, parse, parse_pair

GROUP = 16


@dataclass
class Quant(Policy):
    """Keep everything in one format."""

    fmt: str = "nvfp4"  # the keys' format by its name alone: nvfp4, fp8, int4, tq3, ternary and others
    v_fmt: str = ""  # the values' format; "": as the keys
    group: int | None = None  # elements that share a scale, in formats with groups: 16, 32, 64 or 128; none: 16
    by: str = "channel"  # what a group of keys runs along: channel or token; values always by channel
    buffer: int = 0  # tokens that wait in full precision; 0: one group if by=token, else none
    block: int = 16  # tokens of a page, a power of two
    scale: str = ""  # of tq1 to tq4: unbiased, norm, mse or none; "": unbiased
    params: str = ""  # the type of scales and minima, of int2 to int16 and tq1 to tq4: fp16 or fp32; "": the format's

    name = "quant"
    summary = "keep everything in few bits (nvfp4, fp8, int4, tq3, ternary, …)"
    capturable = True  # there is nothing to decide
    scope = "sequence"

    def __post_init__(self) -> None:
        keys = self.fmt
        values = self.v_fmt or self.fmt
        if any(mark in keys + values for mark in ":/"):
            raise UsageError(
                f"quant: the formats {keys!r} and {values!r} must be plain names; options are fields of their own "
                "(group, by, scale, params), and the values' format is v_fmt."
            )
        if self.by not in ("channel", "token"):
            raise UsageError(f"quant: by is {self.by!r}; a group of keys runs by channel or by token.")
        by_token = self.by == "token"
        parse(values)  # UsageError: there is no such format
        if by_token and not parse(keys).group:
            raise UsageError(f"quant: {keys} has no groups{_because(keys)}: drop by=token.")
        self._refuse_options_of_neither(keys, values)
        group = self._group
        buffer = self.buffer or (group if by_token else 0)
        if buffer < 0 or (by_token and buffer % group):
            raise UsageError(
                f"quant: a buffer of {buffer} tokens; it must be 0 or more, and by=token a multiple of the group, "
                f"{group}."
            )
        pair = f"{self._named(keys, by_token)}/{self._named(values)}"
        parse_pair(pair)  # UsageError: no such group, scale or params
        self.storage = Storage(thoughts=(pair,), buffer=buffer, block=self.block)
        self._biased = False  # whether the model's keys have biases; `bind` tells

    def _refuse_options_of_neither(self, keys: str, values: str) -> None:
        """UsageError: an option was given that neither format takes."""
        if self.group is not None and _has("scale", keys) and _has("scale", values):
            raise UsageError(f"quant: {keys} has no groups{_because(keys)}: drop group={self.group}.")
        formats = keys if keys == values else f"{keys} and {values}"
        if self.scale and not (_has("scale", keys) or _has("scale", values)):
            raise UsageError(f"quant: scale={self.scale} is for tq1, tq2, tq3 and tq4, not for {formats}: drop it.")
        if self.params and not (_has("params", keys) or _has("params", values)):
            raise UsageError(
                f"quant: params={self.params} is for asymmetric integers (int4, …) and for tq1 to tq4, not for "
                f"{formats}: drop it."
            )

    def bind(self, model: Model) -> None:
        self._biased = model.config.qkv_bias

    def caution(self, shape: Shape) -> str:
        if not self._biased or not _has("scale", self.fmt):
            return ""
        values = self.v_fmt or self.fmt
        return (
            f"quant: the error of {self.fmt} is relative to a key's whole norm, and this model adds biases to its "
            f"keys, which can be most of the norm (as in Qwen2.5): if answers are bad, try fmt=fp8,v_fmt={values}"
        )

    @property
    def _group(self) -> int:
        """Elements that share a scale, in formats with groups."""
        return GROUP if self.group is None else self.group

    def _named(self, fmt: str, by_token: bool = False) -> str:
        """The format's name with those of the options that it takes."""
        options = []
        if _has("group", fmt):
            options.append(f"group={self._group}")
        if by_token:
            options.append("by=token")
        if self.scale and _has("scale", fmt):
            options.append(f"scale={self.scale}")
        if self.params and _has("params", fmt):
            options.append(f"params={self.params}")
        return f"{fmt}:{','.join(options)}" if options else fmt


def _has(option: str, fmt: str) -> bool:
    """Whether a format takes an option."""
    return option in options_of(fmt)


def _because(fmt: str) -> str:
    """Why a format has no groups, for a message."""
    return ", because a token's whole head shares its scale" if _has("scale", fmt) else ""


# Choices
#
# - No paper: it is the plainest use of each format. The formats' own choices are in `minithink/quant/`.
# - Values always share scales along channels; `by` is for keys alone.
# - The prompt's last, shorter block is quantized with the rest of the prompt; KIVI lets it wait (`kivi.py`).
