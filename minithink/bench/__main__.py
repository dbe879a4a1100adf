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
    "decode": "speed.decode",
    "busy": "speed.busy",
    "caches": "speed.caches",
    "versus": "speed.versus",
    "hf": "speed.inside",
    "model-steps": "speed.model_steps",
    "attention": "speed.attention",
    "append": "speed.append",
    "counters": "speed.counters",
    "sanitize": "speed.sanitize",
    "sweep": "answers.sweep",
    "differences": "answers.differences",
    "transfer": "answers.transfer",
    "front": "answers.front",
    "reproduce": "answers.reproduce",
    "compile": "speed.compile",
    "tables": "tables.pages",
    "thoughts": "speed.ops",
}
KERNELS = {"steps": "speed.step_times"}  # commands that need Triton, which exists for Linux only


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    # Modules are imported here and not above, because Ctrl-C may come while they are.
    there = COMMANDS | KERNELS if find_spec("triton") is not None else COMMANDS
    modules: dict[str, Any] = {}
    for name, module in there.items():
        modules[name] = import_module(f"minithink.bench.{module}")
    from minithink.bench.methods import collected
    from minithink.bench.speed import cases

    for name, entry in collected("CASES").items():
        modules[name] = cases.Command(name, entry)
    return commands.run(PROGRAM, DESCRIPTION, modules, argv)


if __name__ == "__main__":
    sys.exit(main())
