"""The PTX that looks up TurboQuant's levels, run by hand: no GPU is needed, and every code is tried.

To run it alone: pytest tests/kernels/test_levels_asm.py
"""

from __future__ import annotations

import struct

import pytest

from minithink.kernels import _planes
from minithink.kernels._rotation import LEVELS
from tests.kernels.ptx import run, text_of

LEVELS_OF_CODES = [*(-x for x in reversed(LEVELS[4])), *LEVELS[4]]


@pytest.mark.parametrize("other", [0x0000, 0xFFFF, 0x5A3C])
@pytest.mark.parametrize("first", [False, True])
def test_every_code_of_every_channel(first: bool, other: int) -> None:
    """A word of four codes beside another word, in the low or in the high half of the register."""
    asm = text_of(_planes._levels_asm())
    for word in range(0, 1 << 16, 7):
        both = word | other << 16 if first else other | word << 16
        for channel, numbers in enumerate(run(asm, {"$4": both})):
            for half in range(2):
                bits = numbers >> 16 * half & 0xFFFF
                code = both >> 16 * half + 4 * channel & 15
                want = struct.pack("<e", LEVELS_OF_CODES[code])
                assert struct.pack("<H", bits) == want, f"{both:08x}: channel {channel}"
