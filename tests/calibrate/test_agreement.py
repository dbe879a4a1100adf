"""Agreement of two ways to type segments."""

from __future__ import annotations

import pytest
import torch

from minithink.calibrate.agreement import compare, confusion, fold, kappa, related


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


def test_what_the_length_explains_is_told_from_what_it_does_not() -> None:
    """Types that both follow the place in a text are related within texts, and not within their thirds."""
    generator = torch.Generator().manual_seed(1)
    by_length = [types(*[0] * 6, *[1] * 6, *[2] * 6) for _ in range(8)]
    found = related(by_length, by_length)
    assert found["cramers_v"] == pytest.approx(1)
    assert found["p_in_texts"] == 1 / 2000
    assert found["p_in_thirds"] == 1, "no exchange changes anything"
    drawn = [torch.randint(3, (18,), generator=generator, dtype=torch.uint8) for _ in range(8)]
    same = related(drawn, drawn)
    assert same["p_in_texts"] == same["p_in_thirds"] == 1 / 2000
    others = [torch.randint(3, (18,), generator=generator, dtype=torch.uint8) for _ in range(8)]
    chance = related(drawn, others)
    assert min(chance["p_in_texts"], chance["p_in_thirds"]) > 0.05


def test_a_text_that_differs_as_a_whole_relates_nothing() -> None:
    """Each text has one type of its own, by both ways: exchanges within texts change nothing."""
    texts = [types(*[kind] * 5) for kind in (0, 1, 2)]
    found = related(texts, texts)
    assert found["chi_squared"] == pytest.approx(30)
    assert found["p_in_texts"] == 1
