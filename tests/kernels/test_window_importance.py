"""Importance by the newest queries: the kernel equals its twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.window_importance import window_importance
from minithink.ref import window_importance as ref
from tests.compare import assert_close
from tests.kernels.device import DEVICE
from tests.windows import drawn

MODULE = "minithink.kernels.window_importance"
DTYPES = [(x, x) for x in (torch.float32, torch.float16, torch.bfloat16)] + [(torch.float32, torch.bfloat16)]


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 2, 3]), st.integers(1, 33)),
    window=st.sampled_from([1, 3, 8, 17]),
    dim=st.sampled_from([1, 3, 16, 33, 64, 96]),
    dtypes=st.sampled_from(DTYPES),
    kernel_size=st.sampled_from([1, 3, 7, 21]),
    pooling=st.sampled_from(["max", "avg"]),
    scale=st.sampled_from([0.0, 1.0, 8.0]),
    shared=st.booleans(),
    data=st.data(),
)
def test_equals_its_twin(
    shape: tuple[int, int, int, int],
    window: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    kernel_size: int,
    pooling: str,
    scale: float,
    shared: bool,
    data: st.DataObject,
) -> None:
    """Lanes of differing beginning and length, some of them empty or of one key; NaN where not valid; flat and very
    sharp attention; strided queries and keys."""
    b, hkv, _, s = shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    q, k = drawn(shape, window, dim, dtypes, scale, generator)
    heads = 1 if shared else hkv
    lengths = data.draw(st.lists(st.sampled_from([0, 1, s // 2, s]), min_size=b * heads, max_size=b * heads))
    first = data.draw(st.sampled_from([0, 0, s // 3, 17]))
    column = torch.arange(s)
    valid = (column >= first) & (column < first + torch.tensor(lengths).view(b, heads, 1))
    k = k.masked_fill(~valid.unsqueeze(-1), torch.nan)
    want = ref.window_importance(q, k, valid, kernel_size, pooling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{MODULE}.BLOCK", 16)
        patch.setattr(f"{MODULE}.POOL_BLOCK", 16)
        patch.setattr(f"{MODULE}.QUERIES", 16)  # so that some windows take two rounds
        got = window_importance(q.to(DEVICE), k.to(DEVICE), valid.to(DEVICE), kernel_size, pooling)
    # Logits of some 100 are rounded to 1e−5, and their exponentials with them.
    assert_close("importance", got, want, atol=1e-7, rtol=1e-6 + 1e-5 * scale)


def test_as_it_is_launched() -> None:
    """Blocks of full size, more than sixteen of them; the default pooling; the same answer twice."""
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 2, 8, 64, generator=generator), torch.randn(1, 1, 64, 1200, generator=generator)
    k, valid = k.transpose(2, 3), torch.arange(1200).view(1, 1, -1) < 1190
    got, again = (window_importance(q.to(DEVICE), k.to(DEVICE), valid.to(DEVICE)) for _ in range(2))
    assert_close("importance", got, ref.window_importance(q, k, valid), atol=1e-8, rtol=1e-5)
    assert torch.equal(got, again)


def test_nothing_to_do() -> None:
    none = torch.zeros(2, 1, 5, dtype=torch.bool, device=DEVICE)
    q, k = torch.zeros(2, 6, 4, 64, device=DEVICE), torch.full((2, 3, 5, 64), torch.nan, device=DEVICE)
    assert not window_importance(q, k, none).any()
    assert window_importance(q, k[:, :, :0], none[..., :0]).shape == (2, 3, 0)


@pytest.mark.parametrize(("kernel_size", "pooling"), [(2, "max"), (0, "max"), (3, "mean")])
def test_what_makes_no_sense_is_refused(kernel_size: int, pooling: str) -> None:
    x = torch.zeros(1, 1, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="must be odd"):
        window_importance(x, x, torch.ones(1, 1, 3, dtype=torch.bool, device=DEVICE), kernel_size, pooling)
