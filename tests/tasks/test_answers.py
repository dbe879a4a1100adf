"""Short answers are found in texts and in published solutions. Alone: pytest tests/tasks/test_answers.py."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.tasks.answers import boxed, seems_long, short_answer, stated

# How published rows and texts of models write the answer, and what it is.
SPELLINGS = [
    ("3 boxes of 4 make 3*4=<<3*4=12>>12.\n#### 12", "12"),
    ("It gains 20,000.\n#### 70,000", "70000"),
    ("#### $1,234.50", "1234.50"),
    ("#### -5\n", "-5"),
    ("So.\n#### \\frac{1}{2}", r"\frac{1}{2}"),
    (r"So $x=\boxed 7$.", "7"),
    (r"So $x=\boxed7$.", "7"),
    (r"So $\boxed 3 + 4i$.", "3 + 4i"),
    (r"So \(\boxed 12.\)", "12"),
    (r"So $\boxed\frac12$", r"\frac12"),
    (r"So it is \boxed 7 in the end", "7"),
    (r"So \boxed {8}.", "8"),
    (r"So \fbox{17}.", "17"),
    (r"So \framebox{17} or \framebox[2cm][c]{18}.", "18"),
    (r"\boxed{\left\{1, \frac{a}{\{b\}}\right\}}", r"\left\{1, \frac{a}{\{b\}}\right\}"),
    (r"$s = \frac{45}{3600} 7200=\boxed{1.6} \mathrm{~cm}$", "1.6"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\\boxed{7}", "7"),  # escaped once too often
    (r"It is \boxed{$\frac{1}{2}$}", r"\frac{1}{2}"),
    ("We see that the answer is 12.", "12"),
    ("The answer is: 18", "18"),
    ("Final Answer: The final answer is $12$. I hope it is correct.", "12"),
    ("**Final Answer**\n\n\\[ x + 1 \\]", "x + 1"),
    ("Answer: **12**", "12"),
    ("the answer is 1,5 and 7", "1,5 and 7"),
    ("$\\frac{v_0^2}{2g}$", r"\frac{v_0^2}{2g}"),
    (r"\(5\)", "5"),
]


@pytest.mark.parametrize(("solution", "answer"), SPELLINGS)
def test_the_short_answer_is_found_in_every_published_spelling(solution, answer):
    assert short_answer(solution) == answer
    assert short_answer(answer) == answer
    assert not seems_long(answer)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        " 12 ",
        "x, y",
        "$5 and $3",
        "#### ",
        "answer",
        "the answer is not 5",
        r"\boxed{5",
        r"\boxedx{5}",
        "The answer is \\boxed{5",
        "#### 1. Setup\nThen we are done",
    ],
)
def test_what_has_no_known_spelling_stays_as_it_is(text):
    assert short_answer(text) == text
    assert stated(text) is None


def braced(text: str) -> str | None:
    r"""The content of the last closed \boxed{…}, read again from each of them: the definition, in quadratic time."""
    end = len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        end = start
        start += len(r"\boxed{")
        depth = 1
        for mark in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(mark[0], 0)
            if depth == 0:
                return text[start : start + mark.start()]
    return None


pieces = st.sampled_from([r"\boxed{", "{", "}", "\\", "1", r"\{", r"\}", " ", "\n", "a"])


@given(st.lists(pieces, max_size=20).map("".join))
def test_boxes_with_braces_are_found_as_defined(text):
    assert boxed(text) == braced(text)
    assert boxed(f"\\boxed{{0}}</think>{text}") == braced(text)


def test_whole_solutions_seem_long():
    for solution in ("First we add.\nThen 5.\n\nSo it is seven.", "We add them. We subtract. So it is 7.", "x" * 401):
        assert seems_long(solution)
    for answer in ("7", r"\frac{1}{2}", "6:00 a.m. and 7:00 p.m.", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "No. 5"):
        assert not seems_long(answer)
