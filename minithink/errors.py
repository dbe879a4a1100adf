"""Errors that a user can act on.

Each message is one sentence with the actual values and what to do. The command line prints it without a traceback:
`UsageError` ends with exit code 2, every other `MinithinkError` with 1.

Values in a message often come from a file or from the network. Write them as `{quoted(value)}`, and names of files
and datasets as `{escaped(name)}`: both are safe to print, and `quoted` is short.
"""

from __future__ import annotations

import errno
import re
import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import PurePath

QUOTED = 80  # characters of a value that a message quotes
REASON = 200  # … of what another library says
# What a terminal would obey: control characters (but \n and \t), marks that turn the direction of writing, and lone
# surrogates, which have no bytes.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


NON_FINITE = "non-finite"  # the finish_reason of a sequence whose logits hold NaN or ∞: no token can be drawn


class MinithinkError(Exception):
    """Something failed that is not a bug of minithink: a bad file, a missing model, not enough memory."""


class UsageError(MinithinkError):
    """What was asked for makes no sense as asked: an unknown policy, a negative temperature."""


def quoted(value: object, limit: int = QUOTED) -> str:
    """A value as Python spells it, in at most `limit` characters.

    What is longer ends with "…". Characters that cannot be printed are escaped. It is safe for every value, however
    large or deeply nested.
    """
    if isinstance(value, PurePath):
        value = str(value)
    spelling = _Spelling(limit).repr(value)
    return spelling if len(spelling) <= limit else spelling[: limit - 1] + "…"


def named(name: object, limit: int = QUOTED) -> str:
    """A name without quotation marks, on one line, in at most `limit` characters that can be printed."""
    spelling = repr(str(name)[: limit + 1])[1:-1]
    return spelling if len(spelling) <= limit else spelling[: limit - 1] + "…"


def escaped(text: object) -> str:
    """Text without quotation marks, in which every character that a terminal would obey is escaped, as in `\\x1b`."""
    return CONTROL.sub(_escape, str(text))


def listed(items: Sequence[str], most: int = 3) -> str:
    """The first items of a list, with commas between them, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 text", "1,200 texts". noun: in the singular; its plural ends in s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


class _Spelling(reprlib.Repr):
    """`repr` of values that may be huge. It looks at no more of them than `limit` characters need."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = limit // 2
        self.maxstring = self.maxlong = self.maxother = 4 * limit

    def repr_int(self, value: int, level: int) -> str:
        """The digits; Python spells out no integer of more than 4,300 of them."""
        if value.bit_length() > 4096:
            return f"an integer of {value.bit_length():,} bits"
        return repr(value)


def reason(error: Exception) -> str:
    """Why something failed, for such a sentence, in at most REASON characters.

    Of an OSError it is the text without the number and without the path, which the sentence has already.
    """
    words = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    words = escaped(" ".join(words.split()))
    return words if len(words) <= REASON else words[: REASON - 1] + "…"


def alternatives(name: object, known: Iterable[str]) -> str:
    """What follows when a name is unknown: the name that was probably meant, and all that there are.

    It reads "did you mean rkv? There are …", or "there are …" where no name is similar.
    """
    names = {one.lower(): one for one in known}
    all_names = ", ".join(names.values())
    similar = get_close_matches(str(name).lower(), names, 1)
    if similar:
        return f"did you mean {names[similar[0]]}? There are {all_names}"
    return f"there are {all_names}"


def unwritable(what: str, path: object, error: OSError, other: str) -> MinithinkError:
    """What is raised where a file cannot be written. other: what to give another of."""
    room = "make room there, or " if is_disk_full(error) else ""
    return MinithinkError(f"{what} cannot be written to {path}: {reason(error)}; {room}give another {other}.")


def is_disk_full(error: OSError) -> bool:
    """Whether a file could not be written because the disk, a quota or a limit on files is exhausted."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
