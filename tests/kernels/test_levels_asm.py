"""The PTX that looks up TurboQuant's levels, run by hand: no GPU is needed, and every code is tried.

To run it alone: pytest tests/kernels/test_levels_asm.py
"""

from __future__ import annotations

import struct

import pytest

from minithink.kernels import _planes
from minithink.kernels._rotation import LEVELS

ALL = 0xFFFFFFFF
LEVELS_OF_CODES = [*(-x for x in reversed(LEVELS[4])), *LEVELS[4]]


def prmt(low: int, high: int, selector: int) -> int:
    """Four bytes out of the eight of two registers. A selector above 7 would repeat a sign; none does."""
    both = (low | high << 32).to_bytes(8, "little")
    picked = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes(both[i] for i in picked), "little")


def run(asm: str, word: int) -> list[int]:
    """What the registers $0 to $3 hold behind the last instruction; `word`: what $4 holds."""
    held = {"$4": word}
    for line in asm.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *of = [part.strip() for part in rest.split(",")]
        x = [held[part] if part in held else int(part, 0) for part in of]
        operation = name.split(".")[0]
        if operation == "mov":
            value = x[0]
        elif operation == "not":
            value = ~x[0]
        elif operation == "and":
            value = x[0] & x[1]
        elif operation == "or":
            value = x[0] | x[1]
        elif operation == "xor":
            value = x[0] ^ x[1]
        elif operation == "shl":
            value = x[0] << x[1]
        elif operation == "shr":
            value = x[0] >> x[1]
        elif operation == "sub":
            value = x[0] - x[1]
        else:
            assert operation == "prmt"
            value = prmt(*x)
        held[to] = value & ALL
    return [held[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("other", [0x0000, 0xFFFF, 0x5A3C])
@pytest.mark.parametrize("first", [False, True])
def test_every_code_of_every_channel(first: bool, other: int) -> None:
    """A word of four codes beside another word, in the low or in the high half of the register."""
    asm = str(getattr(_planes._levels_asm(), "value", _planes._levels_asm()))
    for word in range(0, 1 << 16, 7):
        both = word | other << 16 if first else other | word << 16
        for channel, numbers in enumerate(run(asm, both)):
            for half in range(2):
                bits = numbers >> 16 * half & 0xFFFF
                code = both >> 16 * half + 4 * channel & 15
                want = struct.pack("<e", LEVELS_OF_CODES[code])
                assert struct.pack("<H", bits) == want, f"{both:08x}: channel {channel}"
