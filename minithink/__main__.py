"""`python -m minithink` lists the commands; `minithink COMMAND …` and `python -m minithink COMMAND …` run one.

`minithink generate …` is the same as `python -m minithink.generate …`, and so with the others.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from minithink.cli.commands import Parser, exit_code
from minithink.errors import MinithinkError

PROGRAM = "minithink"
CHECKOUT = "(needs a checkout)"  # behind the summary of a command that an installed package does not have


class Command(NamedTuple):
    """A command: the module whose `main` it is, and what it does."""

    module: str
    summary: str

    @property
    def here(self) -> bool:
        """Whether this installation has it. `bench` reads and writes docs/, so that no wheel has it."""
        return find_spec(self.module.removesuffix(".__main__")) is not None


COMMANDS = {
    "generate": Command("minithink.generate", "generate with a reasoning model, under a policy if you like; or chat"),
    "models": Command("minithink.models", "get a real model, or texts, from a package index"),
    "check": Command("minithink.check", "try on a policy of your own what must hold for every policy"),
    "vectors": Command("minithink.vectors", "write numbers to test another implementation of a policy with"),
    "evaluate": Command("minithink.evaluate.__main__", "compare policies: accuracy, lengths, bytes, pictures"),
    "trace": Command("minithink.trace.__main__", "show what happened in a cache, token by token"),
    "calibrate": Command("minithink.calibrate.__main__", "measure or train what some policies must know of a model"),
    "analysis": Command("minithink.analysis.__main__", "test what the methods take for granted"),
    "bench": Command("minithink.bench.__main__", "measure speed, memory and accuracy; write the tables of the pages"),
    "train": Command("minithink.train.__main__", "train a small reasoning model, as the embedded one was"),
    "prepare": Command("minithink.tasks.prepare", "write the tokenizer and the problems of the embedded model"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command, or list the commands → the exit code. argv: None: what the program was called with."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(PROGRAM, lambda: _main(argv))


def _main(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        command = COMMANDS[argv[0]]
        if not command.here:
            raise MinithinkError(
                f"{argv[0]} reads and writes docs/ of a checkout, and this is an installed package: clone the "
                f"repository and run `python -m minithink.{argv[0]}` in its folder."
            )
        module = import_module(command.module)
        code: int = module.main(argv[1:])
        return code
    parser = _parser()
    parser.parse_args(argv)
    parser.print_help()
    return 0


def _parser() -> Parser:
    """For everything that does not begin with a command."""
    width = max(map(len, COMMANDS))
    lines = ["commands (each has --help):"]
    for name, command in COMMANDS.items():
        summary = command.summary if command.here else f"{command.summary} {CHECKOUT}"
        lines.append(f"  {name:{width}}  {summary}")
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND …",
        description="KV-cache management for reasoning models.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
