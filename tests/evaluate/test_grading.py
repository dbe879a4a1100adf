"""Graders find an answer after the thinking and compare it; what they cannot read is wrong, and no error."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.errors import MinithinkError, UsageError
from minithink.evaluate import judge
from minithink.evaluate.grading import GRADERS, Graded, check, grade
from tests.evaluate.run import needs_math

ROOT = Path(__file__).parents[2]
HALF = r"\boxed{\frac{1}{2}}"

# Pieces of answers: what graders look for, broken and whole.
pieces = st.sampled_from(
    [
        r"\boxed{",
        "}",
        "{",
        "(",
        ")",
        "A",
        "B",
        "D",
        "E",
        "answer is ",
        "Answer: ",
        r"\text{",
        "1",
        "2,000",
        ".",
        "-",
        "$",
        r"\frac{1}{2}",
        "^",
        "</think>",
        "<think>",
        "\n",
        " ",
        "−",
        "½",
        "٣",
        "x = ",
    ]
)
texts = st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=12).map("".join)


@given(texts, st.sampled_from(["A", "D", "5", "2,000", "", "x"]), st.sampled_from(sorted(set(GRADERS) - {"math"})))
def test_graders_are_total(text, answer, grader):
    graded = grade(text, answer, grader)
    assert graded.right == GRADERS[grader](text, answer)
    assert graded.found is not None or not graded.right
    # only what follows the thinking counts
    assert grade(f"{text}</think>", answer, grader) == Graded(None, False)
    assert grade(f"So \\boxed{{{answer}}} and the answer is A</think>{text}", answer, grader) == graded


@needs_math
@given(texts, st.sampled_from(["A", "5", "2,000", "", r"\frac{1}{2}"]))
def test_math_is_total(text, answer):
    graded = grade(text, answer, "math")
    assert graded.found is not None or not graded.right
    assert grade(f"So \\boxed{{{answer}}}.</think>{text}", answer, "math") == graded


@pytest.mark.parametrize("grader", sorted(GRADERS))
def test_nothing_is_wrong(grader):
    for text in ("", "5", r"\boxed{", r"\boxed{5", r"\boxed{B}</think>", "</think>"):
        assert grade(text, "B", grader) == Graded(None, False)


def test_unknown_grader():
    with pytest.raises(UsageError, match=r"no grader 'maths'; did you mean math\? There are exact, math"):
        grade("", "", "maths")


def test_exact():
    assert grade(r"\boxed{1}</think>\boxed{4} or \boxed{ 1,2, 3}", "1, 2, 3", "exact") == Graded(" 1,2, 3", True)
    assert not GRADERS["exact"](r"\boxed{0.5}", "1/2")
    assert grade(r"\boxed{1} and then \boxed{2", "1", "exact") == Graded("1", True), "the last that is closed"
    assert grade(r"\boxed{\left\{1\right.}", r"\left\{1\right.", "exact").right
    assert grade(r"\boxed{1\\{2}}", r"1\\{2}", "exact").right


# --- number


@pytest.mark.parametrize(
    ("box", "found"),
    [
        ("18", "18"),
        ("18.", "18"),
        ("$18", "18"),
        (r"\$1,018.50", "1018.50"),
        ("1{,}000{,}000", "1000000"),
        (r"70\,000", "70000"),
        (r"18 \text{ dollars}", "18"),
        ("18 eggs.", "18"),
        ("-3", "-3"),
        ("−3", "-3"),
        ("-$3", "-3"),
        (".5", ".5"),
        ("x = 5", "5"),
        (r"12\text{ m}^2", "12"),
        ("12 cm^{3}", "12"),
        (r"50\%", "50"),
        ("007", "007"),
        ("5 or 6", None),
        ("3/4", None),
        ("12,34", None),
        ("1,0000", None),
        ("5-3", None),
        ("10^3", "1e3"),
        ("2^3", None),
        ("", None),
        ("- 5", "-5"),
        ("x = - 5", "-5"),
        ("x - 5", None),
        (r"\text{Day-5}", None),
        ("twelve", None),
        ("٣", None),
    ],
)
def test_number_reads(box, found):
    assert grade(rf"Thus \boxed{{{box}}}.", "none", "number") == Graded(found, False)


numbers = st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9)


@given(numbers, st.data())
def test_number_does_not_see_formatting(number, data):
    def draw(*options):
        return data.draw(st.sampled_from(options))

    digits = f"{abs(number):,.2f}" if draw(True, False) else f"{abs(number):.2f}"
    if number == number.to_integral_value() and draw(True, False):
        digits = digits.removesuffix(".00")
    digits = digits.replace(",", draw(",", "{,}", r",\!", r"\,") if "," in digits else ",")
    sign = draw("-", "−") if number < 0 else ""
    unit = draw("", " eggs", r"\text{ dollars}", "%", r" \text{ km}^2", " m^{2}")
    box = sign + draw("", "$", r"\$") + digits + unit + draw("", ".", " ")
    assert GRADERS["number"](rf"\boxed{{{box}}}", str(number)), box
    assert GRADERS["number"](rf"\boxed{{{number}}}", box), box
    assert not GRADERS["number"](rf"\boxed{{{box}}}", str(number + data.draw(st.sampled_from([1, -2]))))


# --- choice


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{B.}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{ $\mathrm{B}$ }", "B"),
        (r"\boxed{**B**}", "B"),
        (r"\boxed{B)}", "B"),
        (r"\boxed{\text{(B) } 10^{-4} \text{ eV}}", "B"),
        (r"\boxed{\text{B. A large one}}", "B"),
        (r"\boxed{A} no, \boxed{D}", "D"),
        ("\\boxed{B)\n5\nm}", "B"),
        (r"\boxed{\mathrm{~B}}", "B"),
        (r"\boxed{\text{B}\ }", "B"),
        ("The answer is A or B", None),
        (r"\boxed{E}", None),
        (r"\boxed{AB}", None),
        (r"\boxed{(A) or (B)}", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{A big one}", None),
        (r"\boxed{b}", None),
        (r"\boxed{}", None),
        (r"\boxed{10}", None),
        # a box is what counts, if there is one
        (r"The answer is (B). \boxed{10}", None),
        (r"The answer is (B). \boxed{C}", "C"),
        ("The answer is (B).", "B"),
        ("answer is B", "B"),
        ("the correct answer is **C**, not A", "C"),
        ("Answer: D", "D"),
        (r"**Answer:** $\text{(A)}$", "A"),
        ("The answer is (A). No: the answer is (B).", "B"),
        ("The answer is Boron", None),
        ("The answer is 5", None),
        ("B", None),
        ("It answers (B)", None),
        ("The answer is (A)</think> It is (B).", None),
    ],
)
def test_choice_reads(text, found):
    assert grade(text, "B", "choice") == Graded(found, found == "B")


# --- math


@needs_math
@pytest.mark.parametrize(
    ("box", "answer", "right"),
    [
        ("0.5", r"\frac{1}{2}", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        ("025", "25", True),
        ("27", "27.0", True),
        ("204.", "204", True),
        (r"204 \text{ minutes}", "204", True),
        ("x=5", "5", True),
        ("3, 1, 2", "1,2,3", True),
        (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)", True),
        ("2(k+1)", "2k+2", True),
        ("1,000", "1000", True),
        ("Evelyn", r"\text{Evelyn}", True),
        (r"0.\overline{3}", r"0.\overline{3}", True),
        ("6: 00", "6:00", True),
        ("0.51", r"\frac{1}{2}", False),
        ("7:00", "6:00", False),
        ("1,2", "1,2,3", False),
        ("(2,1)", "(1,2)", False),
        ("silent", r"\text{listen}", False),
        ("", "5", False),
        ("((((", "5", False),
        (r"\frac{1}", "1", False),
        ("204_5", "204_8", False),
        ("204_{5}", "204_5", True),
        ("204", "204_5", True),
    ],
)
def test_math(box, answer, right):
    assert grade(rf"\boxed{{0}} so \boxed{{{box}}}", answer, "math") == Graded(box, right)


@needs_math
def test_math_gives_up_an_expression_that_takes_forever(caplog, monkeypatch):
    """What would take for ever is wrong after a few seconds."""
    monkeypatch.setattr(judge, "_judge", judge.Judge(seconds=1))
    assert not GRADERS["math"](r"\boxed{9^{9^{9^{9}}}}", "7")
    assert not caplog.records


@needs_math
def test_math_works_in_every_thread():
    right = []
    threads = [threading.Thread(target=lambda: right.append(grade(HALF, "0.5", "math").right)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


def test_math_without_math_verify(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr(judge, "_judge", judge.Judge())
    with pytest.raises(MinithinkError, match=r"needs math-verify, .*pip install 'math-verify>=0.9'\.$"):
        GRADERS["math"](HALF, "7")
    assert not GRADERS["math"]("8", "8"), "nothing to compare"


def test_graders_that_work_here() -> None:
    for grader in set(GRADERS) - {"math"}:
        check(grader)
    with pytest.raises(UsageError, match="There is no grader 'gut'"):
        grade("", "", "gut")


@needs_math
def test_a_math_verify_that_reads_nothing_is_found(monkeypatch):
    """Then only what is equal letter by letter would be right."""
    check("math")
    monkeypatch.setattr(judge, "equal", lambda found, answer: False)
    assert grade(r"\boxed{1}", "1", "math").right
    with pytest.raises(MinithinkError, match=r"does not find that 1/2 is 0\.5.*pip install"):
        check("math")


# --- numbers, in every grader

ONE_NUMBER = [
    ("1e-5", "0.00001", r"1\times 10^{-5}", r"1 \cdot 10^{-5}", "10^{-5}", "1.0E-5", "10^-5", "10⁻⁵", "1×10^{−5}"),
    ("2.88e-19", r"2.88 \cdot 10^{-19}", r"2.88\times10^{-19}", "28.8e-20", r"2.88 \, \times \, {10}^{-19}"),
    ("1.5e3", "1500", "1,500", "1{,}500", r"1.5 \times 10^3", "1500.0", "1.5E+3", "0.0015e6"),
    ("6.5e-2", "0.065", ".065", "65e-3"),
    ("-1.6E7", r"-1.6\times 10^{7}", "-16000000", "−16,000,000"),
    ("1e400", r"10^{400}", "10e399"),
]


@pytest.mark.parametrize("spellings", ONE_NUMBER, ids=lambda spellings: spellings[0])
@pytest.mark.parametrize("grader", ["number", pytest.param("math", marks=needs_math)])
def test_a_number_is_equal_to_itself_in_every_spelling(spellings, grader):
    others = list[str]()
    for row in ONE_NUMBER:
        if row is not spellings:
            others += row
    for one in spellings:
        for other in spellings:
            assert GRADERS[grader](rf"\boxed{{{one}}}", other), (one, other)
        for other in others:
            assert not GRADERS[grader](rf"\boxed{{{one}}}", other), (one, other)


def test_exact_compares_the_value_of_numbers_with_a_power_of_ten_only():
    for found, answer in (("0.00001", "1e-5"), ("1e-5", "0.00001"), (r"1\times 10^{-5}", "1e-5"), ("1500", "1.5e3")):
        assert GRADERS["exact"](rf"\boxed{{{found}}}", answer)
    for found, answer in (("1e-5", "1e-6"), ("7", "007"), ("1,234", "1234"), ("0.50", "0.5"), ("1e5", "x")):
        assert not GRADERS["exact"](rf"\boxed{{{found}}}", answer)


@needs_math
@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}"),
        ("10^{-20}", "10^{-21}"),
        ("0.0000001", "0.0000002"),
        ("1e-7", "2e-7"),
        ("1e-7x", "2e-7x"),
        (r"10^{-20}\pi", r"10^{-21}\pi"),
        (r"\{10^{-20}, 1\}", r"\{10^{-21}, 1\}"),
        ("(10^{-20}, 1)", "(10^{-21}, 1)"),
        ("x=10^{-20}", "x=10^{-21}"),
        ("x<10^{-20}", "x<10^{-21}"),
        (r"1+10^{-30}", "1"),
        (r"\pi+10^{-60}", r"\pi"),
        ("0.000123", r"\frac{1}{8100}"),
        (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}"),
        ("2^{100}", "2^{100}+1"),
        ("123456789012345678901", "123456789012345678902"),
        ("(0.1234567890123456789,1)", "(0.1234567890123456788,1)"),
        ("3.14", r"\pi"),
        ("0.3333", r"\frac{1}{3}"),
        (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"),
        (r"1, 2, \ldots, n", r"1, 2, \ldots, 2n"),
    ],
)
def test_different_numbers_are_never_equal(found, answer):
    for one, other in ((found, answer), (answer, found)):
        assert not GRADERS["math"](rf"\boxed{{{one}}}", other)
        assert GRADERS["math"](rf"\boxed{{ {one} }}", one)


@needs_math
@pytest.mark.parametrize(
    ("found", "answer"),
    [
        ("0.333333", r"\frac{1}{3}"),
        ("0.058824", r"\frac{1}{17}"),
        ("3.141593", r"\pi"),
        ("66.666667", r"\frac{200}{3}"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"50\%", "0.5"),
        (r"9\%", "9"),
        ("2e-1", "-1+2e"),
        (r"(1e-7, 2)", r"(1\times 10^{-7}, 2)"),
        (r"5\frac12", "5.5"),
        (r"1, 2, \ldots, n", r"1,2,\dots,n"),
        (r"\frac12, \ldots, n", r"0.5, ..., n"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\frac{1}{2004!}", r"\frac{2005}{2005!}"),
        ("0.1x", r"\frac{x}{10}"),
    ],
)
def test_one_number_in_two_forms_is_equal(found, answer):
    assert GRADERS["math"](rf"\boxed{{{found}}}", answer)
    assert GRADERS["math"](rf"\boxed{{{answer}}}", found)


fractions = st.fractions(max_denominator=10**12)


@needs_math
@settings(max_examples=25)  # each is evaluated by sympy, in another process
@given(fractions, fractions, st.integers(-40, 40))
def test_fractions_are_compared_exactly(one, other, power):
    scaled = [rf"\frac{{{f.numerator}}}{{{f.denominator}}}\cdot 10^{{{power}}}" for f in (one, other)]
    assert GRADERS["math"](rf"\boxed{{{scaled[0]}}}", scaled[1]) == (one == other)
    near = one + Fraction(1, 10**30)
    assert not GRADERS["math"](rf"\boxed{{\frac{{{near.numerator}}}{{{near.denominator}}}}}", scaled[0])


@given(st.decimals(allow_nan=False, allow_infinity=False), st.decimals(allow_nan=False, allow_infinity=False))
def test_decimal_numbers_are_equal_if_and_only_if_their_values_are(one, other):
    for grader in ("number", "math"):
        assert GRADERS[grader](rf"\boxed{{{one}}}", str(other)) == (one == other)
        assert GRADERS[grader](rf"\boxed{{{one:e}}}", str(one))


# --- an answer without a box


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So #### 12", "12"),
        ("It is 3*4.\n#### 1,200", "1,200"),
        ("The answer is 12.", "12"),
        ("The answer is $12$. I hope it is correct.", "12"),
        ("**Answer:** 12", "12"),
        ("**Final Answer**\n\n12", "12"),
        ("Final answer: \\(12\\).", "12"),
        (r"So $x = \boxed 7$.", "7"),
        (r"\boxed7", "7"),
        (r"\fbox{17}", "17"),
        (r"\framebox[2cm]{5}", "5"),
        (r"The answer is 5. \boxed{7}", "7"),
        (r"The answer is \boxed{7", None),
        ("#### 1. The first step", None),
        ("It is 12.", None),
        ("The answer is 12</think>", None),
    ],
)
def test_answers_are_found_in_every_spelling(text, found):
    assert grade(text, "none", "exact").found == found
    number = None if found is None else found.replace(",", "")
    assert grade(text, "none", "number").found == number


# --- adversarial texts

PIECES = [
    r"\boxed{",
    r"\boxed ",
    r"\framebox[",
    "(",
    "{",
    "9",
    "9,999,",
    "1e5",
    r"\times 10^{",
    "1-",
    "answer ",
    "(A) or ",
    "answer is A ",
    " ",
    "*",
    "#",
    "$",
]
ADVERSARIAL = """
import json, sys
from minithink.evaluate.grading import GRADERS, grade
for piece in json.loads(sys.argv[1]):
    body = piece * (200_000 // len(piece))
    for grader in ("exact", "number", "choice"):
        grade("answer is" + body, "12", grader)
        grade("\\\\boxed{A" + body + "}", body, grader)
"""


def test_adversarial_texts_take_time_in_proportion_to_their_length():
    """They take seconds; a search that reads the rest of the text at each place would take hours."""
    words = [sys.executable, "-c", ADVERSARIAL, json.dumps(PIECES)]
    assert subprocess.run(words, cwd=ROOT, timeout=400).returncode == 0


def test_without_a_grader_an_answer_is_found_and_not_graded():
    assert grade(r"\boxed{7}", "7", "none") == Graded("7", None)
    assert grade("nothing", "", "none") == Graded(None, None)
