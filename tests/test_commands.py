"""What all command lines have in common."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from minithink.commands import exit_code, positive
from minithink.errors import MinithinkError, UsageError


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> int:
        raise error

    assert exit_code("x", lambda: 0) == 0
    assert exit_code("x", lambda: fail(MinithinkError("full."))) == 1
    assert exit_code("x", lambda: fail(UsageError("no."))) == 2
    assert exit_code("x", lambda: fail(KeyboardInterrupt()), "stopped") == 130
    assert capsys.readouterr().err == "x: full.\nx: no.\n\nx: stopped\n"
    with pytest.raises(ZeroDivisionError):
        exit_code("x", lambda: 1 // 0)


def test_whoever_reads_may_have_had_enough() -> None:
    code = (
        "from minithink.commands import exit_code; raise SystemExit(exit_code('x', lambda: print('y' * 10**6) or 0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_positive_numbers(text: str) -> None:
    assert positive("7") == 7
    with pytest.raises(argparse.ArgumentTypeError, match="is no whole number of at least 1"):
        positive(text)
