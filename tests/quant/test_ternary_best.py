"""The two scales of ternary numbers. Alone: pytest tests/quant/test_ternary_best.py."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.analysis.best_scale import best_scale
from minithink.kernels import _formats
from minithink.quant import e4m3, parse
from minithink.quant.ternary import Ternary
from minithink.quant.ternary_best import LARGEST, TRIED, TernaryBest
from tests.compare import assert_same
from tests.quant.draw import DTYPES, numbers

torch.set_num_threads(1)

USUAL = Ternary()
BEST = TernaryBest()
ONE = torch.ones(1, 1, 1)
EVERY_SCALE = torch.arange(0x7F, dtype=torch.uint8)


def encoded(fmt: Ternary, x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [n, m], n groups → codes [n, m], scales [n, 1]."""
    return fmt.encode(x, ONE[0], torch.ones_like(x, dtype=torch.bool))


def errors_of_every_scale(x: Tensor) -> Tensor:
    """The squared error of a group, less that of zeros, with each E4M3 scale: float64 [127, n]. x: [n, m]."""
    x = x.double()
    out = []
    for scale in e4m3.decode(EVERY_SCALE).double().tolist():
        magnitude = x.abs()
        out.append(torch.where(magnitude > scale / 2, (magnitude - scale).square() - magnitude.square(), 0).sum(-1))
    return torch.stack(out)


def test_by_hand() -> None:
    """4, 2, 2 and zeros: as 4, 0, 0 the error is 8, and with the mean 8/3 of the three it is 8/3."""
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([4.0, 2.0, -2.0])
    codes, scale = encoded(BEST, x)
    assert codes[0, :4].tolist() == [1, 1, 3, 0]
    assert e4m3.decode(scale).tolist() == [[2.75]]  # the E4M3 number that is nearest to 8/3
    codes, scale = encoded(USUAL, x)
    assert codes[0, :4].tolist() == [1, 0, 0, 0], "2 is not more than half of 4"
    assert e4m3.decode(scale).tolist() == [[4]]


@given(data=st.data())
def test_no_scale_has_a_smaller_error(data: st.DataObject) -> None:
    """All E4M3 scales are tried here, for groups of any length; larger magnitudes count as 2^24."""
    elements = data.draw(st.sampled_from([1, 5, 16, 32, 64, 128]))
    x = data.draw(numbers(3, elements)).float().clamp(-LARGEST, LARGEST)
    errors = errors_of_every_scale(x)
    _, scale = encoded(BEST, x)
    found = errors.gather(0, scale.T.long())[0]
    least = errors.amin(0)
    total = x.double().square().sum(-1)
    assert (found <= least + 1e-9 * total).all()  # these errors are rounded, those of the format are not


@given(seed=st.integers(0, 2**31), elements=st.sampled_from([16, 128]), spread=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_it_is_the_scale_that_was_analysed(seed: int, elements: int, spread: float) -> None:
    """`analysis formats` finds as small an error by trying scales on both sides of the usual one."""
    x = torch.randn(8, elements, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** spread
    codes, scale = encoded(BEST, x)
    want_codes, want = best_scale(USUAL, x, ONE[0])
    same = scale == want
    assert_same("codes", codes.where(same, 0), want_codes.where(same, 0))
    errors = errors_of_every_scale(x)
    found = errors.gather(0, scale.T.long())[0]
    analysed = errors.gather(0, want.T.long())[0]
    assert torch.allclose(found, analysed, rtol=1e-5)
    usual = errors.gather(0, encoded(USUAL, x)[1].T.long())[0]
    assert (found <= usual).all()
    assert (found < usual).any()


def test_of_equal_errors_the_largest_scale_is_taken() -> None:
    """Of 3, 1, 1 and 1: Σx² − 3² with the scale 3, and Σx² − 6²/4 with 1.5, the mean of all four."""
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([3.0, 1.0, 1.0, 1.0])
    _, scale = encoded(BEST, x)
    assert e4m3.decode(scale).tolist() == [[3.0]]


def test_a_small_difference_counts() -> None:
    """One of the three ones is larger by one float32: the second scale is better by less than float32 sums tell."""
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([3.0, 1.0, 1.0 + 2.0**-23, 1.0])
    _, scale = encoded(BEST, x)
    assert e4m3.decode(scale).tolist() == [[1.5]]


def test_magnitudes_beyond_every_scale_count_in_full() -> None:
    """1,000 becomes 448 at best, and each number below is wrong by as much as is left of it."""
    x = torch.zeros(2, 16)
    x[:, 0] = 1000.0
    x[:, 1:5] = 200.0
    x[1, 1:13] = 200.0
    _, scale = encoded(BEST, x)
    assert e4m3.decode(scale).flatten().tolist() == [448.0, 256.0]


@given(data=st.data())
def test_only_the_scale_differs_from_ternary(data: st.DataObject) -> None:
    """Both have as many bytes, and each reads what the other has written."""
    by = data.draw(st.sampled_from(["channel", "token"]))
    usual, best = (parse(f"{name}:by={by}") for name in ("ternary", "ternary_best"))
    x = data.draw(numbers(2, 16, 32, dtypes=DTYPES))
    scale = torch.ones(2, 1) if by == "channel" else torch.ones(2)
    codes, params = best.quantize(x, scale)
    usual_codes, usual_params = usual.quantize(x, scale)
    assert (codes.shape, params.shape) == (usual_codes.shape, usual_params.shape)
    assert best.bytes_per_token(32) == usual.bytes_per_token(32)
    assert (params <= usual_params).all(), "E4M3 codes ascend as the scales do"
    if by == "token":
        params = params.unsqueeze(-2).expand(*codes.shape[:-1], -1)
        scale = scale.unsqueeze(-1)
    for dtype in DTYPES:
        found = best.dequantize(codes, params, scale, dtype)
        assert_same("read", found, usual.dequantize(codes, params, scale, dtype))


def test_tokens_that_do_not_count_do_not_change_the_scale() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(16) < 5
    fmt = parse("ternary_best:by=token")
    _, want = fmt.quantize(x[:5], torch.tensor(1.0))
    _, found = fmt.quantize(x.masked_fill(~valid[:, None], torch.nan), torch.tensor(1.0), valid)
    assert_same("scales", found, want)


def test_the_kernel_tries_as_many_scales() -> None:
    assert _formats.TRIED == TRIED
