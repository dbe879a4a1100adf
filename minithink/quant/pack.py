"""Codes of 1, 2, 3, 4, 8 or 16 bits as bytes, low bits first: element 2i of 4-bit codes is the low nibble of byte i.

Eight codes of 3 bits are three bytes: code i has the bits from 3·i on of a little-endian number of 24 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes.

    Args:
        codes: [..., D], any integer dtype, below 2^bits; D·bits is a multiple of 8.
        bits: 1, 2, 3, 4, 8, or 16 (little endian).

    Returns:
        [..., D·bits/8] uint8.

    Raises:
        ValueError: the codes do not fill whole bytes.
    """
    if bits == 16:
        return torch.stack((codes & 255, codes >> 8), dim=-1).flatten(-2).to(torch.uint8)
    if codes.shape[-1] * bits % 8:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes.")
    if bits == 3:
        return _pack_eights(codes)
    per_byte = 8 // bits
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
    if bits == 3:
        return _unpack_eights(packed)
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)


def _pack_eights(codes: Tensor) -> Tensor:
    """Codes of 3 bits, eight in three bytes. codes: [..., D] → uint8 [..., 3·D/8]."""
    number = torch.zeros_like(codes[..., ::8], dtype=torch.int32)
    for i in range(8):
        number = number | codes[..., i::8].int() << 3 * i
    three = torch.stack((number, number >> 8, number >> 16), dim=-1) & 255
    return three.flatten(-2).to(torch.uint8)


def _unpack_eights(packed: Tensor) -> Tensor:
    """The inverse of `_pack_eights`. packed: uint8 [..., 3·D/8] → uint8 [..., D]."""
    number = packed[..., ::3].int() | packed[..., 1::3].int() << 8 | packed[..., 2::3].int() << 16
    eight = torch.stack([number >> shift & 7 for shift in range(0, 24, 3)], dim=-1)
    return eight.flatten(-2).to(torch.uint8)
