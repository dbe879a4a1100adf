"""The command line that writes models and texts which do not ship ready for use: `python -m minithink.models smollm2
--output FOLDER` a real model, `… smollm2-think …` the same with an adapter of this project, `… tiny-control …` the
embedded model trained without eviction, and `… texts …` texts to compare policies on."""

from __future__ import annotations

import sys
from importlib import import_module

from minithink.cli import commands

PROGRAM = "minithink.models"
DESCRIPTION = "Get a model as a folder that --model takes, or texts as one that `evaluate loss --texts` takes."
COMMANDS = {
    "smollm2": "minithink.checkpoint.smollm2",
    "smollm2-think": "minithink.checkpoint.smollm2_think",
    "tiny-control": "minithink.checkpoint.tiny_control",
    "texts": "minithink.evaluate.fixed_texts",
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    # Modules are imported here and not above, because Ctrl-C may come while they are.
    modules = {name: import_module(module) for name, module in COMMANDS.items()}
    return commands.run(PROGRAM, DESCRIPTION, modules, argv)


if __name__ == "__main__":
    sys.exit(main())
