"""Files that are replaced: whole, or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minithink.files import replace


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "x"
    replace(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    assert path.stat().st_mode & 0o777 == 0o644
    replace(path, b"\xff")
    assert path.read_bytes() == b"\xff"

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        replace(path, "other")
    assert path.read_bytes() == b"\xff"
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_a_link_leads_to_the_file(tmp_path: Path) -> None:
    path, link = tmp_path / "there" / "x", tmp_path / "link"
    replace(path, "old")
    link.symlink_to(path)
    replace(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert {p.name for p in tmp_path.iterdir()} == {"there", "link"}


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """A root user's `--output /dev/null` must not put a file in its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace(pipe, "told")
        assert os.read(reader, 9) == b"told"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        replace(tmp_path, "x")
    if Path("/dev/full").is_char_device():
        with pytest.raises(OSError, match="No space left"):
            replace(Path("/dev/full"), "x")
        assert Path("/dev/full").is_char_device()
