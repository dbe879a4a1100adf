"""Rotated attention equals attention over keys and values that were rotated back.

To run it alone: pytest tests/ref/test_rotated_attention.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.quant.turboquant import LEVELS, SCALES, TurboQuant, rotate
from minithink.ref.decode_attention import decode_attention
from minithink.ref.rotated_attention import Stored, rotated_attention
from tests.compare import assert_close

torch.set_num_threads(1)

ONE = torch.ones(())


def stored(fmt: TurboQuant, x: Tensor) -> tuple[Stored, Tensor]:
    """What is stored, in the rotated basis; and the numbers that it stands for."""
    codes, params = fmt.quantize(x, ONE)
    return fmt.rotated(codes, params), fmt.dequantize(codes, params, ONE, torch.float32)


@given(
    bits=st.tuples(st.sampled_from([*LEVELS]), st.sampled_from([*LEVELS])),
    scale=st.sampled_from(SCALES),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 5)]),
    dim=st.sampled_from([8, 64, 128]),
    shared=st.booleans(),
    seed=st.integers(0, 999),
)
def test_equals_attention_over_what_is_read(
    bits: tuple[int, int], scale: str, heads: tuple[int, int], dim: int, shared: bool, seed: int
) -> None:
    kv_heads, g = heads
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(2, 3, kv_heads, 11, dim, generator=generator)
    q = torch.randn(3, kv_heads * g, dim, generator=generator)
    valid = torch.rand(3, 1 if shared else kv_heads, 11, generator=generator) < 0.7
    valid[..., 0] = True
    keys, k = stored(TurboQuant(bits[0], scale), x[0])
    values, v = stored(TurboQuant(bits[1], scale), x[1])
    want = decode_attention(q, k, v, valid)
    assert_close("out", rotated_attention(q, keys, values, valid), want, atol=2e-5)


def test_worked_inner_product() -> None:
    """⟨q, x̂⟩ of the worked vector at 4 bits: a logit is this, divided by √8."""
    x = torch.tensor([3, -1, 0.5, 0, 2, -0.25, 1, -4])
    q = torch.tensor([0.5, -0.2, 0.1, 0.3, 1, 0, -0.4, 0.6])
    (c, s), numbers = stored(TurboQuant(4), x)
    rotated = torch.tensor([-0.459619, 0.318198, -0.035355, -0.530330, 0.388909, 0.318198, 0.530330, 0.883883])
    assert_close("R(q)", rotate(q), rotated, atol=1e-6)
    assert float((q * x).sum()) == pytest.approx(0.95, abs=1e-6)
    assert float(s * (rotated * c).sum()) == pytest.approx(0.668240, abs=3e-6)
    assert float((q * numbers).sum()) == pytest.approx(0.668240, abs=3e-6)
