"""The journal of an unfinished calibration: its settings, and a line for every prompt.

A line is written when its prompt is done. So a killed process loses only the prompts in flight. The journal is
deleted when the result is written. It lies in --output. Without that option the result goes to the checkpoint's
folder, where nothing unfinished belongs, so the journal lies in a folder for each checkpoint below TEXTS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from minithink.errors import MinithinkError, UsageError, counted, reason, unwritable
from minithink.evaluate.journal import differences
from minithink.results import files

TEXTS = Path("runs/calibrate")  # from where the command is started


def folder_of_texts(output: Path | None, checkpoint: str) -> Path:
    """Where the journal lies. output: the option; checkpoint: the hash of the weights."""
    return TEXTS / checkpoint if output is None else output


class Journal:
    """Lines of JSON objects, open for appending. Also a context manager."""

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool, option: str = "--output") -> None:
        """
        Args:
            path: of the file. A last line that is cut off is removed.
            settings: all settings that decide the result, as JSON knows them.
            resume: go on with the lines of the file.
            option: the command line's option for this path, for messages.

        Raises:
            UsageError: the file holds lines and `resume` is False; it holds no line and `resume` is True; or its
                settings differ.
            MinithinkError: another process writes here, a line is damaged, or the file cannot be written.
        """
        self.path = path
        self.lines = list[dict[str, Any]]()
        new = not path.exists()
        try:
            self._file = files.hold(path)
            try:
                self._open(dict(settings), resume)
            except BaseException:
                if new and not path.stat().st_size:
                    files.remove_held(self._file, path)
                self.close()
                raise
        except OSError as error:
            raise unwritable("The journal", path, error, option) from None

    def _open(self, settings: dict[str, Any], resume: bool) -> None:
        """Read the lines, check that this run may go on with them, and cut off a broken last line."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        found = [self._parsed(n, line) for n, line in enumerate(whole.splitlines(), 1)]
        if found[1:] and not resume:
            raise UsageError(
                f"{self.path} holds {counted(len(found) - 1, 'line')} of an unfinished calibration: add --resume to "
                "finish it, or delete the file."
            )
        if resume and not found:
            raise UsageError(f"There is nothing to resume in {self.path}: drop --resume.")
        if found and resume and (changed := differences(found[0], settings)):
            raise UsageError(
                f"{self.path} was begun with other settings (then and now: {changed}): give the same, or delete the "
                "file."
            )
        self._file.truncate(len(whole) if resume else 0)
        if not resume:
            self._write(settings)
        self.lines = found[1:] if resume else []

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            raise MinithinkError(f"{self.path}, line {number}, is damaged ({error}): delete the file.") from None
        return value

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line. When this returns, the operating system has it."""
        try:
            self._write(line)
        except OSError as error:
            raise MinithinkError(
                f"{self.path} cannot be written ({reason(error)}): what was finished before is safe; make room, and "
                "add --resume."
            ) from None
        self.lines.append(dict(line))

    def _write(self, line: Mapping[str, Any]) -> None:
        files.append(self._file, json.dumps(line, allow_nan=False).encode() + b"\n")

    def remove(self) -> None:
        """Delete the journal, because the result is written."""
        files.remove_held(self._file, self.path)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
