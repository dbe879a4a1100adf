"""Quant: every token stays, stored in another number format (`minithink/quant/`).

The plainest quantized cache, for comparing formats. New tokens are quantized as they come. If keys share their scales
across tokens, new tokens wait in full precision and are quantized in blocks of `buffer` tokens. The prompt is
quantized when it is read, its last, shorter block too.
"""

from __future__ import annotations

from dataclasses import dataclass

from minithink.errors import UsageError
from minithink.kv.contract import Policy, Storage
from minithink.quant import parse, parse_pair


@dataclass
class Quant(Policy):
    """Keep everything in one format."""

    fmt: str = "nvfp4"  # the keys' format: a name of minithink/quant, without options
    v_fmt: str = ""  # the values' format; "": as the keys
    group: int = 16  # elements that share a scale, in formats that have scales: 16, 32, 64 or 128
    by: str = "channel"  # what a group of keys runs along: channel or token; values always by channel
    buffer: int = 0  # tokens that wait in full precision; 0: one group if by=token, else none
    block: int = 16  # tokens of a page, a power of two

    name = "quant"
    summary = "keep everything in few bits (nvfp4, fp8, int4, ternary, …)"
    capturable = True  # there is nothing to decide
    scope = "sequence"

    def __post_init__(self) -> None:
        keys = self.fmt
        values = self.v_fmt or self.fmt
        if any(mark in keys + values for mark in ":/"):
            raise UsageError(
                f"quant: the formats {keys!r} and {values!r} must be plain names; options are fields of their own "
                "(group, by), and the values' format is v_fmt."
            )
        if self.by not in ("channel", "token"):
            raise UsageError(f"quant: by is {self.by!r}; a group of keys runs by channel or by token.")
        by_token = self.by == "token"
        if by_token and not parse(keys).group:
            raise UsageError(f"quant: {keys} has no groups: drop by=token.")
        buffer = self.buffer or (self.group if by_token else 0)
        if buffer < 0 or (by_token and buffer % self.group):
            raise UsageError(
                f"quant: a buffer of {buffer} tokens; it must be 0 or more, and by=token a multiple of the group, "
                f"{self.group}."
            )
        pair = f"{self._named(keys, by_token)}/{self._named(values)}"
        parse_pair(pair)  # UsageError: no such group
        self.storage = Storage(thoughts=(pair,), buffer=buffer, block=self.block)

    def _named(self, fmt: str, by_token: bool = False) -> str:
        """The format's name with its options. UsageError: there is no such format."""
        if not parse(fmt).group:
            return fmt
        axis = ",by=token" if by_token else ""
        return f"{fmt}:group={self.group}{axis}"


# Choices
#
# - No paper: it is the plainest use of each format. The formats' own choices are in `minithink/quant/`.
# - Values always share scales along channels; `by` is for keys alone.
# - The prompt's last, shorter block is quantized with the rest of the prompt; KIVI lets it wait (`kivi.py`).
