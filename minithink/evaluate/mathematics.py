r"""Whether two expressions in LaTeX are equal, by math-verify and exact arithmetic.

math-verify rounds numbers to six decimals and takes differences below 1e-15 for zero, so 1/2004! would be 1/2006!.
Here numbers are compared exactly: 10^{-20} is not 10^{-21}. Only where one side is a decimal number and the other one
is not, as 0.333333 and 1/3, may the decimal be rounded; then it must agree in six decimals and in five digits.

Evaluating what a text writes may take for ever, or all memory: 9^{9^{9^9}}. `judge.py` runs this module in a process
of its own that is bounded in both.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from minithink.evaluate.numerals import spelled_out

RELATIVE = 1e-5  # how far a rounded decimal may be from an exact number, as a share of it
DIGITS = 400  # numbers that agree in so many digits are equal
_DOTS = re.compile(r"\\(?:ldots|dots|cdots|dotsc|dotsb)(?![A-Za-z])|…|⋯|\.\.\.")
_LONG_DECIMAL = re.compile(r"(?<![0-9.,])([0-9]{0,200})\.([0-9]{1,200})(?![0-9.,]|\\(?:over|bar|dot))")
_EULER = re.compile(r"[0-9]e-[0-9]")  # 2e-1 may be 2e − 1, with Euler's number


def equal(found: str, answer: str) -> bool:
    """Whether two expressions are equal. found: in a generated text. answer: the right one."""
    found = _trimmed(found)
    answer = _trimmed(answer)
    if _DOTS.search(found) or _DOTS.search(answer):
        return _equal_sequences(found, answer)
    if _same(spelled_out(found), spelled_out(answer)):
        return True
    return bool(_EULER.search(found + answer)) and _same(found, answer)


def _trimmed(text: str) -> str:
    """The text without a full stop behind it, which math-verify does not read."""
    return text.strip().removesuffix(".")


def _equal_sequences(found: str, answer: str) -> bool:
    r"""Whether two expressions with dots, as in 1, 2, \ldots, n, are equal part by part."""
    parts = []
    for text in (found, answer):
        text = _DOTS.sub("…", text).replace(" ", "")
        parts.append(text.split(","))
    if len(parts[0]) != len(parts[1]):
        return False
    for one, other in zip(*parts, strict=True):
        if one != other and ("…" in one + other or not _same(one, other)):
            return False
    return True


def _same(found: str, answer: str) -> bool:
    """Whether math-verify takes two expressions for equal, with numbers compared as here."""
    parse, verify = _math_verify()
    # The right answer first: verify treats assignments (x = 5) and intervals by their place.
    return bool(verify(parse(_in_box(answer)), parse(_in_box(found))))


def _in_box(text: str) -> str:
    r"""The text in a box: there math-verify reads everything alike. (0.\overline{3} between dollars would be 0.)"""
    return rf"\boxed{{{_LONG_DECIMAL.sub(_as_fraction, text)}}}"


def _as_fraction(decimal: re.Match[str]) -> str:
    """A decimal number with more digits than a float has, as a fraction."""
    whole = decimal[1]
    behind = decimal[2]
    if len(whole + behind) <= 15:
        return decimal[0]
    return rf"\frac{{{int(whole + behind)}}}{{{10 ** len(behind)}}}"


@functools.cache
def _math_verify() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    """`parse` and `verify` of math-verify, without its limits of time, and with numbers compared as here."""
    import math_verify  # here: an extra, and slow to import
    from math_verify import grader

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of limits and of unreadable answers
    theirs = grader.sympy_numeric_eq

    def compare(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        if _left_to_them(a) or _left_to_them(b):
            return bool(theirs(a, b, float_rounding, numeric_precision))
        verdict = _equal_numbers(a, b)
        if verdict is not None:
            return verdict
        return bool(theirs(a, b, float_rounding, numeric_precision)) and not _are_far(a, b)

    grader.sympy_numeric_eq = compare

    def parse(text: str) -> list[Any]:
        return list(math_verify.parse(text, parsing_timeout=None))

    def verify(answer: list[Any], found: list[Any]) -> bool:
        return bool(math_verify.verify(answer, found, timeout_seconds=None))

    return parse, verify


def _left_to_them(expression: Any) -> bool:
    """Whether math-verify compares this: matrices, whose parts come back here, and whole percentages (9 % is 9)."""
    from sympy import Integer, MatrixBase, Mul, Rational, UnevaluatedExpr
    from sympy.matrices.expressions.matexpr import MatrixExpr

    if isinstance(expression, (MatrixBase, MatrixExpr)):
        return True
    if not isinstance(expression, Mul) or len(expression.args) != 2:
        return False
    share, percent = expression.args
    return isinstance(share, Integer) and percent == UnevaluatedExpr(Rational(1, 100))


def _equal_numbers(a: Any, b: Any) -> bool | None:
    """Whether two expressions of sympy are equal in exact arithmetic; None: exact arithmetic does not decide, because
    one of them is infinite, or a decimal that may be rounded beside something exact."""
    from sympy import Float, nan, oo, zoo

    first = _exact(a)
    second = _exact(b)
    if first.has(oo, -oo, zoo, nan) or second.has(oo, -oo, zoo, nan):
        return None
    if _vanishes(first - second):
        return True
    may_be_rounded = bool(a.has(Float)) != bool(b.has(Float))
    return None if may_be_rounded else False


def _are_far(a: Any, b: Any) -> bool:
    """Whether two numbers differ by more than what rounding explains; False: they are no numbers."""
    first = _exact(a)
    second = _exact(b)
    if first.free_symbols or second.free_symbols:
        return False
    apart = abs((first - second).evalf(20))
    size = max(abs(first.evalf(20)), abs(second.evalf(20)))
    return bool(apart > RELATIVE * size)


def _exact(expression: Any) -> Any:
    """The expression evaluated, with decimals as fractions."""
    from sympy import Float, Rational

    evaluated = expression.doit()
    fractions = {number: Rational(str(number)) for number in evaluated.atoms(Float)}
    return evaluated.xreplace(fractions) if fractions else evaluated


def _vanishes(difference: Any) -> bool:
    """Whether an expression is zero: exactly, or in DIGITS digits of the factor of each product of symbols."""
    from sympy import Add, expand

    factors = defaultdict[Any, list[Any]](list)
    expanded = expand(difference) if difference.free_symbols else difference
    for term in Add.make_args(expanded):
        number, rest = term.as_independent(*term.free_symbols, as_Add=False) if term.free_symbols else (term, 1)
        factors[rest].append(number)
    return all(_is_zero(Add(*numbers)) for numbers in factors.values())


def _is_zero(number: Any) -> bool:
    from sympy import N
    from sympy.core.evalf import PrecisionExhausted

    if number.is_Rational:
        return bool(number == 0)
    if number.is_zero is not None:
        return bool(number.is_zero)
    try:
        return bool(N(number, 5, maxn=DIGITS, strict=True) == 0)
    except PrecisionExhausted:
        return True
