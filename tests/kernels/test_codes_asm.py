"""The PTX that makes fp16 of NVFP4 codes, run by hand: the kernels' blocks, and the one of kernels/README.md.

To run it alone: pytest tests/kernels/test_codes_asm.py
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pytest

from minithink.kernels import _planes
from minithink.results.origin import ROOT
from tests.kernels.ptx import instructions, run, text_of

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
POINTS = [*MAGNITUDES, *(-x for x in MAGNITUDES)]
README = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")


def of_the_readme(c: int) -> list[int]:
    """The four planes of two words, by the block of the page."""
    return run(block_of_the_readme(), {"c": c})


def block_of_the_readme() -> str:
    [block] = re.findall(r"```ptx\n(.*?)```", README, re.DOTALL)
    return str(block)


def of_the_kernels(c: int) -> list[int]:
    """The same by the kernels, which make plane after plane."""
    return [run(block_of_the_kernels(plane), {"$1": c})[0] for plane in range(4)]


def block_of_the_kernels(plane: int) -> str:
    return text_of(_planes._fast_asm("nvfp4", plane, 0))


@pytest.mark.parametrize("planes", [of_the_readme, of_the_kernels])
@pytest.mark.parametrize("other", [0x0000, 0xFFFF, 0x5A3C])
def test_a_plane_is_the_points_times_a_power_of_two(planes: Callable[[int], list[int]], other: int) -> None:
    """A word of four codes beside another word, in the low and in the high half of the register."""
    for word in range(0, 1 << 16, 37):
        for both in (word | other << 16, other | word << 16):
            for plane, numbers in enumerate(planes(both)):
                for half in range(2):
                    bits = numbers >> 16 * half & 0xFFFF
                    code = both >> 16 * half + 4 * plane & 15
                    want = struct.pack("<e", POINTS[code] * 2**-14)
                    assert struct.pack("<H", bits) == want, f"{both:08x}: plane {plane}"


def test_there_are_as_many_instructions_as_the_readme_says() -> None:
    """Eleven in its own block, fifteen in those of the kernels: moves and shifts by 0 do not count."""
    assert len(instructions(block_of_the_readme())) == 11
    kernels = [line for plane in range(4) for line in instructions(block_of_the_kernels(plane))]
    work = [line for line in kernels if not line.startswith("mov") and not line.endswith(", 0")]
    assert len(work) == 15


PLANES = {"nvfp4": 4, "ternary": 4, "fp8": 1, "int2": 4, "int4": 4, "int8": 1}


@pytest.mark.parametrize("scales", [0, 1, 4])  # none, one of a word, one of a channel
@pytest.mark.parametrize("kind", PLANES)
def test_an_output_that_is_written_early_has_a_register_of_its_own(kind: str, scales: int) -> None:
    """Else the compiler may put it into the register of an input that is still to be read."""
    if scales and kind not in ("nvfp4", "ternary"):
        return  # codes of the others get their scales outside
    constraints = text_of(_planes._fast_registers(kind, scales)).split(",")
    outputs = [i for i, own in enumerate(constraints) if own.startswith("=")]
    assert constraints[len(outputs) :] == ["r"] * (len(constraints) - len(outputs))
    for plane in range(PLANES[kind]):
        lines = instructions(text_of(_planes._fast_asm(kind, plane, scales)))
        assert registers(lines) == set(range(len(constraints))), "every register is used"
        for i in outputs:
            written = min(at for at, line in enumerate(lines) if line.split()[1] == f"${i},")
            read_later = registers(lines[written + 1 :]) - set(outputs)
            assert bool(read_later) == ("&" in constraints[i])


def registers(lines: list[str]) -> set[int]:
    """The numbers of those that instructions name."""
    return {int(number) for number in re.findall(r"\$(\d+)", " ".join(lines))}
