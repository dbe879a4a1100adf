"""The command line: `python -m minithink.calibrate NAME`, where NAME is one of COMMANDS."""

from __future__ import annotations

import sys
from importlib import import_module

from minithink.cli import commands

PROGRAM = "minithink.calibrate"
DESCRIPTION = "Measure or train what methods must know of a model."
COMMANDS = ("thoughts", "averaging", "steering", "centers", "predictor", "foresight")


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    # Modules are imported here and not above, because Ctrl-C may come while they are.
    modules = {name: import_module(f"minithink.calibrate.{name}") for name in COMMANDS}
    return commands.run(PROGRAM, DESCRIPTION, modules, argv)


if __name__ == "__main__":
    sys.exit(main())
