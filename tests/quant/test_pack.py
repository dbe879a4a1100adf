"""Packing is a bijection, with the low bits first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.quant.pack import pack, unpack
from tests.compare import assert_same

BITS = st.sampled_from([1, 2, 3, 4, 8, 16])


@given(bits=BITS, rows=st.integers(0, 3), n=st.integers(0, 5), seed=st.integers(0, 999))
def test_unpack_inverts_pack(bits: int, rows: int, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (rows, 8 * n), generator=generator, dtype=torch.int32)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, n * bits)
    got = unpack(packed, bits)
    assert got.dtype == (torch.int32 if bits == 16 else torch.uint8)
    assert_same("codes", got.int(), codes)


@given(bits=BITS, n=st.integers(0, 9), seed=st.integers(0, 999))
def test_pack_inverts_unpack(bits: int, n: int, seed: int) -> None:
    packed = torch.randint(256, (2, 6 * n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert_same("bytes", pack(unpack(packed, bits), bits), packed)


def test_low_bits_come_first() -> None:
    assert pack(torch.tensor([0x1, 0xA, 0xF, 0x0]), 4).tolist() == [0xA1, 0x0F]
    assert pack(torch.tensor([1, 2, 3, 0]), 2).tolist() == [0b00_11_10_01]
    assert pack(torch.tensor([1, 0, 1, 1, 0, 0, 0, 1]), 1).tolist() == [0b1000_1101]
    assert pack(torch.tensor([4, 2, 3, 6, 4, 7, 6, 4]), 3).tolist() == [212, 204, 155]
    assert pack(torch.tensor([0x1234, 0xFFFE], dtype=torch.int32), 16).tolist() == [0x34, 0x12, 0xFE, 0xFF]
    assert pack(torch.tensor([7, 255]), 8).tolist() == [7, 255]


def test_halves_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 codes of 4 bits"):
        pack(torch.zeros(3, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match="4 codes of 3 bits"):
        pack(torch.zeros(4, dtype=torch.uint8), 3)
