"""Texts of traces as one picture."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.trace import picture
from minithink.trace.format import Trace, read
from tests.trace.draw import arrays, write

SVG = "{http://www.w3.org/2000/svg}"
PARTS = st.lists(st.tuples(st.text(max_size=300), st.integers(0, picture.LEVELS)), max_size=12)


@given(PARTS)
def test_lines_hold_all_of_the_text(parts: list[picture.Part]) -> None:
    """Every character once and with its shade, full lines but the last, nothing empty, no two neighbours alike."""
    found = list(picture.lines(iter(parts)))
    characters = [(c, shade) for line in found for text, shade in line for c in text]
    assert characters == [(c, shade) for text, shade in parts for c in text]
    assert all(sum(len(text) for text, _ in line) == picture.COLUMNS for line in found[:-1])
    for line in found:
        assert 0 < sum(len(text) for text, _ in line) <= picture.COLUMNS
        assert all(text for text, _ in line)
        assert all(a[1] != b[1] for a, b in pairwise(line))


@example(text="\ufffe\uffff\x00")
@given(text=st.text(st.characters(codec="utf-8"), min_size=1))
def test_any_text_is_valid_xml(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Also a text that XML forbids; the file of a trace holds UTF-8."""
    some = arrays()
    data = text.encode()
    sizes = np.zeros_like(some["pieces"])
    sizes[0] = len(data)
    some |= {"pieces": sizes, "text": np.frombuffer(data, np.uint8)}
    trace = read(write(tmp_path_factory.mktemp("x") / "trace", some)).traces[0]
    assert len(drawn(trace)[1]) == len(text)


def drawn(trace: Trace) -> tuple[str, list[tuple[str, float]]]:
    """The title, and each character of the text with the opacity of what lies behind it; 0: nothing."""
    root = ElementTree.fromstring(picture.render([trace]))
    first, *rows = root.iter(f"{SVG}text")
    behind = {}
    for rect in root.iter(f"{SVG}rect"):
        x, y, width = (int(rect.attrib[name]) for name in ("x", "y", "width"))
        behind |= {(x + i, y): float(rect.attrib["fill-opacity"]) for i in range(0, width, picture.WIDE)}
    out = []
    for row in rows:
        text, top = "".join(row.itertext()), int(row.attrib["y"]) - picture.SIZE
        assert int(row.attrib["textLength"]) == picture.WIDE * len(text)
        out += [(c, behind.get((picture.WIDE * (i + 1), top), 0.0)) for i, c in enumerate(text)]
    return "".join(first.itertext()), out


def test_a_token_is_the_darker_the_more_heads_keep_it(tmp_path: Path) -> None:
    """At the end of thinking; text of tokens is no markup, and holds no control characters."""
    trace = read(write(tmp_path / "trace", arrays())).traces[0]
    title, characters = drawn(trace)
    step = picture.end_of(trace)
    kept = trace.kept(step)
    assert title.startswith(
        f"first + second: after {step:,} thinking tokens, a head holds {kept.sum(1).mean():,.0f} "
    )
    shares = kept.mean(0)[: trace.prompt + step]
    texts = [text.replace("\n", "↵").replace("\x1b", "\ufffd") for text in trace.texts[: trace.prompt + step]]
    want = [(c, ceil(share * picture.LEVELS)) for text, share in zip(texts, shares, strict=True) for c in text]
    assert "".join(c for c, _ in characters) == "".join(c for c, _ in want)
    assert "<script>" in "".join(c for c, _ in characters)
    order = sorted({(shade, opacity) for (_, shade), (_, opacity) in zip(want, characters, strict=True)})
    assert len(order) == len({shade for shade, _ in order}) > 1, "one opacity a shade"
    assert [opacity for _, opacity in order] == sorted(opacity for _, opacity in order)
    assert (order[0] == (0, 0.0)) == bool((shares == 0).any())


def test_traces_stand_one_above_the_other(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "trace", arrays())).traces[0]
    one, two = (ElementTree.fromstring(picture.render([trace] * n)) for n in (1, 2))
    assert len([*two.iter(f"{SVG}text")]) == 2 * len([*one.iter(f"{SVG}text")])
    heights = [int(x.attrib["y"]) for x in two.iter(f"{SVG}text")]
    assert heights == sorted(set(heights))
    assert heights[-1] < int(two.attrib["height"]) == 2 * int(one.attrib["height"]) - picture.HIGH
