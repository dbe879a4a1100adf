"""Rounding: the number that a format makes of a number, which is its code read again."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.quant.format import Format
from minithink.quant.int_asymmetric import shrink


def rounded(fmt: Format, x: Tensor, tensor_scale: Tensor) -> Tensor:
    """Round numbers to a format that is grouped by channel. x: [..., D]; tensor_scale: as in `Format.quantize`."""
    codes, params = fmt.quantize(x, tensor_scale)
    return fmt.dequantize(codes, params, tensor_scale, x.dtype)


def rounded_by_token(fmt: Format, x: Tensor, tensor_scale: Tensor, valid: Tensor) -> Tensor:
    """Round neighbouring tokens to a format that is grouped by token.

    Args:
        x: [..., n, D], n neighbours; each `fmt.group` of them share their parameters.
        tensor_scale: float32 that broadcasts to [..., groups].
        valid: bool [..., n], the tokens that count; the others get any number.

    Returns:
        [..., n, D].
    """
    n = x.shape[-2]
    missing = -n % fmt.group
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, fmt.group))  # [..., groups, group, D]
    valid = torch.nn.functional.pad(valid, (0, missing)).unflatten(-1, (-1, fmt.group))
    codes, params = fmt.quantize(x, tensor_scale, valid)
    of_tokens = params.unsqueeze(-2).expand(*codes.shape[:-1], -1)
    out = fmt.dequantize(codes, of_tokens, tensor_scale[..., None], x.dtype)
    return out.flatten(-3, -2)[..., :n, :]


def rounded_by_shrinking(first: Format, last: Format, x: Tensor) -> Tensor:
    """Round numbers to integers, whose codes then lose bits until they have another format (PM-KVQ). x: [..., D]."""
    one = torch.ones((), device=x.device)
    codes, params = first.quantize(x, one)
    codes, params = shrink(first, last, codes, params)
    return last.dequantize(codes, params, one, x.dtype)
