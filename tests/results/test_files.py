"""Files that are replaced: whole, or as they were. Files that are held: by one process at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from minithink.errors import MinithinkError
from minithink.results.files import (
    WIDTH,
    append,
    check_place,
    dumps,
    hold,
    is_held,
    loads,
    open_to_others,
    read_bytes,
    remove_held,
    replace,
)
from tests.locks import before_the_lock


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "x"
    replace(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    replace(path, b"\xff")
    assert path.read_bytes() == b"\xff"

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        replace(path, "other")
    assert path.read_bytes() == b"\xff"
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path in (circle, circle / "below"):
        with pytest.raises(OSError, match="symbolic link"):
            check_place(path)
        with pytest.raises(OSError, match="symbolic link"):
            replace(path, "x")
    assert circle.is_symlink()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_new_files_have_the_mode_that_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        replace(tmp_path / "x", "new")
        private = tmp_path / "y"
        private.touch(0o600)
        open_to_others(private)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {0o666 & ~umask}
    assert os.umask(before) == before, "reading the umask leaves it as it was"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe without a writer, and a device without an end, are refused at once."""
    path, pipe = tmp_path / "x", tmp_path / "pipe"
    path.write_bytes(b"abc")
    assert read_bytes(path) == read_bytes(path, at_most=3) == b"abc"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_bytes(path, at_most=2)
    os.mkfifo(pipe)
    for other in (pipe, Path("/dev/zero"), Path("/dev/tty")):
        with pytest.raises(OSError, match=r"no regular file|No such device"):
            read_bytes(other)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_files_of_the_system_are_read_although_their_size_is_unknown() -> None:
    if Path("/proc/self/status").exists():
        assert b"Name:" in read_bytes(Path("/proc/self/status"))
        with pytest.raises(OSError, match="larger than 5 bytes"):
            read_bytes(Path("/proc/self/status"), at_most=5)


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


def test_a_held_file_is_refused_to_others_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x"
    assert not is_held(path), "there is none"
    with hold(path) as file:
        append(file, b"one\n")
        assert is_held(path)
        with pytest.raises(MinithinkError, match=rf"^Another process is writing to {path.parent}: wait"):
            hold(path)
        append(file, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert not is_held(path)
    with hold(path) as file:
        append(file, b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_file_that_goes_before_it_is_held_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last holder removes it between another process's open and its lock: that locks a file without a name."""
    path = tmp_path / "x"
    last = hold(path)
    before_the_lock(monkeypatch, lambda: remove_held(last, path))
    with hold(path) as file:
        append(file, b"kept\n")
        assert is_held(path)
    assert path.read_bytes() == b"kept\n"


def test_a_file_goes_before_its_holder_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it went afterwards, another process could hold it by then."""
    path = tmp_path / "x"
    file = hold(path)
    unlink = Path.unlink

    def watched(self: Path, missing_ok: bool = False) -> None:
        assert is_held(path)
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    remove_held(file, path)
    assert file.closed
    assert not path.exists()


def test_json_with_numbers_that_json_does_not_know_is_refused() -> None:
    assert loads('{"a": [1, 2.5e3]}') == {"a": [1, 2500.0]}
    for text in ("NaN", "[Infinity]", '{"a": -Infinity}'):
        with pytest.raises(ValueError, match="is no number of JSON"):
            loads(text)
    with pytest.raises(ValueError, match="'-1e999' is too large"):
        loads("[-1e999]")


def test_json_has_a_line_for_what_fits_into_one() -> None:
    short = {"a": 1, "b": [1, {"c": 2}]}
    assert dumps(short) == '{"a": 1, "b": [1, {"c": 2}]}'
    long = {"plain": list(range(WIDTH)), "rows": [{"n": n, "text": "x" * 60} for n in range(4)], "end": None}
    lines = dumps(long).splitlines()
    assert lines[0] == "{"
    assert lines[2:5] == ['  "rows": [', *(f'    {{"n": {n}, "text": "{"x" * 60}"}},' for n in (0, 1))]
    assert lines[-2:] == ['  "end": null', "}"]
    assert json.loads(dumps(long)) == long
