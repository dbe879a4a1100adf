"""The command line: `python -m minithink.trace view FILE`, or several files side by side, and `python -m
minithink.trace compare`, which answers one problem under several policies."""

from __future__ import annotations

import sys

from minithink.cli import commands

PROGRAM = "minithink.trace"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    return commands.exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str]) -> int:
    # Both import torch. `exit_code` has said before how its threads wait (`cli/cores.py`).
    from minithink.trace import compare, view

    described = "Traces of a cache: what was recorded with --trace, or several policies on one problem."
    return commands.run(PROGRAM, described, {"view": view, "compare": compare}, argv)


if __name__ == "__main__":
    sys.exit(main())
