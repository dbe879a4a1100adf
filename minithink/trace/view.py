"""Show a trace, or several side by side: as a page for a browser, or in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from minithink.cli import commands
from minithink.errors import MinithinkError, UsageError, escaped, unwritable
from minithink.results.files import replace
from minithink.trace import page_file
from minithink.trace.format import File, read, refuse_others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `view`."""
    add = parser.add_argument
    add("files", metavar="FILE", nargs="+", type=commands.location, help="what --trace has written")
    add(
        "--sequence",
        type=commands.natural,
        metavar="N",
        help="the sequence, if there are several (default: the first)",
    )
    add("--output", type=commands.location, metavar="PAGE", help="default: FILE.html; of several: A+B.html")
    add("--open", action="store_true", help="open the page in a browser")
    add("--terminal", action="store_true", help="print how it ended, here, instead")
    add(
        "--svg",
        type=commands.location,
        metavar="FILE",
        help="draw the texts instead, one above the other: the "
        "darker a token, the more heads keep it when thinking ends",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Read, check, show."""
    paths: list[Path] = args.files
    for option, given in (("--terminal", args.terminal), ("--svg", args.svg)):
        if given and (args.open or args.output):
            raise UsageError(f"{option} writes no page: drop --output and --open, or {option}.")
    if args.terminal and args.svg:
        raise UsageError("--terminal draws no picture: drop it, or --svg.")
    if args.output and args.output.resolve() in [path.resolve() for path in paths]:
        raise UsageError(f"--output {args.output} is the trace itself, which the page would replace: drop it.")
    shown = []
    for path in paths:
        file = read(path)
        shown.append((file, chosen(file, path, args.sequence)))
    if args.terminal:
        from minithink.trace.terminal import show

        for file, sequence in shown:
            show(file, sequence)
        return 0
    if args.svg:
        from minithink.trace import picture

        refuse_others(args.svg, 256, lambda begins: b"<svg" in begins, "picture", "--svg")
        try:
            replace(args.svg, picture.render([file.traces[sequence] for file, sequence in shown]))
        except OSError as error:
            raise unwritable("The picture", args.svg, error, "--svg") from None
        print(f"drawn to {escaped(args.svg)}{notes(shown)}")
        return 0
    from minithink.trace.page import render

    output = args.output or paths[0].with_name("+".join(path.name for path in paths) + ".html")
    page_file.write(output, render(*shown[0], shown[1:]))
    print(f"written to {escaped(output)}{notes(shown)}")
    if args.open:
        page_file.show(output, ", or use --terminal")
    return 0


def notes(shown: list[tuple[File, int]]) -> str:
    """What a reader of the page must know: which sequence it shows, and what is missing or does not fit together."""
    found = [f"; it shows sequence {sequence}, see --sequence" for file, sequence in shown if len(file.traces) > 1]
    found += [file.cut for file, _ in shown]
    traces = [file.traces[sequence] for file, sequence in shown]
    if len({tuple(trace.ids[: trace.prompt].tolist()) for trace in traces}) > 1:
        found.append("; the prompts differ, so equal positions are different tokens")
    return "".join(dict.fromkeys(found))


def chosen(file: File, path: Path, sequence: int | None) -> int:
    """The number of the sequence that is shown.

    Args:
        path: of the file, for error messages.
        sequence: as the user has said; None: the first.

    Raises:
        MinithinkError: the file holds none. UsageError: it does not hold this one.
    """
    if not file.traces:
        raise MinithinkError(
            f"The trace {path} ends before a token was read{file.cut}: record a longer run, or copy the whole file."
        )
    if sequence is None:
        return min(file.traces)
    if sequence not in file.traces:
        numbers = sorted(file.traces)
        there = ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
        holds = f"sequences {there}" if len(numbers) > 1 else f"sequence {there} alone"
        raise UsageError(f"--sequence {sequence} is not in {path}, which holds {holds}.")
    return sequence
