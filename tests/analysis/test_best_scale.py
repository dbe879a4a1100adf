"""The group scale of least squared error. Alone: pytest tests/quant/test_best_scale.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.analysis.best_scale import best_scale
from minithink.quant import e4m3, parse
from minithink.quant.format import divide
from minithink.quant.symmetric import Symmetric
from tests.quant.draw import SYMMETRIC

torch.set_num_threads(1)

ONE = torch.ones(1, 1)
every_name = pytest.mark.parametrize("name", SYMMETRIC)


def family(name: str) -> Symmetric:
    fmt = parse(name)
    assert isinstance(fmt, Symmetric)
    return fmt


def squared_error(fmt: Symmetric, x: Tensor, codes: Tensor, params: Tensor) -> Tensor:
    return (fmt.decode(fmt.point(codes), params, ONE) - x).square().sum(-1)


def groups(seed: int, elements: int, spread: float) -> Tensor:
    """Groups [8, elements]; with a larger spread their magnitudes differ more."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, elements, generator=draw)
    return x.sign() * x.abs() ** spread


def test_by_hand() -> None:
    """4, 2, 2 and zeros: as 4, 0, 0 the error is 8, and with the mean 8/3 of the three it is 8/3."""
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([4.0, 2.0, -2.0])
    codes, params = best_scale(family("ternary"), x, ONE)
    assert codes[0, :4].tolist() == [1, 1, 3, 0]
    assert e4m3.decode(params).tolist() == [[2.75]]  # the E4M3 number that is nearest to 8/3
    usual, _ = family("ternary").encode(x, ONE, torch.ones_like(x, dtype=torch.bool))
    assert usual[0, :4].tolist() == [1, 0, 0, 0], "2 is not more than half of 4"


@every_name
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_no_other_scale_is_better(name: str, seed: int, spread: float) -> None:
    """All positive E4M3 numbers are tried here."""
    fmt = family(name)
    x = groups(seed, 16, spread)
    found = squared_error(fmt, x, *best_scale(fmt, x, ONE))
    errors = []
    for code in range(0x7F):
        params = torch.full((8, 1), code, dtype=torch.uint8)
        codes = fmt.nearest(divide(x, fmt.step(params, ONE)))
        errors.append(squared_error(fmt, x, codes, params))
    assert torch.equal(found, torch.stack(errors).amin(0))


@given(seed=st.integers(0, 2**31), elements=st.sampled_from([16, 32, 128]), spread=st.sampled_from([0.5, 1.0, 3.0]))
def test_a_ternary_scale_is_the_mean_of_the_largest(seed: int, elements: int, spread: float) -> None:
    """Without rounding the least error is Σx² − (Σ of the k largest)²/k for the best k. E4M3 costs little of that."""
    x = groups(seed, elements, spread)
    largest = x.abs().sort(descending=True).values
    k = torch.arange(1, elements + 1)
    gain = largest.cumsum(-1) ** 2 / k
    total = x.square().sum(-1)
    found = squared_error(family("ternary"), x, *best_scale(family("ternary"), x, ONE))
    least = total - gain.amax(-1)
    assert (found >= least - 1e-4 * total).all()
    assert (found <= least + 0.01 * total).all(), "the nearest scale is 1/16 away at most: (1/16)² of the gain"


@every_name
def test_of_equal_errors_the_usual_scale_is_taken(name: str) -> None:
    fmt = family(name)
    x = torch.zeros(2, 16)
    x[1, ::2] = -fmt.reach  # exact with the usual scale, 1, and in most formats with others
    codes, params = best_scale(fmt, x, ONE)
    usual_codes, usual = fmt.encode(x, ONE, torch.ones_like(x, dtype=torch.bool))
    assert torch.equal(params, usual)
    assert torch.equal(codes, usual_codes)


def test_a_tensor_scale_is_part_of_the_step() -> None:
    fmt = family("nvfp4")
    x = groups(1, 16, 1.0)
    scale = torch.full((1, 1), 2.0**-12)
    codes, params = best_scale(fmt, x * 2.0**-12, scale)
    want_codes, want = best_scale(fmt, x, ONE)
    assert torch.equal(codes, want_codes)
    assert torch.equal(params, want)
