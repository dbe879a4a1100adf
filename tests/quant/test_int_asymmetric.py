"""Asymmetric integers: worked examples of KIVI and PM-KVQ, the nearest code of all, error bounds, and the shrink."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.quant import parse, shrink
from minithink.quant.int_asymmetric import PARAMS, WIDEST, IntAsymmetric
from minithink.quant.pack import pack, unpack
from tests.compare import assert_close, assert_same
from tests.quant.draw import ASYMMETRIC, numbers, round_trip

torch.set_num_threads(1)

ONE = torch.ones(())


def family(text: str) -> IntAsymmetric:
    fmt = parse(text)
    assert isinstance(fmt, IntAsymmetric)
    return fmt


def stored(fmt: IntAsymmetric, params: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of [..., params_bytes] → [..., n] each, float32."""
    scale, minimum = params.view(PARAMS[fmt.params]).float().unflatten(-1, (-1, 2)).unbind(-1)
    return scale, minimum


def test_kivi_keys() -> None:
    """Four tokens of two channels, grouped along the tokens. 10.5 is an exact half and goes to code 0."""
    fmt = IntAsymmetric(2, group=4, by="token")
    k = torch.tensor([[0, 10], [1, 10.5], [2, 11], [3.3, 13]])
    four = k.repeat(1, 2)  # a byte holds four channels
    codes, params = fmt.quantize(four, ONE)
    assert unpack(codes, 2)[:, :2].tolist() == [[0, 0], [1, 0], [2, 1], [3, 3]]
    scale, minimum = stored(fmt, params)
    assert_close("scale", scale[:2], torch.tensor([1.1, 1.0]), atol=1e-3)
    assert_same("minimum", minimum[:2], torch.tensor([0.0, 10.0]))
    got = fmt.dequantize(codes, params.expand(4, -1), ONE, torch.float32)[:, :2]
    want = torch.tensor([[0, 10], [1.1, 10], [2.2, 11], [3.3, 13]])
    assert_close("K", got, want, atol=2e-3)
    assert_close("mean error", (got - k).abs().mean(), torch.tensor(0.1), atol=1e-3)


def test_kivi_values() -> None:
    fmt = IntAsymmetric(2, group=4)
    v = torch.tensor([[1, 2, 4, 8], [-1, 0, 0.4, 0.5]])
    codes, params = fmt.quantize(v, ONE)
    assert unpack(codes, 2).tolist() == [[0, 0, 1, 3], [0, 2, 3, 3]]
    scale, _ = stored(fmt, params)
    assert_close("scale", scale, torch.tensor([[2.3333], [0.5]]), atol=2e-3)
    want = torch.tensor([[1, 1, 3.3333, 8], [-1, 0, 0.5, 0.5]])
    assert_close("V", fmt.dequantize(codes, params, ONE, torch.float32), want, atol=3e-3)


def test_pm_kvq_example() -> None:
    fmt = IntAsymmetric(4, group=6, params="fp32")
    x = torch.tensor([0, 0.7, 1.1, 2, 2.9, 3])
    codes, params = fmt.quantize(x, ONE)
    assert unpack(codes, 4).tolist() == [0, 4, 6, 10, 14, 15]
    assert_close("scale", stored(fmt, params)[0], torch.tensor([0.2]), atol=1e-7)
    got = fmt.dequantize(codes, params, ONE, torch.float32)
    assert_close("x", got, torch.tensor([0, 0.8, 1.2, 2.0, 2.8, 3.0]), atol=1e-6)


def test_pm_kvq_example_shrunk() -> None:
    """The same six numbers, filled up to whole bytes with two that fit."""
    fmt = IntAsymmetric(4, group=8, params="fp32")
    x = torch.tensor([0, 0.7, 1.1, 2, 2.9, 3, 0, 3])
    half = IntAsymmetric(2, group=8, params="fp32")
    codes, params = shrink(fmt, half, *fmt.quantize(x, ONE))
    assert unpack(codes, 2).tolist() == [0, 1, 1, 2, 3, 3, 0, 3]
    assert_close("scale", stored(half, params)[0], torch.tensor([1.0]), atol=1e-6)
    got = half.dequantize(codes, params, ONE, torch.float32)
    assert_close("x", got, torch.tensor([0.0, 1, 1, 2, 3, 3, 0, 3]), atol=1e-5)


@pytest.mark.parametrize("text", ASYMMETRIC)
@given(data=st.data())
def test_the_code_is_the_nearest_of_all(text: str, data: st.DataObject) -> None:
    """Under the scale and the minimum as stored. x − min and its quotient are rounded to float32, which can move y by
    2⁻²³ of itself: a tie may be missed by that much, and by no more."""
    fmt = family(text)
    x = data.draw(numbers(16)).float()
    widest = WIDEST[fmt.params]
    x = x.clamp(-widest, widest)
    codes, params = fmt.quantize(x, ONE)
    scale, minimum = (Fraction(float(p)) for p in stored(fmt, params))
    for value, code in zip(x.tolist(), unpack(codes, fmt.bits).tolist(), strict=True):
        if scale == 0:
            assert code == 0
            continue
        y = (Fraction(value) - minimum) / scale
        best = min(max(round(y), 0), fmt.top)
        assert abs(y - code) <= abs(y - best) + abs(y) * Fraction(2) ** -22, f"{value}: code {code}, nearest {best}"


@pytest.mark.parametrize("text", ASYMMETRIC)
@given(data=st.data())
def test_ties_go_to_the_even_code(text: str, data: st.DataObject) -> None:
    """Groups that span exactly 2^b − 1 steps of a power of two, where all arithmetic is exact."""
    fmt = family(text)
    step, lowest = 2.0 ** data.draw(st.integers(-6, 4)), data.draw(st.integers(-8, 8))
    halves = data.draw(st.lists(st.integers(0, 2 * fmt.top), min_size=14, max_size=14))
    y = torch.tensor([0.0, fmt.top, *(h / 2 for h in halves)])
    codes, params = fmt.quantize((y + lowest) * step, ONE)
    scale, minimum = stored(fmt, params)
    assert (float(scale), float(minimum)) == (step, lowest * step)
    assert unpack(codes, fmt.bits).tolist() == [round(v) for v in y.tolist()]  # Python's round: ties to even


@pytest.mark.parametrize("text", ASYMMETRIC)
@given(data=st.data())
def test_error_bound(text: str, data: st.DataObject) -> None:
    """Half a step, and what the rounding of the parameters adds.

    With u the rounding of the stored dtype (half an ulp, at least half its smallest denormal): the minimum may stand
    above the lowest element by u(min), and the last point below the highest by (2^b − 1)·u(scale).
    """
    fmt = family(text)
    info = torch.finfo(PARAMS[fmt.params])
    x = data.draw(numbers(1, 3, 64)).float().clamp(-60000, 60000)
    got = round_trip(fmt, x, ONE[None, None]).double().unflatten(-1, (4, 16))
    x64 = x.double().unflatten(-1, (4, 16))
    lowest, highest = x64.amin(-1, keepdim=True), x64.amax(-1, keepdim=True)
    least = info.smallest_normal * info.eps / 2
    u_min = (lowest.abs() * info.eps / 2).clamp_min(least)
    step = (highest - lowest + u_min) / fmt.top
    u_step = (step * info.eps / 2).clamp_min(least)
    arithmetic = (x64.abs().amax(-1, keepdim=True) + highest - lowest) * 2.0**-22
    bound = (step + u_step) / 2 + u_min + fmt.top * u_step + arithmetic
    assert ((got - x64).abs() <= bound).all(), f"{x}\n{got}"
    # the parameters themselves
    _, params = fmt.quantize(x, ONE[None, None])
    scale, minimum = stored(fmt, params)
    assert_close("minimum", minimum, x.unflatten(-1, (4, 16)).amin(-1).to(PARAMS[fmt.params]).float(), atol=0)
    assert (
        (scale.double() - (highest[..., 0] - minimum.double()).clamp_min(0) / fmt.top).abs()
        <= u_step[..., 0] + arithmetic[..., 0] / fmt.top
    ).all()


@pytest.mark.parametrize("text", ASYMMETRIC)
@given(value=st.floats(-65504, 65504, width=16))
def test_constant_groups_are_exact(text: str, value: float) -> None:
    fmt = family(text)
    x = torch.full((16,), value)
    codes, _ = fmt.quantize(x, ONE)
    assert codes.eq(0).all()
    assert_same("constant", round_trip(fmt, x, ONE), x)


def test_what_fp16_parameters_cannot_hold_saturates() -> None:
    fmt = family("int8")
    x = torch.full((16,), 1e9)
    x[0] = -1e9
    got = round_trip(fmt, x, ONE)
    assert_same("lowest", got[0], torch.tensor(-65504.0))
    assert_close("highest", got[1:], torch.full((15,), 65504.0), atol=0, rtol=2**-10)
    wide = round_trip(family("int8:params=fp32"), x, ONE)
    assert_close("fp32", wide, x, atol=0, rtol=1e-6)


@pytest.mark.parametrize("text", ["int2", "int4", "int8"])
@pytest.mark.parametrize("large", [7e4, 1e9, 3e38, math.inf])
def test_large_numbers_saturate_on_both_sides(text: str, large: float) -> None:
    """A minimum and a scale of 65504 each would make 1,048,064 of 3e38 at 4 bits, and −65504 of −3e38."""
    fmt = family(text)
    for value in (large, -large):
        x = torch.full((16,), value)
        assert_same(f"{value}", round_trip(fmt, x, ONE), torch.full((16,), math.copysign(65504.0, value)))


def test_the_widest_range_of_fp32_parameters() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([-largest, 0.0, largest, 2.0**125] * 4)
    got = round_trip(family("int16"), x, ONE)
    widest = WIDEST["fp32"]
    want = torch.tensor([-widest, 0.0, widest, 2.0**125] * 4)
    assert_close("x", got / widest, want / widest, atol=1e-4)


def test_int16_needs_fp32() -> None:
    with pytest.raises(UsageError, match="int16"):
        IntAsymmetric(16, params="fp16")


def formula(q: int, c: int) -> int:
    """⌊(q + 2^(c−1)) / (2^c + 1)⌋ in Python's integers."""
    return (q + 2 ** (c - 1)) // (2**c + 1)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_shrink_equals_the_formula_for_every_code(bits: int) -> None:
    c = bits // 2
    source, target = IntAsymmetric(bits, 16, params="fp32"), IntAsymmetric(c, 16, params="fp32")
    q = torch.arange(1 << bits, dtype=torch.int32).view(-1, 16)
    row = torch.tensor([0.25, -3.0]).view(torch.uint8).expand(len(q), -1)
    codes, params = shrink(source, target, pack(q, bits), row)
    assert codes.shape[-1] == target.code_bytes(16)
    want = [formula(code, c) for code in range(1 << bits)]
    assert unpack(codes, c).flatten().tolist() == want
    assert all(abs(Fraction(code, 2**c + 1) - small) <= Fraction(1, 2) for code, small in enumerate(want))
    scale, minimum = stored(target, params)
    assert scale.eq(0.25 * (2**c + 1)).all()
    assert minimum.eq(-3).all()
    if bits == 4:
        assert want == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]


@given(data=st.data())
def test_shrinks_chain(data: st.DataObject) -> None:
    """16 → 2 at once is 16 → 8 → 4 → 2, in any layout; each halving adds at most half of a new step."""
    by = data.draw(st.sampled_from(["channel", "token"]))
    formats = [IntAsymmetric(bits, 16, by, "fp32") for bits in (16, 8, 4, 2)]
    x = data.draw(numbers(2, 5, 32)).float().clamp(-WIDEST["fp32"], WIDEST["fp32"])
    codes, params = formats[0].quantize(x, ONE)
    direct = shrink(formats[0], formats[3], codes, params)
    rows = params.shape[:-1]
    for source, target in pairwise(formats):
        old = decoded(source, codes, params)
        codes, params = shrink(source, target, codes, params)
        assert params.shape == (*rows, target.params_bytes(32))
        new = decoded(target, codes, params)
        scale = stored(target, params)[0].double()
        scale = scale[:, None] if by == "token" else scale.repeat_interleave(16, -1)
        slack = 2.0**-20 * (old.abs().double() + 4 * scale) + 1e-44
        assert ((new.double() - old.double()).abs() <= scale / 2 + slack).all()
    for got, want in zip(direct, (codes, params), strict=True):
        assert_same("16 → 2", got, want)


def decoded(fmt: IntAsymmetric, codes: Tensor, params: Tensor) -> Tensor:
    if fmt.by == "token":
        params = params[:, None].expand(*codes.shape[:-1], -1)
    return fmt.dequantize(codes, params, ONE, torch.float32)


def test_shrink_saturates_fp16_scales() -> None:
    source, target = family("int8"), family("int4")
    codes = torch.full((16,), 255, dtype=torch.uint8)
    params = torch.tensor([60000.0, 1.0], dtype=torch.float16).view(torch.uint8)
    small, row = shrink(source, target, codes, params)
    assert unpack(small, 4).eq(15).all()
    assert stored(target, row)[0].tolist() == [65504.0]


def test_shrink_takes_rows_in_any_layout() -> None:
    """None at all, and columns of a wider array."""
    source, target = family("int16"), family("int4:params=fp32")
    x = torch.randn(3, 32)
    codes, params = source.quantize(x, ONE)
    both = torch.cat((codes, params, codes[:, :3]), dim=-1)
    width = codes.shape[-1]
    got = shrink(source, target, both[:, :width], both[:, width : width + params.shape[-1]])
    for a, b in zip(got, shrink(source, target, codes, params), strict=True):
        assert_same("rows", a, b)
    none = shrink(source, target, codes[:0], params[:0])
    assert [part.shape for part in none] == [(0, target.code_bytes(32)), (0, target.params_bytes(32))]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("int4", "int2:group=32"),
        ("int4", "int2:by=token"),
        ("int4", "int2:params=fp32"),
        ("int4", "int8"),
        ("int8", "int16"),
        ("int4", "int2s"),
        ("nvfp4", "int2"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_shrink_changes_the_bits_of_integers_only(source: str, target: str) -> None:
    with pytest.raises(UsageError, match="cannot be shrunk"):
        shrink(parse(source), parse(target), *parse(source).quantize(torch.randn(32), ONE))


@pytest.mark.parametrize("order", [[-0.0, 0.0], [0.0, -0.0]])
def test_a_minimum_of_zero_has_no_sign(order: list[float]) -> None:
    """Which of two zeros is the smaller one is up to the reduction: the bytes must not depend on it."""
    _, params = family("int4:group=16").quantize(torch.tensor(order * 8), ONE)
    assert not params.any()
