"""What tests compare numbers with (`tests/compare.py`) lets nothing pass that differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compare import assert_close, assert_same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_equal_numbers_pass_and_others_do_not(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0, 1, 1]).to(dtype)
    assert_same("numbers", numbers, numbers.clone())
    with pytest.raises(AssertionError, match=r"^numbers: 1 of 3 elements differ .* at \(1,\): got 0, want 1$"):
        assert_same("numbers", torch.tensor([0, 0, 1]).to(dtype), numbers)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_never_passes(number: float) -> None:
    numbers = torch.tensor([1.0, number])
    with pytest.raises(AssertionError, match=r"^numbers: 1 of 2 elements differ"):
        assert_same("numbers", numbers, numbers.clone())
    with pytest.raises(AssertionError, match=r"^numbers: 1 of 2 elements differ"):
        assert_close("numbers", numbers, numbers.clone(), atol=1.0)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (torch.zeros(2, 1), r"shape \[2, 1\], expected \[2\]"),
        (torch.zeros(2, dtype=torch.float64), "dtype torch.float64, expected torch.float32"),
    ],
)
def test_shape_and_dtype_must_agree(got: Tensor, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert_same("numbers", got, torch.zeros(2))


def test_a_tolerance() -> None:
    assert_close("numbers", torch.tensor([1.25]), torch.tensor([1.0]), atol=0.25)
    with pytest.raises(AssertionError, match=r"differ by more than 0\.125"):
        assert_close("numbers", torch.tensor([1.25]), torch.tensor([1.0]), atol=0.125)
