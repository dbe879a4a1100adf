"""Files that are replaced whole or not at all, and JSON that people read."""

from __future__ import annotations

import io
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

DIGITS = 5  # that are kept of every measurement


def replace(path: Path, content: str | bytes) -> None:
    """Write a file, with the folder it lies in. An earlier file of that name is replaced only by a whole one; links
    lead to it. What is no file, such as /dev/stdout, is written to.

    Raises:
        OSError: it cannot be written; the earlier file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # root could put a file in the place of a device
        path.write_bytes(data)
        return
    path, temporary = path.resolve(), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # a temporary file is private, a result is not
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def append(file: io.FileIO, line: bytes) -> None:
    """Write at the end of a file, all of it or nothing. OSError: it cannot be written; the file is as it was."""
    size = os.fstat(file.fileno()).st_size
    try:
        if (written := file.write(line)) != len(line):  # the disk became full within the line
            raise OSError(f"{written} of {len(line)} bytes fitted")
    except OSError:
        file.truncate(size)
        raise


def rounded(value: Any) -> Any:
    """Every float in a tree to DIGITS significant digits; the others as they are. Infinities and NaN become None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def dumps(value: Any, indent: str = "") -> str:
    """JSON with two spaces of indentation, where a list of plain values takes one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(k)}: {dumps(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, (list, dict)) for v in value):
        return "[\n" + ",\n".join(inner + dumps(v, inner) for v in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
