"""Tests of pairs: against numbers worked out by hand, and against the definition.

To run it alone: pytest tests/evaluate/test_paired.py
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.evaluate.paired import difference, holm, mcnemar


def pairs(better: int, worse: int, alike: int = 5) -> tuple[list[bool], list[bool]]:
    own = [True] * better + [False] * worse + [True, False] * alike
    other = [False] * better + [True] * worse + [True, False] * alike
    return own, other


@pytest.mark.parametrize(
    ("better", "worse", "want"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 6, 2 / 64), (8, 2, 2 * 56 / 1024), (3, 3, 1.0), (4, 3, 1.0)],
)
def test_mcnemar_by_hand(better: int, worse: int, want: float) -> None:
    assert mcnemar(*pairs(better, worse)) == pytest.approx(want)
    assert mcnemar(*pairs(worse, better)) == pytest.approx(want)
    assert mcnemar(*pairs(better, worse, alike=0)) == pytest.approx(want), "problems of equal answers do not count"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=9))
def test_mcnemar_is_the_share_of_swaps_that_differ_as_much(problems: list[tuple[bool, bool]]) -> None:
    """All ways to swap the two answers of a problem are equally likely if neither policy is better."""
    signed = [own - other for own, other in problems]
    swapped = [
        sum(s * d for s, d in zip(signs, signed, strict=True)) for signs in product((1, -1), repeat=len(signed))
    ]
    want = sum(abs(x) >= abs(sum(signed)) for x in swapped) / len(swapped)
    assert mcnemar([own for own, _ in problems], [other for _, other in problems]) == pytest.approx(want)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
@example([(True, False), (False, True), (True, True)])
def test_exchanged_policies_have_the_negative_difference(problems: list[tuple[bool, bool]]) -> None:
    """The interval is mirrored, and the probability stays."""
    own = [mine for mine, _ in problems]
    other = [theirs for _, theirs in problems]
    found = difference(own, other)
    exchanged = difference(other, own)
    assert exchanged == {"less": -found["less"], "less_low": -found["less_high"], "less_high": -found["less_low"]}
    assert mcnemar(other, own) == mcnemar(own, other)


def test_lists_of_different_problems() -> None:
    with pytest.raises(ValueError, match="longer"):
        mcnemar([True], [True, False])


def test_holm_by_hand() -> None:
    """The smallest is multiplied by 4, the next by 3; and no corrected probability is below an earlier one."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])
    assert holm([0.9, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.sampled_from((0.01, 0.05, 0.3)))
def test_holm_rejects_as_the_procedure_does(found: list[float], alpha: float) -> None:
    """Step by step: the smallest against α/m, the next against α/(m − 1), until one is too large."""
    rejected = set[int]()
    order = sorted(range(len(found)), key=found.__getitem__)
    for rank, place in enumerate(order):
        if (len(found) - rank) * found[place] > alpha:
            break
        rejected.add(place)
    assert {place for place, p in enumerate(holm(found)) if p <= alpha} == rejected
