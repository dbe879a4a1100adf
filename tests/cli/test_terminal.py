"""What is shown on terminals and in pipes.

Alone: python -m pytest tests/cli/test_terminal.py
"""

from __future__ import annotations

import io

import pytest

from minithink.cli.terminal import plain_console


def test_a_reader_that_has_had_enough_is_told_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would end the program with exit code 1."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):
        plain_console().print("text")
