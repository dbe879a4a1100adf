"""docs/replay.html, the comparison that ships. Alone: pytest tests/trace/test_replay.py"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from minithink.trace import page
from minithink.trace.compare import DEMO
from tests.trace.browser import Page, needs_browser

REPLAY = Path(__file__).parents[2] / "docs" / "replay.html"
AGAIN = "write it again: python -m minithink.trace compare --output docs/replay.html"
MEGABYTE = 1_000_000
COLUMNS = ("", "-1", "-2", "-3")  # ends of the ids of each column


def test_the_page_is_small_and_current() -> None:
    """It has the script, the style and the frame that pages have now."""
    html = REPLAY.read_text(encoding="utf-8")
    assert REPLAY.stat().st_size <= MEGABYTE
    for name in ("css", "js"):
        part = (files("minithink.trace") / f"page.{name}").read_text("utf-8")
        assert part in html, AGAIN
        assert page._hash(part) in html, AGAIN
    frame = (files("minithink.trace") / "page.html").read_text("utf-8")
    body = frame.partition("<main")[2].partition("{{")[0]
    assert body in html, AGAIN


@pytest.fixture
def replay(browser: Page) -> Iterator[Page]:
    """The page, which may neither complain nor ask for anything."""
    browser.driver.get_log("browser")
    browser.open_at_beginning(REPLAY)
    yield browser
    assert browser.driver.get_log("browser") == []
    assert browser.requests() == []


@needs_browser
def test_a_demonstration_in_four_columns(replay: Page) -> None:
    """The full cache is right. Only the window, which loses the question, is wrong. ThinKV holds a fifteenth."""
    assert replay.now.startswith("0 of ")
    names = [replay.text(f"name{x}").partition(",")[0] for x in COLUMNS]
    assert names == DEMO.split(",")
    verdicts = [replay.text(f"outcome{x}").partition(":")[0] for x in COLUMNS]
    assert verdicts == ["right", "wrong", "right", "right"]
    assert "6.4 % of a full cache's" in replay.text("ending-3")
    replay.colour("thought")
    types = replay.text("legend-3").split("\n")
    assert types == ["prompt", "transition", "execution", "reasoning", "kept by none"]
    replay.seek(777)
    code = "return [...document.querySelectorAll('#text-3 span')].map((e) => e.className.split(' ')[0])"
    assert {"c0", "c1", "c2", "c3"} <= set(replay.js(code)), "all types are there"


@needs_browser
def test_the_texts_of_the_demonstration_depart_where_it_says(replay: Page) -> None:
    """Before that token the tokens are those of the full cache, and at that token they are not."""
    code = """const texts = ["text", arguments[0]].map((id) => [...document.querySelectorAll(`#${id} span`)]);
        const [full, other] = texts.map((spans) => spans.map((e) => e.textContent));
        return other.findIndex((text, p) => text !== full[p])"""
    departing = 0
    for x in COLUMNS[1:]:
        said = replay.text(f"departs{x}")
        if "same text" in said:
            assert replay.js(code, f"text{x}") == -1
            continue
        departing += 1
        replay.driver.find_element("css selector", f"#departs{x} button").click()
        replay.settle()
        step = int(replay.now.partition(" ")[0])
        assert said == f"departs from the text of full at token {step}"
        [marked] = replay.js(
            "return [...document.querySelectorAll(`#${arguments[0]} .apart`)].map((e) => e.p)", f"text{x}"
        )
        assert replay.js(code, f"text{x}") == marked
    assert departing >= 1


@needs_browser
def test_what_each_head_holds_in_the_demonstration(replay: Page) -> None:
    """At the last step of the full cache's text: all, the window, and a number for every layer and head."""
    replay.seek(698)
    held = [[int(cell.replace(",", "")) for cell in replay.cells(f"map{x}")] for x in COLUMNS]
    assert [len(cells) for cells in held] == [1, 1, 32, 8]
    tokens = held[0][0]
    assert tokens > 800
    assert held[1] == [512]
    assert all(512 <= count < tokens for count in held[2])
    assert all(0 < count <= 512 for count in held[3])
