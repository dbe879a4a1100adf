"""The group scale of least squared error, in place of the one that the group's largest magnitude gives.

The cache stores the largest magnitude's scale (`symmetric.py`), except in `ternary_best` (`ternary_best.py`). This
function is for comparisons of all symmetric formats: how much of a format's error is its rule for the scale? It takes
the place of `Symmetric.encode`, and what it returns is decoded as usual.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minithink.quant.format import divide
from minithink.quant.symmetric import Symmetric

OCTAVE = 8  # E4M3 numbers between a number and its double
LARGEST = 0x7E  # the code of 448; codes of positive numbers ascend as the numbers do


def best_scale(fmt: Symmetric, x: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups, each with the E4M3 scale that gives it the least squared error Σ(x̂ − x)².

    All scales from usual / √m to 2 · usual are tried, where `usual` is the scale that `encode` stores. Of formats
    other than ternary a test tries all scales.

    No ternary group has its best scale outside: if its k largest magnitudes become one, the best scale is their mean,
    and the error is Σx² − k · mean². With k = 1 that is Σx² − amax². So where another k is better, its mean is at
    least amax/√k, and k ≤ m. Of equal errors the usual scale is taken, then the smallest.

    Args:
        fmt: the format.
        x: finite, float32 [..., n, m], n groups of m elements.
        tensor_scale: float32 [], or [..., 1, 1].

    Returns:
        codes: uint8 [..., n, m].
        params: uint8 [..., n, 1], the stored scales.
    """
    codes, params = fmt.encode(x, tensor_scale, torch.ones_like(x, dtype=torch.bool))
    least = _squared_error(fmt, x, codes, params, tensor_scale)
    usual = params.int()
    octaves_down = math.log2(x.shape[-1]) / 2
    lowest = -math.ceil(OCTAVE * octaves_down) - 1  # one more, because the usual scale has been rounded
    for offset in range(lowest, OCTAVE + 1):
        tried = (usual + offset).clamp(0, LARGEST).to(torch.uint8)
        found = fmt.nearest(divide(x, fmt.step(tried, tensor_scale)))
        error = _squared_error(fmt, x, found, tried, tensor_scale)
        better = error < least
        codes = torch.where(better, found, codes)
        params = torch.where(better, tried, params)
        least = torch.where(better, error, least)
    return codes, params


def _squared_error(fmt: Symmetric, x: Tensor, codes: Tensor, params: Tensor, tensor_scale: Tensor) -> Tensor:
    """Of each group: [..., n, 1]. The arguments are those of `best_scale` and what it returns."""
    decoded = fmt.decode(fmt.point(codes), params, tensor_scale)
    return (decoded - x).square().sum(-1, keepdim=True)
