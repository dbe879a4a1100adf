"""The page: what it is told, and what it does in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minithink.trace import page
from minithink.trace.format import KINDS, File, Trace, read
from tests.trace.browser import Page, needs_browser, prefer
from tests.trace.draw import PROMPT, TEXTS, arrays, write

N, STEPS = len(TEXTS), len(TEXTS) - PROMPT


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    return read(write(tmp_path_factory.mktemp("trace") / "trace", arrays()))


# -- without a browser


def test_nothing_of_the_trace_is_markup(file: File) -> None:
    """Whatever a token says, the page has its own two scripts, and a policy that lets nothing else in."""
    html = page.render(file, 0)
    assert html.count("<script") == html.count("</script>") == 2
    assert "hacked" not in html
    assert "{{" not in html.replace("{{}}", "")
    assert re.findall(r'\b(?:src|href)="([^"]*)"', html) == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]


def test_titles_are_escaped(tmp_path: Path) -> None:
    file = read(write(tmp_path / "trace", arrays(), head={"policies": ["<b>{{js}}", "x"]}))
    html = page.render(file, 0)
    assert "<title>minithink trace: &lt;b&gt;{{js}} + x, sequence 0</title>" in html


def test_nothing_of_several_traces_is_markup(file: File, tmp_path: Path) -> None:
    """The script, and the data of each trace; the content security policy is that of a page of one trace."""
    other = read(write(tmp_path / "trace", arrays(TEXTS[:9]), head={"policies": ["</script><b>", "x"]}))
    html = page.render(file, 0, [(other, 0), (file, 0)])
    assert html.count("<script") == html.count("</script>") == 4
    assert "hacked" not in html
    title = "minithink trace: first + second, sequence 0 | &lt;/script&gt;&lt;b&gt; + x, sequence 0 | first +"
    assert f"<title>{title}" in html
    found = [re.search(r'Content-Security-Policy" content="([^"]*)"', x) for x in (html, page.render(file, 0))]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0][1] == found[1][1]


def test_what_the_page_knows(file: File) -> None:
    about, got = page.data(file.traces[0], file.done)
    assert about["thoughts"] == ["<b>slow</b>", "fast"]
    assert about["kinds"] == [KINDS[i] for i in (0, 2, 4, 5)], "none that is always 0"
    assert (about["prompt"], about["steps"], about["texts"]) == (PROMPT, STEPS, TEXTS)
    assert got["stage"].tolist() == [0] * PROMPT + [1] * (STEPS - 3) + [2] * 3
    assert got["thought"].tolist() == [0] * PROMPT + [t // 2 % 2 for t in range(1, STEPS + 1)]
    trace = file.traces[0]
    of_first = slice(int(got["start"][0]), int(got["start"][1]))
    assert got["step"][of_first].tolist() == [3, STEPS, STEPS, STEPS], "in the order of the steps"
    assert got["unit"][of_first].tolist() == [3, 0, 1, 2]
    assert got["start"][-1] == len(trace.evict_pos)
    assert np.array_equal(
        np.isnan(got["score"]), np.isnan(trace.evict_score[np.argsort(trace.evict_pos, kind="stable")])
    )
    assert np.nanmax(np.abs(got["score"][np.isfinite(got["score"])])) <= 1
    summed = got["bytes"].reshape(4, -1).cumsum(1).T
    assert (summed == trace.ledger[:, [0, 2, 4, 5]]).all()
    assert got["rank"].tolist() == [{2: 255, 6: 1, 7: 130}.get(p, 0) for p in range(N)], "0 is: none"


def test_long_traces_show_fewer_snapshots(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page._thinned(5, 8).tolist() == [0, 1, 2, 3, 4]
    assert page._thinned(100, 4).tolist() == [0, 33, 66, 99]
    many = arrays(
        score_step=range(10), score_by=[0] * 10, score_count=[1] * 10, score_pos=[2] * 10, rank=range(10, 110, 10)
    )
    monkeypatch.setattr(page, "RANKS", 8 * N)
    _, got = page.data(Trace(file.head, 0, PROMPT, many), None)
    assert got["snapshotStep"].tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    assert got["rank"].reshape(8, N)[:, 2].tolist() == [10, 20, 40, 50, 60, 70, 90, 100]


FAMILY = [
    "Facts (mod 100): ",
    "zot = ",
    "3",
    "; led = zot + 4. Find led",
    ".\n",
    "First, led. led = zot + 4",
    ", zot = ",
    "3",
    " is given",
    ".\n",
    "Then led = zot + 4 = 3 + 4",
    " = 7",
    ".\n",
    "I find led = 7, so the answer is \\boxed{7}",
    ".",
    "\n",
]


def of_family(path: Path) -> File:
    """A problem with three statements, which begin at tokens 5, 10 and 13. All heads lose token 2 at step 4."""
    lost = {
        "evict_step": [4] * 4,
        "evict_unit": range(4),
        "evict_pos": [2] * 4,
        "evict_by": [0] * 4,
        "evict_score": [0] * 4,
    }
    return read(write(path, arrays(FAMILY, **lost)))


def test_what_later_statements_need(file: File, tmp_path: Path) -> None:
    """By hand. Where the prompt holds no question of a family nothing is known."""
    about, got = page.data(of_family(tmp_path / "trace").traces[0], None)
    found = {p: [] for p in range(N)}
    for p in range(N):
        for i in range(got["needStart"][p], got["needStart"][p + 1]):
            found[p].append((int(got["needAt"][i]), about["needs"][got["needWhat"][i]]))
    parts = ("left led", "op led", "right led")
    assert {p: needs for p, needs in found.items() if needs} == {
        2: [(5, "plan: value zot"), (10, "compute: value zot")],
        3: [
            *((5, f"plan: {x}") for x in (*parts, "target led")),
            *((10, f"compute: {x}") for x in parts),
            (13, "answer: target led"),
        ],
        5: [*((10, f"compute: {x}") for x in ("goal led", *parts)), (13, "answer: target led")],
        7: [(10, "compute: value zot")],
        11: [(13, "answer: value led")],
    }
    about, got = page.data(file.traces[0], None)
    assert about["needs"] == []
    assert got["needStart"].tolist() == [0] * (N + 1)


def cut(trace: Trace, steps: int, **changes: list[int]) -> Trace:
    """The first steps of a trace without evictions. changes: of its arrays."""
    texts = TEXTS[: PROMPT + steps]
    gone = {name: [] for name in arrays() if name.startswith("evict")}
    return Trace(trace.head, 0, PROMPT, arrays(texts, **gone, **changes))


@pytest.mark.parametrize(
    ("ids", "steps", "want"),
    [
        (range(N), STEPS, 0),
        ([*range(PROMPT), 99, *range(PROMPT + 1, N)], STEPS, 1),
        ([*range(PROMPT + 4), 99, 98, *range(PROMPT + 6, N)], STEPS, 5),
        (range(N - 2), STEPS - 2, STEPS - 1),
        ([99, *range(1, N)], STEPS, None),
    ],
    ids=["equal", "the first token", "the first of two", "it ends before", "another prompt"],
)
def test_where_a_text_departs(file: File, ids: list[int], steps: int, want: int | None) -> None:
    other = cut(file.traces[0], steps, ids=list(ids))
    columns = [page.Column(file, 0), page.Column(File(file.head, {0: other}, {}), 0)]
    assert page.departure(*columns) == want
    assert page.departure(*columns[::-1]) == want


def test_nobody_knows_how_an_interrupted_text_goes_on(file: File) -> None:
    """It departs from another text only if a token differs."""
    whole = page.Column(file, 0)
    for ids, want in ((range(N - 2), 0), ([*range(N - 3), 99], STEPS - 2)):
        broken = page.Column(File(file.head, {0: cut(file.traces[0], STEPS - 2, ids=list(ids))}, None), 0)
        assert page.departure(whole, broken) == want
        assert page.departure(broken, whole) == want


def test_what_a_trace_holds_in_words(file: File, tmp_path: Path) -> None:
    assert page.holds(file.traces[0]) == "holds 0.4 KiB at the end, 39.6 % of a full cache's"
    none = {name: [] for name in arrays()}
    none |= {"ids": [1], "pieces": [1], "text": [65], "budget_step": [0], "budget": [-1] * 4}
    assert page.holds(read(write(tmp_path / "trace", arrays(**none))).traces[0]) == ""


def test_what_becomes_of_a_text_is_told_to_the_page() -> None:
    outcome = page.Outcome(right=False, found="x" * 500, answer="7", ended="cut off")
    assert outcome.shown() == {"word": "wrong", "found": "x" * 200 + "…", "answer": "7", "ended": "cut off"}
    assert [page.Outcome(right, None, "", "").word for right in (True, False, None)] == [
        "right",
        "wrong",
        "not graded",
    ]


def test_formats_in_words() -> None:
    for name, want in [
        ("plain", "full precision"),
        ("ternary:group=16/ternary:group=16", "ternary, 2 bits (2.5 with scales)"),
        ("nvfp4:group=16", "nvfp4, 4 bits (4.5 with scales)"),
        ("int2:by=token,group=32/int4", "keys int2, 2 bits (3 with scales), values int4, 4 bits (6 with scales)"),
        ("fp8", "fp8, 8 bits"),
        ("tq2", "tq2, 2 bits"),
        ("<b>new</b>", "<b>new</b>"),
    ]:
        assert page.stored(name) == want


def test_titles_do_not_turn_the_direction_of_writing(file: File) -> None:
    html = page.side_by_side([page.Column(file, 0, "a\u202eb<i>"), page.Column(file, 0, "c")])
    assert "<title>minithink trace: a\ufffdb&lt;i&gt; | c</title>" in html
    assert "<h1>minithink trace: <bdi>a\ufffdb&lt;i&gt;</bdi> | <bdi>c</bdi></h1>" in html
    assert "\u202e" not in html


# -- in a browser


@pytest.fixture(scope="module")
def path(file: File, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "trace.html"
    path.write_text(page.render(file, 0), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Page, path: Path) -> Iterator[Page]:
    """The page, opened anew; it may neither complain nor ask for anything."""
    browser.driver.get_log("browser")
    browser.open(path)
    yield browser
    assert browser.driver.get_log("browser") == []
    assert browser.requests() == []


@needs_browser
def test_the_text_is_the_tokens(opened: Page) -> None:
    """Escaped: what looks like markup is text, and nothing of it ran."""
    spans = opened.js("return [...document.querySelectorAll('#text span')].map((e) => e.textContent)")
    assert spans == TEXTS
    assert opened.js(
        "return [typeof window.hacked, document.querySelectorAll('#text img, #text script').length]"
    ) == [
        "undefined",
        0,
    ]
    lines = opened.js("return [...document.querySelectorAll('#text > div')].map((e) => e.textContent)")
    assert lines == ["".join(TEXTS[:6]), "".join(TEXTS[6:9]), TEXTS[9], "".join(TEXTS[10:])]
    assert opened.driver.title == "minithink trace: first + second, sequence 0"
    about = opened.text("about")
    assert "model <script>window.hacked = 1</script>" in about
    assert "5 prompt tokens, 11 generated · 2 layers × 2 KV heads · recording took 0.25 s for 11 steps" in about
    assert opened.js("return document.getElementById('notice').hidden")


def shown(trace: Trace, step: int, colour: Callable[[int, int], str]) -> list[str]:
    """The classes that tokens should have. colour: of (position, heads that keep it)."""
    out = []
    for p, text in enumerate(TEXTS):
        heads = int(trace.kept(step)[:, p].sum())
        name = colour(p, heads) if p < PROMPT + step else "future"
        gone = " gone" if p < PROMPT + step and not heads else ""
        out.append(name + gone + (" nl" if text == "\n" else ""))
    return out


@needs_browser
def test_the_slider_goes_through_time(opened: Page, file: File) -> None:
    """Colours, bytes, tokens kept and budgets of every step."""
    trace = file.traces[0]
    for step in (11, 0, 1, 3, 7, 10, 11):
        opened.seek(step)
        assert opened.now == f"{step} of 11 tokens"
        assert opened.classes() == shown(trace, step, lambda p, heads: f"l{2 * heads}" if heads else "")
        assert opened.cells("map") == [str(x) for x in trace.kept(step).sum(1)]
        total, full = trace.ledger[step].sum(), 64 * (PROMPT + step)
        said = opened.text("held")
        assert said.startswith(
            f"{total / 1024:.1f} KiB, {100 * total / full:.0f} % of a full cache's {full / 1024:.1f} KiB"
        )
        budgets = "7 to 9" if step >= 4 else "none to 9"
        assert opened.text("budget") == f"of {PROMPT + step} tokens; budgets {budgets}"
        assert opened.js("return document.getElementById('time').getAttribute('aria-valuetext')") == (
            f"{step} of 11 generated tokens"
        )
    x = [float(opened.js("return document.querySelector('.cursor').getAttribute('x1')"))]
    opened.seek(0)
    x.append(float(opened.js("return document.querySelector('.cursor').getAttribute('x1')")))
    assert x == [396, 4]


@needs_browser
def test_the_page_opens_at_the_beginning(browser: Page, path: Path) -> None:
    """It plays at once, unless the system asks for less motion."""
    playing = "return document.getElementById('play').getAttribute('aria-pressed')"
    browser.open_at_beginning(path)
    assert browser.now == "0 of 11 tokens"
    assert [name.split()[0] for name in browser.classes()[PROMPT:]] == ["future"] * STEPS
    assert browser.js(playing) == "false"
    prefer(browser.driver, motion="no-preference")
    try:
        browser.open_at_beginning(path)
        browser.wait("document.getElementById('now').textContent === '11 of 11 tokens'")
        browser.wait("document.getElementById('play').textContent === 'Play'")
        assert browser.js(playing) == "false", "it stops at the end"
    finally:
        prefer(browser.driver)


@needs_browser
def test_following_scrolls_the_text_alone(browser: Page, tmp_path: Path) -> None:
    """The newest token is in view, and the page stays where its reader is."""
    texts = [*TEXTS[:PROMPT], *["line\n"] * 200]
    plain = {name: [] for name in arrays() if name.startswith("evict")}
    narrow = {"width": 500, "height": 400, "deviceScaleFactor": 1, "mobile": False}
    path = tmp_path / "page.html"
    path.write_text(page.render(read(write(tmp_path / "trace", arrays(texts, **plain))), 0), encoding="utf-8")
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    browser.open_at_beginning(path)
    browser.js("scrollTo(0, document.documentElement.scrollHeight)")
    before = browser.js("return scrollY")
    assert before > 500
    code = """const box = document.getElementById("text").getBoundingClientRect();
        const token = document.querySelectorAll("#text span")[arguments[0]].getBoundingClientRect();
        return token.top >= box.top && token.bottom <= box.bottom"""
    try:
        for step in (150, 200, 20):
            browser.seek(step)
            assert browser.js(code, PROMPT + step - 1), step
            assert browser.js("return scrollY") == before
        browser.js("document.getElementById('follow').checked = false")
        browser.seek(200)
        assert not browser.js(code, PROMPT + 199)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


TURNED = ["Q: ", "one\u202etwo", "\u2069", "?", "\n", "שלום ", "עולם", " 12", "\n", "three", " four", "\n"]


@needs_browser
def test_other_directions_of_writing_stay_in_their_line(browser: Page, tmp_path: Path) -> None:
    """A line of Hebrew runs from right to left.

    Marks that would turn the rest are shown as U+FFFD, wherever a text or a name of the trace is shown.
    """
    plain = {name: [] for name in arrays() if name.startswith("evict")}
    head = {"policies": ["a\u202eb", "x"], "about": {"model": "c\u2067d"}}
    file = read(write(tmp_path / "trace", arrays(TURNED, **plain), head=head))
    outcome = page.Outcome(right=False, found="e\u202ef", answer="g\u202eh", ended="")
    path = tmp_path / "page.html"
    path.write_text(page.side_by_side([page.Column(file, 0, "", outcome), page.Column(file, 0)]), encoding="utf-8")
    browser.open(path)
    code = "return [...document.querySelectorAll('#text > div')].map((e) => getComputedStyle(e).direction)"
    assert browser.js(code) == ["ltr", "rtl", "ltr"]
    spans = browser.js("return [...document.querySelectorAll('#text span')].map((e) => e.textContent)")
    assert spans == ["Q: ", "one\ufffdtwo", "\ufffd", *TURNED[3:]]
    code = """const left = (p) => document.querySelectorAll("#text span")[p].getBoundingClientRect().left;
        return [left(5) > left(6), left(6) > left(7), left(9) < left(10)]"""
    assert browser.js(code) == [True, True, True], "words of Hebrew stand in their own order"
    browser.point(1)
    assert "text\none\ufffdtwo" in browser.text("token")
    assert browser.text("outcome") == "wrong: e\ufffdf, and g\ufffdh is right"
    assert not browser.js("return /[\\u202a-\\u202e\\u2066-\\u2069]/.test(document.body.innerText + document.title)")
    isolated = browser.js(
        "return [...document.querySelectorAll('#name, #outcome, #about')].every((e) => e.querySelector('bdi'))"
    )
    assert isolated


@needs_browser
def test_bytes_have_a_scale_of_their_own(browser: Page, tmp_path: Path) -> None:
    """The picture is as high as the most bytes of the trace, though a full cache has a hundred times as many."""
    file = read(write(tmp_path / "trace", arrays(), head={"full_bytes": 6400}))
    path = tmp_path / "page.html"
    path.write_text(page.render(file, 0), encoding="utf-8")
    browser.open(path)
    code = """return Math.min(...[...document.querySelectorAll("#chart polygon")].map(
        (e) => Math.min(...e.getAttribute("points").split(" ").map((point) => Number(point.split(",")[1])))))"""
    assert browser.js(code) == 14
    said = browser.js("return [...document.querySelectorAll('#chart text')].map((e) => e.textContent)")
    assert said[:2] == ["at most 0.4 KiB", "a full cache at the end (dashed): 100.0 KiB"]
    assert browser.js("return document.querySelectorAll('#chart .full').length") == 0, "it is never in the picture"
    path.write_text(page.render(read(write(tmp_path / "trace", arrays())), 0), encoding="utf-8")
    browser.open(path)
    end = browser.js(
        "const e = document.querySelector('#chart .full'); return ['x2', 'y2'].map((k) => Number(e.getAttribute(k)))"
    )
    ratio = 405 / 64 - PROMPT
    assert end == pytest.approx([4 + 392 * ratio / STEPS, 14], abs=0.01), "it leaves the picture at its top"


@needs_browser
def test_every_colour(opened: Page, file: File) -> None:
    trace = file.traces[0]
    names = opened.js("return [...document.getElementById('mode').options].map((e) => e.textContent)")
    assert names == ["heads that keep it", "thought type", "sentence", "score", "held when thinking ends"]
    opened.colour("sentence")
    assert opened.classes() == shown(trace, 11, lambda p, _: f"c{1 + trace.sentences[p] % 6}")
    opened.colour("thought")
    want = ["c0"] * PROMPT + [f"c{1 + t // 2 % 2}" for t in range(1, STEPS + 1)]
    assert opened.classes() == shown(trace, 11, lambda p, _: want[p])
    assert opened.text("legend").split("\n") == ["prompt", "<b>slow</b>", "fast", "kept by none"]
    opened.colour("score")
    level = {2: "l8", 6: "l1", 7: "l5"}
    assert opened.classes() == shown(trace, 11, lambda p, heads: level.get(p, "") if heads else "")
    opened.seek(3)
    assert opened.classes() == shown(trace, 3, lambda p, heads: ""), "before the first snapshot"
    opened.colour("heads")
    assert opened.text("legend").startswith("kept by all 4 heads")


@needs_browser
def test_what_is_needed_later(browser: Page, tmp_path: Path) -> None:
    """Darker where more needs are to come, orange where no head keeps the token."""
    path = tmp_path / "page.html"
    path.write_text(page.render(of_family(tmp_path / "trace"), 0), encoding="utf-8")
    browser.open(path)
    browser.colour("needed")
    assert browser.js("return document.getElementById('mode').selectedOptions[0].textContent") == "needed later"

    def classes(step: int) -> dict[int, str]:
        browser.seek(step)
        found = [" ".join(x for x in name.split() if x not in ("nl", "chosen")) for name in browser.classes()]
        return {p: name for p, name in enumerate(found[: PROMPT + step]) if name}

    assert classes(0) == {2: "l2", 3: "l8"}
    assert classes(3) == {2: "l1", 3: "l4", 5: "l5", 7: "l1"}
    assert classes(5) == {2: "c6 gone", 3: "l4", 5: "l5", 7: "l1"}
    browser.point(2)
    assert "needed\nby 1 of 2 needs to come; next by token 10, compute: value zot" in browser.text("token")
    assert classes(6) == {2: "gone", 3: "l1", 5: "l1"}, "the statement has begun"
    assert "needed\nby 0 of 2 needs to come\n" in browser.text("token")
    assert classes(8) == {2: "gone", 3: "l1", 5: "l1", 11: "l1"}
    assert classes(11) == {2: "gone"}
    browser.point(1)
    assert "needed" not in browser.text("token")
    assert browser.text("legend").startswith("would do for 8 needs to come, or more")
    assert browser.driver.get_log("browser") == []


def holdings(path: Path, thinks: list[int]) -> File:
    """Tokens 5, 6, 7, … are evicted by 4, 3, 1 and 2 heads at the steps 6, 8, 9 and 10; token 0 by all at step 7."""
    lost = [(5, 6, 4), (0, 7, 4), (6, 8, 3), (7, 9, 1), (8, 10, 2)]
    rows = [(pos, step, unit) for pos, step, heads in lost for unit in range(heads)]
    gone = {
        "evict_pos": [row[0] for row in rows],
        "evict_step": [row[1] for row in rows],
        "evict_unit": [row[2] for row in rows],
        "evict_by": [0] * len(rows),
        "evict_score": [np.nan] * len(rows),
    }
    return read(write(path, arrays(thinks=thinks, **gone)))


@needs_browser
def test_what_is_held_when_thinking_ends(browser: Page, tmp_path: Path) -> None:
    """The colour is that of the step of `</think>`, wherever the slider is. Prompt and answer tokens have none."""
    path = tmp_path / "page.html"
    path.write_text(page.render(holdings(tmp_path / "trace", [1] * 9 + [0] * 3), 0), encoding="utf-8")
    browser.open(path)
    browser.colour("ended")

    def classes(step: int) -> list[str]:
        browser.seek(step)
        return [" ".join(x for x in name.split() if x not in ("nl", "chosen")) for name in browser.classes()]

    want = [""] * PROMPT + ["gone", "l2", *["l8"] * 6] + [""] * 3
    for step in (11, 8, 4, 0):
        assert classes(step) == want[: PROMPT + step] + ["future"] * (STEPS - step), step
    legend = "thinking tokens: held by all 4 heads when thinking ends (step 8)"
    assert browser.text("legend").split("\n") == [legend, "by half", "by few", "by none"]
    browser.seek(11)
    for position, held in ((6, 1), (7, 4)):
        browser.point(position)
        assert f"kept\nby {[1, 3][position - 6]} of 4 heads\n" in browser.text("token")
        assert f"thinking ends\nkept by {held} of 4 heads (step 8)\n" in browser.text("token")
    for position in (0, 14):
        browser.point(position)
        assert "thinking ends" not in browser.text("token"), "no thinking token"


@needs_browser
def test_thinking_that_does_not_end(browser: Page, tmp_path: Path) -> None:
    """The colour is that of the last step, and the page says so. Without thinking tokens there is no such colour."""
    path = tmp_path / "page.html"
    endless = holdings(tmp_path / "trace", [1] * 12)
    silent = holdings(tmp_path / "other", [1] + [0] * 11)
    path.write_text(page.render(endless, 0), encoding="utf-8")
    browser.open(path)
    browser.colour("ended")
    browser.seek(9)
    got = [name.replace(" nl", "").strip() for name in browser.classes()]
    assert got == [""] * PROMPT + ["gone", "l2", "l6", "l4", *["l8"] * 5] + ["future"] * 2
    legend = "thinking tokens: held by all 4 heads at the last step, for there is no answer (step 11)"
    assert browser.text("legend").split("\n")[0] == legend
    browser.point(8)
    assert "last step\nkept by 2 of 4 heads (step 11)" in browser.text("token")
    path.write_text(page.render(silent, 0), encoding="utf-8")
    browser.open(path)
    assert browser.js("return [...document.getElementById('mode').options].map((e) => e.value)")[-1] == "score"
    path.write_text(page.render(silent, 0, [(endless, 0)]), encoding="utf-8")
    browser.open(path)
    browser.colour("ended")
    assert browser.text("legend").split("\n")[0] == "there are no thinking tokens"
    assert browser.text("legend-1").split("\n")[0] == legend
    assert browser.driver.get_log("browser") == []


@needs_browser
def test_budgets_over_time(opened: Page, browser: Page, tmp_path: Path) -> None:
    """A rectangle for each head and change, in a stronger colour where the budget is larger; none without a budget.
    The cells name the budget of the step that is shown."""
    code = """return [...document.querySelectorAll("#budgets rect")].map((e) =>
        ["x", "y", "width", "fill-opacity"].map((key) => Number(e.getAttribute(key))))"""
    at = {step: 46 + 350 * step / STEPS for step in (0, 4, STEPS)}
    got = opened.js(code)
    want = [(at[0], y, at[4] - at[0], 1) for y in (5, 12, 17)]  # the first head has no budget yet
    want += [(at[4], y, at[STEPS] - at[4], s) for y, s in ((0, 0.12), (5, 1), (12, 1), (17, 1))]
    assert [tuple(row) for row in got] == [pytest.approx(row, abs=0.01) for row in want]
    names = opened.js("return [...document.querySelectorAll('#budgets text')].map((e) => e.textContent)")
    assert names == ["layer 0", "layer 1"]
    said = "2 rows in a layer, one for each head; a stronger colour is a larger budget, 7 to 9 tokens"
    assert opened.text("moved") == said
    titles = "return [...document.querySelectorAll('#map td')].map((e) => e.title)"
    assert opened.js(titles) == ["budget 7"] + ["budget 9"] * 3
    opened.seek(3)
    assert opened.js(titles) == ["no budget"] + ["budget 9"] * 3
    x = opened.js("return document.querySelector('#budgets .cursor').getAttribute('x1')")
    assert float(x) == pytest.approx(46 + 350 * 3 / STEPS)
    opened.js(
        """const svg = document.getElementById("budgets"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointerdown", { clientX: box.left + box.width * arguments[0] / 400 }))""",
        46 + 350 * 2 / STEPS,
    )
    opened.settle()
    assert opened.now == "2 of 11 tokens"

    def drawn(name: str, changes: int, budget: list[int], **head: Any) -> list[Any]:
        made = arrays(budget_step=[i * STEPS // changes for i in range(changes)], budget=budget)
        path = tmp_path / f"{name}.html"
        path.write_text(page.render(read(write(tmp_path / name, made, head=head)), 0), encoding="utf-8")
        browser.open(path)
        return list(browser.js(code))

    assert drawn("even", 2, [9] * 4 + [7] * 4) == []
    assert browser.js("return document.getElementById('moves').hidden"), "equal budgets need no picture"
    many = drawn("many", 100, list(range(400)))
    assert len(many) == 4 * 64, "at most so many changes are drawn"
    assert many[0][3] == 0.12
    assert many[-1][3] == 1, "the last change is among them"


@needs_browser
def test_keys(opened: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    for key, times, now in [
        (Keys.HOME, 1, 0),
        (Keys.ARROW_RIGHT, 3, 3),
        (Keys.ARROW_LEFT, 1, 2),
        (Keys.ARROW_LEFT, 4, 0),
        (Keys.END, 1, 11),
        (Keys.ARROW_RIGHT, 1, 11),
        (Keys.PAGE_UP, 2, 9),
        (Keys.PAGE_DOWN, 1, 10),
    ]:
        opened.press(key, times)
        assert opened.now == f"{now} of 11 tokens", key
    opened.press(".", 3)
    assert "position\n2, in the prompt" in opened.text("token")
    opened.press(",")
    assert "position\n1, in the prompt" in opened.text("token")
    opened.press(Keys.END)
    opened.press(" ")  # from the beginning to the end in a moment
    assert opened.js("return document.getElementById('play').getAttribute('aria-pressed')") == "true"
    opened.wait("document.getElementById('play').textContent === 'Play'")
    opened.settle()
    assert opened.now == "11 of 11 tokens"
    opened.press(Keys.HOME)
    opened.js("document.getElementById('play').focus()")
    opened.press(" ")  # a button's own key
    opened.wait("document.getElementById('now').textContent === '11 of 11 tokens'")


@needs_browser
def test_keys_scroll_nothing(opened: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    metrics = {"width": 800, "height": 300, "deviceScaleFactor": 1, "mobile": False}
    opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert opened.js("return document.documentElement.scrollHeight") > 600
        opened.press(Keys.END)
        opened.press(Keys.PAGE_DOWN, 2)
        assert opened.js("return scrollY") == 0
    finally:
        opened.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_browser
def test_a_token_tells_its_story(opened: Page) -> None:
    opened.point(0)
    said = opened.text("token")
    assert "text\nIs␣" in said
    assert "position\n0, in the prompt; id 0" in said
    assert "part\nprompt, <b>slow</b>; sentence 0" in said
    assert "kept\nby 0 of 4 heads" in said
    assert "by first from 1 head, step 3; score −1" in said
    assert "by second from 3 heads, step 11; score −∞ to ∞" in said
    assert opened.cells("token") == ["11", "11", "11", "3"]
    opened.seek(5)
    assert "kept\nby 3 of 4 heads" in opened.text("token")
    assert opened.cells("token") == ["kept", "kept", "kept", "3"]
    opened.point(6)
    said = opened.text("token")
    assert "text\n<img␣src=x␣onerror=hacked()>" in said
    assert "position\n6, generated token 2; id 6" in said
    assert "score\nabove 0 % of the tokens (step 4, mean over heads)" in said
    assert "evicted" not in said
    opened.point(7, click=True)
    opened.point(6)
    assert "position\n7" in opened.text("token"), "a click keeps a token"
    assert [i for i, name in enumerate(opened.classes()) if "chosen" in name] == [7]
    opened.point(7, click=True)
    opened.point(6)
    assert "position\n6" in opened.text("token"), "until the next one"
    opened.seek(0)
    assert "kept\nnot there yet" in opened.text("token")


@needs_browser
def test_bits_of_a_token(opened: Page, browser: Page, tmp_path: Path) -> None:
    """How it is stored at the step that is shown, in the heads that keep it."""
    plain = "stored as\nfull precision: 4 heads"
    mixed = "stored as\nfull precision: 3 heads; int4, 4 bits (6 with scales): 1 head"
    opened.point(1)
    for step, want in ((1, plain), (2, mixed)):
        opened.seek(step)
        assert want in opened.text("token")
    opened.seek(11)
    assert "stored as\nfull precision: 2 heads; int4, 4 bits (6 with scales): 1 head" in opened.text("token")
    opened.point(0)
    assert "stored as" not in opened.text("token"), "no head keeps it"
    opened.point(7)
    assert "stored as\nint4, 4 bits (6 with scales): 3 heads" in opened.text("token"), "of its thought type"
    path = tmp_path / "page.html"
    path.write_text(page.render(read(write(tmp_path / "trace", arrays(), head={"buffer": 4})), 0), encoding="utf-8")
    browser.open(path)
    browser.point(7)
    assert "stored as\nfull precision, until its group is full: 3 heads" in browser.text("token")


@needs_browser
def test_the_chart_is_a_slider_too(opened: Page) -> None:
    from selenium.webdriver import ActionChains

    svg = opened.driver.find_element("id", "chart")
    ActionChains(opened.driver).move_to_element(svg).click().perform()
    opened.settle()
    assert opened.now in ("5 of 11 tokens", "6 of 11 tokens")
    assert opened.text("kinds").split() == ["payload", "tables", "state", "observations"]
    assert opened.js("return document.querySelectorAll('#chart polygon').length") == 4


@needs_browser
def test_labels_and_roles(opened: Page) -> None:
    tree = opened.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    # Chromium 150 leaves the space between a label and its field in the name.
    named = {(n["role"]["value"], n["name"]["value"].strip()) for n in tree if n.get("role") and n.get("name")}
    for role, name in [
        ("slider", "Generated tokens"),
        ("button", "Play"),
        ("combobox", "Colour"),
        ("checkbox", "follow"),
        ("region", "Tokens: comma and full stop go through them"),
        ("heading", "KV bytes held"),
        ("rowheader", "layer 1"),
        ("group", "Time and colours"),
    ]:
        assert (role, name) in named
    assert any(role in ("image", "img") and name.startswith("KV bytes held") for role, name in named)
    assert opened.js("return document.documentElement.lang") == "en"


def contrast(first: list[float], second: list[float]) -> float:
    """WCAG's contrast of two colours, 0 to 255."""

    def luminance(rgb: list[float]) -> float:
        parts = [x / 255 / 12.92 if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in rgb]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(scheme: str, opened: Page) -> None:
    """In the dark too: every colour leaves a contrast of at least 4.5 to its text (3.5 where no head keeps it)."""
    prefer(opened.driver, scheme)
    code = """
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        const rgb = (...colours) => { canvas.clearRect(0, 0, 1, 1);
          for (const c of colours) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); }
          return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
        const paper = getComputedStyle(document.body).backgroundColor, out = {};
        for (const name of arguments[0]) {
          const span = document.querySelector("#text span"), style = getComputedStyle(span);
          span.className = name;
          out[name] = [rgb(paper, style.backgroundColor), rgb(paper, style.backgroundColor, style.color)];
        }
        return [rgb(paper), out]"""
    hues = [f"c{i}" for i in range(8)]
    names = ["", *(f"l{i}" for i in range(1, 9)), *hues, "gone", *(f"{name} gone" for name in hues)]
    paper, colours = opened.js(code, names)
    assert (sum(paper) < 150) == (scheme == "dark")
    for name, (ground, ink) in colours.items():
        assert contrast(ground, ink) >= (3.5 if "gone" in name else 4.5), (scheme, name, ground, ink)
    assert len({tuple(ground) for ground, _ in colours.values()}) > 20
    prefer(opened.driver)


@needs_browser
def test_narrow_windows(opened: Page) -> None:
    """One column, and nothing that must be scrolled sideways."""

    def wide(width: int) -> list[float]:
        metrics = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
        opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        code = """const left = (e) => document.querySelector(e).getBoundingClientRect().left;
            const page = document.documentElement;
            return [page.scrollWidth - page.clientWidth, left("aside") - left("#reading")]"""
        return list(opened.js(code))

    try:
        assert wide(340) == [0, 0]
        assert wide(1280)[1] > 400
    finally:
        opened.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_browser
def test_many_heads_scroll_in_their_table(browser: Page, tmp_path: Path) -> None:
    """A table that is wider than the panel scrolls by itself; the page does not."""
    wide = arrays(budget_step=[0], budget=[9] * 32)
    path = tmp_path / "page.html"
    path.write_text(page.render(read(write(tmp_path / "trace", wide, head={"kv_heads": 16})), 0), encoding="utf-8")
    browser.open(path)
    code = "const e = document.querySelector(arguments[0]); return e.scrollWidth - e.clientWidth"
    assert browser.js(code, "html") == 0
    assert browser.js(code, ".wide") > 0


@needs_browser
def test_what_was_interrupted_says_so(browser: Page, tmp_path: Path) -> None:
    """Without thought types tokens are coloured by stage; where all share a table, so do the cells."""
    plain = {"scope": "sequence", "thoughts": [0], "thought_names": []}
    changed = {
        "thought": [0] * 12,
        "evict_unit": [0] * 9,
        "evict_pos": range(9),
        "evict_step": range(3, 12),
        "evict_by": [0] * 9,
        "evict_score": [np.nan] * 9,
        "move_unit": [0],
        "budget_step": [0],
        "budget": [-1],
        "score_step": [],
        "score_by": [],
        "score_count": [],
        "score_pos": [],
        "rank": [],
    }
    file = read(write(tmp_path / "trace", arrays(**changed), head=plain, done=False))
    path = tmp_path / "page.html"
    path.write_text(page.render(file, 0), encoding="utf-8")
    browser.open(path)
    assert "was interrupted" in browser.text("notice")
    names = browser.js("return [...document.getElementById('mode').options].map((e) => e.textContent)")
    assert names == ["heads that keep it", "stage", "sentence", "held when thinking ends"]
    browser.colour("thought")
    stages = ["c0"] * PROMPT + ["c1"] * 8 + ["c2"] * 3
    assert browser.classes() == shown(file.traces[0], 11, lambda p, _: stages[p])
    assert browser.cells("map") == ["7"]
    assert browser.text("budget") == "of 16 tokens; no budget"
    browser.press(".")
    assert "by first from 4 heads, step 3" in browser.text("token")
    assert "score" not in browser.text("token")
    browser.press(".", 12)
    assert "kept\nby 4 of 4 heads" in browser.text("token"), "they share a table"
    none = {name: [] for name in arrays()}
    none |= {"ids": [1], "pieces": [1], "text": [65], "budget_step": [0], "budget": [-1] * 4}
    path.write_text(page.render(read(write(tmp_path / "trace", arrays(**none))), 0), encoding="utf-8")
    browser.open(path)
    assert browser.now == "0 of 0 tokens"
    assert browser.driver.get_log("browser") == []


@pytest.fixture
def beside(browser: Page, file: File, tmp_path: Path) -> Iterator[Page]:
    """Two traces with equal prompts: the second ends after 4 tokens, and knows neither scores nor thought types."""
    plain = {"policies": ["<i>other</i>"], "scope": "sequence", "thoughts": [0], "thought_names": []}
    changed = {
        "evict_unit": [0],
        "evict_pos": [1],
        "evict_step": [2],
        "evict_by": [0],
        "evict_score": [np.nan],
        "thought": [0] * 5,
        "move_unit": [0],
        "budget_step": [0],
        "budget": [6],
        "score_step": [],
        "score_by": [],
        "score_count": [],
        "score_pos": [],
        "rank": [],
    }
    other = read(write(tmp_path / "trace", arrays(TEXTS[:9], **changed), head=plain, done=False))
    path = tmp_path / "page.html"
    path.write_text(page.render(file, 0, [(other, 0)]), encoding="utf-8")
    browser.driver.get_log("browser")
    browser.open(path)
    yield browser
    assert browser.driver.get_log("browser") == []
    assert browser.requests() == []


def classes_of(of: Page, name: str) -> list[str]:
    return list(of.js("return [...document.querySelectorAll(`#${arguments[0]} span`)].map((e) => e.className)", name))


@needs_browser
def test_several_traces_stand_side_by_side(beside: Page, file: File) -> None:
    """Each trace has its own text, bytes, heads and notice; nothing of it is markup."""
    assert beside.text("name") == "first + second, sequence 0"
    assert beside.text("name-1") == "<i>other</i>, sequence 0"
    for name, texts in (("text", TEXTS), ("text-1", TEXTS[:9])):
        code = "return [...document.querySelectorAll(`#${arguments[0]} span`)].map((e) => e.textContent)"
        assert beside.js(code, name) == texts
    assert beside.js("return typeof window.hacked") == "undefined"
    assert "5 prompt tokens, 11 generated" in beside.text("about")
    assert "5 prompt tokens, 4 generated" in beside.text("about-1")
    assert beside.js("return document.getElementById('notice').hidden")
    assert "was interrupted" in beside.text("notice-1")
    assert len(beside.cells("map")) == 4
    assert beside.cells("map-1") == ["8"]
    assert "budget 6" in beside.text("budget-1")
    ids = beside.js("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    code = """return [...document.querySelectorAll("[aria-labelledby]")].every(
        (e) => e.getAttribute("aria-labelledby").split(" ").every((id) => e.parentElement.closest("#trace, #trace-1")
          .contains(document.getElementById(id))))"""
    assert beside.js(code), "labels are those of the own column"
    left = [
        beside.js("return document.getElementById(arguments[0]).getBoundingClientRect().left", name)
        for name in ("trace", "trace-1")
    ]
    assert left[1] > left[0] + 300


@needs_browser
def test_what_became_of_each_text(browser: Page, file: File, tmp_path: Path) -> None:
    """The verdict, the bytes, and where a text departs: a mark in the text, and a button that goes there."""
    ids = [*range(PROMPT + 3), 99, *range(PROMPT + 4, N)]
    other = File(file.head, {0: cut(file.traces[0], STEPS, ids=ids)}, {"seconds": 0, "steps": 11})
    stranger = File(file.head, {0: cut(file.traces[0], STEPS, ids=[99, *range(1, N)])}, {"seconds": 0, "steps": 11})
    columns = [
        page.Column(file, 0, "<b>full</b>", page.Outcome(right=True, found="7", answer="7", ended="")),
        page.Column(other, 0, "two", page.Outcome(right=False, found="<i>8</i>", answer="7", ended="")),
        page.Column(
            file, 0, "three", page.Outcome(right=False, found=None, answer="7", ended="cut off after 9 tokens")
        ),
        page.Column(stranger, 0, "four", page.Outcome(right=None, found=None, answer="", ended="")),
    ]
    path = tmp_path / "page.html"
    path.write_text(page.side_by_side(columns), encoding="utf-8")
    browser.open(path)
    names = ["", "-1", "-2", "-3"]
    assert [browser.text(f"name{x}") for x in names] == ["<b>full</b>", "two", "three", "four"]
    assert [browser.text(f"outcome{x}") for x in names] == [
        "right: 7",
        "wrong: <i>8</i>, and 7 is right",
        "wrong: no answer, and 7 is right (cut off after 9 tokens)",
        "not graded: no answer",
    ]
    assert [browser.text(f"departs{x}") for x in names] == [
        "the others are compared with this text",
        "departs from the text of <b>full</b> at token 4",
        "the same text as that of <b>full</b>",
        "another prompt than that of <b>full</b>",
    ]
    assert browser.text("ending") == "holds 0.4 KiB at the end, 39.6 % of a full cache's"
    for step, marked in ((11, [PROMPT + 3]), (4, [PROMPT + 3]), (3, [])):
        browser.seek(step)
        assert browser.js("return [...document.querySelectorAll('.apart')].map((e) => e.p)") == marked
    browser.driver.find_element("css selector", "#departs-1 button").click()
    browser.settle()
    assert browser.now == "4 of 11 tokens"
    assert browser.js("return [...document.querySelectorAll('.chosen')].map((e) => e.p)") == [PROMPT + 3] * 4
    code = "return arguments[0].map((x) => document.getElementById(`text${x}`).getBoundingClientRect().top)"
    assert len(set(browser.js(code, names))) == 1, "the texts begin at one height"
    assert browser.driver.get_log("browser") == []


@needs_browser
def test_one_bar_steps_through_all_traces(beside: Page, file: File) -> None:
    assert beside.now == "11 of 11 tokens"
    for step in (11, 1, 2, 4, 7):
        beside.seek(step)
        want = shown(file.traces[0], step, lambda p, heads: f"l{2 * heads}" if heads else "")
        assert classes_of(beside, "text") == want
        other = ["l8"] * min(9, PROMPT + step) + ["future"] * max(0, 4 - step)
        other[1] = "gone" if step >= 2 else "l8"
        got = [name.replace(" nl", "").strip() for name in classes_of(beside, "text-1")]
        assert got == other, step
    names = beside.js("return [...document.getElementById('mode').options].map((e) => e.textContent)")
    assert names == ["heads that keep it", "thought type", "sentence", "score", "held when thinking ends"], "any's"
    beside.seek(11)
    beside.colour("score")
    got = {name.replace(" nl", "").strip() for name in classes_of(beside, "text-1")}
    assert got == {"", "gone"}, "it knows no scores"
    beside.colour("thought")
    assert {name.split()[0] for name in classes_of(beside, "text-1")[:PROMPT]} == {"c0"}, "coloured by stage"


@needs_browser
def test_a_token_is_selected_in_all_traces(beside: Page) -> None:
    beside.point(0)
    assert "by first from 1 head" in beside.text("token")
    assert "kept\nby 4 of 4 heads" in beside.text("token-1")
    beside.press(".")
    assert "position\n1, in the prompt" in beside.text("token")
    assert "by <i>other</i> from 4 heads, step 2" in beside.text("token-1")
    beside.press(".", 9)
    assert "position\n10, generated" in beside.text("token")
    assert beside.text("token-1") == "position 10: this sequence has ended before"
    chosen = beside.js("return [...document.querySelectorAll('.chosen')].map((e) => e.p)")
    assert chosen == [10]
    beside.press(",", 2)
    chosen = beside.js("return [...document.querySelectorAll('.chosen')].map((e) => e.p)")
    assert chosen == [8, 8]


@needs_browser
def test_texts_scroll_together(beside: Page) -> None:
    """A shorter text stays at its end, and does not pull the other one back."""
    metrics = {"width": 800, "height": 100, "deviceScaleFactor": 1, "mobile": False}
    beside.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    code = """const [a, b] = ["text", "text-1"].map((id) => document.getElementById(id)), done = arguments[2];
        const leader = arguments[0] ? b : a;
        leader.dispatchEvent(new PointerEvent("pointerenter"));
        leader.scrollTop = arguments[1];
        let frames = 8; // the browser may move a text by some pixels when its lines are laid out
        const wait = () => frames-- ? requestAnimationFrame(wait)
          : done([a, b].map((e) => [e.scrollTop, e.scrollHeight - e.clientHeight]));
        wait();"""

    def scroll(which: int, to: int) -> list[list[float]]:
        return list(beside.driver.execute_async_script(code, which, to))

    try:
        (first, most), (second, less) = scroll(0, 30)
        assert most >= first > less > 0, "the second text is shorter"
        assert first == pytest.approx(30, abs=10)
        assert second == pytest.approx(less, abs=1)
        (first, _), (second, less) = scroll(0, 1)
        assert 0 < first == second <= less
        (first, _), (second, _) = scroll(1, 0)
        assert (first, second) == (0, 0)
    finally:
        beside.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
