"""The command line: `python -m minithink.evaluate plot DIR…`."""

from __future__ import annotations

import sys

from minithink import commands
from minithink.evaluate import plots

COMMANDS = {"plot": plots}  # a first word that is none of these will be an option of the run itself


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.run("minithink.evaluate", "Accuracy, length and memory of policies.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
