"""Budgets in bytes, as in `--budgets 2MiB`: a number of bytes that keeps the text in which it was given.

How many tokens the bytes hold depends on the model and on the format in which a policy stores tokens
(`sizes.tokens_of_bytes`).
"""

from __future__ import annotations

import re
from fractions import Fraction

from minithink.errors import UsageError, quoted

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
EXAMPLE = "2MiB, 512KiB or 1.5GiB"
MOST = 2**62  # bytes
_TEXT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?(B|KiB|MiB|GiB)")


class ByteSize(str):
    """A number of bytes in the words of a user: it is stored, shown and compared as its text.

    Raises:
        ValueError: the text is no number of bytes with a unit, or less than one byte.
    """

    number: int  # of bytes, rounded down

    def __new__(cls, text: str) -> ByteSize:
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{quoted(text)} is no number of bytes such as {EXAMPLE}")
        made = super().__new__(cls, text)
        amount, unit = found.groups()
        made.number = int(Fraction(amount) * UNITS[unit])
        if not 1 <= made.number <= MOST:
            raise ValueError(f"{quoted(text)} is no number of bytes from 1 to {MOST:,}")
        return made

    @classmethod
    def given(cls, budget: int | str | None) -> int | ByteSize | None:
        """A budget as Python code gives it: a text becomes bytes. UsageError: the text says no number of bytes."""
        if not isinstance(budget, str):
            return budget
        try:
            return cls(budget)
        except ValueError as error:
            raise UsageError(f"The budget {error}: give such a text, or tokens as a number.") from None


def looks_like_bytes(text: str) -> bool:
    """Whether a text was probably meant as a number of bytes: it begins with a digit and ends with a b."""
    return bool(re.fullmatch(r"[0-9][0-9.]* ?[A-Za-z]*[Bb](?:ytes?)?", text))
