"""Comparisons over all families: differences in pairs, their table and their picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minithink.bench.answers import overall, pool
from minithink.bench.tables import pages


def _runs(policy: str, budget: float | None, *right: str, samples: int = 1) -> list[pool.Run]:
    """A run of each family, "facts" first."""
    keys = [{"dataset": d, "policy": policy, "budget": budget, "num_samples": samples} for d in ("facts", "search")]
    about = {name: {} for name in ("source", "row", "machine", "versions")}
    return [
        pool.Run(key, answers=[], tokens=[], commit="", date="", command="", right=digits, **about)
        for key, digits in zip(keys, right, strict=True)
    ]


def test_policies_are_compared_problem_by_problem() -> None:
    """By hand: of 4 problems 2 more are right and 1 fewer. What keeps no single answers is left out."""
    runs = _runs("a", 0.5, "1101", "11") + _runs("b", 0.5, "0011", "11") + _runs("old", 0.5, "", "11")
    found = overall.compared(runs + _runs("full", None, "1111", "11"), "b")
    assert found["facts", "a", 0.5]["less"] == 0.25
    low, high = found["facts", "a", 0.5]["less_low"], found["facts", "a", 0.5]["less_high"]
    assert -1 <= low < 0.25 < high <= 1
    assert found["search", "a", 0.5] == {"less": 0, "less_low": 0, "less_high": 0}
    assert found["", "a", 0.5]["less"] == pytest.approx(1 / 6)
    assert found["", "a", 0.5]["right"] == pytest.approx(5 / 6)
    assert found["", "a", 0.5]["p"] == 1.0, "two against one"
    assert found["", "b", 0.5].keys() == {"right", "low", "high"}
    assert ("facts", "b", 0.5) not in found
    assert {cell for cell in found if "old" in cell} == {("search", "old", 0.5)}
    assert not any("full" in cell for cell in found)
    assert overall.compared(runs, "") == {}


def test_of_several_samples_a_problem_has_the_mean() -> None:
    runs = _runs("a", 0.5, "1011", "00", samples=2) + _runs("b", 0.5, "0011", "00", samples=2)
    found = overall.compared(runs, "b")
    assert found["facts", "a", 0.5]["less"] == 0.25
    assert found["", "a", 0.5]["right"] == 0.5
    assert "p" not in found["", "a", 0.5], "the test takes problems that are right or wrong"


def result(*policies: tuple[str, float | None, dict[str, float], dict[str, float] | None]) -> dict[str, Any]:
    """A comparison of two families. Of each policy: name, budget, right answers by family, difference in points."""
    rows = [
        {
            "policy": policy,
            "budget": budget,
            "family": family,
            "pass_at_1": share,
            "samples": 50,
            "cut_off": 0.25 * i,
            "generated_mean": 100.0 + 100 * i,
            "of_full": 0.5,
            "all": points and {name: x / 100 for name, x in points.items()},
        }
        for policy, budget, shares, points in policies
        for i, (family, share) in enumerate(shares.items())
    ]
    settings = {"limit": 50, "split": "test", "beside": "random"}
    return {"measurements": rows, "settings": settings}


LESS = {"less": 20.0, "less_low": 10.0, "less_high": 30.0}


def test_loops_are_shown_where_all_of_them_are_known() -> None:
    """A run without texts that were cut off has no loop, whatever its version looked for."""
    one = result(("a", 0.5, {"facts": 0.8, "search": 0.7}, None), ("b", 0.5, {"facts": 0.5, "search": 0.4}, None))
    facts, search, _, other = one["measurements"]
    assert facts["cut_off"] == 0 < search["cut_off"]
    search["looped"] = 0.1
    assert [row["looped"] for row in overall.rows(one)] == [None, None]  # of b nothing is known
    other["looped"] = 0.2
    assert [row["looped"] for row in overall.rows(one)] == [0.05, 0.1]


def test_the_table_of_all_families() -> None:
    """By hand: means of both families, the best policy over all budgets first, no policy without a budget."""
    found = result(
        ("full", None, {"a": 1.0, "b": 1.0}, None),
        ("random", 0.25, {"a": 0.25, "b": 0.75}, {}),
        ("random", 0.5, {"a": 0.75, "b": 0.75}, {}),
        ("x", 0.25, {"a": 0.5, "b": 0.9}, LESS),
        ("x", 0.5, {"a": 1.0}, None),
    )
    header, first, second = pages.cells(overall.TABLE, overall.rows(found))
    each = ("tokens", "cut off", "bytes")
    assert header == ("policy", "25 %: right", "difference", *each, "50 %: right", *each)
    assert first[0] == "`x`"
    assert first[1:6] == ("**70.0%** (60.4% to 78.1%)", "+20.0 (+10.0 to +30.0)", "150", "12.5%", "50.0%")
    assert second[:4] == ("`random`", "**50.0%** (40.4% to 59.6%)", "–", "150")
    assert first[6].startswith("**100.0%**"), "of the one family that there is"
    [said, _] = overall.said(found)
    assert "each of 2 families. Where a policy lacks runs, of fewer." in said
    assert "points to `random` at the same budget" in said


def test_a_difference_that_its_corrected_test_does_not_confirm_is_marked() -> None:
    """By hand: of three tests the smallest probability counts three times, the next one twice."""
    found = result(
        ("random", 0.25, {"a": 0.5, "b": 0.5}, {}),
        ("x", 0.25, {"a": 0.7, "b": 0.7}, LESS),
        ("y", 0.25, {"a": 0.6, "b": 0.7}, LESS),
        ("z", 0.25, {"a": 0.5, "b": 0.4}, {"less": -5.0, "less_low": -11.0, "less_high": 1.0}),
    )
    for row in found["measurements"]:
        for name, p in (("x", 0.01), ("y", 0.03), ("z", 0.9)):
            if row["policy"] == name:
                row["all"]["p"] = p
    _, *lines = pages.cells(overall.TABLE, overall.rows(found))
    differences = {line[0]: line[2] for line in lines}
    assert differences == {
        "`x`": "+20.0 (+10.0 to +30.0)",
        "`y`": "+20.0 (+10.0 to +30.0) °",
        "`random`": "–",
        "`z`": "-5.0 (-11.0 to +1.0)",
    }
    [said, _] = overall.said(found)
    assert "Holm's correction for the 3 tests of this table (p > 0.05; 1 of them)." in said


def test_the_picture_of_differences(tmp_path: Path) -> None:
    """A name for each policy that can be compared; without any there is no picture."""
    pytest.importorskip("matplotlib")
    cells = [("random", 0.25, {"a": 0.5, "b": 0.5}, {})]
    overall.draw(result(*cells), tmp_path / "none.svg")
    assert not [*tmp_path.iterdir()]
    worse = {"less": -5.0, "less_low": -9.0, "less_high": -1.0}
    cells += [("x", 0.25, {"a": 0.7, "b": 0.7}, LESS), ("y", 0.25, {"a": 0.4, "b": 0.5}, worse)]
    overall.draw(result(*cells), tmp_path / "some.svg")
    drawn = (tmp_path / "some.svg").read_text()
    assert all(text in drawn for text in (">x<", ">y<", ">25 %<", overall.BETTER.lower(), overall.WORSE.lower()))
    assert ">random<" not in drawn
