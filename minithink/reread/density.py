"""Modes of a sample: a kernel density estimate on a fixed grid, its maxima, and the valleys between them.

    f(x) = 1/(M·h) · Σ K((x − x_m)/h),  K the standard normal density     (ThinKV, algorithm 1, line 17)

The paper does not give h: it is Scott's rule here, h = σ·M^(−1/5), and at least one step of the grid. Every maximum
counts, as in algorithm 1, however low it is.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

GRID = 257  # points from 0 to 1, where sparsity lies


class Peaks(NamedTuple):
    """The modes of a density on [0, 1]."""

    modes: list[float]  # ascending
    valleys: list[float]  # between each and the next, the lowest point
    depths: list[float]  # of each valley, 0 to 1: how far it lies below the lower of its two modes, as a share


def grid() -> Tensor:
    """Where densities are known: float64 [GRID]."""
    return torch.linspace(0, 1, GRID, dtype=torch.float64)


def bandwidth(x: Tensor) -> float:
    """h of a sample, by Scott's rule."""
    return max(float(x.double().std(correction=0)) * len(x) ** -0.2, 1 / (GRID - 1))


def density(x: Tensor) -> Tensor:
    """f of a sample, float [M], M ≥ 1, on the grid: float64 [GRID]."""
    h = bandwidth(x)
    x = x.double().cpu()
    out = torch.zeros(GRID, dtype=torch.float64)
    for part in x.split(4096):  # a bounded table of [GRID, points]
        out += torch.exp(-0.5 * ((grid()[:, None] - part) / h) ** 2).sum(1)
    return out / (len(x) * h * math.sqrt(2 * math.pi))


def peaks(f: Tensor) -> Peaks:
    """Modes (f' = 0, f'' < 0; of a plateau, its first point) and the valleys between them. f: [GRID]."""
    around = torch.nn.functional.pad(f, (1, 1))  # nothing is beyond 0 and 1, so that the ends may be modes
    modes = ((f > around[:-2]) & (f >= around[2:])).nonzero().flatten().tolist()
    valleys = list[int]()
    depths = list[float]()
    for left, right in pairwise(modes):
        valleys.append(left + int(f[left : right + 1].argmin()))
        depths.append(1 - float(f[valleys[-1]] / torch.minimum(f[left], f[right])))
    x = grid()
    return Peaks(x[modes].tolist(), x[valleys].tolist(), depths)


def noise_like(u: Tensor, steps: int, seed: int) -> Tensor:
    """Noise without types, with the mean and the spectrum of a text's steps. So neighbouring steps are as similar as
    in the text, and every mode of its averages is there by chance. Only the phases are drawn (a surrogate, Theiler et
    al. 1992). u: [N, L]; rows before the last `steps`, the prompt's queries, stay."""
    own = u[len(u) - steps :].double()
    spectrum = torch.fft.rfft(own, dim=0)
    phases = torch.rand(spectrum.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    phases[0] = 0  # the mean
    if steps % 2 == 0:
        phases[-1] = 0  # real
    noise = torch.fft.irfft(spectrum * torch.polar(torch.ones_like(phases), 2 * torch.pi * phases), n=steps, dim=0)
    return torch.cat((u[: len(u) - steps].double(), noise.clamp(0, 1)))
