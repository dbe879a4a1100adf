"""What command lines share: subcommands, errors of one sentence, and exit codes."""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from minithink import __version__
from minithink.cli.cores import wait_briefly
from minithink.cli.process import INTERRUPTED, Signals, Stopped, open_streams
from minithink.errors import MinithinkError, UsageError, alternatives, escaped, is_disk_full, quoted, reason
from minithink.kv.byte_size import EXAMPLE, ByteSize, looks_like_bytes

SCHEDULES = (  # values of --schedule, as its help explains them
    "every (step), interval:n (each n tokens), sawtooth:B/k (at B tokens, down to k) or share:r/l (DynTS's windows)"
)
LONGEST_NAME = 255  # bytes of a file's name: the limit of nearly all file systems


class _Help(argparse.HelpFormatter):
    """Lists commands without a heading that says their names again."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        return "".join(map(super()._format_action, action._get_subactions()))


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and suggests what was probably meant. It knows --version."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--version", action="version", version=f"minithink {__version__}", help="print the version")

    def error(self, message: str) -> NoReturn:
        """UsageError: the message, and where to look."""
        raise UsageError(f"{message}; --help lists the options.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it, but nothing may be left over. Misspelt options come before missing ones."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # else what follows the command is for the command's own parser
            self._refuse_unknown_options(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest and rest[0].startswith("-"):
            self.error(f"there is no option {escaped(rest[0])}{self._similar_option(rest[0])}")
        if rest:
            self.error(f"{quoted(rest[0])} is one word too many: a text with spaces needs quotation marks")
        return found, rest

    def _refuse_unknown_options(self, words: list[str]) -> None:
        for word in words:
            if word == "--":  # what follows are no options
                return
            name = word.partition("=")[0]
            if word.startswith("--") and " " not in word and name not in self._option_string_actions:
                self.error(f"there is no option {escaped(name)}{self._similar_option(name)}")

    def _similar_option(self, name: str) -> str:
        """A suggestion such as " (did you mean --policy?)", or "". name: an option that does not exist."""
        options = list(self._option_string_actions)
        longer = [option for option in options if option.startswith(name) and len(name) > len("--")]
        similar = longer or get_close_matches(name, options)
        return f" (did you mean {similar[0]}?)" if similar else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        hint = alternatives(str(value), map(str, action.choices))
        if action.dest == "command":
            self.error(f"there is no command {quoted(value)}; {hint}")
        raise argparse.ArgumentError(action, f"there is no {quoted(value)}; {hint}")


def run(program: str, description: str, commands: Mapping[str, Any], argv: list[str] | None) -> int:
    """Run one subcommand of `python -m program` → its exit code, as of `exit_code`.

    Args:
        commands: name → a module with `add_arguments(parser)` and `run(args, argv)`; the first paragraph of its
            docstring is its help, followed by its HELP if it has one. ON_INTERRUPT is the sentence for Ctrl-C, if
            it has one.
        argv: None: what the program was called with.
    """
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(program, lambda: _run(program, description, commands, argv))


def _run(program: str, description: str, commands: Mapping[str, Any], argv: list[str]) -> int:
    parser = Parser(prog=f"python -m {program}", description=description, formatter_class=_Help)
    choices = parser.add_subparsers(title="commands (each has --help)", dest="command", metavar="COMMAND")
    for name, module in commands.items():
        summary = " ".join((module.__doc__ or "").partition("\n\n")[0].split())
        more = f"{summary} {getattr(module, 'HELP', '')}".strip()
        in_list = summary.replace("%", "%%")  # argparse fills in %(…) there, and not in a description
        module.add_arguments(choices.add_parser(name, help=in_list, description=more))
    args = parser.parse_args(argv)
    if args.command is None:
        parser.error(f"the command is missing; there are {', '.join(commands)}")
    interrupted = getattr(commands[args.command], "ON_INTERRUPT", "interrupted")
    return exit_code(program, lambda: commands[args.command].run(args, argv), interrupted)


def exit_code(program: str, command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command → its exit code.

    It is 0, 1 (the command failed), 2 (it makes no sense as asked), 130 (Ctrl-C), 143 (SIGTERM) or 129 (SIGHUP).
    Errors become one line on standard error, in which control characters are escaped.

    Args:
        program: what the line begins with.
        command: what runs; its return value is the exit code.
        interrupted: the sentence for Ctrl-C and signals.
    """
    wait_briefly()
    if "stdout" in open_streams():
        print(f"{program}: standard output is closed: what would be shown there is lost", file=sys.stderr)
    with Signals() as signals:
        code = _finished(program, command, interrupted, signals)
    stopped = signals.stopped
    if stopped is None or code not in (INTERRUPTED, stopped.code):
        return code
    _say_what_stopped(stopped, program, interrupted)
    return stopped.code


def _say_what_stopped(stopped: Stopped, program: str, interrupted: str) -> None:
    """Say once which signal ended the command."""
    if stopped.said:
        return
    stopped.said = True
    with suppress(OSError):  # after SIGHUP there may be no terminal any more
        print(f"{program}: {interrupted.rstrip('.')} ({stopped})", file=sys.stderr)


def _finished(program: str, command: Callable[[], int], interrupted: str, signals: Signals) -> int:
    """Run a command, and say in one line what went wrong → its exit code."""
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # here, so that its errors are caught below
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = quoted(error.filename)
            print(f"{program}: {name} is too long for the name of a file: shorten it.", file=sys.stderr)
            return 2
        if isinstance(error, PermissionError) and error.filename is not None:
            name = quoted(error.filename)
            print(
                f"{program}: {name}: {reason(error)}; change who may use it, or give another path.", file=sys.stderr
            )
            return 1
        if error.errno == errno.EIO and signals.stopped is not None:  # the terminal is gone
            _discard(sys.stdout.fileno())
            _discard(sys.stderr.fileno())
            return signals.stopped.code
        if error.errno != errno.EPIPE and not is_disk_full(error):
            raise
        _discard(sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # whoever read the output has had enough
            return 0
        print(f"{program}: the output cannot be written ({error.strerror}): make room for it.", file=sys.stderr)
        return 1
    except MinithinkError as error:
        print(f"{program}: {escaped(' '.join(str(error).split()))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except Stopped as stopped:
        _say_what_stopped(stopped, program, interrupted)
        return stopped.code
    except KeyboardInterrupt:
        print(f"\n{program}: {interrupted}", file=sys.stderr)
        return INTERRUPTED


def _discard(stream: int) -> None:
    """Send to the null device what Python itself writes when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream)
    os.close(null)


def location(text: str) -> Path:
    """For argparse: a file or folder. Nothing at all would be the current folder, from an unset variable."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a name")
    path = Path(text)
    longest = max(len(os.fsencode(part)) for part in path.parts or [text])
    if longest > LONGEST_NAME:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} holds a name of {longest:,} bytes, and a file's name can have {LONGEST_NAME}: shorten it"
        )
    return path


def different(text: str, what: str, known: Iterable[str]) -> list[str]:
    """For argparse: names with commas between them, each known and none twice. what: the noun in messages."""
    names, known = text.split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        hint = alternatives(unknown[0], known)
        raise argparse.ArgumentTypeError(f"there is no {what} {quoted(unknown[0])}; {hint}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{quoted(text)} names a {what} twice")
    return names


# Numbers are plain decimal digits. Python's own `int` and `float` also read "nan", "1_000" and digits of all scripts.
WHOLE = re.compile("[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
LARGEST = 2**64 - 1  # of whole numbers: nothing that is counted here, and no seed, is larger


def integer(text: str) -> int:
    """For argparse: a whole number."""
    return _whole(text, -LARGEST, "whole number")


def natural(text: str) -> int:
    """For argparse: a whole number, 0 or more."""
    return _whole(text, 0, "whole number of at least 0")


def positive(text: str) -> int:
    """For argparse: a whole number of at least 1."""
    return _whole(text, 1, "whole number of at least 1")


def _whole(text: str, least: int, what: str) -> int:
    if not WHOLE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no {what}")
    value = int(text[:40])  # more digits would not make it right
    if value < least:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no {what}")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is too large: give at most {LARGEST:,}")
    return value


def tokens_or_bytes(text: str) -> int | ByteSize:
    """For argparse: a budget in whole tokens, or in bytes such as 2MiB."""
    if not looks_like_bytes(text):
        # A share is one of what the full cache generates, which is known only where full runs, too.
        return _whole(
            text,
            1,
            f"budget: give whole tokens from 1 on, or bytes such as {EXAMPLE} (shares are for minithink.evaluate)",
        )
    try:
        return ByteSize(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def finite(text: str) -> float:
    """For argparse: a finite number."""
    value = float(text) if DECIMAL.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no finite number")
    return value
