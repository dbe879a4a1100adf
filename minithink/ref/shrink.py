"""Requantize integers to fewer bits, from the codes alone (PM-KVQ's packed backend)."""

from __future__ import annotations

from torch import Tensor

from minithink import quant
from minithink.quant import Format


def shrink(source: Format, target: Format, codes: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """Requantize to half, a quarter or an eighth of the bits; the formula is in `minithink/quant/int_asymmetric.py`.

    Args:
        source, target: asymmetric integers, equal in `group`, `by` and `params`.
        codes: [..., source.code_bytes] uint8.
        params: [..., source.params_bytes] uint8; by token one row for every token, or each shared row once.

    Returns:
        codes: [..., target.code_bytes] uint8.
        params: like `params`.

    Raises:
        UsageError: the formats differ in more than the bits, or the target has more.
    """
    return quant.shrink(source, target, codes, params)
