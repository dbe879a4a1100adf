"""The command line: `python -m minithink.bench COMMAND`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from minithink.cli import commands

PROGRAM = "minithink.bench"
DESCRIPTION = "Speed and answers, measured and written down."
# command → its module in this folder
COMMANDS = {
    "decode": "decode",
    "busy": "busy",
    "caches": "caches",
    "versus": "versus",
    "attention": "attention",
    "append": "append",
    "counters": "counters",
    "sanitize": "sanitize",
    "sweep": "sweep",
    "differences": "differences",
    "compile": "compile",
    "tables": "tables",
    "thoughts": "ops",
}
KERNELS = {"steps": "step_times"}  # commands that need Triton, which exists for Linux only


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    # Modules are imported here and not above, because Ctrl-C may come while they are.
    there = COMMANDS | KERNELS if find_spec("triton") is not None else COMMANDS
    modules: dict[str, Any] = {}
    for name, module in there.items():
        modules[name] = import_module(f"minithink.bench.{module}")
    from minithink.bench import cases
    from minithink.experiments import collected

    for name, entry in collected("CASES").items():
        modules[name] = cases.Command(name, entry)
    return commands.run(PROGRAM, DESCRIPTION, modules, argv)


if __name__ == "__main__":
    sys.exit(main())
