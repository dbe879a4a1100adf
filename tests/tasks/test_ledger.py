"""The family ledger: an independent simulator agrees with problems and with every line of the traces."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from minithink.tasks import SPLITS, grade, holds_question, ledger, load_problems
from minithink.tasks.writing import MODULUS, NAMES, Fact
from tests.tasks.manners import assert_three_kinds_and_manners

seeds = st.integers(0, 2**32)
problems = st.builds(ledger.draw_problem, seeds.map(random.Random), st.integers(1, 56))

NAME = "[a-z]{3}"


def simulate(question: str) -> tuple[list[int], dict[str, int], dict[str, str]]:
    """What the prompt alone says, carried out: the answer, every balance that ever held, the newest of each."""
    balances = {name: int(value) for name, value in re.findall(rf"({NAME})@0 = (\d+)", question)}
    history = {f"{name}@0": value for name, value in balances.items()}
    newest = {name: f"{name}@0" for name in balances}
    listed = question.split("Steps: ")[1].split(". Find ")[0].split("; ")
    for i, entry in enumerate(listed, 1):
        number, text = entry.split(": ")
        assert int(number) == i
        if moved := re.fullmatch(rf"move (\d+) from ({NAME}) to ({NAME})", text):
            changes = {moved[2]: balances[moved[2]] - int(moved[1]), moved[3]: balances[moved[3]] + int(moved[1])}
        else:
            name, expression = text.split(" = ")
            changes = {name: eval(expression, {}, dict(balances))}
        for name, value in changes.items():
            balances[name] = history[f"{name}@{i}"] = value % 100
            newest[name] = f"{name}@{i}"
    targets = re.findall(NAME, question.split("Find ")[1].replace(" and ", ", "))
    return [balances[name] for name in targets], history, newest


@given(problems)
def test_the_simulator_agrees(problem):
    answer, history, newest = simulate(problem.question)
    assert problem.answer == ", ".join(map(str, answer))
    assert problem.values() == history
    assert problem.newest() == newest


@given(problems)
def test_a_problem_is_well_formed(problem):
    accounts = [f.name for f in problem.balances]
    assert 4 <= len(accounts) == len(set(accounts)) <= 9
    assert len(set(problem.targets)) == 3
    assert set(problem.targets) <= set(accounts)
    for step in problem.steps:
        names = [f.name for f in step.sets]
        assert len(set(names)) == len(names) <= 2
        assert all(f.left != f.right for f in step.sets)
    changed = {f.name for step in problem.steps for f in step.sets}
    assert len(changed & set(problem.targets)) == min(3, len(changed))  # what rested from the start is seldom asked


def test_the_size_is_the_number_of_steps():
    assert [len(ledger.draw_problem(random.Random(n), n).steps) for n in (1, 7, 48)] == [1, 7, 48]


@given(problems)
def test_a_question_is_known_by_its_wording(problem):
    assert holds_question(problem.question)
    assert not holds_question(problem.question.replace("Balances", "Accounts"))


@given(problems, seeds)
def test_every_line_of_a_trace_is_true_or_corrected_at_once(problem, seed):
    thinking, answer = ledger.draw_trace(problem, random.Random(seed))
    assert grade(f"{thinking}</think>{answer}", problem.answer)
    _, history, newest = simulate(problem.question)
    lines = thinking.split("\n")
    for i, line in enumerate(lines):
        said = re.findall(rf"((?:\d+ [-+*] )?\d+|{NAME}@\d+) = (\d+)", line)
        wrong = [value for left, value in said if value_of(left, history) != int(value)]
        if wrong:  # the result of a calculation and the balance that it sets
            (calculation, result), (name, balance) = said[-2:]
            right = value_of(calculation, history)
            assert wrong == [result, balance] == [result, result], line
            assert re.fullmatch(
                rf"Wait, [a-z, I]+\. {re.escape(calculation)} = {right}, not {result}\. So {name} = {right}\.",
                lines[i + 2],
            ), line
            assert lines[i + 1] == lines[i + 3] == ""
        # What is read is what is computed with.
        reads = rf"@\d+ = (\d+)(?: and {NAME}@\d+ = (\d+))?, (\d+) [-+*] (\d+) = "
        for first, second, left, right in re.findall(reads, line):
            assert left == first, line
            assert second in ("", right), line
    assert re.findall(rf"({NAME}@\d+) = \d+", answer) == [newest[t] for t in problem.targets]
    assert "<" not in thinking


def value_of(side: str, history: dict[str, int]) -> int:
    """What one side of an equation is, by the simulator's balances."""
    side = re.sub(rf"{NAME}@\d+", lambda m: str(history[m[0]]), side)
    return eval(side) % MODULUS


@given(problems, seeds)
def test_a_plan_names_the_newest_balances_and_they_are_computed_next(problem, seed):
    thinking, _ = ledger.draw_trace(problem, random.Random(seed))
    newest = {f.name: 0 for f in problem.balances}
    plans = re.findall(r"step (\d+): ([^.]+)\. I need ([^.]+) to find ([^.]+)\.", thinking)
    assert [int(i) for i, *_ in plans] == list(range(1, len(problem.steps) + 1))
    for (i, text, needs, sets), step in zip(plans, problem.steps, strict=True):
        assert text == step.text
        # Whatever the step reads: names behind the equals sign, or both of a move.
        read = re.findall(rf"\b{NAME}\b", text.split(" = ")[1] if " = " in text else text.partition(" from ")[2])
        assert set(re.findall(rf"{NAME}@\d+", needs)) == {f"{name}@{newest[name]}" for name in read}
        newest.update((f.name, int(i)) for f in step.sets)
        assert sets == " and ".join(f"{f.name}@{i}" for f in step.sets)


@given(problems, seeds)
def test_what_was_superseded_is_only_read_by_doubts_about_the_last_steps(problem, seed):
    thinking, answer = ledger.draw_trace(problem, random.Random(seed))
    set_at = dict.fromkeys(problem.newest(), 0)
    done = 0
    for line in (thinking + answer).split("\n"):
        execution = re.match(rf"(?!Wait|Alternatively|Again|I find)[A-Z].*, so ({NAME})@(\d+) = ", line)
        if execution:
            done = int(execution[2])
        for name, since in re.findall(rf"({NAME})@(\d+)", line):
            if int(since) < set_at[name] and not execution:
                doubt = re.findall(rf"(?:so|backwards:|was|look at) {NAME}@(\d+)", line)
                assert doubt, line
                assert all(done - int(d) <= 4 + ledger.RECENT for d in doubt), line
        if execution:
            set_at[execution[1]] = done


@given(problems, st.randoms(use_true_random=False))
def test_the_split_depends_on_the_content_alone(problem, rng):
    shuffled = rng.sample(problem.balances, len(problem.balances))
    other = ledger.LedgerProblem(tuple(shuffled), problem.steps, problem.targets)
    assert other.digest() == problem.digest()
    assert other.split() in (*SPLITS, "train")
    swapped = ledger.LedgerProblem(problem.balances, problem.steps, problem.targets[::-1])
    assert swapped.digest() != problem.digest()
    other_steps = ledger.LedgerProblem(problem.balances, problem.steps[:-1], problem.targets)
    assert other_steps.digest() != problem.digest()


def test_an_example():
    tup, nug, lim, ded = (Fact(n, v) for n, v in (("tup", 56), ("nug", 20), ("lim", 7), ("ded", 33)))
    steps = (
        ledger.Step((Fact("tup", "tup", "+", "nug"),)),
        ledger.Step((Fact("lim", "lim", "*", 3),)),
        ledger.Step((Fact("ded", "ded", "-", 12), Fact("nug", "nug", "+", 12))),
        ledger.Step((Fact("tup", "lim"),)),
    )
    problem = ledger.LedgerProblem((tup, nug, lim, ded), steps, ("tup", "ded", "nug"))
    assert problem.question == (
        "Balances (mod 100): tup@0 = 56; nug@0 = 20; lim@0 = 7; ded@0 = 33. Steps: 1: tup = tup + nug; "
        "2: lim = lim * 3; 3: move 12 from ded to nug; 4: tup = lim. Find tup, ded and nug."
    )
    assert problem.answer == "21, 21, 32"
    thinking, _ = ledger.draw_trace(problem, random.Random(3))
    assert "step 3: move 12 from ded to nug. I need ded@0 and nug@0 to find ded@3 and nug@3.\n" in thinking
    assert " tup@0 = 56 and nug@0 = 20, 56 + 20 = 76, so tup@1 = 76.\n" in thinking
    assert " lim@2 = 21, so tup@4 = 21.\n" in thinking


def test_thoughts_of_all_three_kinds_and_manners_that_differ():
    words = ("I need", "Wait, that is wrong", "was ", "backwards", "Before I answer", "that matches", "move ")
    assert_three_kinds_and_manners(ledger, 16, words)


def test_accounts_rest_while_others_are_busy():
    """Steps between the one that set a balance and the one that reads it: many few, some very many."""
    rng = random.Random(6)
    rests = []
    for _ in range(200):
        versions = ledger.draw_problem(rng, 30).versions()
        rests += [i - int(need.split("@")[1]) for i, step in enumerate(versions) for f in step for need in f.needs]
    assert sum(r > 8 for r in rests) > 0.15 * len(rests)
    assert sum(r <= 3 for r in rests) > 0.3 * len(rests)


def test_no_word_is_a_name():
    rng = random.Random(7)
    for _ in range(200):
        problem = ledger.draw_problem(rng, 8)
        text = problem.question + "".join(ledger.draw_trace(problem, rng))
        accounts = {f.name for f in problem.balances}
        assert set(re.findall(r"\b[a-z]{3}\b", text)) & set(NAMES) == accounts


def parse(question: str) -> ledger.LedgerProblem:
    """A question back into its problem."""
    balances = [Fact(name, int(value)) for name, value in re.findall(rf"({NAME})@0 = (\d+)", question)]
    steps = []
    for text in re.findall(r"\d+: ([^;.]+)", question.split("Steps: ")[1]):
        if moved := re.fullmatch(r"move (\d+) from (\w+) to (\w+)", text):
            amount = int(moved[1])
            sets = (Fact(moved[2], moved[2], "-", amount), Fact(moved[3], moved[3], "+", amount))
        else:
            name, expression = text.split(" = ")
            sets = (Fact(name, *(int(x) if x.isdigit() else x for x in expression.split())),)
        steps.append(ledger.Step(sets))
    targets = re.findall(NAME, question.split("Find ")[1].replace(" and ", ", "))
    return ledger.LedgerProblem(tuple(balances), tuple(steps), tuple(targets))


def test_every_shipped_problem_is_parsed_back_with_its_answer():
    for split in SPLITS:
        for shipped in load_problems(split, "ledger"):
            problem = parse(shipped.question)
            assert problem.question == shipped.question
            assert problem.split() == split
            assert problem.answer == shipped.answer == ", ".join(map(str, simulate(shipped.question)[0]))
            assert shipped.id == f"ledger-{split}-{problem.digest().hex()[:12]}"
