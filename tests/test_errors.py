"""What is said of errors that come from elsewhere."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.errors import (
    CONTROL,
    QUOTED,
    MinithinkError,
    alternatives,
    counted,
    escaped,
    is_disk_full,
    listed,
    named,
    quoted,
    reason,
    unwritable,
)

ROOT = Path(__file__).parent.parent
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_the_reason_of_a_file_is_in_words(tmp_path: Path) -> None:
    """The number and the path, which the sentence around it has, are left out."""
    path = tmp_path / "there is none"
    with pytest.raises(FileNotFoundError) as caught:
        path.read_text()
    assert reason(caught.value) == os.strerror(errno.ENOENT)
    assert not is_disk_full(caught.value)
    error = unwritable("The page", path, caught.value, "--output")
    assert isinstance(error, MinithinkError)
    assert str(error) == (
        f"The page cannot be written to {path}: {os.strerror(errno.ENOENT)}; give another --output."
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_on_a_full_disk_room_must_be_made(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert is_disk_full(error)
    assert str(unwritable("The page", "x", error, "--output")) == (
        f"The page cannot be written to x: {os.strerror(number)}; make room there, or give another --output."
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("line 3 is no number"), "line 3 is no number"),
        (OSError("a library's own words"), "a library's own words"),
        (ValueError("x" * 1000 + "\n"), "x" * 199 + "…"),
        (ValueError("a\n b\x1b"), r"a b\x1b"),
        (OSError(), "OSError"),
        (EOFError(), "EOFError"),
    ],
)
def test_the_reason_of_all_else(error: Exception, said: str) -> None:
    assert reason(error) == said


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@given(value=JSON)
@example(value=10**400)
@example(value=["\ud800", {"\u202e": "\x1b[31m"}])
def test_quoted_values_are_short_and_printable(value: object) -> None:
    said = quoted(value)
    assert 0 < len(said) <= QUOTED
    assert said.isprintable()
    assert len(quoted(value, 20)) <= 20


def test_huge_and_deep_values_are_quoted_too() -> None:
    assert quoted(-(10**100_000)) == "an integer of 332,193 bits"
    assert quoted(nested(50_000)) == "[[[[[...]]]]]"
    assert len(quoted(["a" * 100_000] * 1000)) == QUOTED


@pytest.mark.parametrize("value", ["one", "it's", 7, -1.5, True, None, [1, 2], {"a": [None]}, ("x",), "ü"])
def test_short_values_are_quoted_as_python_spells_them(value: object) -> None:
    assert quoted(value) == repr(value)


def test_what_is_quoted_of_long_values_is_their_beginning() -> None:
    assert quoted("abc" * 100) == "'" + ("abc" * 100)[: QUOTED - 2] + "…"
    assert quoted(10**79 + 5, 30) == "1" + "0" * 28 + "…"
    assert quoted(Path("/tmp/x")) == "'/tmp/x'", "a path is its text"


@given(name=st.text())
@example(name="a\n\x1b\u202e'\"" * 99)
def test_names_are_one_short_line(name: str) -> None:
    said = named(name, 30)
    assert len(said) <= 30
    assert said.isprintable()
    assert not name.isprintable() or len(name) > 30 or "\\" in name or "'" in name or said == name


@given(text=st.text())
@example(text="\x00\x1b[2J\x7f\x9b\u202eabc\u2066\ud800")
def test_escaped_text_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    said = escaped(text)
    assert not CONTROL.search(said)
    assert said == text or CONTROL.search(text)
    assert len(said) >= len(text)


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert listed([]) == ""


def test_escapes_say_which_character_it_was() -> None:
    assert escaped("a\x1b[31mb\u202ec\n") == r"a\x1b[31mb\u202ec" + "\n"
    assert escaped(Path("é\x07")) == r"é\x07"


def test_advice_to_install_names_packages_that_an_index_has() -> None:
    """`minithink[plots]` works in no checkout; what is named instead is a requirement of pyproject.toml."""
    known = (ROOT / "pyproject.toml").read_text()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "appendix").glob("*.md"), ROOT / "README.md"]
    for path in [*(ROOT / "minithink").rglob("*.py"), *pages]:
        text = path.read_text()
        assert "minithink[" not in text, path
        for advised in re.findall(r"pip install (?:--force-reinstall )?'([\w-]+[<>=][^']*)'", text):
            assert f'"{advised}' in known, (path, advised)


def test_the_nearest_name_is_suggested_for_an_unknown_one() -> None:
    assert alternatives("rvk", ("full", "rkv")) == "did you mean rkv? There are full, rkv"
    assert alternatives("AIME 24", ("facts", "AIME24")) == "did you mean AIME24? There are facts, AIME24"
    assert alternatives("FULL", ("full", "rkv")) == "did you mean full? There are full, rkv"
    assert alternatives(7, ("full", "rkv")) == "there are full, rkv"


def test_one_thing_is_counted_in_the_singular() -> None:
    assert [counted(n, "text") for n in (0, 1, 2, 1200)] == ["0 texts", "1 text", "2 texts", "1,200 texts"]
