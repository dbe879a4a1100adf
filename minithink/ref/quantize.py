"""Numbers as a format of the cache stores them."""

from __future__ import annotations

from torch import Tensor

from minithink.quant import Format


def quantize(
    fmt: Format,
    x: Tensor,
    tensor_scale: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode rows of numbers; the formats are in `minithink/quant/`.

    Args:
        fmt: the format.
        x: [..., D] by channel, [..., T, D] by token with 1 ≤ T ≤ `fmt.group`; any float dtype.
        tensor_scale: float32 that broadcasts to [...]; read if the format is `tensor_scaled`.
        valid: [..., T] bool, by token only: the tokens that count; None: all. Other tokens may be NaN; they do not
            change the parameters, and get codes 0.

    Returns:
        codes: uint8, [..., code_bytes] by channel, [..., T, code_bytes] by token.
        params: [..., params_bytes] uint8.

    Raises:
        ValueError: by token, more tokens than a group has.
    """
    return fmt.quantize(x, tensor_scale, valid)
