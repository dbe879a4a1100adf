"""The command line: `python -m minithink.calibrate thoughts | steering | predictor | foresight`."""

from __future__ import annotations

import sys

from minithink import commands
from minithink.calibrate import foresight, predictor, steering, thoughts

PROGRAM = "minithink.calibrate"
COMMANDS = {"thoughts": thoughts, "steering": steering, "predictor": predictor, "foresight": foresight}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.run(PROGRAM, "Measure or train what methods must know of a model.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
