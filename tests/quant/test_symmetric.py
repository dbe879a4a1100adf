"""NVFP4, ternary and the symmetric integers against tables of their points, their error bounds and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.quant import e4m3, parse
from minithink.quant.pack import unpack
from minithink.quant.symmetric import Symmetric
from tests.compare import assert_close, assert_same
from tests.quant.draw import E4M3, POINTS, REACH, SYMMETRIC, nearest, numbers, own_scale, round_trip

torch.set_num_threads(1)

every_name = pytest.mark.parametrize("name", SYMMETRIC)


def family(name: str) -> Symmetric:
    fmt = parse(name)
    assert isinstance(fmt, Symmetric)
    return fmt


@every_name
def test_points_and_ties(name: str) -> None:
    """Every point, the middle between neighbours, and the floats beside the middle."""
    fmt, points = family(name), sorted(POINTS[name], key=lambda point: point[1])
    codes, values = (
        torch.tensor([c for c, _ in points], dtype=torch.uint8),
        torch.tensor([float(v) for _, v in points]),
    )
    assert_same("points", fmt.point(codes), values)
    assert_same("codes", fmt.nearest(values), codes)
    middles = (values[1:] + values[:-1]) / 2
    beside = [middles.nextafter(torch.tensor(s * math.inf)) for s in (-1, 1)]
    y = torch.cat((middles, *beside, values * 1.03, torch.tensor([1e30, -1e30, math.inf, -math.inf, 9.0, -9.0])))
    want = torch.tensor([float(nearest(min(max(v, -99), 99), points)[1]) for v in y.tolist()])
    assert_same("nearest", fmt.point(fmt.nearest(y)), want)


def test_minus_zeros() -> None:
    assert family("nvfp4").point(torch.tensor([8], dtype=torch.uint8)).eq(0).all()
    assert family("ternary").point(torch.tensor([2], dtype=torch.uint8)).eq(0).all()
    assert family("ternary").nearest(torch.tensor([-0.5, -0.1, -0.0])).eq(0).all()


@every_name
@given(data=st.data())
def test_equals_the_table(name: str, data: st.DataObject) -> None:
    """Scale and codes of a group, by trying all E4M3 numbers and all points."""
    fmt = parse(name)
    x = data.draw(numbers(1, 1, 16)).float()
    scale = own_scale(fmt, x)
    codes, params = fmt.quantize(x, scale)
    unit = (x.abs().amax() / REACH[name] / (scale[0, 0] if fmt.tensor_scaled else 1)).item()
    stored, value = nearest(unit if unit < 1e30 else 1e30, E4M3)
    assert params.flatten().tolist() == [stored]
    step = torch.tensor(float(value)) * (scale[0, 0] if fmt.tensor_scaled else 1)
    y = x / step if step > 0 else torch.zeros_like(x)
    want = torch.tensor([float(nearest(v, POINTS[name])[1]) for v in y.flatten().tolist()])
    assert_same("decoded", fmt.dequantize(codes, params, scale, torch.float32).flatten(), want * step)
    assert set(unpack(codes, fmt.bits).flatten().tolist()) <= {c for c, _ in POINTS[name]} | {8}  # 8: NVFP4's −0


@every_name
@given(data=st.data())
def test_error_is_at_most_half_a_step(name: str, data: st.DataObject) -> None:
    """In groups whose scale is a normal E4M3 number.

    The scale is then rounded by at most 1/16 of itself: a step is at most 17/16·amax/reach, and the largest element
    lies at most reach/16 beyond the last point, less than half of the gap before it on every grid. int2s has no +2.
    """
    fmt = parse(name)
    x = data.draw(numbers(1, 4, 64)).float()
    scale = own_scale(fmt, x)
    x64, got = x.double().unflatten(-1, (4, 16)), round_trip(fmt, x, scale).double().unflatten(-1, (4, 16))
    amax = x64.abs().amax(-1, keepdim=True)
    unit = amax / REACH[name] / (scale.double()[..., None, None] if fmt.tensor_scaled else 1)
    step = amax / REACH[name] * 17 / 16
    if name == "nvfp4":
        a = x64.abs() / step
        half = torch.where(a < 2 * 15 / 17, 0.25, torch.where(a < 4 * 15 / 17, 0.5, 1.0))
    else:
        half = torch.full_like(x64, 0.5)
    bound = half * step
    if name == "int2s":
        bound = bound.maximum(x64 - amax / 2 * 15 / 16)
    usual = (unit >= 2**-6) & (unit <= 448) & (amax > 1e-30)
    assert (((got - x64).abs() <= bound * (1 + 1e-6)) | ~usual).all(), f"{x}\n{got}"


@every_name
def test_scales_that_underflow_give_zeros_and_large_ones_saturate(name: str) -> None:
    """For the formats without a tensor scale, and for NVFP4 with a scale of 1."""
    fmt, reach = parse(name), REACH[name]
    one = torch.ones(1, 1)
    x = torch.zeros(1, 1, 16)
    x[..., 3] = -reach * 2.0**-10  # halfway between 0 and the smallest scale: to the even code, 0
    assert round_trip(fmt, x, one).eq(0).all()
    x[..., 3] *= 1.01
    assert_close(
        "smallest", round_trip(fmt, x, one)[..., 3], torch.full((1, 1), -reach * 2.0**-10), atol=reach / 1024
    )
    assert round_trip(fmt, x, one)[..., 3] != 0
    x[..., 3] = -1e6
    assert_same("largest", round_trip(fmt, x, one)[..., 3], torch.full((1, 1), -448.0 * reach))


@pytest.mark.parametrize(
    ("name", "sigma", "scaled", "want"),
    [
        # the figures of the specification of TBQ
        ("nvfp4", 1.0, True, 0.095),
        ("nvfp4", 0.01, True, 0.095),
        ("nvfp4", 0.002, True, 0.095),
        ("nvfp4", 0.01, False, 0.126),
        ("nvfp4", 0.002, False, 0.96),
        # measured here
        ("ternary", 1.0, True, 0.586),
        ("int4s", 1.0, True, 0.086),
        ("int2s", 1.0, True, 0.375),
    ],
)
def test_errors_on_gaussians(name: str, sigma: float, scaled: bool, want: float) -> None:
    fmt = parse(name)
    x = sigma * torch.randn(1, 2000, 128, generator=torch.Generator().manual_seed(0))
    got = round_trip(fmt, x, own_scale(fmt, x) if scaled else torch.ones(1, 1))
    error = (got - x).norm() / x.norm()
    assert_close("relative error", error, torch.tensor(want), atol=0.005 if want > 0.9 else 0.001)


def test_the_largest_magnitude_of_a_tensor_gets_half_of_the_largest_scale() -> None:
    x = torch.full((1, 1, 16), 5.37)
    fmt = parse("nvfp4")
    codes, params = fmt.quantize(x, own_scale(fmt, x))
    assert_same("scale", e4m3.decode(params), torch.full((1, 1, 1), 224.0))
    assert unpack(codes, 4).eq(7).all()


def test_int2s_is_not_ternary() -> None:
    x = torch.tensor([-4.0, -2.0, 0.0, 2.0, 4.0, 0.9] + [0.0] * 10)[None, None]
    assert round_trip(parse("int2s"), x, torch.ones(1, 1))[0, 0, :6].tolist() == [-4, -2, 0, 2, 2, 0]
    assert round_trip(parse("ternary"), x, torch.ones(1, 1))[0, 0, :6].tolist() == [-4, 0, 0, 0, 4, 0]
