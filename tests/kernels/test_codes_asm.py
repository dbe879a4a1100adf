"""The PTX that makes fp16 of codes, run by hand: the kernels' blocks, and the one of kernels/README.md.

To run it alone: pytest tests/kernels/test_codes_asm.py
"""

from __future__ import annotations

import re
import struct

import pytest

from minithink.kernels import _planes
from minithink.kernels._planes import planes_of_word
from minithink.results.origin import ROOT
from tests.kernels.ptx import E4M3, instructions, run, text_of

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The number of every code, and the power of two that it is multiplied with unless it is converted.
POINTS: dict[str, tuple[list[float], float]] = {
    "nvfp4": ([*MAGNITUDES, *(-x for x in MAGNITUDES)], 2**-14),
    "ternary": ([0.0, 1.0, -0.0, -1.0], 2**-14),
    "fp8": (E4M3, 2**-8),
    "int2": ([float(i) for i in range(4)], 1.0),
    "int4": ([float(i) for i in range(16)], 1.0),
    "int8": ([float(i) for i in range(256)], 1.0),
}
WAYS = [*((kind, False) for kind in POINTS), ("fp8", True)]
README = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("other", [0x0000, 0xFFFF, 0x5A3C])
@pytest.mark.parametrize(("kind", "converts"), WAYS)
def test_a_plane_is_the_points_times_a_power_of_two(kind: str, converts: bool, other: int) -> None:
    """A word beside another word, in the low and in the high half of the register."""
    asm = text_of(_planes._fast_asm(kind, converts))
    planes = planes_of_word(kind)
    points, factor = POINTS[kind]
    if kind == "fp8" and converts:
        factor = 1.0
    bits = 16 // planes
    for word in range(0, 1 << 16, 37):
        for both in (word | other << 16, other | word << 16):
            for plane, numbers in enumerate(run(asm, {f"${planes}": both}, planes)):
                for half in range(2):
                    code = both >> 16 * half + bits * plane & (1 << bits) - 1
                    if points[code] == points[code]:  # E4M3 has NaN, which no token is stored as
                        want = struct.pack("<e", points[code] * factor)
                        got = struct.pack("<H", numbers >> 16 * half & 0xFFFF)
                        assert got == want, f"{both:08x}: plane {plane}"


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("channel", range(4))
def test_scales_of_a_channel_are_those_of_two_words(channel: int, converts: bool) -> None:
    """In fp16, times 2^6 if they are not converted; the other channels' scales are different ones."""
    asm = text_of(_planes._scale_asm(channel, converts))
    factor = 1.0 if converts else 2.0**6
    for code in range(0x7F):
        first = 0x5A3C2D1E & ~(0xFF << 8 * channel) | code << 8 * channel
        second = 0x01234567 & ~(0xFF << 8 * channel) | (0x7E - code) << 8 * channel
        [got] = run(asm, {"$1": first, "$2": second}, outputs=1)
        assert struct.pack("<I", got) == struct.pack("<2e", E4M3[code] * factor, E4M3[0x7E - code] * factor)


def test_the_readme_shows_the_block_of_nvfp4() -> None:
    """The same eleven instructions, where $4 is called c."""
    [block] = re.findall(r"```ptx\n(.*?)```", README, re.DOTALL)
    kernel = instructions(text_of(_planes._fast_asm("nvfp4", False)).replace("$4", "c"))
    assert instructions(block) == kernel
    assert len(kernel) == 11


@pytest.mark.parametrize(("kind", "converts"), WAYS)
def test_outputs_have_registers_of_their_own(kind: str, converts: bool) -> None:
    """Some are written before the codes are read for the last time. Without the & the compiler may put them into the
    register of the codes."""
    planes = planes_of_word(kind)
    assert text_of(_planes._fast_registers(kind)).split(",") == ["=&r"] * planes + ["r"]
    lines = instructions(text_of(_planes._fast_asm(kind, converts)))
    named = {int(number) for number in re.findall(r"\$(\d+)", " ".join(lines))}
    assert named == set(range(planes + 1)), "every register is used"


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("kind", ["nvfp4", "ternary"])
def test_points_times_scales_are_exact(kind: str, converts: bool) -> None:
    """Every product fits into an fp16 number, and is the value without the factor that is left over."""
    points, power = POINTS[kind]
    scale_power = 1.0 if converts else 2.0**6
    for point in points:
        for scale in E4M3[:0x7F]:
            product = point * power * (scale * scale_power)
            assert struct.unpack("<e", struct.pack("<e", product)) == (product,)
            assert product * _planes.left_over(kind, converts) == point * scale
