"""E4M3 against a table made from its definition."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.quant import e4m3
from tests.compare import assert_same
from tests.quant.draw import E4M3, nearest


def signed(x: list[float]) -> torch.Tensor:
    return torch.tensor([*x, *(-v for v in x)])


def test_every_code_decodes_as_defined() -> None:
    want = signed([float(v) for _, v in E4M3])
    codes = [code for code, _ in E4M3]
    assert_same("values", e4m3.decode(torch.tensor([*codes, *(c + 128 for c in codes)], dtype=torch.uint8)), want)
    assert want.max() == e4m3.MAX
    assert e4m3.decode(torch.tensor([127, 255], dtype=torch.uint8)).isnan().all()


def test_every_number_encodes_as_itself() -> None:
    codes = torch.tensor([c for c in range(256) if c not in (127, 255)], dtype=torch.uint8)
    assert_same("codes", e4m3.encode(e4m3.decode(codes)), codes)


def test_halfway_goes_to_the_even_code_and_beside_it_to_the_nearer() -> None:
    for (low, a), (high, b) in pairwise(E4M3):
        middle = torch.tensor(float((a + b) / 2))
        below, above = middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(math.inf))
        even = low if low % 2 == 0 else high
        assert e4m3.encode(torch.stack((below, middle, above))).tolist() == [low, even, high]
        assert e4m3.encode(-torch.stack((below, middle, above))).tolist() == [c + 128 for c in (low, even, high)]


@given(x=st.floats(-500, 500, width=32) | st.floats(-(2**-5), 2**-5, width=32))
def test_nearest_of_all(x: float) -> None:
    code, _ = nearest(abs(x), E4M3)
    assert int(e4m3.encode(torch.tensor(x))) == code + 128 * (math.copysign(1, x) < 0)


def test_large_saturates_and_nan_stays() -> None:
    assert e4m3.decode(e4m3.encode(signed([449.0, 464.0, 480.0, 1e38, math.inf]))).abs().eq(448).all()
    assert e4m3.decode(e4m3.encode(torch.tensor([math.nan]))).isnan().all()
