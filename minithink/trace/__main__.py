"""The command line: `python -m minithink.trace view FILE`."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from minithink import commands
from minithink.errors import MinithinkError, UsageError, unwritable
from minithink.files import replace
from minithink.trace.format import PAGE, File, read, refuse_others


class View:
    """Show a trace: as a page for a browser, or in the terminal."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The options of `view`."""
        add = parser.add_argument
        add("file", metavar="FILE", type=commands.location, help="what --trace has written")
        add("--sequence", type=int, metavar="N", help="the sequence, if there are several (default: the first)")
        add("--output", type=commands.location, metavar="PAGE", help="default: FILE.html")
        add("--open", action="store_true", help="open the page in a browser")
        add("--terminal", action="store_true", help="print how it ended, here, instead")

    @staticmethod
    def run(args: argparse.Namespace, argv: list[str]) -> int:
        """Read, check, show."""
        if args.terminal and (args.open or args.output):
            raise UsageError("--terminal writes no page: drop --output and --open, or --terminal.")
        if args.output and args.output.resolve() == args.file.resolve():
            raise UsageError(f"--output {args.output} is the trace itself, which the page would replace: drop it.")
        file = read(args.file)
        sequence = chosen(file, args.file, args.sequence)
        if args.terminal:
            from minithink.trace.terminal import show

            show(file, sequence)
            return 0
        from minithink.trace.page import render

        output = args.output or args.file.with_name(args.file.name + ".html")
        refuse_others(output, 4096, lambda begins: PAGE in begins, "page of a trace", "--output")
        try:
            replace(output, render(file, sequence))
        except OSError as error:
            raise unwritable("The page of a trace", output, error, "--output") from None
        others = f"; it shows sequence {sequence}, see --sequence" if len(file.traces) > 1 else ""
        print(f"written to {output}{others}{file.cut}")
        if args.open and not webbrowser.open(output.resolve().as_uri()):
            raise MinithinkError(f"No browser was found: open {output} in one yourself, or use --terminal.")
        return 0


def chosen(file: File, path: Path, sequence: int | None) -> int:
    """The sequence that is shown. UsageError: it is not in the file."""
    if not file.traces:
        raise MinithinkError(f"The trace {path} ends before a token was read: let the run go on for longer.")
    if sequence is None:
        return min(file.traces)
    if sequence not in file.traces:
        numbers = sorted(file.traces)
        there = ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
        holds = f"sequences {there}" if len(numbers) > 1 else f"sequence {there} alone"
        raise UsageError(f"--sequence {sequence} is not in {path}, which holds {holds}.")
    return sequence


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand → exit code: 0, 1 (it failed), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return commands.run("minithink.trace", "Traces of a cache, recorded with --trace.", {"view": View}, argv)


if __name__ == "__main__":
    sys.exit(main())
