"""Kernel density estimates against their formula, and modes of mixtures that are known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.reread.density import GRID, bandwidth, density, grid, peaks


def mixture(*parts: tuple[float, float, int]) -> torch.Tensor:
    """A sample of normal distributions (mean, deviation, points), by quantiles: nothing is drawn."""
    out = []
    for mean, sd, n in parts:
        p = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        out.append(mean + sd * torch.distributions.Normal(0.0, 1.0).icdf(p))
    return torch.cat(out).float()


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40))
def test_the_density_is_the_sum_of_its_kernels(values: list[float]) -> None:
    n, mean = len(values), sum(values) / len(values)
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / n)
    h = max(sd * n ** (-1 / 5), 1 / 256)
    assert bandwidth(torch.tensor(values)) == pytest.approx(h, rel=1e-6, abs=1e-9)
    f = density(torch.tensor(values))
    assert f.shape == (GRID,)
    for i in (0, 31, 128, 256):
        x = i / 256
        want = sum(math.exp(-(((x - v) / h) ** 2) / 2) for v in values) / (n * h * math.sqrt(2 * math.pi))
        assert float(f[i]) == pytest.approx(want, rel=1e-4, abs=1e-12)


def test_a_long_sample_is_summed_in_parts() -> None:
    x = torch.linspace(0.2, 0.8, 5000)
    h = bandwidth(x)
    kernels = torch.exp(-0.5 * ((grid()[:, None] - x.double()) / h) ** 2).sum(1)
    torch.testing.assert_close(density(x), kernels / (5000 * h * math.sqrt(2 * math.pi)))
    assert float(density(x).sum() / 256) == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize(
    ("parts", "modes"),
    [
        ([(0.5, 0.05, 400)], [0.5]),
        ([(0.3, 0.04, 300), (0.8, 0.04, 300)], [0.3, 0.8]),
        ([(0.2, 0.03, 400), (0.5, 0.03, 300), (0.85, 0.03, 300)], [0.2, 0.5, 0.85]),
        ([(0.45, 0.1, 300), (0.55, 0.1, 300)], [0.5]),  # nearer than their widths: one
    ],
)
def test_modes_of_mixtures(parts: list[tuple[float, float, int]], modes: list[float]) -> None:
    found = peaks(density(mixture(*parts)))
    assert found.modes == pytest.approx(modes, abs=0.02)
    assert len(found.valleys) == len(found.depths) == len(modes) - 1
    for i, valley in enumerate(found.valleys):
        assert modes[i] + 0.05 < valley < modes[i + 1] - 0.05
        assert 0.3 < found.depths[i] < 1


def test_one_value_has_one_mode_also_at_the_ends() -> None:
    for value in (0.0, 0.5, 1.0):
        assert peaks(density(torch.full((9,), value))) == ([value], [], [])


def test_valleys_and_their_depths() -> None:
    f = torch.zeros(GRID, dtype=torch.float64)
    f[64], f[65], f[66], f[128], f[192] = 4.0, 1.0, 2.0, 8.0, 6.0
    f[67:128], f[129:192] = 1.5, 3.0
    found = peaks(f)
    assert found.modes == [64 / 256, 66 / 256, 128 / 256, 192 / 256]
    assert found.valleys == [65 / 256, 67 / 256, 129 / 256]
    assert found.depths == pytest.approx([1 - 1 / 2, 1 - 1.5 / 2, 1 - 3 / 6])


def test_a_plateau_is_one_mode() -> None:
    f = torch.zeros(GRID, dtype=torch.float64)
    f[10:14] = 1.0
    f[0], f[-1] = 0.5, 0.25
    assert peaks(f).modes == [0, 10 / 256, 1], "nothing is beyond the ends"
    assert peaks(torch.zeros(GRID, dtype=torch.float64)).modes == []
