"""Rotary embedding: the kernel equals its twin, for heads inside a larger projection."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.rope import rope
from minithink.ref import rope as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE

# of the number type: half a unit in the last place, twice (the interpreter truncates what it stores as bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def angles(n: int, half: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1, 2·half] each: (cos, cos) and (−sin, sin)."""
    angle = 7 * torch.randn(n, 1, half, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(DEVICE), torch.cat((-sin, sin), -1).to(DEVICE)


@given(
    n=st.integers(0, 5),
    before=st.integers(0, 3),
    heads=st.integers(1, 19),
    after=st.integers(0, 3),
    half=st.sampled_from([1, 5, 16, 32, 40, 64, 128]),
    dtype=st.sampled_from(list(ROUNDING)),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    n: int, before: int, heads: int, after: int, half: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    """The rest of the projection is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((n, before + heads + after, 2 * half), torch.nan, device=DEVICE, dtype=dtype)
    x = whole[:, before : before + heads]
    x.copy_(scale * torch.randn(n, heads, 2 * half, generator=generator))
    cos, sin = angles(n, half, generator)
    got = rope(x, cos, sin)
    assert got.dtype == dtype
    assert got.is_contiguous()
    # Where the two products cancel, the error is that of the products; and float16 is no finer than 2⁻²⁴.
    atol = 1e-6 * scale + (2**-24 if dtype == torch.float16 else 0)
    assert_close("rope", got, ref.rope(x.float(), cos, sin), atol, ROUNDING[dtype])


@given(n=st.integers(1, 4), heads=st.integers(1, 4), half=st.sampled_from([3, 16]), seed=st.integers(0, 2**31))
def test_any_strides(n: int, heads: int, half: int, seed: int) -> None:
    """x and the tables with other orders of their axes, and one cosine for all tokens (a stride of 0)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * half, n, heads, generator=generator).to(DEVICE).permute(1, 2, 0)
    cos, sin = angles(n, half, generator)
    assert_close("permuted", rope(x, cos, sin), ref.rope(x, cos, sin), atol=1e-6)
    x = torch.randn(heads, n, 2 * half, generator=generator).to(DEVICE).transpose(0, 1)
    # other tables than the documented ones, too: each number is used where it stands
    cos = torch.randn(1, 1, 2 * half, generator=generator).to(DEVICE).expand(n, -1, -1)
    sin = torch.randn(n, 1, 2 * half, generator=generator).to(DEVICE)
    assert_close("expanded", rope(x, cos, sin), ref.rope(x, cos, sin), atol=2e-6)


def test_position_0_changes_nothing() -> None:
    for dtype in ROUNDING:
        x = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        cos, sin = torch.ones(2, 1, 20, device=DEVICE), torch.zeros(2, 1, 20, device=DEVICE)
        assert_same(f"{dtype}", rope(x, cos, sin), x)
