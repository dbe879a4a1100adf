"""The family facts: problems have one right answer, traces are right."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from minithink.tasks import SPLITS, facts, grade, holds_question, load_problems
from minithink.tasks.writing import MODULUS
from tests.tasks.manners import assert_three_kinds_and_manners

problems = st.builds(facts.draw_problem, st.integers(0, 2**32).map(random.Random), st.integers(1, 64))


def evaluate(question: str) -> list[int]:
    """The answer by another road: the definitions are substituted as text and computed by Python."""
    defined = dict(re.findall(r"([a-z]{3}) = ([^;.]+)[;.]", question))
    asked = re.findall(r"[a-z]{3}", question.split("Find ")[1].replace(" and ", ", "))

    def text(name: str) -> str:
        return "(" + re.sub(r"[a-z]{3}", lambda m: text(m[0]), defined[name]) + ")%100"

    # Substitution grows without bound where chains share names, so small problems only.
    return [eval(text(name)) % 100 for name in asked]


@given(problems)
def test_a_problem_is_well_formed(problem):
    names = [f.name for f in problem.facts]
    assert len(set(names)) == len(names)
    assert len(set(problem.targets)) == 3
    assert all(0 <= v < MODULUS for v in problem.values().values())
    assert set(problem.targets) <= set(names)
    assert not any(f.op and f.left == f.right for f in problem.facts)


@given(problems)
def test_a_question_is_known_by_its_wording(problem):
    assert holds_question(problem.question)
    assert holds_question(f"<|user|>\n{problem.question}\n<|assistant|>")
    assert not holds_question(problem.question.replace("Facts", "Values"))
    assert not holds_question(problem.question.partition("Find")[0]), "it asks for nothing"


@given(st.builds(facts.draw_problem, st.integers(0, 2**32).map(random.Random), st.integers(1, 8)))
def test_the_answer_is_what_python_computes(problem):
    assert [int(x) for x in problem.answer.split(", ")] == evaluate(problem.question)


@given(problems, st.integers(0, 2**32))
def test_a_trace_is_right_and_says_so(problem, seed):
    thinking, answer = facts.draw_trace(problem, random.Random(seed))
    assert grade(f"{thinking}</think>{answer}", problem.answer)
    values = problem.values()
    lines = thinking.split("\n")
    for i, line in enumerate(lines):
        found = re.search(r"\b([a-z]{3}) = [^=]+ = (\d+) ([-+*]) (\d+) = (\d+)", line)
        if found and "backwards" not in line:
            name, a, op, b, result = found[1], int(found[2]), found[3], int(found[4]), int(found[5])
            # a slip is corrected in the next paragraph
            slip = i + 2 < len(lines) and f"not {result}." in lines[i + 2]
            right = {"+": a + b, "-": a - b, "*": a * b}[op] % MODULUS
            assert (result == right == values[name]) != slip, line
    assert "<" not in thinking


@given(problems)
def test_every_name_is_derived_before_it_is_used(problem):
    thinking, _ = facts.draw_trace(problem, random.Random(0))
    known = set()
    for name, value in re.findall(r"\b([a-z]{3}) = (?:[^=\n]* = )*(\d+)(?:[.,]| is given)", thinking):
        known.add((name, int(value)))
    for name, value in re.findall(r"I (?:already )?have ([a-z]{3}) = (\d+)", thinking):
        assert problem.values()[name] == int(value)
    assert all((t, problem.values()[t]) in known for t in problem.targets)


@given(problems, st.randoms(use_true_random=False))
def test_the_split_depends_on_the_content_alone(problem, rng):
    shuffled = list(problem.facts)
    rng.shuffle(shuffled)
    other = facts.FactsProblem(tuple(shuffled), problem.targets)
    assert other.digest() == problem.digest()
    assert other.split() in (*SPLITS, "train")


def test_thoughts_of_all_three_kinds_and_manners_that_differ():
    words = ("so I need", "I have", "is given", "Wait, ", "Alternatively, ", "Before I answer", "\n\n")
    assert_three_kinds_and_manners(facts, 24, words)


def test_a_name_that_is_given_is_not_computed():
    problem = facts.FactsProblem(
        (facts.Fact("gas", 45), facts.Fact("tup", "gas", "+", 60), facts.Fact("nob", 7)), ("gas", "tup", "nob")
    )
    for seed in range(30):
        thinking, _ = facts.draw_trace(problem, random.Random(seed))
        assert "First, gas. gas = 45 is given.\n" in thinking
        assert "Next, tup. tup = gas + 60, I have gas = 45.\n" in thinking
        assert "Last, nob. nob = 7 is given.\n" in thinking
        assert not re.search(r"= (\d+) = \1\b", thinking)


def parse(question: str) -> facts.FactsProblem:
    """A question back into its problem."""
    found = []
    for name, expression in re.findall(r"([a-z]{3}) = ([^;.]+)[;.]", question):
        parts = [int(x) if x.isdigit() else x for x in expression.split()]
        found.append(facts.Fact(name, *parts))
    targets = re.findall(r"[a-z]{3}", question.split("Find ")[1].replace(" and ", ", "))
    return facts.FactsProblem(tuple(found), tuple(targets))


def test_every_shipped_problem_is_parsed_back_with_its_answer():
    for split in SPLITS:
        for shipped in load_problems(split):
            problem = parse(shipped.question)
            assert problem.question == shipped.question
            assert problem.split() == split
            assert problem.answer == shipped.answer
            assert shipped.id == f"facts-{split}-{problem.digest().hex()[:12]}"
