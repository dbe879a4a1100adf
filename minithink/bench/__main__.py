"""The command line: `python -m minithink.bench COMMAND`, one for each module of COMMANDS."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from minithink import commands
from minithink.bench import (
    accuracy,
    append,
    attention,
    cases,
    compile,
    counters,
    decode,
    evaluate,
    memory,
    ops,
    paged,
    sanitize,
    sweep,
    tables,
)
from minithink.experiments import collected

MODULES = [
    decode, accuracy, evaluate, paged, memory, attention, append, counters, sanitize, sweep, compile, tables,
]  # fmt: skip
COMMANDS: dict[str, Any] = {module.__name__.rpartition(".")[2]: module for module in MODULES} | {"thoughts": ops}
if find_spec("triton") is not None:  # it exists for Linux only
    from minithink.bench import step_times

    COMMANDS |= {"steps": step_times}
COMMANDS |= {name: cases.Command(name, entry) for name, entry in collected("CASES").items()}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.run("minithink.bench", "Speed and accuracy, measured and written down.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
