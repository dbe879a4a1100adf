"""The file of a page. Alone: pytest tests/trace/test_page_file.py"""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

import pytest

from minithink.errors import MinithinkError
from minithink.trace import page_file

PAGE = "<!doctype html><title>minithink trace: x</title>"


def test_a_page_replaces_only_a_page(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    page_file.write(path, PAGE)
    page_file.write(path, PAGE + "again")
    assert path.read_text() == PAGE + "again"
    path.write_text("mine")
    with pytest.raises(MinithinkError, match="there is a file that is no page of a trace"):
        page_file.write(path, PAGE)
    assert path.read_text() == "mine"
    with pytest.raises(MinithinkError, match="The page of a trace cannot be written to"):
        page_file.write(tmp_path / "new" / "page.html" / "below", PAGE)


def test_a_place_is_refused_before_a_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking writes nothing, not even a folder."""
    new = tmp_path / "new" / "folder" / "page.html"
    page_file.check_place(new)
    page_file.check_place(Path("/dev/null"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(MinithinkError, match=r"page\.html: Not a directory; give another --output"):
        page_file.check_place(tmp_path / "file" / "below" / "page.html")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(MinithinkError, match=r"page\.html: Permission denied; give another --output"):
        page_file.check_place(new)


def test_without_a_browser_the_page_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a\x1bb.html"
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    page_file.show(path)
    assert opened == [path.as_uri()]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    page_file.show(path, ", or elsewhere")
    said = capsys.readouterr().err
    assert said.endswith("a\\x1bb.html in one yourself, or elsewhere\n")
