"""Places by right answers and bytes. Alone: pytest tests/evaluate/test_standing.py"""

from __future__ import annotations

from minithink.evaluate import standing
from minithink.evaluate.standing import Point


def point(policy: str, of_full: float, right: float, *, own: bool = False, changed: bool = False) -> Point:
    return Point(
        policy=policy,
        budget=0.25,
        own=own,
        right=right,
        right_low=right,
        right_high=right,
        samples=100,
        of_full=of_full,
        changed=changed,
    )


OTHERS = [
    point("full", 1.0, 0.9),
    point("few", 0.1, 0.2),
    point("middle", 0.5, 0.6, changed=True),
    point("bad", 0.6, 0.3),
]


def test_a_point_is_on_the_front_or_below_the_best_of_at_most_its_bytes() -> None:
    places = standing.placed(OTHERS)
    assert [(place.policy, place.front, round(place.below, 6)) for place in places] == [
        ("few", True, 0.0),
        ("middle", True, 0.0),
        ("bad", False, 0.3),
        ("full", True, 0.0),
    ]


def test_a_policy_below_the_front_is_told_who_is_above_it_and_its_place() -> None:
    [sentence] = standing.said(standing.placed([*OTHERS, point("mine", 0.7, 0.5, own=True)]))
    assert sentence == (
        "Your `mine` at 25 % is **10.0 points below the front**: 50.0% right with 70.0% of the full cache's bytes. "
        "`middle` at 25 % has 60.0% with 50.0%. By this distance it is number 4 of 5."
    )


def test_equal_distances_share_a_place_whatever_rounding_leaves() -> None:
    """0.2 − 0.1 and 0.6 − 0.5 differ in their last bit."""
    ties = [point("early", 0.2, 0.1), point("within", 0.55, 0.5), point("far", 0.7, 0.1)]
    places = standing.placed([*OTHERS, *ties, point("mine", 0.65, 0.5, own=True)])
    distances = {place.policy: place.below for place in places}
    assert distances["early"] != distances["mine"]
    [sentence] = standing.said(places)
    assert sentence.endswith(" By this distance it is number 4 of 8, together with 2 others.")


def test_a_policy_on_the_front_is_told_whom_it_takes_off() -> None:
    [sentence] = standing.said(standing.placed([*OTHERS, point("mine", 0.4, 0.7, own=True)]))
    assert sentence == (
        "Your `mine` at 25 % is **on the front**: 70.0% right with 40.0% of the full cache's bytes. It takes "
        "`middle` at 25 % off it."
    )


def test_the_fewest_bytes_are_on_the_front_whatever_is_right() -> None:
    [sentence] = standing.said(standing.placed([*OTHERS, point("mine", 0.05, 0.0, own=True)]))
    assert sentence.startswith(
        "Your `mine` at 25 % is **on the front**, because nothing else has so few bytes: 0.0% right"
    )


def test_a_committed_policy_that_is_run_again_is_told_from_the_committed_one() -> None:
    again = [point("middle", 0.4, 0.6, own=True), point("few", 0.3, 0.1, own=True)]
    places = standing.placed([*OTHERS, *again])
    first, second = standing.said(places)
    assert first.startswith("Your `few` at 25 % is **10.0 points below the front**")
    assert "`few` at 25 % has 20.0% with 10.0%." in first
    assert second.startswith("Your `middle` at 25 % is **on the front**")
    assert second.endswith(" It takes `middle` at 25 % off it.")
    rows = standing.whole_table(places).splitlines()
    assert [row.split(" | ")[0] for row in rows if "few" in row] == ["| ● `few`", "| **`few`** (yours)"]
    _, worse = standing.said(standing.placed([again[0], point("more", 0.5, 0.5, own=True)]))
    assert "bytes. Your `middle` at 25 % has 60.0% with 40.0%." in worse


def test_the_table_of_the_front_has_ones_own_points_and_the_whole_one_all() -> None:
    places = standing.placed([*OTHERS, point("mine", 0.7, 0.5, own=True), point("near", 0.55, 0.55)])
    assert standing.front_table(places).splitlines()[2:] == [
        "| ● `few` | 25 % | 20.0% (20.0% to 20.0%) | 10.0% | 0.0 |",
        "| ● `middle` † | 25 % | 60.0% (60.0% to 60.0%) | 50.0% | 0.0 |",
        "| **`mine`** (yours) | 25 % | 50.0% (50.0% to 50.0%) | 70.0% | 10.0 |",
        "| ● `full` | 25 % | 90.0% (90.0% to 90.0%) | 100.0% | 0.0 |",
    ]
    rows = standing.whole_table(places).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == ["few", "middle", "full", "near", "mine", "bad"]


def test_the_mean_is_over_datasets_that_all_have_the_policy() -> None:
    first = [point("a", 0.2, 0.5), point("b", 0.3, 0.1)]
    second = [point("a", 0.4, 0.7), point("c", 0.3, 0.1)]
    [both] = standing.together([first, second])
    assert (both.policy, both.samples) == ("a", 200)
    assert round(both.right, 6) == 0.6
    assert round(both.of_full, 6) == 0.3
    assert both.right_low < 0.6 < both.right_high
    assert standing.together([first]) == first
