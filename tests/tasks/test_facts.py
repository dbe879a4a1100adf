"""The task family: problems have one right answer, traces are right, splits are apart and as committed."""

from __future__ import annotations

import hashlib
import random
import re

from hypothesis import given
from hypothesis import strategies as st

from minithink.tasks import DATA, SPLITS, boxed, facts, grade, load_problems, prepare

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
    assert all(0 <= v < facts.MODULUS for v in problem.values().values())
    assert set(problem.targets) <= set(names)
    assert not any(f.op and f.left == f.right for f in problem.facts)


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
            right = {"+": a + b, "-": a - b, "*": a * b}[op] % facts.MODULUS
            assert (result == right == values[name]) != slip, line
    assert "<" not in thinking


@given(problems)
def test_every_name_is_derived_before_it_is_used(problem):
    thinking, _ = facts.draw_trace(problem, random.Random(0))
    known = set()
    for name, value in re.findall(r"\b([a-z]{3}) = (?:[^=\n]* = )*(\d+)[.,]", thinking):
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
    rng = random.Random(5)
    waits = {}
    texts = []
    for _ in range(300):
        problem = facts.draw_problem(rng, 24)
        thinking, _ = facts.draw_trace(problem, rng)
        texts.append(thinking)
        opening = thinking.split("\n")[0]
        manner = next(i for i, m in enumerate(facts.MANNERS) if opening in m.opening)
        waits.setdefault(manner, []).append(len(re.findall("Wait, let me|Alternatively", thinking)))
    mean = [sum(waits[i]) / len(waits[i]) for i in range(3)]
    assert mean[0] < mean[1] < mean[2]  # the inclination to re-check is a trait of the trace
    collected = sum("So the results are" in t for t in texts) / len(texts)
    assert 0.02 < collected < 0.3  # most traces do not collect their results
    everything = "".join(texts)
    for word in ("so I need", "I have", "is given", "Wait, ", "Alternatively, ", "Before I answer", "\n\n"):
        assert word in everything


def test_the_splits_are_the_committed_ones():
    sums = dict(reversed(line.split()) for line in (DATA / "SHA256SUMS").read_text().splitlines())
    assert sorted(sums) == [f"facts-{split}.jsonl" for split in sorted(SPLITS)]
    for name, expected in sums.items():
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == expected


def test_the_splits_are_large_enough_and_apart():
    ids = {}
    for split in SPLITS:
        problems = load_problems(split)
        ids[split] = {p.id for p in problems}
        assert len(ids[split]) == len(problems) >= 500
        for low, high in prepare.BINS[1:]:
            assert sum(low <= p.thinking_tokens < high for p in problems) >= 200
    assert not ids["test"] & ids["validation"]
    assert {p.question for p in load_problems("test")}.isdisjoint(p.question for p in load_problems("validation"))


def parse(question: str) -> facts.FactsProblem:
    """A question back into its problem."""
    found = []
    for name, expression in re.findall(r"([a-z]{3}) = ([^;.]+)[;.]", question):
        parts = [int(x) if x.isdigit() else x for x in expression.split()]
        found.append(facts.Fact(name, *parts))
    targets = re.findall(r"[a-z]{3}", question.split("Find ")[1].replace(" and ", ", "))
    return facts.FactsProblem(tuple(found), tuple(targets))


def test_every_shipped_problem_belongs_to_its_split_and_its_bin():
    from minithink.engine import TINY
    from minithink.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(TINY)
    for split in SPLITS:
        for shipped in load_problems(split):
            problem = parse(shipped.question)
            assert problem.question == shipped.question
            assert problem.split() == split
            assert problem.answer == shipped.answer
        for shipped in load_problems(split)[::50]:
            problem = parse(shipped.question)
            thinking, _ = facts.draw_trace(problem, random.Random(problem.digest()))
            assert len(tokenizer.encode(thinking)) == shipped.thinking_tokens


def test_boxed_takes_the_last_one_after_the_thinking():
    assert boxed(r"\boxed{1}</think> \boxed{2} then \boxed{3, {4}}!") == "3, {4}"
    assert boxed(r"\boxed{1}</think> none") is None
    assert boxed(r"</think>\boxed{1") is None
    assert grade(r"</think>\boxed{ 1,2 , 3}", "1, 2, 3")
    assert not grade(r"</think>\boxed{1, 23}", "1, 2, 3")
    assert not grade(r"\boxed{1, 2, 3}</think>", "1, 2, 3")
