"""Numbers from what a format of the cache stores."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.quant import Format


def dequantize(
    fmt: Format,
    codes: Tensor,
    params: Tensor,
    tensor_scale: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Decode, in float32; numbers that `dtype` cannot hold saturate. The formats are in `minithink/quant/`.

    Args:
        fmt: the format.
        codes: [..., code_bytes] uint8.
        params: [..., params_bytes] uint8; also by token one row for every token.
        tensor_scale: float32 that broadcasts to [...].
        dtype: of the result.

    Returns:
        [..., D].
    """
    return fmt.dequantize(codes, params, tensor_scale, dtype)
