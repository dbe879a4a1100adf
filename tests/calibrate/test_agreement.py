"""Agreement of two ways to type segments."""

from __future__ import annotations

import pytest
import torch

from minithink.calibrate.agreement import compare, confusion, fold, kappa


def types(*of: int) -> torch.Tensor:
    return torch.tensor(of, dtype=torch.uint8)


def test_the_table_has_the_first_in_rows() -> None:
    table = confusion(types(0, 0, 1, 2, 2, 2), types(0, 1, 1, 2, 2, 0))
    assert table.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 2]]


def test_kappa_is_agreement_beyond_chance() -> None:
    assert kappa(types(0, 1, 2, 2), types(0, 1, 2, 2)) == pytest.approx(1)
    assert kappa(types(2, 2, 2, 2), types(0, 1, 2, 2)) == pytest.approx(0), "one type for all: as chance"
    assert kappa(types(0, 1), types(1, 0)) == pytest.approx(-1)
    # 20 + 15 of 50 agree; chance: .5 · .6 + .5 · .4 = .5 (the textbook's example)
    a, b = types(*[1] * 25, *[2] * 25), types(*[1] * 20, *[2] * 5, *[1] * 10, *[2] * 15)
    assert kappa(a, b) == pytest.approx(0.4)
    assert kappa(types(1, 1), types(1, 1)) == 1


def test_all_of_it_as_json() -> None:
    found = compare(types(0, 1, 2, 2), types(2, 1, 2, 2))
    assert found["segments"] == 4
    assert found["agree"] == 0.75
    assert found["majority"] == 0.75
    assert found["confusion"] == [[0, 0, 1], [0, 1, 0], [0, 0, 2]]
    assert found["kappa"] == pytest.approx((3 / 4 - 7 / 16) / (1 - 7 / 16))


def test_two_types_know_no_transitions() -> None:
    assert fold(types(0, 1, 2), 2).tolist() == [2, 1, 2]
    assert fold(types(0, 1, 2), 3).tolist() == [0, 1, 2]
