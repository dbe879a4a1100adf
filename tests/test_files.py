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
