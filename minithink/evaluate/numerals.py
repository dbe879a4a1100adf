r"""Numbers as texts write them: 1,000.5, 1e-5, 1.6\times 10^{7}, 10^{-5}. They are compared digit by digit.

No arithmetic is done, so 1e999999999 takes no longer than 1, and numbers that differ are never equal.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MARK = "\0"  # stands between the digits of a number and its power of ten, where others write e
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RAISED = re.compile("10([⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,18})")
_POWER_OF_TEN = r"\{?10\}?[ ]?(?:\^|\*\*)[ ]?(?:\{[ ]?([+-]?[0-9]{1,18})[ ]?\}|([+-]?[0-9]{1,18}))"
_TIMES = re.compile(rf"(?<=[0-9.])\s{{0,9}}(?:\\times|\\cdot|×|·|⋅|\*|x)\s{{0,9}}{_POWER_OF_TEN}")
_TEN_ALONE = re.compile(rf"(?<![0-9A-Za-z.^_}}\\*/)×·⋅{MARK}]){_POWER_OF_TEN}")
_E = re.compile(r"(?<=[0-9.])[eE]([+-]?[0-9]{1,18})(?![0-9A-Za-z])")
_POWER = rf"(?:{MARK}[+-]?[0-9]+)?"
_DIGITS = rf"(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]*)?{_POWER}|\.[0-9]+{_POWER}"
_WHOLE = re.compile(rf"([+-]?)({_DIGITS})")
_SPACES = re.compile(r"\\[,!;: ]|\s")


class Number(NamedTuple):
    """A number as its sign, its digits without zeros at their ends, and the power of ten behind them."""

    negative: bool
    digits: str
    power: int


def with_marks(text: str) -> str:
    """The text with every power of ten, however it is written, as MARK and its exponent: 1e-5 and 10^{-5} alike."""
    text = text.replace(MARK, "").replace("−", "-")
    text = _RAISED.sub(lambda raised: f"10^{{{raised[1].translate(_SUPERSCRIPTS)}}}", text)
    text = _TIMES.sub(lambda power: MARK + (power[1] or power[2]), text)
    text = _E.sub(lambda power: MARK + power[1], text)
    return _TEN_ALONE.sub(lambda power: f"1{MARK}{power[1] or power[2]}", text)


def read(text: str) -> Number | None:
    """The number that a text is, spaces aside; None: it is anything else, or its exponent has more than 18 digits."""
    whole = _WHOLE.fullmatch(with_marks(_SPACES.sub("", text.replace("{,}", ","))))
    if whole is None:
        return None
    return of_digits(whole[1], whole[2])


def of_digits(sign: str, digits: str) -> Number:
    """The number that a match of digits with MARK is."""
    mantissa, _, exponent = digits.replace(",", "").partition(MARK)
    whole, _, fraction = mantissa.partition(".")
    significant = (whole + fraction).lstrip("0")
    stripped = significant.rstrip("0")
    if not stripped:
        return Number(False, "", 0)
    power = int(exponent or "0") - len(fraction) + len(significant) - len(stripped)
    return Number(sign == "-", stripped, power)


def is_scientific(text: str) -> bool:
    """Whether a text writes a number with a power of ten: 1e-5 or 10^{-5}."""
    return MARK in with_marks(_SPACES.sub("", text))


def spelled_out(text: str) -> str:
    r"""The text in which 1e-5 is 1\times 10^{-5}, which LaTeX readers know."""
    return _E.sub(lambda power: rf"\times 10^{{{power[1]}}}", text)
