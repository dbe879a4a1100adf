"""The importance predictor: the kernels beside their twin, and the twin beside the worked example."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.kernels import predict as kernel
from minithink.kernels.predict import predict
from minithink.ref import predict as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE


@example(64, 46, torch.float16, True, 1.0, False, 1)  # the most rows that the kernel takes
@given(
    rows=st.sampled_from([0, 1, 2, 16, 17, 33, 65]),
    d=st.sampled_from([2, 6, 16, 46]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    own=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    rows: int, d: int, dtype: torch.dtype, own: bool, scale: float, transposed: bool, seed: int
) -> None:
    """Few rows and many, sizes that fill no tile, weights [out, in]; softplus far below and above 0."""
    g = torch.Generator().manual_seed(seed)
    sizes = ((d, 2 * d), (2 * d, d // 2), (d // 2, 1))
    weights = [(scale * torch.randn(size, generator=g) / size[0] ** 0.5).to(dtype) for size in sizes]
    if transposed:
        weights = [x.t().contiguous().t() for x in weights]
    hidden = torch.randn(rows, d, generator=g).to(dtype if own else torch.float32)
    want = ref.predict(hidden, weights)
    got = predict(hidden.to(DEVICE), [x.to(DEVICE) for x in weights])
    assert got.dtype == want.dtype == torch.float32
    limit = bound(hidden, weights)
    assert_close("predict, in bounds", got.cpu() / limit, want / limit, atol=1.0)


def bound(hidden: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """How far two ways to round may lie apart, [N]: the twin rounds sums and activations of a layer to the weights'
    dtype, the kernel activations only; sums are of float32, in some order. Softplus makes no difference larger."""
    about = torch.finfo(weights[0].dtype)
    u, x = about.eps / 2, hidden.to(weights[0].dtype).double()
    error = torch.zeros_like(x)
    for weight in (w.double() for w in weights):
        error = error @ weight.abs() + len(weight) * 2**-23 * (x.abs() @ weight.abs())
        z = x @ weight
        x = torch.nn.functional.softplus(z)
        error += u * (z.abs() + 2 * x) + 2**-20 * x + about.tiny * about.eps
    return error[:, 0]


@pytest.mark.parametrize("function", [predict, ref.predict, kernel.many_rows])
def test_by_hand(function) -> None:
    """d = 2, all weights 1, h = (1, 0): softplus(1) four times, then 5.258265, then 5.263456."""
    weights = [torch.ones(2, 4, device=DEVICE), torch.ones(4, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)]
    score = function(torch.tensor([[1.0, 0.0]], device=DEVICE), weights)
    assert float(score) == pytest.approx(5.263456, abs=1e-6)
    x = torch.nn.functional.softplus(torch.tensor([[1.0, 0.0]], device=DEVICE) @ weights[0])
    assert x.flatten().tolist() == pytest.approx([1.313262] * 4, abs=1e-6)
    assert float(x @ weights[1]) == pytest.approx(5.253047, abs=1e-6)
    assert float(kernel.layer(x, weights[1])) == pytest.approx(5.258265, abs=1e-6)


def test_small_scores_differ() -> None:
    """log(1 + eˣ) of numbers whose eˣ is far below 1: a score of 0 would tie with many."""
    weights = [torch.ones(2, 4, device=DEVICE), torch.ones(4, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)]
    weights[-1] *= -6
    hidden = torch.tensor([[x, 0.5] for x in (1.0, 1.5, 2.0, 2.5)], device=DEVICE)
    got, want = predict(hidden, weights), ref.predict(hidden, weights)
    assert 0 < float(got.min()) < float(got.max()) < 1e-12
    assert_close("predict", got, want, atol=0.0, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 20, 64])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    """At a fixed number of rows: not a bit."""
    g = torch.Generator().manual_seed(7)
    weights = [torch.randn(size, generator=g).to(DEVICE) / 8 for size in ((32, 64), (64, 16), (16, 1))]
    one, other = (torch.randn(rows, 32, generator=g).to(DEVICE) for _ in range(2))
    other[rows // 2] = one[rows // 2]
    assert_same("row", predict(one, weights)[rows // 2], predict(other, weights)[rows // 2])
