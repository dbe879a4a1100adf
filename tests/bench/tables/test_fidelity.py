"""docs/fidelity.md names what exists. Alone: pytest tests/bench/tables/test_fidelity.py."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from minithink.bench.fidelity import lines
from minithink.bench.fidelity.item import VERDICTS, Item, Paper
from minithink.bench.tables import pages
from minithink.errors import MinithinkError
from minithink.evaluate import papers
from minithink.policies import POLICIES
from minithink.results.origin import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "fidelity.md").read_text("utf-8")
ITEMS = [(name, item) for name, paper in lines.PAPERS.items() for item in paper.items]
NUMBER = re.compile(r"(?<![\w§.])\d[\d,]*(?:\.\d+)?")  # but for sections, and in names such as float64


def of_every_row(test):
    """Run a test on each row of each paper."""
    return pytest.mark.parametrize("item", [item for _, item in ITEMS], ids=[f"{n}: {i.of}"[:60] for n, i in ITEMS])(
        test
    )


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {text.replace(" ", "-") for text in words}


def without_code(text: str) -> str:
    """A text without what stands in backticks, and without the targets of its links."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)


@of_every_row
def test_every_symbol_exists(item: Item) -> None:
    for name in item.code:
        module, _, symbol = name.partition(":")
        found = importlib.import_module(f"minithink.{module}")
        for part in symbol.split("."):
            assert hasattr(found, part), name
            found = getattr(found, part)
        target = re.search(r"\((.+)\)", lines.link_to_code(name))
        assert target is not None
        assert (DOCS / target[1]).is_file(), name


@of_every_row
def test_every_test_exists(item: Item) -> None:
    for name in item.tests:
        file, _, test = name.partition(":")
        path = ROOT / "tests" / file
        assert path.is_file(), name
        assert re.search(rf"^def {test}\(", text_of(path), re.MULTILINE), name


@of_every_row
def test_every_page_picture_and_anchor_exists(item: Item) -> None:
    for place in item.shown:
        file, _, anchor = place.partition("#")
        assert (DOCS / file).is_file(), place
        assert not anchor or anchor in anchors_of(DOCS / file), place


@of_every_row
def test_every_number_stands_in_a_page_that_the_row_names(item: Item) -> None:
    """A number of `here` that is measured elsewhere could go stale unseen."""
    found = set[str]()
    for place in item.shown:
        path = DOCS / place.partition("#")[0]
        if path.suffix == ".md":
            found |= set(NUMBER.findall(text_of(path)))
    for number in NUMBER.findall(without_code(item.here)):
        assert number in found, f"{number} stands in no page that the row names: {item.of}"


@of_every_row
def test_a_row_says_enough_for_its_verdict(item: Item) -> None:
    assert item.verdict in VERDICTS
    assert ": " in item.of, "a place, a colon, what it says"
    if item.verdict == "agrees":
        assert item.code or item.shown
        assert item.tests or item.shown
    else:
        assert item.here, "what is done or was found here"
    if item.verdict == "differs by choice":
        assert item.paper or item.authors, "what differs from it"
    for text in (item.paper, item.authors, item.here):
        assert not text or text.rstrip("”").endswith(".") or text.endswith(")."), text


def numbered(text: str, what: str) -> set[int]:
    """The numbers behind a word, as in "figures 3, 13 and 14" or "equations 7 to 11"."""
    found = set[int]()
    for several in re.findall(rf"\b{what}s? ((?:\d+(?:, | and | to )?)+)", text, re.IGNORECASE):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", several):
            found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("paper", lines.PAPERS.values(), ids=lines.PAPERS)
def test_everything_that_a_paper_numbers_has_a_row(paper: Paper) -> None:
    text = "\n".join(item.of.replace("able I", "able 1") for item in paper.items)
    assert numbered(text, "figure") == set(range(1, paper.figures + 1))
    assert numbered(text, "table") == set(range(1, paper.tables + 1))
    assert numbered(text, "equation") == set(range(1, paper.equations + 1))
    assert numbered(text, "algorithm") == set(range(1, paper.algorithms + 1))
    assert len({item.of for item in paper.items}) == len(paper.items)


def test_numbers_of_a_text_are_found() -> None:
    text = "Figures 3, 13 and 14: maps. Equations 7 to 11, table 2."
    assert numbered(text, "figure") == {3, 13, 14}
    assert numbered(text, "equation") == {7, 8, 9, 10, 11}
    assert numbered(text, "table") == {2}


def test_every_command_of_a_paper_has_a_row() -> None:
    named = {name for _, item in ITEMS for name in item.runs}
    assert named == papers.TABLES.keys()


def test_every_policy_that_the_papers_compare_has_a_row() -> None:
    rows = [row for table in papers.TABLES.values() for column in table.columns for row in column.rows]
    compared = {row.policy.partition(":")[0] for row in rows} - {"full"}
    assert len(compared) > 12
    named = {name.partition(":")[2] for _, item in ITEMS for name in item.code}
    assert [name for name in compared if POLICIES[name].__name__ not in named] == []


def test_rows_that_differ_stand_first() -> None:
    rows = [Item(of=f"§{i}: x", verdict=verdict) for i, verdict in enumerate(("agrees", "missing", "agrees"))]
    assert [item.of for item in Paper("", tuple(rows)).ordered()] == ["§1: x", "§0: x", "§2: x"]


def test_a_row_in_markdown() -> None:
    item = Item(
        of="§3.1: |T| types",
        verdict="partial",
        code=("ref.lrfu:hit_set", "kernels.retain:retain", "loop:DecodeLoop"),
        tests=("ref/test_lrfu.py:test_by_hand",),
        shown=("crystal_kv.md#a-floor", "budgets-search.svg", "evaluate.md"),
        runs=("crystal_kv-table1",),
        paper="Three.",
        here="Two.",
    )
    [_, _, row] = lines.of_cells([["a"] * 6, lines.cells_of(item)])
    assert row == (
        r"| §3.1: \|T\| types | partial | [`hit_set`](../minithink/ref/lrfu.py), [`retain`](../kernels/retain.py), "
        "[`DecodeLoop`](../minithink/loop.py) | [`test_by_hand`](../tests/ref/test_lrfu.py) | "
        "[crystal_kv: a floor](crystal_kv.md#a-floor), [budgets-search.svg](budgets-search.svg), "
        "[evaluate](evaluate.md), `evaluate paper crystal_kv-table1` | **Paper:** Three. **Here:** Two. |"
    )


def test_verdicts_are_counted() -> None:
    papers_ = [
        Paper("A", (Item(of="§1: x", verdict="agrees"), Item(of="§2: x", verdict="missing"))),
        Paper("B", (Item(of="§1: x", verdict="agrees"),)),
    ]
    found = lines.of_counts(papers_)
    assert found[0] == "| verdict | what it means | A | B | all |"
    assert [row.count("–") for row in found if "**missing**" in row] == [1]
    assert found[-2].endswith("| 1 | 1 | **2** |")
    assert found[-1] == "| rows |  | 2 | 1 | **3** |"


def test_the_page_has_every_table_and_is_up_to_date(tmp_path: Path) -> None:
    """Without any result: these tables show none."""
    named = re.findall(r"^<!-- table:(\S+) -->$", PAGE, re.MULTILINE)
    assert named == [*lines.TABLES]
    assert pages.fill(PAGE, "fidelity.md", tmp_path) == PAGE


def test_what_is_written_by_hand_in_a_table_goes(tmp_path: Path) -> None:
    text = "<!-- table:fidelity -->\nold\n<!-- end -->\nafter"
    filled = pages.fill(text, "x.md", tmp_path)
    assert "old" not in filled
    assert filled.endswith("\n<!-- end -->\nafter")
    with pytest.raises(MinithinkError, match="no line"):
        pages.fill("<!-- table:fidelity -->", "x.md", tmp_path)
