"""Questions of the families are found in texts. Alone: pytest tests/tasks/test_init.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from minithink.tasks import question_in

ROOT = Path(__file__).parents[2]
# The definition in one expression, which takes quadratic time where questions begin and do not end.
WHOLE = re.compile(
    r"((Facts|Balances) \(mod 100\): \w+(@0)?|Numbers from 1 to 9: \w+ \* \w+ \+ \w+) = .*?\. Find \w+[\w, ]*",
    re.DOTALL,
)
BEGINNINGS = ["Facts (mod 100): a = ", "Balances (mod 100): ", "Numbers from 1 to 9: a * b + c = "]
PIECES = [*BEGINNINGS, "a", "@0", " = ", "5", ".", ". Find a", " Find ", "a, b", "\n", " "]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_the_last_question_is_found_as_defined(text):
    found = [question[0] for question in WHOLE.finditer(text)]
    assert question_in(text) == (found[-1] if found else None)


def test_questions_that_never_end_take_time_in_proportion_to_the_text():
    code = "from minithink.tasks import question_in\nassert question_in('Facts (mod 100): a = ' * 100_000) is None"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
