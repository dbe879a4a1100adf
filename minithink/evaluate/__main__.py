"""The command line: `python -m minithink.evaluate --policies … --output-dir DIR`, and its companions
`python -m minithink.evaluate paper TABLE …`, `… plot DIR…`, `… summary DIR…`, `… tune …`, `… margins` and
`… loss …`."""

from __future__ import annotations

import sys
from importlib import import_module

from minithink.cli import commands
from minithink.errors import UsageError, alternatives, quoted

PROGRAM = "minithink.evaluate"
DESCRIPTION = "Accuracy, length and memory of policies."
# a first word that is none of these is an option of the run itself
COMMANDS = {
    "loss": "minithink.evaluate.loss",
    "paper": "minithink.evaluate.paper",
    "plot": "minithink.evaluate.plots",
    "summary": "minithink.evaluate.equal_bytes",
    "tune": "minithink.evaluate.tune",
    "margins": "minithink.evaluate.margins",
}


def main(argv: list[str] | None = None) -> int:
    """Run it → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    first = argv[0] if argv else ""
    return commands.exit_code(PROGRAM, lambda: _run(first, argv))  # imports in there: Ctrl-C may come in one


def _run(first: str, argv: list[str]) -> int:
    if first in COMMANDS:  # only its own module is imported: a plot needs no torch
        module = import_module(COMMANDS[first])
        return commands.run(PROGRAM, DESCRIPTION, {first: module}, argv)
    if first and not first.startswith("-"):
        hint = alternatives(first, COMMANDS)
        raise UsageError(f"There is no command {quoted(first)}; {hint}, and options (--help).")
    from minithink.evaluate import runner

    parser = commands.Parser(
        prog=f"python -m {PROGRAM}",
        description=DESCRIPTION,
        epilog=f"`python -m {PROGRAM} paper` runs tables of papers, `… loss` takes the loss of texts, "
        "`… plot DIR…` redraws pictures, `… summary DIR… --at-bytes` compares policies at equal bytes, "
        "`… tune` chooses hyperparameters, and `… margins` "
        "counts where another batch size may change a result.",
    )
    runner.add_arguments(parser)
    return runner.run(parser.parse_args(argv), argv)


if __name__ == "__main__":
    sys.exit(main())
