"""Pictures as SVG: the same for the same values, and short. Alone: pytest tests/results/test_figures.py."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minithink.results.figures import drawing, shortened

pytest.importorskip("matplotlib")


def draw(path: Path) -> str:
    with drawing(path, 3, 2) as figure:
        axes = figure.subplots()
        axes.plot([0, 1, 2], [0.123456, 0.5, 0.25], marker="o")
        axes.set_title("0.123456 of 1.000001")
    return path.read_text()


def test_a_picture_is_the_same_again_and_its_text_is_whole(tmp_path: Path) -> None:
    svg = draw(tmp_path / "a.svg")
    assert svg == draw(tmp_path / "b.svg")
    assert "0.123456 of 1.000001" in svg
    ElementTree.fromstring(svg)


def test_places_have_two_decimals_and_lines_no_indentation() -> None:
    path = '<path d="M 1.005001 -2.499999 \nL 3.100000 4 \n" style="stroke-width: 0.123456"/>'
    svg = f'<g>\n  {path}\n   <use x="7.999999"/>'
    assert shortened(svg) == (
        '<g>\n<path d="M 1.01 -2.5 \nL 3.1 4 \n" style="stroke-width: 0.123456"/>\n<use x="8"/>'
    )
    assert shortened(shortened(svg)) == shortened(svg)


def test_nothing_of_a_path_is_longer_than_it_need_be(tmp_path: Path) -> None:
    places = re.findall(r' (?:d|x|y)="([^"]*)"', draw(tmp_path / "a.svg"))
    assert places
    assert not re.search(r"\.\d{3}", " ".join(places))
