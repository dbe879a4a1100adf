"""The family search: an independent simulator agrees with problems and with every line of the traces."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.tasks import SPLITS, grade, holds_question, load_problems, question_in, search
from minithink.tasks.search import CEILING, EXCITEMENT, HIGH, LARGEST, LOW, MEMORY, MISREAD, MOODS, RESTATED

seeds = st.integers(0, 2**32)
problems = st.builds(search.draw_problem, seeds.map(random.Random), st.integers(1, 12))

NAME = "[a-z]{3}"
LOCK = rf"({NAME}) \* (\w+) \+ (\w+) = (\d+)"
SIDE = r"from (1 up|9 down)"
SAID = {mood.said: mood for mood in MOODS}


def simulate(question: str) -> dict[str, int]:
    """What the prompt alone says: every number, each the only one from 1 to 9 that fits its lock."""
    locks = re.findall(LOCK, question)
    known: dict[str, int] = {}
    while len(known) < len(locks):
        before = len(known)
        for name, factor, added, result in locks:
            if name not in known and all(o.isdigit() or o in known for o in (factor, added)):
                c, d = (known[o] if o in known else int(o) for o in (factor, added))
                (known[name],) = (x for x in range(LOW, HIGH + 1) if x * c + d == int(result))
        assert len(known) > before, "locks need each other in a circle"
    return known


def targets(question: str) -> list[str]:
    return re.findall(NAME, question.split("Find ")[1].partition(".")[0].replace(" and ", ", "))


@dataclass
class Paragraph:
    """What the reader of a trace knows of one paragraph."""

    kind: str = ""  # what its last line is, or which doubt
    mood: search.Mood = MOODS[0]  # at its end
    doubts: bool = False


@dataclass
class Reader:
    """Reads a trace line by line, knows what must hold, and refuses every line that it does not expect."""

    question: str
    paragraphs: list[Paragraph] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.truth = simulate(self.question)
        self.locks = {name: (f"{name} * {c} + {d} = {r}", c, d) for name, c, d, r in re.findall(LOCK, self.question)}
        self.known: dict[str, int] = {}
        self.current = ""  # whose lock is searched
        self.numbers = (0, 0, 0)  # of that lock, as the trace has read it: factor, added, result
        self.misread = False
        self.left: list[int] = []  # numbers that are still to be tried, in this order
        self.side = ""
        self.last: tuple[int, int] = (0, 0)  # trial, product that it shows
        self.hit = self.hidden = False
        self.moods: list[search.Mood] = []  # of every search

    def number(self, operand: str) -> int:
        return int(operand) if operand.isdigit() else self.known[operand]

    def goal(self, side: str) -> str:
        c, d, result = self.numbers
        return f"{self.current} with {self.current} * {c} + {d} = {result}, from {side}"

    def begin(self, side: str) -> None:
        numbers = range(LOW, HIGH + 1)
        self.side, self.left = side, [*numbers] if side == "1 up" else [*reversed(numbers)]

    def read(self, thinking: str) -> Reader:
        *paragraphs, closing = thinking.rstrip("\n").split("\n\n")
        opening, first = paragraphs[0].split("\n", 1)
        mood = next(m for m in MOODS if opening in m.opening)
        for i, text in enumerate([first, *paragraphs[1:]]):
            self.paragraphs.append(Paragraph(mood=mood, doubts=text.startswith("Wait")))
            here = self.paragraphs[-1]
            for line in text.split("\n"):
                if said := re.search(r"(Quick now|Step by step|Carefully now)\.$", line):
                    mood = here.mood = SAID[said[0]]
                here.kind = self.line(line, here, follows=self.paragraphs[i - 1].kind if i else "")
        assert closing in ("That is all I need.", "Now I can answer.", "That settles it.") or re.fullmatch(
            rf"So the results are {re.escape(listed(self.truth, targets(self.question)))}\.", closing
        )
        assert set(self.known) >= set(targets(self.question))
        return self

    def line(self, line: str, here: Paragraph, follows: str) -> str:
        """The kind of a line, once all that it says is found true."""
        for kind in (
            "plan",
            "want",
            "trial",
            "still",
            "none",
            "so",
            "know",
            "already",
            "recheck",
            "review",
            "remind",
            "retry",
            "turn",
            "reread",
        ):
            if found := re.fullmatch(getattr(self, kind.upper()), line):
                getattr(self, kind)(found, here, follows)
                self.counts[kind] += 1
                return kind
        raise AssertionError(f"an unknown line: {line}")

    PLAN = (
        rf"(?:(?:First|Next|Last), ({NAME})\.|Here|Back to ({NAME})\.) {LOCK}"
        rf"((?:, I have {NAME} = \d)*)(, so I need ({NAME})(?: and ({NAME}))? first)?\."
    )

    def plan(self, found: re.Match[str], *_: object) -> None:
        assert found[1] in (None, found[3])
        assert found[2] in (None, found[3])
        self.reads(*found.group(3, 4, 5, 6, 7))
        missing = [o for o in self.locks[found[3]][1:] if not o.isdigit() and o not in self.known]
        assert [n for n in (found[9], found[10]) if n] == missing

    def reads(self, name: str, factor: str, added: str, result: str, have: str) -> None:
        """A lock as the question has it, and those of its numbers that are known."""
        text, *operands = self.locks[name]
        assert f"{name} * {factor} + {added} = {result}" == text
        assert re.findall(rf"I have ({NAME}) = (\d)", have) == [
            (o, str(self.known[o])) for o in operands if o in self.known
        ]

    WANT = rf"I want ({NAME}) with {LOCK}, {SIDE}\. (?:Quick now|Step by step|Carefully now)\."

    def want(self, found: re.Match[str], here: Paragraph, _: str) -> None:
        again = self.current == found[1]  # as the line before says, "None fits."
        assert again or not self.current, "one search at a time"
        assert found[1] == found[2]
        self.numbers = c, d, result = int(found[3]), int(found[4]), int(found[5])
        text, factor, added = self.locks[found[1]]
        true = (self.number(factor), self.number(added), int(text.rpartition(" = ")[2]))
        self.misread = self.numbers != true
        if self.misread:  # one number is another one, so that nothing fits
            assert not again
            assert sum(a != b for a, b in zip(self.numbers, true, strict=True)) == 1
            assert all(x * c + d != result for x in range(LOW, HIGH + 1))
            self.counts["misread"] += 1
        assert not again or found[6] != self.side
        self.current = found[1]
        self.begin(found[6])
        self.hit = self.hidden = False
        if not again:
            self.moods.append(here.mood)

    TRIAL = (
        r"(Try|Now try|Carefully try) (\d): (?:(\d) \* (\d) = (\d+), no, )?(\d) \* (\d) = (\d+), "
        r"(\d+) \+ (\d+) = (\d+), (yes|no)\."
    )

    def trial(self, found: re.Match[str], here: Paragraph, _: str) -> None:
        assert found[1] == here.mood.trial
        x, *slip, again, factor, product, repeated, added, total = (int(n or 0) for n in found.groups()[1:-1])
        *numbers, result = self.numbers
        assert x == again == self.left.pop(0)
        assert [factor, added] == numbers
        assert product == repeated
        assert total == repeated + added
        assert (found[12] == "yes") == (total == result)
        if any(slip):  # corrected in the same line
            assert slip[:2] == [x, factor]
            assert abs(slip[2] - x * factor) in (1, 10)
            assert product == x * factor
            self.counts["corrected"] += 1
        if product != x * factor:  # unnoticed: only ever hides
            assert abs(product - x * factor) in (1, 10)
            assert total != result
            self.hidden |= x == self.truth[self.current]
            self.counts["unnoticed"] += 1
        self.hit = found[12] == "yes"
        assert not self.hit or x == self.truth[self.current]
        self.last = x, product

    STILL = rf"Still ({NAME} with .*)\."

    def still(self, found: re.Match[str], *_: object) -> None:
        assert found[1] == self.goal(self.side)

    NONE = rf"None fits\. Let me look at it again\. {LOCK}((?:, I have {NAME} = \d)*)\."

    def none(self, found: re.Match[str], *_: object) -> None:
        assert not self.left
        assert self.hidden or self.misread, "some number fits, so a slip hid it"
        assert not self.hit
        assert found[1] == self.current
        self.reads(*found.groups())

    SO = rf"So ({NAME}) = (\d)\."

    def so(self, found: re.Match[str], *_: object) -> None:
        assert self.hit
        assert not self.misread
        assert (found[1], int(found[2])) == (self.current, self.truth[self.current])
        self.known[self.current] = self.truth[self.current]
        self.current = ""

    KNOW = r"I know (.*)\."

    def know(self, found: re.Match[str], *_: object) -> None:
        assert found[1] == listed(self.truth, [*self.known][-6:])

    ALREADY = rf"(?:First|Next|Last), ({NAME})\. I already have ({NAME}) = (\d)\."

    def already(self, found: re.Match[str], *_: object) -> None:
        assert found[1] == found[2]
        assert self.known[found[1]] == int(found[3])

    def calculation(self, name: str) -> str:
        text, c, d = self.locks[name]
        x, c, d = self.known[name], self.number(c), self.number(d)
        return f"{text}, {x} * {c} = {x * c}, {x * c} + {d} = {x * c + d}"

    RECHECK = rf"Wait, was ({NAME}) right\? (.*)\. Yes, ({NAME} = \d)\."

    def recheck(self, found: re.Match[str], *_: object) -> None:
        assert found[2] == self.calculation(found[1])
        assert found[3] == f"{found[1]} = {self.known[found[1]]}"

    REVIEW = r"Wait, let me look over what I have\. (.*), fine\."

    def review(self, found: re.Match[str], *_: object) -> None:
        parts = found[1].split(", fine. ")
        assert len(parts) == min(3, len(self.known)) >= 2
        assert parts == [self.calculation(part[:3]) for part in parts]

    REMIND = rf"Wait, what do I want\? ({NAME} with .*)\."

    def remind(self, found: re.Match[str], _: Paragraph, follows: str) -> None:
        assert follows == "trial"
        assert found[1] == self.goal(self.side)

    RETRY = r"Wait, let me check (\d) again\. (\d+ .*), (that is|not) (\d+)\."

    def retry(self, found: re.Match[str], _: Paragraph, follows: str) -> None:
        assert follows == "trial"
        x, shown = self.last
        c, d, result = self.numbers
        assert shown == x * c, "an unnoticed slip stays unnoticed"
        assert found[2] == f"{x} * {c} = {x * c}, {x * c} + {d} = {x * c + d}"
        assert int(found[1]) == x
        assert (found[3] == "that is") == self.hit
        assert int(found[4]) == result

    TURN = rf"Wait, this takes too long\. I want ({NAME} with .*), {SIDE}\."

    def turn(self, found: re.Match[str], *_: object) -> None:
        assert self.current
        assert not self.hit
        assert found[2] != self.side
        assert f"{found[1]}, from {found[2]}" == self.goal(found[2])
        self.begin(found[2])
        self.hidden = False

    REREAD = r"Wait, let me look at that again\. (.*)\. I have that\."

    def reread(self, found: re.Match[str], *_: object) -> None:
        texts = found[1].split("; ")
        assert 1 <= len(set(texts)) == len(texts) <= 2
        assert set(texts) <= {text for text, *_ in self.locks.values()}


def listed(values: dict[str, int], names: list[str]) -> str:
    return " and ".join(", ".join(f"{n} = {values[n]}" for n in names).rsplit(", ", 1))


@given(problems)
def test_the_simulator_agrees(problem):
    assert problem.values() == simulate(problem.question)
    assert problem.answer == ", ".join(str(problem.values()[t]) for t in targets(problem.question))


@given(st.integers(1, 12), seeds)
def test_a_problem_is_well_formed(size, seed):
    problem = search.draw_problem(random.Random(seed), size)
    names = [lock.name for lock in problem.locks]
    assert len(set(names)) == len(names)
    assert size <= len(names) <= size + 2  # up to two that nothing needs
    assert len(set(problem.targets)) == len(problem.targets) == min(3, size)
    assert set(problem.targets) <= set(names)
    values = problem.values()
    assert all(LOW <= v <= HIGH for v in values.values())
    for lock in problem.locks:
        c, d = (values[o] if isinstance(o, str) else o for o in (lock.factor, lock.added))
        assert lock.result == values[lock.name] * c + d
        assert not isinstance(lock.factor, int) or HIGH * c + d <= LARGEST
        assert len(lock.needs) == sum(isinstance(o, str) for o in (lock.factor, lock.added)), "two different names"


@given(problems, seeds)
def test_every_line_of_a_trace_is_true_or_hides(problem, seed):
    thinking, answer = search.draw_trace(problem, random.Random(seed))
    assert grade(f"{thinking}</think>{answer}", problem.answer)
    Reader(problem.question).read(thinking)
    assert f"I find {listed(problem.values(), list(problem.targets))}, so" in answer
    assert "<" not in thinking


@pytest.fixture(scope="module")
def read():
    """What readers found in 500 traces: every line of theirs is true, a slip that hides, or a misread lock."""
    rng = random.Random(11)
    found = []
    for _ in range(500):
        problem = search.draw_problem(rng, 9)
        found.append(Reader(problem.question).read(search.draw_trace(problem, rng)[0]))
    return found


def test_lines_of_all_kinds_occur(read):
    counts = sum((one.counts for one in read), Counter())
    for kind in (
        "plan",
        "already",
        "still",
        "know",
        "retry",
        "remind",
        "turn",
        "recheck",
        "review",
        "reread",
        "corrected",
        "unnoticed",
    ):
        assert counts[kind] >= 20, kind
    assert counts["none"] >= counts["misread"] >= 30
    assert counts["none"] - counts["misread"] >= 5  # a slip hid the hit
    assert counts["trial"] > 0.4 * counts.total()  # most of the text
    assert counts["want"] == counts["so"] + counts["none"]
    misread = counts["misread"] / counts["so"]
    assert 0.5 * MISREAD < misread < 1.5 * MISREAD


def test_a_doubt_is_equally_likely_after_every_kind_of_paragraph(read):
    """Given the inclination (the mood, and the doubts among the last paragraphs), what a paragraph said does not
    matter: after every kind there are as many doubts as the inclinations promise."""
    boundaries: dict[str, list[tuple[float, bool]]] = {}
    for one in read:
        recent: list[bool] = []
        for before, after in zip(one.paragraphs, one.paragraphs[1:], strict=False):
            inclination = min(CEILING, before.mood.base + EXCITEMENT * sum(recent[-MEMORY:]))
            boundaries.setdefault(before.kind, []).append((inclination, after.doubts))
            recent.append(after.doubts)
    assert len(boundaries) >= 11
    for kind, found in boundaries.items():
        expected, variance = sum(p for p, _ in found), sum(p * (1 - p) for p, _ in found)
        seen = sum(doubts for _, doubts in found)
        assert abs(seen - expected) < 4 * variance**0.5 + 1, (kind, seen, expected)
    # The check has power: after the frequent kinds, a shift by 0.05 would be seen.
    for kind in ("trial", "so", "want", "recheck", "reread"):
        assert 4 * sum(p * (1 - p) for p, _ in boundaries[kind]) ** 0.5 < 0.05 * len(boundaries[kind]), kind
    # It is more likely after doubts than after none.
    share = [
        sum(d for p, d in of) / len(of)
        for of in ([b for f in boundaries.values() for b in f if low <= b[0] < low + 0.1] for low in (0, 0.2, 0.4))
    ]
    assert share[0] < share[1] - 0.1 < share[2] - 0.2


def test_moods_change_and_show_in_how_often_the_trace_doubts(read):
    moods = [pair for one in read for pair in zip(one.moods, one.moods[1:], strict=False)]
    changed = sum(a != b for a, b in moods) / len(moods)
    assert 0.17 < changed < 0.23  # drawn anew before three searches of ten, and then often the same
    share = []
    for mood in MOODS:
        doubts = [p.doubts for one in read for p in one.paragraphs if p.mood == mood]
        share.append(sum(doubts) / len(doubts))
    assert share[0] < share[1] - 0.05 < share[2] - 0.15


def test_moods_say_different_words():
    for part in ("said", "trial", "opening"):
        assert len({getattr(mood, part) for mood in MOODS}) == len(MOODS)


@given(problems, seeds)
def test_redundancy_changes_how_often_things_are_restated_and_nothing_else(problem, seed):
    traces = []
    for redundancy in range(3):
        other = replace(problem, redundancy=redundancy)
        assert (other.digest(), other.values(), other.answer, other.split()) == (
            problem.digest(),
            problem.values(),
            problem.answer,
            problem.split(),
        )
        assert other.question.rpartition(". Repeat")[0] == problem.question.rpartition(". Repeat")[0]
        lines = [x for x in search.draw_trace(other, random.Random(seed))[0].split("\n") if x]
        restated = [x.split(" ")[0] for x in lines if x.startswith(("Still ", "I know "))]
        tried = [int(x.split("ry ")[1][0]) for x in lines if re.match("(Carefully t|Now t|T)ry ", x)]
        assert restated.count("Still") == sum(x in RESTATED[redundancy] for x in tried)
        milestones = sum(bool(re.fullmatch(Reader.SO, x)) for x in lines)
        assert {0: restated.count("I") == 0, 1: True, 2: restated.count("I") == milestones - 1}[redundancy]
        traces.append([x for x in lines if not x.startswith(("Still ", "I know "))])
    assert traces[0] == traces[1] == traces[2]


def test_some_redundancy_lists_results_behind_half_of_the_new_ones():
    lists = new = 0
    for seed in range(60):
        problem = replace(search.draw_problem(random.Random(seed), 6), redundancy=1)
        lines = search.draw_trace(problem, random.Random(seed))[0].split("\n")
        lists += sum(line.startswith("I know ") for line in lines)
        new += sum(bool(re.fullmatch(Reader.SO, line)) for line in lines) - 1  # the first has nothing before it
    assert 0.4 < lists / new < 0.6


def test_the_question_says_the_redundancy():
    problem = search.draw_problem(random.Random(0), 4)
    ends = [replace(problem, redundancy=r).question.rpartition(". ")[2] for r in range(3)]
    assert ends == ["Repeat little.", "Repeat some.", "Repeat much."]


@given(problems)
def test_a_question_is_known_by_its_wording(problem):
    assert holds_question(problem.question)
    assert holds_question(f"<|user|>\n{problem.question}\n<|assistant|>")
    assert not holds_question(problem.question.replace("Numbers", "Values"))
    assert not holds_question(problem.question.partition("Find")[0]), "it asks for nothing"


@given(problems, problems)
def test_the_last_of_two_questions_is_found(first, second):
    """A conversation's newest question is the one that is answered."""
    asked = second.question.rpartition(". Repeat")[0]
    assert question_in(f"<|user|>{first.question}<|assistant|>6<|user|>{second.question}") == asked
    assert question_in(first.answer) is None


@given(problems, st.randoms(use_true_random=False))
def test_the_split_depends_on_the_content_alone(problem, rng):
    shuffled = rng.sample(problem.locks, len(problem.locks))
    other = search.SearchProblem(tuple(shuffled), problem.targets, rng.randrange(3))
    assert other.digest() == problem.digest()
    assert other.split() in (*SPLITS, "train")
    if len(problem.targets) > 1:
        assert search.SearchProblem(problem.locks, problem.targets[::-1]).digest() != problem.digest()
    fewer = search.SearchProblem(problem.locks[1:], problem.targets)
    assert fewer.digest() != problem.digest()


def test_an_example():
    locks = (search.Lock("gon", "duv", 7, 79), search.Lock("duv", 8, 14, 78), search.Lock("zog", 7, "duv", 29))
    problem = search.SearchProblem(locks, ("gon", "duv", "zog"), 0)
    assert problem.question == (
        "Numbers from 1 to 9: gon * duv + 7 = 79; duv * 8 + 14 = 78; zog * 7 + duv = 29. Find gon, duv and zog. "
        "Repeat little."
    )
    assert problem.answer == "9, 8, 3"
    thinking, _ = search.draw_trace(problem, random.Random(1))
    assert "First, gon. gon * duv + 7 = 79, so I need duv first.\nHere duv * 8 + 14 = 78.\nI want duv " in thinking
    assert "\n\nNext, duv. I already have duv = 8.\n\n" in thinking
    assert "\nI want zog with zog * 7 + 8 = 29, from " in thinking


def parse(question: str) -> search.SearchProblem:
    """A question back into its problem."""
    locks = [
        search.Lock(name, *(int(o) if o.isdigit() else o for o in (factor, added)), int(result))
        for name, factor, added, result in re.findall(LOCK, question)
    ]
    redundancy = search.WORDING.index("Repeat " + question.rpartition("Repeat ")[2])
    return search.SearchProblem(tuple(locks), tuple(targets(question)), redundancy)


def test_every_shipped_problem_is_parsed_back_with_its_answer():
    for split in SPLITS:
        for shipped in load_problems(split, "search"):
            problem = parse(shipped.question)
            assert problem.question == shipped.question
            assert problem.split() == split
            values = simulate(shipped.question)
            assert problem.answer == shipped.answer == ", ".join(str(values[t]) for t in problem.targets)
            assert shipped.id == f"search-{split}-{problem.digest().hex()[:12]}"
