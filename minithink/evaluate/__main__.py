"""The command line: `python -m minithink.evaluate --policies … --output-dir DIR`, and its companions
`python -m minithink.evaluate plot DIR…` and `python -m minithink.evaluate tune …`."""

from __future__ import annotations

import sys

from minithink import commands
from minithink.evaluate import plots, runner, tune

COMMANDS = {"plot": plots, "tune": tune}  # a first word that is none of these is an option of the run itself
PROGRAM = "minithink.evaluate"


def main(argv: list[str] | None = None) -> int:
    """Run it → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in COMMANDS:
        return commands.run(PROGRAM, "Accuracy, length and memory of policies.", COMMANDS, argv)
    parser = commands.Parser(
        prog=f"python -m {PROGRAM}", description="Accuracy, length and memory of policies.",
        epilog=f"`python -m {PROGRAM} plot DIR…` redraws pictures, `python -m {PROGRAM} tune …` chooses "
        "hyperparameters.",
    )  # fmt: skip
    runner.add_arguments(parser)
    args = parser.parse_args(argv)
    return commands.exit_code(PROGRAM, lambda: runner.run(args, argv))


if __name__ == "__main__":
    sys.exit(main())
