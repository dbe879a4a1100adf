"""Runs a few instructions of PTX by hand, so that blocks of inline assembly are tested without a GPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

import torch

ALL = 0xFFFFFFFF
E4M3: list[float] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
OR_OF_AND = 0xEA  # the table of lop3 for (a & b) | c


def instructions(asm: str) -> list[str]:
    """The instructions of a block; declarations, braces and comments are left out."""
    text = re.sub(r"//.*", "", asm).strip().strip("{}")
    lines = [" ".join(line.split()) for line in text.split(";")]
    return [line for line in lines if line and not line.startswith(".reg")]


def run(asm: str, given: Mapping[str, int], outputs: int = 4) -> list[int]:
    """What the registers $0, $1, … hold behind the last instruction; −1 for one that nothing has written.

    given: what registers hold before the first one.
    """
    held = dict(given)
    for line in instructions(asm):
        halves = re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\S+)", line)
        if halves:
            both = held[halves[3]]
            held[halves[1]] = both & 0xFFFF
            held[halves[2]] = both >> 16
            continue
        name, _, rest = line.partition(" ")
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
        elif name == "cvt.u16.u32":
            value = x[0] & 0xFFFF
        elif name == "cvt.rn.f16x2.e4m3x2":
            value = int(struct.unpack("<I", struct.pack("<2e", E4M3[x[0] & 0xFF], E4M3[x[0] >> 8]))[0])
        elif name.endswith("f16x2"):
            value = of_halves(operation, x[0], x[1])
        elif operation == "sub":
            value = x[0] - x[1]
        elif operation == "lop3":
            assert x[3] == OR_OF_AND
            value = x[0] & x[1] | x[2]
        else:
            assert operation == "prmt"
            value = prmt(*x)
        held[to] = value & ALL
    return [held.get(f"${i}", -1) for i in range(outputs)]


def of_halves(operation: str, x: int, y: int) -> int:
    """The product or the difference of two pairs of fp16 numbers, rounded to fp16."""
    pairs = zip(struct.unpack("<2e", struct.pack("<I", x)), struct.unpack("<2e", struct.pack("<I", y)), strict=True)
    results = [a * b if operation == "mul" else a - b for a, b in pairs]
    return int(struct.unpack("<I", struct.pack("<2e", *results))[0])


def prmt(low: int, high: int, selector: int) -> int:
    """Four bytes out of the eight of two registers. A selector above 7 would repeat a sign; none does."""
    both = (low | high << 32).to_bytes(8, "little")
    picked = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes(both[i] for i in picked), "little")


def text_of(constexpr: Any) -> str:
    """The text that a function of `_planes.py` makes, which Triton may have wrapped."""
    return str(getattr(constexpr, "value", constexpr))
