"""The command line: `python -m minithink.analysis premises|pilot`."""

from __future__ import annotations

import sys

from minithink import commands
from minithink.analysis import pilot, premises

COMMANDS = {"premises": premises, "pilot": pilot}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.run("minithink.analysis", "What methods take for granted.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
