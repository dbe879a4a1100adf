"""Summaries: by hand, and what must hold whatever the records are."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.errors import CONTROL, NON_FINITE, MinithinkError, UsageError
from minithink.evaluate.intervals import bootstrap, wilson
from minithink.evaluate.journal import Record
from minithink.evaluate.summary import (
    Row,
    as_csv,
    as_json,
    as_markdown,
    budget_of,
    budget_text,
    points,
    show,
    size,
    summarize,
    write,
)
from tests.evaluate.draw import record, runs

# Problems p, q, r; q has four samples, the others one.
FULL = [
    record(id="p", right=True, generated_tokens=100, steps=100, seconds=1.0, kv_bytes_mean=1000.0, tokens_mean=50.0),
    *[
        record(
            id="q",
            sample=i,
            right=i == 0,
            generated_tokens=200,
            steps=200,
            seconds=0.5,
            kv_bytes_peak=4096,
            kv_bytes_mean=2000.0,
            tokens_mean=80.0,
            tokens_peak=160.0,
            finish_reason=("length", "context")[i % 2],
        )
        for i in range(4)
    ],
    record(id="r", right=False, generated_tokens=1000, steps=0, seconds=0.0, kv_bytes_mean=9.0, tokens_mean=9.0),
]


def test_a_row_by_hand() -> None:
    (row,) = summarize(FULL)
    assert (row.policy, row.budget, row.group, row.problems, row.samples) == ("full", None, None, 3, 6)
    assert row.pass_at_1 == pytest.approx((1 + 1 / 4 + 0) / 3), "problems count alike, not sequences"
    assert (row.pass_at_1_low, row.pass_at_1_high) == bootstrap([1, 0.25, 0])
    assert row.interval == "bootstrap"
    assert (row.generated_mean, row.generated_median) == (1900 / 6, 200)
    assert row.cut_off == 4 / 6
    assert (row.kv_bytes_peak, row.kv_bytes_most) == ((2 * 2048 + 4 * 4096) / 6, 4096)
    assert row.kv_bytes_mean == (100 * 1000 + 800 * 2000) / 900, "over sequence-steps"
    assert row.tokens_mean == (100 * 50 + 800 * 80) / 900
    assert row.tokens_peak == (2 * 150 + 4 * 160) / 6
    assert row.evicting_share == 0
    assert row.tokens_per_second == 1900 / 3
    assert [row.reference, row.difference, row.difference_low, row.paired_problems] == [None, None, None, 0]


def test_logits_that_are_not_finite_count_neither_as_right_nor_as_wrong() -> None:
    broken = [
        record(id="q", sample=7, finish_reason=NON_FINITE, right=False, generated_tokens=3, kv_bytes_peak=10**9),
        record(id="s", group="other", finish_reason=NON_FINITE, right=False),
        record(policy="a", id="p", finish_reason=NON_FINITE, right=False),
    ]
    (row,) = summarize([*FULL, *broken])
    assert replace(row, non_finite=None) == summarize(FULL)[0]
    assert row.non_finite == 2
    assert "| not finite |\n" in as_markdown([row])
    assert "not finite" not in as_markdown(summarize(FULL)).lower()
    assert next(csv.DictReader(io.StringIO(as_csv([row]))))["non_finite"] == "2"


def test_evictions_by_hand() -> None:
    rows = [record(id="p", steps=100, evicting_steps=10), record(id="q", steps=300, evicting_steps=50)]
    assert summarize(rows)[0].evicting_share == 60 / 400


def test_what_a_policy_counts_is_added_up() -> None:
    of = {"p": {"case_1": 3, "case_2": 0}, "q": {"case_1": 4, "case_2": 1200}}
    counted = [record(policy="thinkv", id=x, counts=counts) for x, counts in of.items()]
    rows = summarize([*counted, record(id="p")])
    counts = {"case_1": 7, "case_2": 1200}
    assert [(row.policy, row.counts) for row in rows] == [("full", None), ("thinkv", counts)]
    assert json.loads(list(csv.DictReader(io.StringIO(as_csv(rows))))[1]["counts"]) == counts
    lines = as_markdown(rows).splitlines()
    assert lines[2].endswith("| counted |")
    assert lines[4].endswith("| – |")
    assert lines[5].endswith("| case 1: 7, case 2: 1,200 |")
    assert "case" not in as_markdown(summarize([record()]))


def test_what_took_no_steps_and_no_time() -> None:
    (row,) = summarize([record(id=x, steps=0, seconds=0.0, kv_bytes_mean=b) for x, b in (("p", 1.0), ("q", 3.0))])
    assert (row.evicting_share, row.tokens_per_second, row.kv_bytes_mean) == (None, None, 2.0)


@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (1, 1), (0, 1)])
def test_where_resamples_are_all_alike_the_interval_is_wilsons(right: int, n: int) -> None:
    (row,) = summarize([record(id=str(i), right=i < right) for i in range(n)])
    assert row.interval == "wilson"
    assert (row.pass_at_1_low, row.pass_at_1_high) == wilson(right / n, n)
    halves = [record(id=str(i), sample=s, right=s == 0) for i in range(4) for s in (0, 1)]
    assert summarize(halves)[0].pass_at_1_low == wilson(0.5, 4)[0], "problems are the trials, not sequences"


def test_a_paired_comparison_by_hand() -> None:
    # full: p 1, q 1/4, r 0. a: q 1, r 0, s 1. They share q and r.
    a = [record(policy="a", budget=8, id=x, right=x != "r") for x in "qrs"]
    full, row = summarize([*a, *FULL])
    assert (full.policy, full.reference, full.difference) == ("full", None, None)
    assert (row.reference, row.paired_problems) == ("full", 2)
    assert row.difference == pytest.approx(((1 - 1 / 4) + 0) / 2)
    assert (row.difference_low, row.difference_high) == bootstrap([0.75, 0.0])
    alone = summarize([*FULL, record(policy="a", id="elsewhere")])[1]
    assert (alone.reference, alone.paired_problems, alone.difference) == (None, 0, None)
    equal = summarize([*FULL, *[replace(r, policy="b") for r in FULL]])[1]
    assert (equal.difference, equal.difference_low, equal.difference_high) == (0, None, None)


def test_without_full_the_first_policy_is_compared_with_at_the_same_budget() -> None:
    def at(policy: str, budget: int | float | None, right: bool) -> Record:
        return record(policy=policy, budget=budget, right=right)

    rows = [at("a", 8, True), at("a", 16, False), at("b", 8, True), at("b", 16, True), at("c", None, True)]
    by_name = {(r.policy, r.budget): r for r in summarize(rows)}
    assert [r.difference for r in by_name.values()] == [None, None, 0, 1, None]
    assert [r.reference for r in by_name.values()] == [None, None, "a", "a", None]
    named = summarize(rows, policies=["b", "a"])
    assert [(r.policy, r.budget, r.difference) for r in named] == [
        ("b", 8, None),
        ("b", 16, None),
        ("a", 8, 0),
        ("a", 16, -1),
        ("c", None, None),
    ]
    # One without a budget is compared with at every budget; full is, wherever it stands.
    assert [r.difference for r in summarize(rows, policies=["c"])] == [None, 0, -1, 0, 0]
    late = summarize([*rows, at("full", None, False)], policies=["a", "b", "c", "full"])
    assert [r.reference for r in late] == ["full"] * 5 + [None]
    assert summarize([*rows, at("full", None, False)])[0].policy == "full"


def test_the_order_of_rows() -> None:
    budgets = [0.5, 512, None, 64, 0.25]
    rows = summarize([record(policy="a", budget=b) for b in budgets])
    assert [r.budget for r in rows] == [None, 64, 512, 0.25, 0.5]
    named = summarize([record(policy="a", budget=b) for b in budgets], budgets=[512, 0.5, 64])
    assert [r.budget for r in named] == [512, 0.5, 64, None, 0.25]


def test_groups_go_by_their_numbers() -> None:
    names = ["0–600", "600–1200", "1200–2000", "level 2", "level 10", "²"]
    rows = summarize([record(id=name, group=name) for name in reversed(names)])
    assert [r.group for r in rows] == [None, *names]


def test_groups() -> None:
    assert [r.group for r in summarize([record(group="g", id=x) for x in "pq"])] == [None], "one group is all"
    rows = [
        record(id=x, group=g, right=x == "p", policy=policy)
        for policy in ("full", "a")
        for x, g in (("p", "short"), ("q", "long"), ("r", "long"))
    ]
    found = summarize([*rows, record(id="s", group="other", policy="a")])
    assert [(r.group, r.policy, r.problems) for r in found] == [
        (None, "full", 3),
        (None, "a", 4),
        ("long", "full", 2),
        ("long", "a", 2),
        ("other", "a", 1),
        ("short", "full", 1),
        ("short", "a", 1),
    ]
    assert [r.pass_at_1 for r in found] == [1 / 3, 1 / 2, 0, 0, 1, 1, 1]
    assert found[3].difference == 0
    assert found[4].difference is None


@settings(max_examples=50)
@given(runs(), st.randoms(use_true_random=False), st.integers(0, 2))
def test_laws(rows: list[Record], rng: random.Random, seed: int) -> None:
    found = summarize(rows, seed)
    assert summarize(rng.sample(rows, len(rows)), seed) == found, "the order of the records changes nothing"
    assert sum(r.samples for r in found if r.group is None) == len(rows)
    if any(r.group is not None for r in found):
        assert sum(r.samples for r in found if r.group is not None) == len(rows)
    for row in found:
        assert 0 <= row.pass_at_1_low <= row.pass_at_1 <= row.pass_at_1_high <= 1
        if row.difference is not None and row.difference_low is not None and row.difference_high is not None:
            assert -1 <= row.difference_low <= row.difference <= row.difference_high <= 1
        assert row.kv_bytes_peak <= row.kv_bytes_most
    text = as_json(found, seed)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(text, parse_constant=refuse)
    assert len(list(csv.DictReader(io.StringIO(as_csv(found))))) == len(found)
    with pytest.raises(UsageError, match="twice"):
        summarize([*rows, rows[0]])


def test_nothing_is_summed_up_to_nothing() -> None:
    assert summarize([]) == []


def test_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = summarize([*FULL, *[replace(r, policy="a|b", budget=0.25, right=True) for r in FULL]])
    paths = write(tmp_path / "new", rows)
    assert [p.name for p in paths] == ["summary.json", "summary.csv", "summary.md"]
    result = json.loads(paths[0].read_text())
    assert {k: v for k, v in result.items() if k != "rows"} == {"confidence": 0.95, "resamples": 10_000, "seed": 0}
    columns = [f.name for f in fields(Row)]
    assert [list(row) for row in result["rows"]] == [columns, columns]
    assert result["rows"][0]["pass_at_1"] == 0.41667
    assert result["rows"][0]["reference"] is None
    header, first, second = csv.reader(paths[1].read_text().splitlines())
    assert header == columns
    assert (first[0], first[1], second[0], second[1]) == ("full", "", "a|b", "0.25")
    before = paths[0].read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MinithinkError, match=r"summary\.json: disk full; no result is lost: mend that, and run"):
        write(tmp_path / "new", [])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MinithinkError, match=r"No space left.*: make room there, and run the command again"):
        write(tmp_path / "new", [])
    assert paths[0].read_bytes() == before


def test_the_markdown_table() -> None:
    right = [replace(r, policy="a|b", budget=0.25, right=True, seconds=0.0, group="x_y") for r in FULL]
    text = as_markdown(summarize([*FULL, *right]), seed=7)
    assert text.startswith("## All problems\n\n| policy | budget | problems × samples | pass@1 |")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {13}, "a bar in a name ends no cell"
    low, high = bootstrap([1, 0.25, 0]) or (0, 0)
    first, second = lines[2:4]
    assert first.startswith(
        f"| `full` | – | 3 × 2 | 41.7% ({low:.1%} to {high:.1%}) | – | 317 (200) | 66.7% | 3.3 KiB |"
    )
    assert first.endswith("| 157 (77) | 0.0% | 633 |")
    difference = bootstrap([0, 0.75, 1]) or (0, 0)
    wilsons = f"100.0% ({wilson(1, 3)[0]:.1%} to 100.0% w)"
    said = f"+58.3 ({points(difference[0])} to {points(difference[1])}) against `full`"
    assert second.startswith(f"| `a\\|b` | 25 % | 3 × 2 | {wilsons} | {said} |")
    assert second.endswith("| – |")
    assert "## Group x\\_y" in text
    assert "10,000 resamples, seed 7" in text
    assert "one without an interval is the same for each problem" in text
    assert "a lane (a KV head of a layer)" in text
    assert "peaks are means over sequences of each one's peak" in text
    same = as_markdown(summarize([*FULL, *[replace(r, policy="a") for r in FULL]]))
    assert "| +0.0 against `full` |" in same


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (size(0), "0 B"),
        (size(1023), "1,023 B"),
        (size(1536), "1.5 KiB"),
        (size(2**20), "1.0 MiB"),
        (size(2**30), "1.0 GiB"),
        (size(5 * 2**40), "5,120.0 GiB"),
        (points(0.125), "+12.5"),
        (points(-0.03), "−3.0"),
        (points(-1e-9), "+0.0"),
        (budget_text(None), "–"),
        (budget_text(4096), "4,096"),
        (budget_text(0.25), "25 %"),
        (budget_text(0.125), "12.5 %"),
    ],
)
def test_units(said: str, want: str) -> None:
    assert said == want


def test_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole tables, or on a terminal the columns that fit into 80: of all problems, whole names, no markup."""
    name = "rkv:lam=0.1,buffer=0[b]"
    grouped = [replace(r, group="short" if r.id == "p" else "long") for r in FULL]
    rows = summarize([*grouped, *[replace(r, policy=name, budget=0.25) for r in grouped]])
    assert {row.group for row in rows} == {None, "short", "long"}
    show(rows, tmp_path)
    assert capsys.readouterr().out == as_markdown(rows) + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    show(rows, tmp_path)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert out[0].strip() == "All problems"
    table = out[1:-1]
    assert max(map(len, table)) <= 80
    assert "".join(line[:24].strip() for line in table[2:]) == name, "broken, where it is too long, and all there"
    whole = [row for row in rows if row.group is None]
    for row, line in zip(whole, table[1:], strict=False):
        assert f"{row.pass_at_1:.1%}" in line
        assert f"{row.pass_at_1_low:.1%} to {row.pass_at_1_high:.1%}" in line
        assert size(row.kv_bytes_peak) in line
    assert out[-1].endswith(f"groups of problems: {tmp_path / 'summary.md'}")


@pytest.mark.parametrize("terminal", [False, True])
def test_names_reach_the_terminal_without_control_characters(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = summarize([record(policy=f"\x1b[31m{name}\u202e", group=f"\x9b{name}") for name in "ab"])
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    show(rows, tmp_path / "\x1b[31m")
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)  # the table's own styles
    assert "\\x1b[31ma\\u202e" in out
    assert not CONTROL.search(out)
    assert not CONTROL.search(as_markdown(rows))


def test_a_share_is_named_with_what_it_comes_to() -> None:
    """The mean over sequences; nothing where records do not say it."""
    rows = [record(policy="a", budget=0.25, id=x, budget_tokens=n) for x, n in (("p", 400), ("q", 425))]
    [row] = summarize(rows)
    assert (row.budget_tokens, budget_of(row)) == (412.5, "25 % (412)")
    text = as_markdown([row])
    assert "| `a` | 25 % (412) |" in text
    assert "In brackets behind a share or bytes: the tokens of the budget" in text
    [row] = summarize([record(policy="a", budget=0.25)])
    assert (row.budget_tokens, budget_of(row)) == (None, "25 %")
    assert "In brackets" not in as_markdown([row])


def test_sequences_that_were_not_graded_have_all_measures_but_accuracy(tmp_path: Path) -> None:
    (graded,) = summarize(FULL)
    (row,) = summarize([replace(r, right=None) for r in FULL])
    assert row == replace(
        graded, pass_at_1=None, pass_at_1_low=None, pass_at_1_high=None, interval="none", problems=3, samples=6
    )
    with pytest.raises(UsageError, match=r"full were not graded: choose a grader other than none\.$"):
        _ = row.accuracy
    write(tmp_path, [row])
    assert json.loads((tmp_path / "summary.json").read_text())["rows"][0]["pass_at_1"] is None
    text = (tmp_path / "summary.md").read_text()
    assert "| `full` | – | 3 × 2 | – | – |" in text
    assert "these sequences were not graded (`--grader none`)" in text


def test_only_graded_sequences_count_in_the_accuracy() -> None:
    (row,) = summarize([*FULL, record(id="s", right=None)])
    assert row.pass_at_1 == summarize(FULL)[0].pass_at_1
    assert (row.problems, row.samples) == (4, 7)
