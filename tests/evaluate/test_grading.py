"""Graders find an answer after the thinking and compare it; what they cannot read is wrong, and no error."""

from __future__ import annotations

import importlib.util
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.grading import GRADERS, Graded, check, grade

needs_math = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs the extra math")
# Pieces of answers: what graders look for, broken and whole.
pieces = st.sampled_from(
    [r"\boxed{", "}", "{", "(", ")", "A", "B", "D", "E", "answer is ", "Answer: ", r"\text{", "1", "2,000", ".", "-",
     "$", r"\frac{1}{2}", "^", "</think>", "<think>", "\n", " ", "−", "½", "٣", "x = "]
)  # fmt: skip
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
    with pytest.raises(UsageError, match="no grader 'maths'; there are exact, math, number, choice"):
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
    [("18", "18"), ("18.", "18"), ("$18", "18"), (r"\$1,018.50", "1018.50"), ("1{,}000{,}000", "1000000"),
     (r"70\,000", "70000"), (r"18 \text{ dollars}", "18"), ("18 eggs.", "18"), ("-3", "-3"), ("−3", "-3"),
     ("-$3", "-3"), (".5", ".5"), ("x = 5", "5"), (r"12\text{ m}^2", "12"), ("12 cm^{3}", "12"), (r"50\%", "50"),
     ("007", "007"),
     ("5 or 6", None), ("3/4", None), ("12,34", None), ("1,0000", None), ("5-3", None), ("10^3", None), ("", None),
     ("- 5", "-5"), ("x = - 5", "-5"), ("x - 5", None), (r"\text{Day-5}", None), ("twelve", None), ("٣", None)],
)  # fmt: skip
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
    [(r"\boxed{B}", "B"), (r"\boxed{\text{B}}", "B"), (r"\boxed{(B)}", "B"), (r"\boxed{B.}", "B"),
     (r"\boxed{\textbf{(B)}}", "B"), (r"\boxed{ $\mathrm{B}$ }", "B"), (r"\boxed{**B**}", "B"), (r"\boxed{B)}", "B"),
     (r"\boxed{\text{(B) } 10^{-4} \text{ eV}}", "B"), (r"\boxed{\text{B. A large one}}", "B"),
     (r"\boxed{A} no, \boxed{D}", "D"), ("\\boxed{B)\n5\nm}", "B"),
     (r"\boxed{\mathrm{~B}}", "B"), (r"\boxed{\text{B}\ }", "B"), ("The answer is A or B", None),
     (r"\boxed{E}", None), (r"\boxed{AB}", None), (r"\boxed{(A) or (B)}", None), (r"\boxed{A, B}", None),
     (r"\boxed{A big one}", None), (r"\boxed{b}", None), (r"\boxed{}", None), (r"\boxed{10}", None),
     # a box is what counts, if there is one
     (r"The answer is (B). \boxed{10}", None), (r"The answer is (B). \boxed{C}", "C"),
     ("The answer is (B).", "B"), ("answer is B", "B"), ("the correct answer is **C**, not A", "C"),
     ("Answer: D", "D"), (r"**Answer:** $\text{(A)}$", "A"), ("The answer is (A). No: the answer is (B).", "B"),
     ("The answer is Boron", None), ("The answer is 5", None), ("B", None), ("It answers (B)", None),
     ("The answer is (A)</think> It is (B).", None)],
)  # fmt: skip
def test_choice_reads(text, found):
    assert grade(text, "B", "choice") == Graded(found, found == "B")


# --- math


@needs_math
@pytest.mark.parametrize(
    ("box", "answer", "right"),
    [("0.5", r"\frac{1}{2}", True), (r"\dfrac12", r"\frac{1}{2}", True), ("025", "25", True), ("27", "27.0", True),
     ("204.", "204", True), (r"204 \text{ minutes}", "204", True), ("x=5", "5", True), ("3, 1, 2", "1,2,3", True),
     (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)", True), ("2(k+1)", "2k+2", True), ("1,000", "1000", True),
     ("Evelyn", r"\text{Evelyn}", True), (r"0.\overline{3}", r"0.\overline{3}", True), ("6: 00", "6:00", True),
     ("0.51", r"\frac{1}{2}", False), ("7:00", "6:00", False), ("1,2", "1,2,3", False), ("(2,1)", "(1,2)", False),
     ("silent", r"\text{listen}", False), ("", "5", False), ("((((", "5", False), (r"\frac{1}", "1", False),
     ("204_5", "204_8", False), ("204_{5}", "204_5", True), ("204", "204_5", True)],
)  # fmt: skip
def test_math(box, answer, right):
    assert grade(rf"\boxed{{0}} so \boxed{{{box}}}", answer, "math") == Graded(box, right)


@needs_math
def test_math_hands_over_the_right_answer_first(monkeypatch):
    import math_verify

    calls = []
    monkeypatch.setattr(math_verify, "verify", lambda gold, target: calls.append((gold[0], target[0])))
    GRADERS["math"](r"\boxed{8}", "7")
    assert calls == [(7, 8)]


@needs_math
def test_math_ends(caplog):
    """What would take for ever is wrong after math-verify's limit of 5 s."""
    assert not GRADERS["math"](r"\boxed{9^{9^{9^{9}}}}", "7")
    assert not caplog.records


@needs_math
def test_math_survives_what_math_verify_does_not(monkeypatch):
    import math_verify

    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr(math_verify, "verify", fail)
    assert not GRADERS["math"](r"\boxed{8}", "7")


@needs_math
def test_math_refuses_other_threads():
    caught = []

    def run():
        try:
            GRADERS["math"](r"\boxed{8}", "7")
        except MinithinkError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert caught == ["The grader math works in the main thread only: grade there."]


def test_math_without_math_verify(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MinithinkError, match=r"needs math-verify, .*pip install 'minithink\[math\]'\.$"):
        GRADERS["math"](r"\boxed{8}", "7")
    assert not GRADERS["math"]("8", "8"), "nothing to compare"


def test_graders_that_work_here() -> None:
    for grader in set(GRADERS) - {"math"}:
        check(grader)
    with pytest.raises(UsageError, match="There is no grader 'gut'"):
        grade("", "", "gut")


@needs_math
def test_a_math_verify_that_reads_nothing_is_found(monkeypatch):
    """What it needs is imported late: without that it takes only what is equal letter by letter."""
    import math_verify

    check("math")
    monkeypatch.setattr(math_verify, "parse", lambda text: 1 // 0)
    assert grade(r"\boxed{1}", "1", "math").right
    with pytest.raises(MinithinkError, match=r"does not find that 1/2 is 0\.5.*pip install"):
        check("math")
