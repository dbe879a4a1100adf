"""KIVI: integers of 2 or 4 bits, keys per channel and values per token (Liu et al. 2024, arXiv 2402.02750).

Outliers of keys sit in fixed channels, so a group of keys is G consecutive tokens of one channel (§3.1: "per
channel"); values have no such pattern, and a group is G channels of one token ("per token"). Scale and minimum are
FP16 (§3.2; `quant/int_asymmetric.py` has the equations). The newest tokens, the residual, are in full precision
(algorithm 1). As soon as R tokens wait, they are quantized together. The prompt's last tokens, which fill no block of
R, wait too. Attention sees waiting tokens exact, also while the prompt is read and in the step that fills a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minithink.errors import UsageError
from minithink.kv.contract import Policy, Storage
from minithink.quant import parse_pair


@dataclass
class Kivi(Policy):
    """Keep everything in 2 or 4 bits, the newest tokens exact."""

    bits: int = 2  # bits of a key's codes: 2, 4 or 8
    v_bits: int | None = None  # bits of a value's codes; none: as the keys
    group: int = 32  # G: elements that share scale and minimum
    residual: int = 128  # R: tokens that are quantized together
    block: int = 16  # tokens of a page, a power of two
    flush: Literal["block", "official"] = "block"  # when values are quantized: with their keys, or one every step

    name = "kivi"
    summary = "keep everything in 2 bits, keys per channel, values per token (KIVI)"
    capturable = True  # there is nothing to decide
    scope = "sequence"

    def __post_init__(self) -> None:
        v_bits = self.bits if self.v_bits is None else self.v_bits
        if not {self.bits, v_bits} <= {2, 4, 8}:
            raise UsageError(f"kivi: bits are {self.bits} for keys and {v_bits} for values; choose 2, 4 or 8.")
        pair = f"int{self.bits}:group={self.group},by=token/int{v_bits}:group={self.group}"
        parse_pair(pair)  # UsageError: no such group
        if self.residual < 1 or self.residual % self.group:
            raise UsageError(
                f"kivi: a residual of {self.residual} tokens must be a positive multiple of the group, {self.group}."
            )
        lag = self.flush == "official"
        self.storage = Storage(thoughts=(pair,), buffer=self.residual, tail="keep", block=self.block, lag=lag)


# Choices
#
# The authors' code is jy-yuan/KIVI, `models/llama_kivi.py` and `quant/new_pack.py`. Where this differs:
#
# - Values: the code keeps a sliding window of the last R values in full precision and quantizes the oldest one in
#   every step, after the attention. So attention sees R + 1 exact values, the new one included: flush=official. By
#   default (flush=block) values are quantized in blocks, with their keys. Then about R/2 values are exact on average,
#   and the buffer holds no value twice.
# - flush=official writes a value's codes with its key's, and reads them only after the value has left the window. The
#   result is that of the code, because the groups of values lie within one token.
# - Precision: the code computes codes, scales and minima in the type of the data, and stores scale and minimum in it:
#   FP16 in its models. Here codes are computed in float32 and parameters are stored in FP16 (§3.2), whatever the
#   type.
# - Constant groups: the code divides 0 by 0; here such a group decodes to its minimum.
# - Defaults are those of the paper's main results: 2 bits, G = 32, R = 128.
