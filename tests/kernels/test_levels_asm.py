"""The PTX that looks up TurboQuant's levels, run by hand: no GPU is needed, and every code is tried.

To run it alone: pytest tests/kernels/test_levels_asm.py
"""

from __future__ import annotations

import re
import struct

import pytest

from minithink.kernels import _planes
from minithink.kernels._rotation import LEVELS
from tests.kernels.ptx import instructions, run, text_of


@pytest.mark.parametrize("other", [0x000000, 0xFFFFFF, 0x3C5A69])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_code_of_every_channel(bits: int, first: bool, other: int) -> None:
    """A word beside another word: in the low or in the high half of the register; of 3 bits in the first or in the
    second register."""
    asm = text_of(_planes._levels_asm(bits))
    planes = 4 if bits == 4 else 8
    wide = planes * bits  # bits of a word
    levels = [*(-x for x in reversed(LEVELS[bits])), *LEVELS[bits]]
    other &= (1 << wide) - 1
    for word in range(0, 1 << wide, 7 if wide == 16 else 5003):
        pair = (word, other) if first else (other, word)
        given = {"$8": pair[0], "$9": pair[1]} if bits == 3 else {f"${planes}": pair[0] | pair[1] << 16}
        for channel, numbers in enumerate(run(asm, given, planes)):
            for half in range(2):
                code = pair[half] >> bits * channel & (1 << bits) - 1
                got = struct.pack("<H", numbers >> 16 * half & 0xFFFF)
                assert got == struct.pack("<e", levels[code]), f"{pair}: channel {channel}"


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_words_are_read_before_a_plane_is_written(bits: int) -> None:
    """So no output needs a register that differs from those of the words."""
    lines = instructions(text_of(_planes._levels_asm(bits)))
    planes = 4 if bits == 4 else 8
    words = [f"${planes}", f"${planes + 1}"][: 2 if bits == 3 else 1]
    written = min(i for i, line in enumerate(lines) if re.match(r"\S+ \$\d", line))
    assert all(word not in line for line in lines[written:] for word in words)
    named = {int(number) for number in re.findall(r"\$(\d+)", " ".join(lines))}
    assert named == set(range(planes + len(words))), "every register is used"
    registers = text_of(_planes._levels_registers(bits)).split(",")
    assert registers == ["=r"] * planes + ["r"] * len(words)
