"""The quality of a prediction: the worked example, and the laws of each measure."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.calibrate import quality as module
from minithink.calibrate.quality import BIN, by_position, first, kendall, mean, overlap, quality

TRUTH = torch.tensor([2 / 3, 1 / 3, 8 / 3, 1 / 3, 1])


def test_the_example_of_the_spec() -> None:
    """8 pairs agree, 1 disagrees, 1 is tied in the truth."""
    assert quality(torch.ones(5), TRUTH)["mse"] == pytest.approx(34 / 45)
    assert float(TRUTH.var(correction=0)) == pytest.approx(34 / 45)
    found = quality(torch.tensor([0.5, 0.4, 2.0, 0.6, 0.9]), TRUTH)
    assert found["mse"] == pytest.approx(0.11156, abs=5e-6)
    assert found["tau"] == pytest.approx(7 / math.sqrt(90))
    assert found["tau"] == pytest.approx(0.7379, abs=5e-5)
    assert found["top_20"] == 1
    assert float((1 - TRUTH[:3]).square().mean()) == pytest.approx(10 / 9), "the letter of eq. 8: the first 3 items"
    assert found["tau"] * math.sqrt(9 / 10) == pytest.approx(0.7), "τ_a: 7 of 10 pairs, ties count"


@given(st.integers(2, 40), st.integers(1, 8), st.sampled_from([1, 3, 1024]), st.integers(0, 2**31))
def test_kendall_counts_pairs(n: int, values: int, rows: int, seed: int) -> None:
    """However many rows are in memory at once."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(values, (n,), generator=g).float() for _ in range(2))
    pairs = [(i, j) for i in range(n) for j in range(i)]
    agree = sum(int((a[i] - a[j]) * (b[i] - b[j]) > 0) for i, j in pairs)
    disagree = sum(int((a[i] - a[j]) * (b[i] - b[j]) < 0) for i, j in pairs)
    untied = [sum(int(x[i] != x[j]) for i, j in pairs) for x in (a, b)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS", rows)
        found = kendall(a, b)
    if 0 in untied:
        assert math.isnan(found)
    else:
        assert found == pytest.approx((agree - disagree) / math.sqrt(untied[0] * untied[1]))
        assert kendall(a, a) == pytest.approx(1)
        assert kendall(a, -a) == pytest.approx(-1)


@given(st.integers(5, 60), st.sampled_from([20, 30, 90]), st.integers(0, 2**31))
def test_overlap_is_a_share_of_the_true_best(n: int, percent: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    predicted, truth = torch.rand(n, generator=g), torch.rand(n, generator=g)
    best = set(truth.topk(n // 5).indices.tolist())
    chosen = set(predicted.topk(max(1, n * percent // 100)).indices.tolist())
    assert overlap(predicted, truth, percent) == pytest.approx(len(best & chosen) / len(best))
    assert overlap(truth, truth, percent) == 1


def test_of_equal_scores_the_older_is_first() -> None:
    assert first(torch.tensor([0.0, 1, 0, 1, 1, 0, 0, 0, 0, 0]), 0.2).nonzero().flatten().tolist() == [1, 3]
    assert int(first(torch.zeros(3), 0.2).sum()) == 1
    many = (torch.arange(400) % 3).float()  # sorts that are not stable mix ties of many tokens
    assert first(many, 0.2).nonzero().flatten().tolist() == list(range(2, 240, 3))


def test_means_leave_out_what_is_undefined() -> None:
    assert mean([{"a": 1.0, "tau": math.nan}, {"a": 3.0, "tau": 0.5}]) == {"a": 2.0, "tau": 0.5}
    assert mean([{"tau": math.nan}]) == {"tau": None}


@given(st.lists(st.integers(2, 100), min_size=1, max_size=4), st.integers(0, 2**31))
def test_the_predictor_by_position_is_the_best_of_its_kind(lengths: list[int], seed: int) -> None:
    """No other value of a bin has a smaller error on the traces that it knows."""
    g = torch.Generator().manual_seed(seed)
    truths = [torch.rand(n, generator=g) for n in lengths]
    known = by_position(truths)
    assert len(known(max(lengths) + 3 * BIN)) == max(lengths) + 3 * BIN

    def error(shift: Tensor) -> float:
        rows = [(known(len(x)) + shift[torch.arange(len(x)) // BIN] - x).square().sum() for x in truths]
        return float(sum(rows))

    bins = max(lengths) // BIN + 1
    least = error(torch.zeros(bins))
    for i in range((max(lengths) - 1) // BIN + 1):
        for step in (-0.05, 0.05):
            assert error(step * (torch.arange(bins) == i)) > least
