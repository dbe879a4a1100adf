"""The command line: `python -m minithink.evaluate plot DIR…`."""

from __future__ import annotations

import sys

from minithink.commands import Parser, exit_code
from minithink.evaluate import plots

COMMANDS = {"plot": plots}  # a first word that is none of these will be an option of the run itself


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="python -m minithink.evaluate", description="Accuracy, length and memory of policies.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)
    return exit_code("minithink.evaluate", lambda: COMMANDS[args.command].run(args, argv))


if __name__ == "__main__":
    sys.exit(main())
