"""What is said of errors that come from elsewhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from minithink.errors import MinithinkError, reason, unwritable


def test_the_reason_of_a_file_is_in_words(tmp_path: Path) -> None:
    """The number and the path, which the sentence around it has, are left out."""
    path = tmp_path / "there is none"
    with pytest.raises(FileNotFoundError) as caught:
        path.read_text()
    assert reason(caught.value) == os.strerror(errno.ENOENT)
    error = unwritable("The page", path, caught.value, "--output")
    assert isinstance(error, MinithinkError)
    assert str(error) == (
        f"The page cannot be written to {path}: {os.strerror(errno.ENOENT)}; give another --output."
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("line 3 is no number"), "line 3 is no number"),
        (OSError("a library's own words"), "a library's own words"),
        (OSError(), "OSError"),
        (EOFError(), "EOFError"),
    ],
)
def test_the_reason_of_all_else(error: Exception, said: str) -> None:
    assert reason(error) == said
