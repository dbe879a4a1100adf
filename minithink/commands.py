"""What the command lines of `bench` and `evaluate` share: errors of one sentence, and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from minithink.errors import MinithinkError, UsageError

INTERRUPTED = 130  # what shells report for a program that SIGINT ended


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and nothing else."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options.\n")


def exit_code(program: str, command: Callable[[], int]) -> int:
    """Run a command → its exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    try:
        return command()
    except MinithinkError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
