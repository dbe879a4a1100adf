"""The command line: `python -m minithink.analysis NAME`, where NAME is one of COMMANDS."""

from __future__ import annotations

import sys
from importlib import import_module

from minithink.cli import commands

PROGRAM = "minithink.analysis"
DESCRIPTION = "Measure what methods take for granted."
COMMANDS = ("premises", "attention", "segments", "answer-attention", "budgets", "importance", "formats", "bits")


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    # Ctrl-C may come in here
    modules = {name: import_module("minithink.analysis." + name.replace("-", "_")) for name in COMMANDS}
    return commands.run(PROGRAM, DESCRIPTION, modules, argv)


if __name__ == "__main__":
    sys.exit(main())
