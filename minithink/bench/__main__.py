"""The command line: `python -m minithink.bench decode|accuracy|paged|memory|attention|steps|compile|tables`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from minithink.bench import accuracy, attention, compile, decode, memory, paged, tables
from minithink.commands import Parser, exit_code

MODULES = [decode, accuracy, paged, memory, attention, compile, tables]
if find_spec("triton") is not None:  # it exists for Linux only
    from minithink.bench import steps

    MODULES.insert(5, steps)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="python -m minithink.bench", description="Speed and accuracy, measured and written down.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)
    return exit_code("minithink.bench", lambda: COMMANDS[args.command].run(args, argv))


if __name__ == "__main__":
    sys.exit(main())
