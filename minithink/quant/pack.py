"""Codes of 2, 4, 8 or 16 bits as bytes, low bits first: element 2i of 4-bit codes is the low nibble of byte i."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes.

    Args:
        codes: [..., D], any integer dtype, below 2^bits; D·bits is a multiple of 8.
        bits: 2, 4, 8, or 16 (little endian).

    Returns:
        [..., D·bits/8] uint8.

    Raises:
        ValueError: the codes do not fill whole bytes.
    """
    if bits == 16:
        return torch.stack((codes & 255, codes >> 8), dim=-1).flatten(-2).to(torch.uint8)
    per_byte = 8 // bits
    if codes.shape[-1] % per_byte:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes.")
    out = codes[..., ::per_byte].to(torch.uint8)
    for i in range(1, per_byte):
        out = out | codes[..., i::per_byte].to(torch.uint8) << bits * i
    return out


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`. packed: [..., D·bits/8] uint8 → [..., D] uint8, or int32 for 16 bits."""
    if bits == 16:
        return packed[..., ::2].int() | packed[..., 1::2].int() << 8
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
