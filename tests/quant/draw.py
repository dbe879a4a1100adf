"""What the tests of the formats share: formats, inputs that are hard to encode, and the points of small floats."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import strategies as st
from torch import Tensor

from minithink.quant import Format, parse

SYMMETRIC = ("nvfp4", "ternary", "int4s", "int2s")
ASYMMETRIC = ("int2", "int4", "int8", "int2:params=fp32", "int4:params=fp32", "int8:params=fp32", "int16")
UNGROUPED = ("fp32", "fp16", "bf16", "fp8")
TURBO = ("tq1", "tq2", "tq3", "tq4", "tq2:scale=mse", "tq3:scale=none,params=fp32", "tq4:scale=norm")
GROUPED = (*SYMMETRIC, "ternary_best", *ASYMMETRIC)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def with_option(text: str, option: str) -> Format:
    """The format of a text that may have options already."""
    return parse(text + ("," if ":" in text else ":") + option)


FORMATS = [
    *(parse(text) for text in UNGROUPED + TURBO + GROUPED),
    *(with_option(text, "by=token") for text in GROUPED),
    parse("nvfp4:group=32"),
    parse("int4:group=64,by=token"),
]


@st.composite
def numbers(draw: st.DrawFn, *shape: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    """Finite tensors of a shape: Gaussians of any scale, coarse grids (ties), constants, denormals, largest numbers,
    all magnitudes mixed."""
    dtype = draw(st.sampled_from(dtypes))
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    whole = torch.randint(-16, 17, shape, generator=generator).double()
    kind = draw(st.sampled_from(["gaussian", "grid", "extreme", "magnitudes", "constant", "shifted", "listed"]))
    if kind == "gaussian":
        x = normal * 10.0 ** draw(st.integers(-7, 4))
    elif kind == "grid":
        x = whole * 2.0 ** draw(st.integers(-13, 6))
    elif kind == "extreme":
        smallest = info.smallest_normal * info.eps
        ends = [0, info.max, -info.max, info.tiny, -info.tiny, smallest, -smallest, 1, info.max / 2, 448, 65504]
        allowed = torch.tensor(draw(st.lists(st.sampled_from(ends), min_size=1, max_size=4)), dtype=torch.float64)
        x = allowed[torch.randint(len(allowed), shape, generator=generator)]
    elif kind == "magnitudes":
        x = normal * 10.0 ** torch.randint(-45, 38, shape, generator=generator).double()
    elif kind == "constant":
        x = torch.full(shape, draw(st.floats(-info.max, info.max)), dtype=torch.float64)
    elif kind == "shifted":
        x = draw(st.floats(-1e4, 1e4)) + normal * draw(st.sampled_from([1e-6, 1e-3, 1.0]))
    else:
        listed = torch.tensor(draw(st.lists(st.floats(-info.max, info.max), min_size=1, max_size=6)))
        x = listed.double()[torch.randint(len(listed), shape, generator=generator)]
    return x.clamp(-info.max, info.max).to(dtype)


def e4m3_points() -> list[tuple[int, Fraction]]:
    """The 127 codes of numbers that are not negative, from the definition."""
    points = []
    for code in range(127):
        e, m = code >> 3, code & 7
        points.append((code, Fraction(8 + m, 8) * Fraction(2) ** (e - 7) if e else Fraction(m, 8) * Fraction(1, 64)))
    return points


E4M3 = e4m3_points()
# format → codes and points, from the definitions; one code a point
POINTS = {
    "nvfp4": [
        *zip(range(8), map(Fraction, (0, 0.5, 1, 1.5, 2, 3, 4, 6)), strict=True),
        *zip(range(9, 16), map(Fraction, (-0.5, -1, -1.5, -2, -3, -4, -6)), strict=True),
    ],
    "ternary": [(0, Fraction(0)), (1, Fraction(1)), (3, Fraction(-1))],
    "int4s": [(q & 15, Fraction(q)) for q in range(-7, 8)],
    "int2s": [(q & 3, Fraction(q)) for q in range(-2, 2)],
}
REACH = {"nvfp4": 6, "ternary": 1, "int4s": 7, "int2s": 2}


def nearest(y: float, points: list[tuple[int, Fraction]]) -> tuple[int, Fraction]:
    """The point nearest to a number, by trying all; of two equally near, the one with the even code."""
    exact = Fraction(y)
    return min(points, key=lambda point: (abs(exact - point[1]), point[0] & 1))


def round_trip(fmt: Format, x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Encode and decode. x: [..., D], by token [..., T, D]; scale: like x without its last one, or two, axes."""
    codes, params = fmt.quantize(x, scale)
    if fmt.by == "token":
        params, scale = params.unsqueeze(-2).expand(*codes.shape[:-1], -1), scale.unsqueeze(-1)
    return fmt.dequantize(codes, params, scale, dtype)


def own_scale(fmt: Format, x: Tensor) -> Tensor:
    """The tensor scale of each leading index. x: [B, T, D] → [B, 1] by channel, [B] by token."""
    scale = fmt.tensor_scale(x.float().abs().amax((-1, -2)))
    return scale if fmt.by == "token" else scale.unsqueeze(-1)
