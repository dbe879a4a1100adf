"""Rotary embedding is a rotation by position, seen by attention only as a difference of positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.model import Rope
from minithink.ref.rope import rope
from tests.compare import assert_close, assert_same
from tests.strategies import configs, example_config


def test_rotation_of_a_pair() -> None:
    """(1, 0) turned by a quarter is (0, 1): the pair is (x_i, x_{i + D/2}), and positive angles turn x to y."""
    x = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]])  # [1, 1, 4]
    cos = torch.tensor([[[0.0, 1.0, 0.0, 1.0]]])  # a quarter turn, none
    sin = torch.tensor([[[-1.0, 0.0, 1.0, 0.0]]])
    assert_same("quarter turn", rope(x, cos, sin), torch.tensor([[[0.0, 2.0, 1.0, 0.0]]]))


@given(n=st.integers(1, 7), heads=st.integers(1, 5), half=st.integers(1, 9), seed=st.integers(0, 999))
def test_complex_multiplication(n: int, heads: int, half: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, heads, 2 * half, generator=generator)
    angle = 7 * torch.randn(n, half, generator=generator)
    z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones(()).double(), angle.double())[:, None]
    want = torch.cat((z.real, z.imag), -1)
    cos, sin = (torch.cat(halves, -1)[:, None] for halves in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    assert_close("rotated", rope(x, cos, sin), want, atol=3e-6)


@given(config=configs(rope="default"), seed=st.integers(0, 999))
def test_scores_depend_on_the_distance_alone(config: object, seed: int) -> None:
    table = Rope(config)  # type: ignore[arg-type]
    d = table.cos.shape[-1]
    q, k = torch.randn(2, 1, 1, d, generator=torch.Generator().manual_seed(seed)).unbind()

    def score(i: int, j: int) -> torch.Tensor:
        return (rope(q, *table.at(torch.tensor([i]))) * rope(k, *table.at(torch.tensor([j])))).sum()

    assert_close("score", score(9, 4), score(58, 53), atol=1e-4)
    assert_same("position 0", rope(q, *table.at(torch.tensor([0]))), q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    cos, sin = Rope(example_config()).at(torch.arange(100, 140))
    x = torch.randn(40, 3, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_same(f"{dtype}", rope(x, cos, sin), rope(x.float(), cos, sin).to(dtype))
