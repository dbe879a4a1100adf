"""What statements need: right on reference traces by the generator's knowledge, and token by token on examples."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.engine import TINY
from minithink.results.origin import ROOT
from minithink.tasks import needs, prepare
from minithink.tasks.needs import Reading, Statement
from minithink.tasks.writing import NAMES
from minithink.text import thoughts
from minithink.text.tokenizer import Tokenizer

FAMILIES = list(prepare.FAMILIES)
TOKENIZER = Tokenizer.from_folder(TINY)
seeds = st.integers(0, 2**32)


def trace(family: str, seed: int, size: int | None = None) -> tuple[object, list[str], int]:
    """A problem, and the tokens of its prompt and trace."""
    rng = random.Random(seed)
    problem = prepare.FAMILIES[family].draw_problem(rng, size or rng.randint(*prepare.SIZES[family]))
    prompt, response = ([TOKENIZER.decode([i]) for i in TOKENIZER.encode(x)] for x in prepare.document(problem, rng))
    return problem, prompt + response, len(prompt)


def cut(text: str) -> list[str]:
    """A simple tokenizer, for examples: words and numbers, each without the space before it."""
    return re.findall(r"</think>|<\|end\|>|\n+|[A-Za-z]+|\d+| |[^\sA-Za-z\d]", text)


def text_of(pieces: list[str], statement: Statement) -> str:
    return "".join(pieces[statement.start : statement.end])


def of_statements(reading: Reading) -> Iterator[tuple[Statement, dict[needs.Key, tuple[int, ...]]]]:
    """Statements with their needs."""
    for i, statement in enumerate(reading.statements):
        yield statement, {n.key: n.places for n in reading.needs if n.statement == i}


# --- reference traces


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds)
def test_reference_traces_are_read_whole(family, seed):
    problem, pieces, prompt = trace(family, seed)
    reading = needs.read(problem.question, pieces, prompt)
    assert reading.skipped == []
    assert reading.parsed == 1
    assert reading.unknown == 0
    lines = [text_of(pieces, s).strip() for s in reading.statements]
    text = "".join(pieces[prompt:]).replace("</think>", "\n").replace("<|end|>", "\n")
    assert lines == [line for line in text.split("\n") if line]
    for need in reading.needs:
        assert need.places, need
        assert max(need.places) < reading.statements[need.statement].start
        assert len(set(need.places)) == len(need.places)
    for statement, found in of_statements(reading):
        for key, places in found.items():
            texts = {pieces[p].strip() for p in places}
            assert len(texts) == 1 or key[0] in ("side", "verdict"), (key, texts)
            if key[0] == "value" and statement.kind != "correct":
                assert texts == {str(problem.values()[key[1]])}, key
            elif key[0] in ("goal", "target", "last", "newest", "reads"):
                names = {w for p in places for w in re.findall("[a-z]{3}|[0-9]+", pieces[p])}
                assert names <= {*re.split("@", key[-1])} or key[0] in ("newest", "reads")


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds)
def test_every_name_and_number_is_needed_or_computed(family, seed):
    problem, pieces, prompt = trace(family, seed)
    reading = needs.read(problem.question, pieces, prompt)
    for statement, found in of_statements(reading):
        line = text_of(pieces, statement).strip()
        at = {p for places in found.values() for p in places}
        there = {pieces[p].strip() for p in at}
        there |= {pieces[p].strip() + pieces[p + 1] for p in at}  # a number above 100 is of several tokens
        there |= set(re.findall(r"(?=(?<!\d)\d+ [-+*] \d+ = (\d+))", line))  # computed here
        there |= free(line, statement.kind, problem)
        misread = 0
        for word in re.findall(r"\b[a-z]{3}\b|\d+", line):
            if word not in there and (word.isdigit() or word in NAMES):
                misread += 1
            there.add(word)
        # In search, one number of a lock may be misread.
        assert misread <= (statement.kind == "want"), (line, found)


def free(line: str, kind: str, problem: object) -> set[str]:
    """What a line chooses, or counts on to: a trial's number, a side, what is doubted, the next step."""
    if kind == "trial":
        return {re.search(r"\d+", line)[0]}
    if kind in ("want", "turn"):
        return {re.search(r"from (\d)", line)[1]}
    if kind == "plan" and problem.family == "ledger":
        return {re.search(r"\d+", line)[0]}
    if kind == "recap":
        return set(re.findall("[a-z]{3}", line))
    if kind in ("check", "reread", "backwards", "newest"):
        found = re.findall(r"([a-z]{3})(?: \*|@(\d+)|\?| =| -| \+| once| again| is)|step (\d+)", line)
        return (
            {word for words in found for word in words if word}
            if problem.family == "ledger"
            else {words[0] for words in found}
        )
    return set()


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds, at=st.floats(0, 1))
def test_what_was_read_does_not_depend_on_what_follows(family, seed, at):
    problem, pieces, prompt = trace(family, seed, size=6)
    end = prompt + round(at * (len(pieces) - prompt))
    reader = needs.reader(problem.question, pieces[:prompt])
    for piece in pieces[prompt:end]:
        reader.add(piece)
    before = len(reader.reading.statements)
    whole = needs.read(problem.question, pieces, prompt)
    assert reader.reading.statements == whole.statements[:before]
    assert reader.reading.needs == [n for n in whole.needs if n.statement < before]
    unended = pieces[end:] == ["<|end|>"]  # the last line ends when this is read
    assert before == sum(s.end <= end for s in whole.statements) - unended
    assert all(place < end for place in reader.live())


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds)
def test_live_tokens_meet_what_a_statement_needs(family, seed):
    """Whatever the next statement of a reference trace needs is among the live tokens."""
    problem, pieces, prompt = trace(family, seed)
    whole = needs.read(problem.question, pieces, prompt)
    of = [found for _, found in of_statements(whole)]
    reader, i, most = needs.reader(problem.question, pieces[:prompt]), 0, 0
    for at, piece in enumerate(pieces[prompt:], prompt):
        if i < len(of) and whole.statements[i].start == at:
            live = reader.live()
            most = max(most, sum(place >= prompt for place in live))
            for key, places in of[i].items():
                assert live & set(places), (key, text_of(pieces, whole.statements[i]))
            i += 1
        reader.add(piece)
    if family == "search":
        assert most <= 40  # however long the text is
    if family == "ledger":
        assert most <= 100  # likewise
    assert most < 200


# --- examples, token by token


def shown(question: str, generated: str) -> dict[str, dict[str, list[str]]]:
    """Every line with its needs; a place as the text of its line up to its token, which it ends in."""
    prompt = ["<|user|>", *cut(question), "<|assistant|>", "<think>", "\n"]
    pieces = [*prompt, *cut(generated)]
    reading = needs.read(question, pieces, len(prompt))
    assert not reading.skipped
    assert not reading.unknown

    def place(token: int) -> str:
        return "".join(pieces[: token + 1]).rpartition("\n")[2].removeprefix("<|user|>")

    return {
        text_of(pieces, statement).strip(): {" ".join(k): [place(p) for p in places] for k, places in found.items()}
        for statement, found in of_statements(reading)
    }


def test_a_search_token_by_token():
    question = "Numbers from 1 to 9: gon * duv + 7 = 25; duv * 8 + 14 = 30. Find gon and duv. Repeat little."
    found = shown(
        question,
        (
            "First, gon. gon * duv + 7 = 25, so I need duv first.\n"
            "Here duv * 8 + 14 = 30.\n"
            "I want duv with duv * 8 + 14 = 30, from 1 up. Quick now.\n\n"
            "Try 1: 1 * 8 = 8, 8 + 14 = 22, no.\n\n"
            "Try 2: 2 * 8 = 16, 16 + 14 = 30, yes.\n\n"
            "So duv = 2.\n\n"
            "Back to gon. gon * duv + 7 = 25, I have duv = 2.\n"
            "I want gon with gon * 2 + 7 = 25, from 9 down. Quick now.\n\n"
            "Try 9: 9 * 2 = 18, 18 + 7 = 25, yes.\n\n"
            "Wait, was duv right? duv * 8 + 14 = 30, 2 * 8 = 16, 16 + 14 = 30. Yes, duv = 2.\n\n"
            "So gon = 9.\n</think>\n\nI find gon = 9 and duv = 2, so the answer is \\boxed{9, 2}."
        ),
    )
    start = "Numbers from 1 to 9: gon"
    first = "First, gon. gon"
    lock = f"{start} * duv + 7 = 25; duv"
    assert found["First, gon. gon * duv + 7 = 25, so I need duv first."] == {
        "lock factor gon": [f"{start} * duv"],
        "lock added gon": [f"{start} * duv + 7"],
        "lock result gon": [f"{start} * duv + 7 = 25"],
        "target gon": [f"{lock} * 8 + 14 = 30. Find gon"],
    }
    assert found["Here duv * 8 + 14 = 30."]["goal duv"] == [f"{first} * duv + 7 = 25, so I need duv"]
    want = "I want duv with duv"
    assert found["I want duv with duv * 8 + 14 = 30, from 1 up. Quick now."] == {
        "lock factor duv": [f"{lock} * 8", "Here duv * 8"],
        "lock added duv": [f"{lock} * 8 + 14", "Here duv * 8 + 14"],
        "lock result duv": [f"{lock} * 8 + 14 = 30", "Here duv * 8 + 14 = 30"],
        "goal duv": [f"{first} * duv + 7 = 25, so I need duv", "Here duv"],
    }
    assert found["Try 1: 1 * 8 = 8, 8 + 14 = 22, no."] == {
        "from duv": [f"{want} * 8 + 14 = 30, from 1"],
        "factor duv": [f"{want} * 8", f"{lock} * 8", "Here duv * 8"],
        "added duv": [f"{want} * 8 + 14", f"{lock} * 8 + 14", "Here duv * 8 + 14"],
        "result duv": [f"{want} * 8 + 14 = 30", f"{lock} * 8 + 14 = 30", "Here duv * 8 + 14 = 30"],
    }
    assert found["Try 2: 2 * 8 = 16, 16 + 14 = 30, yes."] == {
        "trial duv": ["Try 1", "Try 1: 1"],
        "verdict duv": ["Try 1: 1 * 8 = 8, 8 + 14 = 22, no"],
        "side duv": [f"{want} * 8 + 14 = 30, from 1 up", "Try 1", "Try 1: 1"],
        "factor duv": [f"{want} * 8", "Try 1: 1 * 8", f"{lock} * 8", "Here duv * 8"],
        "added duv": [f"{want} * 8 + 14", "Try 1: 1 * 8 = 8, 8 + 14", f"{lock} * 8 + 14", "Here duv * 8 + 14"],
        "result duv": [f"{want} * 8 + 14 = 30", f"{lock} * 8 + 14 = 30", "Here duv * 8 + 14 = 30"],
    }
    assert found["So duv = 2."] == {
        "goal duv": [f"{first} * duv + 7 = 25, so I need duv", "Here duv", "I want duv", want],
        "trial duv": ["Try 2", "Try 2: 2"],
        "verdict duv": ["Try 2: 2 * 8 = 16, 16 + 14 = 30, yes"],
    }
    back = "Back to gon. gon * duv + 7 = 25, I have duv = 2"
    assert found[f"{back}."] == {
        "lock factor gon": [f"{start} * duv", f"{first} * duv"],
        "lock added gon": [f"{start} * duv + 7", f"{first} * duv + 7"],
        "lock result gon": [f"{start} * duv + 7 = 25", f"{first} * duv + 7 = 25"],
        "goal gon": ["First, gon", "First, gon. gon"],
        "value duv": ["So duv = 2"],
    }
    assert found["I want gon with gon * 2 + 7 = 25, from 9 down. Quick now."]["value duv"] == ["So duv = 2", back]
    # The lock of the question has a name for the factor: only the goal shows the number.
    assert found["Try 9: 9 * 2 = 18, 18 + 7 = 25, yes."]["factor gon"] == ["I want gon with gon * 2"]
    check = "Wait, was duv right? duv * 8 + 14 = 30, 2 * 8 = 16, 16 + 14 = 30. Yes, duv = 2."
    assert found[check] == {
        "lock factor duv": [f"{lock} * 8", "Here duv * 8"],
        "lock added duv": [f"{lock} * 8 + 14", "Here duv * 8 + 14"],
        "lock result duv": [f"{lock} * 8 + 14 = 30", "Here duv * 8 + 14 = 30"],
        "value duv": ["So duv = 2", back],
    }
    answer = "I find gon = 9 and duv = 2, so the answer is \\boxed{9, 2}."
    assert found[answer] == {
        "value gon": ["So gon = 9"],
        "target gon": [f"{lock} * 8 + 14 = 30. Find gon", "First, gon"],
        "value duv": ["So duv = 2", back, f"{check.partition(', 2 *')[0]}, 2", check[:-1]],
        "target duv": [f"{lock} * 8 + 14 = 30. Find gon and duv"],
    }


def test_a_search_that_is_misread_and_turned():
    question = "Numbers from 1 to 9: gon * 2 + 7 = 25. Find gon. Repeat little."
    begin = "First, gon. gon * 2 + 7 = 25.\nI want gon with gon * 2 + 8 = 25, from 1 up. Quick now.\n\n"
    tried = "Try {0}: {0} * 2 = {1}, {1} + 8 = {2}, no.\n\n"
    turn = "Wait, this takes too long. I want gon with gon * 2 + 8 = 25, from 9 down."
    text = begin + tried.format(1, 2, 10) + f"{turn}\n\n" + tried.format(9, 18, 26)
    text += "".join(tried.format(x, 2 * x, 2 * x + 8) for x in range(8, 0, -1))
    none = "None fits. Let me look at it again. gon * 2 + 7 = 25."
    text += f"{none}\nI want gon with gon * 2 + 7 = 25, from 1 up. Quick now.\n\nTry 1: 1 * 2 = 2, 2 + 7 = 9, no.\n"
    found = shown(question, text)
    side = "I want gon with gon * 2 + 8 = 25, from 1 up"
    assert found[turn]["side gon"] == [side, "Try 1", "Try 1: 1"]
    assert found[turn]["added gon"] == ["I want gon with gon * 2 + 8", "Try 1: 1 * 2 = 2, 2 + 8"], "not the lock's 7"
    turned = "Wait, this takes too long. I want gon with gon * 2 + 8"
    assert found["Try 9: 9 * 2 = 18, 18 + 8 = 26, no."] == {
        "from gon": [f"{turned} = 25, from 9"],
        "factor gon": [
            "I want gon with gon * 2",
            "Try 1: 1 * 2",
            turned[:-4],
            "Numbers from 1 to 9: gon * 2",
            "First, gon. gon * 2",
        ],
        "added gon": ["I want gon with gon * 2 + 8", "Try 1: 1 * 2 = 2, 2 + 8", turned],
        "result gon": [
            "I want gon with gon * 2 + 8 = 25",
            f"{turned} = 25",
            "Numbers from 1 to 9: gon * 2 + 7 = 25",
            "First, gon. gon * 2 + 7 = 25",
        ],
    }
    assert found[none]["trial gon"] == ["Try 1", "Try 1: 1"]
    assert found[none]["side gon"] == [f"{turned} = 25, from 9 down", "Try 2", "Try 2: 2"]
    assert found[none]["verdict gon"] == ["Try 1: 1 * 2 = 2, 2 + 8 = 10, no"]
    want = "I want gon with gon * 2 + 7 = 25, from 1 up. Quick now."
    assert found[want]["side gon"] == found[none]["side gon"]
    assert found[want]["goal gon"] == [*found[none]["goal gon"], none.partition(" * ")[0]]
    # What was misread is superseded, and so are the trials.
    again = found["Try 1: 1 * 2 = 2, 2 + 7 = 9, no."]
    assert again["added gon"] == [
        "I want gon with gon * 2 + 7",
        "Numbers from 1 to 9: gon * 2 + 7",
        "First, gon. gon * 2 + 7",
        none[:-6],
    ]
    assert "trial gon" not in again


def test_goals_and_trials_that_are_stated_again():
    question = "Numbers from 1 to 9: gon * 2 + 7 = 25. Find gon. Repeat little."
    want = "I want gon with gon * 2 + 7 = 25, from 9 down"
    still, remind = "Still gon with gon * 2 + 7 = 25, from 9 down.", "Wait, what do I want? " + want[7:] + "."
    one, two = "Try 8: 8 * 2 = 16, 16 + 7 = 23, no.", "Try 7: 7 * 2 = 14, 14 + 7 = 21, no."
    retry = "Wait, let me check 8 again. 8 * 2 = 16, 16 + 7 = 23, not 25."
    found = shown(
        question,
        "\n\n".join((f"{want}. Quick now.", one, retry, still, remind, two)).replace(
            "I want", ("First, gon. gon * 2 + 7 = 25.\nI want"), 1
        ),
    )
    lock = ["Numbers from 1 to 9: gon * 2", "First, gon. gon * 2"]
    assert found[retry] == {
        "trial gon": ["Try 8", "Try 8: 8"],
        "factor gon": ["I want gon with gon * 2", "Try 8: 8 * 2", *lock],
        "added gon": ["I want gon with gon * 2 + 7", "Try 8: 8 * 2 = 16, 16 + 7", *(f"{x} + 7" for x in lock)],
        "result gon": ["I want gon with gon * 2 + 7 = 25", *(f"{x} + 7 = 25" for x in lock)],
    }
    again = "Wait, let me check 8"
    assert found[still]["result gon"][:2] == ["I want gon with gon * 2 + 7 = 25", retry[:-1]]
    assert found[still]["from gon"] == [want[:-5]]
    assert found[still]["side gon"] == [want, "Try 8", "Try 8: 8"]
    assert found[remind]["goal gon"] == [
        "First, gon",
        "First, gon. gon",
        "I want gon",
        "I want gon with gon",
        "Still gon",
        "Still gon with gon",
    ]
    assert found[two]["trial gon"] == ["Try 8", "Try 8: 8", again, f"{again} again. 8"]
    assert found[two]["side gon"] == [want, still[:-1], remind[:-1], "Try 8", "Try 8: 8"]
    assert found[two]["added gon"][:5] == [
        "I want gon with gon * 2 + 7",
        "Try 8: 8 * 2 = 16, 16 + 7",
        f"{again} again. 8 * 2 = 16, 16 + 7",
        "Still gon with gon * 2 + 7",
        "Wait, what do I want? gon with gon * 2 + 7",
    ]


def test_a_search_that_another_one_interrupts_is_over():
    question = "Numbers from 1 to 9: gon * 2 + 7 = 25; duv * 8 + 14 = 30. Find gon and duv. Repeat little."
    reader = needs.reader(question, prompt := cut(question))
    text = cut("I want gon with gon * 2 + 7 = 25, from 1 up. Quick now.\nTry 1: 1 * 2 = 2, 2 + 7 = 9, no.\n")
    for piece in text:
        reader.add(piece)
    live = {place - len(prompt) for place in reader.live() if place >= len(prompt)}
    words = re.findall("from|up|[a-z]{3}|[0-9]+", "".join(text[i] + " " for i in sorted(live)))
    # The newest copies: the goal's name, result and side; the trial's number, factor and added number.
    assert words == ["gon", "25", "1", "up", "1", "2", "7"]
    for piece in cut("I want duv with duv * 8 + 14 = 30, from 1 up. Quick now.\n"):
        reader.add(piece)
    trial = range(len(prompt) + text.index("Try"), len(prompt) + len(text))
    assert not reader.live() & set(trial)


def test_facts_token_by_token():
    question = "Facts (mod 100): zot = buz * 2; nup = zot + 20; buz = 25. Find nup, zot and buz."
    first = "First, nup. nup = zot + 20, so I need zot first."
    here = "Well, zot = buz * 2, buz = 25 is given."
    slip, right = "Then zot = buz * 2 = 25 * 2 = 51.", "Wait, that is wrong. 25 * 2 = 50, not 51. So zot = 50."
    last = "And nup = zot + 20 = 50 + 20 = 70."
    back = "Alternatively, work backwards: nup - 20 = 70 - 20 = 50, and zot = 50. Good, that agrees."
    look = "Wait, was nup right? Again nup = zot + 20 = 50 + 20 = 70. Yes, nup = 70 stands."
    answer = "I find nup = 70, zot = 50 and buz = 25, so the answer is \\boxed{70, 50, 25}."
    end = "That settles it.\n</think>"
    found = shown(question, "\n\n".join((first, here, slip, right, last, back, look, end, answer)))
    start = "Facts (mod 100): zot = buz"
    given = f"{start} * 2; nup = zot + 20; buz = 25"
    assert found[first] == {
        "left nup": [f"{start} * 2; nup = zot"],
        "op nup": [f"{start} * 2; nup = zot +"],
        "right nup": [f"{start} * 2; nup = zot + 20"],
        "target nup": [f"{given}. Find nup"],
    }
    assert found[here]["goal zot"] == ["First, nup. nup = zot + 20, so I need zot"]
    assert found[here]["value buz"] == [given]
    assert found[slip] == {
        "left zot": [start, "Well, zot = buz"],
        "op zot": [f"{start} *", "Well, zot = buz *"],
        "right zot": [f"{start} * 2", "Well, zot = buz * 2"],
        "value buz": [given, "Well, zot = buz * 2, buz = 25"],
        "goal zot": ["First, nup. nup = zot + 20, so I need zot", "Well, zot"],
    }
    wrong = "Then zot = buz * 2 = 25"
    assert found[right] == {
        "value buz": [given, "Well, zot = buz * 2, buz = 25", wrong],
        "right zot": [f"{start} * 2", "Well, zot = buz * 2", "Then zot = buz * 2"],
        "op zot": [f"{start} *", "Well, zot = buz *", "Then zot = buz *"],
        "value zot": [slip[:-1]],
        "last zot": ["Then zot"],
    }
    assert found[last]["value zot"] == [right[:-1]], "51 is superseded"
    assert found[last]["goal nup"] == ["First, nup", "First, nup. nup"]
    assert found[back] == {
        "left nup": [f"{start} * 2; nup = zot", "First, nup. nup = zot", "And nup = zot"],
        "op nup": [f"{start} * 2; nup = zot +", "First, nup. nup = zot +", "And nup = zot +"],
        "right nup": [f"{start} * 2; nup = zot + 20", "First, nup. nup = zot + 20", "And nup = zot + 20"],
        "value nup": [last[:-1]],
        "value zot": [right[:-1], "And nup = zot + 20 = 50"],
    }
    assert found[look]["left nup"] == [*found[back]["left nup"], f"{back.partition(' = 50')[0]} = 50, and zot"]
    assert found[look]["right nup"] == [*found[back]["right nup"], "Alternatively, work backwards: nup - 20"]
    assert found["That settles it."] == {}
    backwards = "Alternatively, work backwards: nup - 20 = 70"
    assert found[answer] == {
        "value nup": [last[:-1], backwards, look.partition(".")[0], look[:-8]],
        "target nup": [f"{given}. Find nup", "First, nup"],
        "value zot": [
            right[:-1],
            "And nup = zot + 20 = 50",
            f"{backwards} - 20 = 50, and zot = 50",
            look.partition(" + 20 = 70")[0],
        ],
        "target zot": [f"{given}. Find nup, zot"],
        "value buz": [given, "Well, zot = buz * 2, buz = 25", wrong],
        "target buz": [f"{given}. Find nup, zot and buz"],
    }


def test_a_ledger_token_by_token():
    question = (
        "Balances (mod 100): tup@0 = 56; nug@0 = 20. Steps: 1: tup = tup + nug; 2: move 12 from tup to nug. "
        "Find tup and nug."
    )
    plan1 = "First, step 1: tup = tup + nug. I need tup@0 and nug@0 to find tup@1."
    plan2 = "Here step 2: move 12 from tup to nug. I need tup@1 and nug@0 to find tup@2 and nug@2."
    one = "So tup@0 = 56 and nug@0 = 20, 56 + 20 = 76, so tup@1 = 76."
    two = "Then tup@1 = 76, 76 - 12 = 64, so tup@2 = 64."
    three = "And nug@0 = 20, 20 + 12 = 32, so nug@2 = 32."
    look = f"Wait, was tup@1 right? Again {one[3:]} Yes, tup@1 = 76 stands."
    again = "Again tup is tup@2 = 64, fine."
    answer = "I find tup@2 = 64 and nug@2 = 32, so the answer is \\boxed{64, 32}."
    found = shown(question, "\n".join((plan1, plan2, "", one, two, three, "", look, "", again, "</think>", answer)))
    start = "Balances (mod 100): tup@0"
    steps = f"{start} = 56; nug@0 = 20. Steps: 1"
    assert found[plan1] == {
        "step 1 0": [f"{steps}: tup"],
        "step 1 1": [f"{steps}: tup = tup"],
        "step 1 2": [f"{steps}: tup = tup +"],
        "step 1 3": [f"{steps}: tup = tup + nug"],
        "newest tup": [start],
        "newest nug": [f"{start} = 56; nug@0"],
    }
    move = f"{steps}: tup = tup + nug; 2: move 12"
    assert found[plan2] == {
        "at": ["First, step 1", plan1[:-1]],
        "step 2 0": [move],
        "step 2 1": [f"{move} from tup"],
        "step 2 2": [f"{move} from tup to nug"],
        "newest tup": [steps, "First, step 1", plan1[:-1]],  # tup@0 is superseded
        "newest nug": [f"{start} = 56; nug@0", "First, step 1: tup = tup + nug. I need tup@0 and nug@0"],
    }
    assert {k: v for k, v in found[one].items() if not k.startswith("step")} == {
        "reads 1 tup": ["First, step 1: tup = tup + nug. I need tup@0"],
        "value tup@0": [f"{start} = 56"],
        "reads 1 nug": ["First, step 1: tup = tup + nug. I need tup@0 and nug@0"],
        "value nug@0": [f"{start} = 56; nug@0 = 20"],
        "goal tup@1": [plan1[:-1]],
    }
    assert [k for k in found[one] if k.startswith("step")] == [f"step 1 {k}" for k in range(4)]
    assert found[two]["value tup@1"] == [one[:-1]]
    assert found[two]["goal tup@2"] == [plan2[:-11]]
    assert found[three]["value nug@0"] == [
        f"{start} = 56; nug@0 = 20",
        "So tup@0 = 56 and nug@0 = 20",
        "So tup@0 = 56 and nug@0 = 20, 56 + 20",
    ]
    assert found[look]["value tup@1"] == [one[:-1], "Then tup@1 = 76", "Then tup@1 = 76, 76"]
    newest = [f"{move.rpartition(':')[0]}", "Here step 2", plan2[:-11], "Then tup@1 = 76, 76 - 12 = 64, so tup@2"]
    assert found[again] == {"value tup@2": [two[:-1]], "newest tup": newest}
    assert found[answer] == {
        "value tup@2": [two[:-1], "Again tup is tup@2 = 64"],
        "target tup": [f"{move} from tup to nug. Find tup"],
        "newest tup": [*newest, "Again tup is tup@2"],
        "value nug@2": [three[:-1]],
        "target nug": [f"{move} from tup to nug. Find tup and nug"],
        "newest nug": [newest[0], "Here step 2", plan2[:-1], "And nug@0 = 20, 20 + 12 = 32, so nug@2"],
    }


def test_a_superseded_balance_is_live_while_a_doubt_may_read_it():
    steps = "; ".join(f"{i}: tup = tup + nug" for i in range(1, 9))
    question = f"Balances (mod 100): tup@0 = 10; nug@0 = 1. Steps: {steps}. Find tup."
    reader = needs.reader(question, cut(question))

    def say(line: str) -> None:
        for piece in cut(line + "\n"):
            reader.add(piece)

    def of(name: str) -> int:
        """The newest token that carries the balance."""
        return reader.memory["value", name].places[-1]

    for i in range(1, 7):
        say(f"Next, step {i}: tup = tup + nug. I need tup@{i - 1} and nug@0 to find tup@{i}.")
        say(f"So tup@{i - 1} = {i + 9} and nug@0 = 1, {i + 9} + 1 = {i + 10}, so tup@{i} = {i + 10}.")
        assert {of("tup@0"), of("tup@1")} <= reader.live(), "a doubt about one of the last five before this run"
    say("Next, step 7: tup = tup + nug. I need tup@6 and nug@0 to find tup@7.")
    assert of("tup@0") not in reader.live(), "step 1 is the sixth from the end"
    assert of("tup@1") in reader.live(), "step 2 reads it"
    say("And here step 8: tup = tup + nug. I need tup@7 and nug@0 to find tup@8.")
    say("So tup@0 = 10 and nug@0 = 1, 10 + 1 = 12, so tup@8 = 12.")
    assert of("tup@0") in reader.live(), "the line read a wrong balance; its correction would read it again"
    say("And tup@6 = 16 and nug@0 = 1, 16 + 1 = 17, so tup@7 = 17.")
    assert of("tup@0") not in reader.live()
    assert of("tup@6") in reader.live()


# --- texts with errors


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds, data=st.data())
def test_texts_with_errors_never_raise(family, seed, data):
    problem, pieces, prompt = trace(family, seed, size=5)
    _, other, start = trace(data.draw(st.sampled_from(FAMILIES)), seed + 1, size=3)
    generated = pieces[prompt:]
    for _ in range(data.draw(st.integers(1, 30))):
        at = data.draw(st.integers(0, len(generated) - 1))
        kind = data.draw(st.sampled_from(["drop", "swap", "word", "lines", "mix"]))
        if kind == "drop":
            generated[at : at + 1] = [""]
        elif kind == "word":
            words = ["7", " gon", ".\n", "\n\n", " *", "99", "</think>", "", "é", "@"]
            generated[at] = data.draw(st.sampled_from(words))
        elif kind == "swap":
            to = data.draw(st.integers(0, len(generated) - 1))
            generated[at], generated[to] = generated[to], generated[at]
        elif kind == "lines":
            lines = "".join(generated).splitlines(keepends=True)
            generated = cut("".join(lines[:: data.draw(st.sampled_from([-1, 2, 3]))]))
        else:
            generated[at:at] = other[start : start + data.draw(st.integers(1, 60))]
        generated = generated or ["So"]
    whole = [*pieces[:prompt], *generated]
    reading = needs.read(problem.question, whole, prompt)
    assert 0 <= reading.parsed <= 1 or not (reading.statements or reading.skipped)
    text = "".join(generated).replace("</think>", "\n").replace("<|end|>", "\n")
    full = [line for line in text.split("\n")[:-1] if line.strip()]
    assert len(reading.statements) + len(reading.skipped) - len(full) in (0, 1)
    for need in reading.needs:
        assert need.places
        assert 0 <= min(need.places) <= max(need.places) < len(whole)
    reader = needs.reader(problem.question, pieces[:prompt])
    for piece in generated:
        reader.add(piece)
    assert all(0 <= place < len(whole) for place in reader.live())


def test_a_goal_beside_another_names_lock():
    question = "Numbers from 1 to 9: gon * 2 + 3 = 9; duv * 8 + 7 = 79. Find gon and duv."
    goal = "gon with duv * 8 + 7 = 79, from 1 up."
    prompt, want, still = cut(question), cut(f"I want {goal} Quick now.\n"), cut(f"Still {goal}\n")
    reading = needs.read(question, [*prompt, *want, *still], len(prompt))
    assert [s.kind for s in reading.statements] == ["want", "still"]
    names = [n.places for n in reading.needs if n.statement == 1 and n.key == ("goal", "duv")]
    assert names == [(len(prompt) + want.index("duv"),)], "gon is no place of duv"


def test_lines_that_no_rule_reads_are_skipped_and_counted():
    question = "Facts (mod 100): buz = 25; zot = buz * 2; nup = 3. Find nup, zot and buz."
    prompt = cut(question)
    text = "First, nup. nup = 3 is given.\nI like it here.\nSo zot = buz * 2 = 25 * 2 = 50.\nThen lim = 3"
    reading = needs.read(question, [*prompt, *cut(text)], len(prompt))
    assert [s.kind for s in reading.statements] == ["already", "compute"]
    assert len(reading.skipped) == 1, "the last line is not complete"
    assert reading.parsed == 2 / 3
    assert reading.unknown == 1, "zot is no goal"


def test_a_wrong_value_is_what_later_statements_need():
    question = "Facts (mod 100): buz = 25; zot = buz * 2; nup = zot + 1. Find nup, zot and buz."
    prompt = cut(question)
    text = "So zot = buz * 2 = 25 * 2 = 60.\nThen nup = zot + 1 = 61 + 1 = 62.\nAnd nup = zot + 1 = 60 + 1 = 61.\n"
    pieces = [*prompt, *cut(text)]
    reading = needs.read(question, pieces, len(prompt))
    wrong = pieces.index("60")
    assert [n.places for n in reading.needs if n.key == ("value", "zot")] == [(wrong,), (wrong,)], "61 is no copy"


def test_a_correction_of_another_line_than_the_last_needs_that_value_only():
    question = "Facts (mod 100): buz = 25; zot = buz * 2; nup = zot + 1. Find nup, zot and buz."
    prompt = cut(question)
    text = "So zot = buz * 2 = 25 * 2 = 60.\nAnd nup = zot + 1 = 60 + 1 = 61.\n"
    text += "Wait, that is wrong. 25 * 2 = 50, not 60. So zot = 50.\n"
    reading = needs.read(question, [*prompt, *cut(text)], len(prompt))
    assert [n.key for n in reading.needs if n.statement == 2] == [("value", "zot")], "nup's numbers are not read"


@pytest.mark.parametrize("question", ["What is 2+2?", "", "Numbers", "Facts (mod 100):", "Balances. Find "])
def test_a_question_of_no_family(question):
    pieces = [*cut(question), *cut("So duv = 2.\nIt is 4.\n</think>\n\nI find it.")]
    reading = needs.read(question, pieces, len(cut(question)))
    assert reading.needs == []
    assert len(reading.skipped) >= 1
    assert needs.reader(question, cut(question)).live() == set()


def test_a_question_that_the_prompt_does_not_hold():
    problem, pieces, prompt = trace("search", 1)
    reading = needs.read(problem.question, ["?", *pieces[prompt:]], 1)
    assert reading.parsed == 1
    assert reading.unknown > 0
    assert all(min(need.places) >= 1 for need in reading.needs)


def test_a_token_may_hold_a_line_break_and_more():
    question = "Numbers from 1 to 9: duv * 8 + 14 = 30. Find duv. Repeat little."
    generated = "First, duv. duv * 8", " + 14 = 30.\nI want duv with duv * 8 + 14 = 30, ", "from 1 up. Quick now.\n\n"
    pieces = [question, *generated]
    reading = needs.read(question, pieces, 1)
    assert reading.statements == [Statement(1, 3, "plan"), Statement(2, 4, "want")]


# --- the card's figures


def row_of_the_card(family: str) -> tuple[str, list[str]]:
    """docs/embedded-model.md, "What must be known, and for how long": a family's live tokens, and its distances."""
    text = (ROOT / "docs" / "embedded-model.md").read_text(encoding="utf-8")
    section = text.partition("\n### What must be known, and for how long\n")[2].partition("\n### ")[0]
    [row] = [line for line in section.splitlines() if line.startswith(f"| `{family}` |")]
    *_, live, again, _ = row.split("|")
    return live.replace(" ", ""), re.findall(r"\d+(?:,\d{3})*", again)


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_of_the_card(family: str) -> None:
    """Tokens that are live, of those generated, and how far back the newest token lies that carries what a line reads
    (median, 90 %, 99 %); without content that the prompt gives. 60 reference traces."""
    rng, shares, behind = random.Random(0), list[float](), list[int]()
    for _ in range(60):
        problem = prepare.FAMILIES[family].draw_problem(rng, rng.randint(*prepare.SIZES[family]))
        prompt, text = (TOKENIZER.pieces(TOKENIZER.encode(x)) for x in prepare.document(problem, rng))
        reader = needs.reader(problem.question, prompt)
        for i, piece in enumerate(text, 1):
            reader.add(piece)
            shares.append(sum(place >= len(prompt) for place in reader.live()) / i)
        found = reader.reading
        written = [need for need in found.needs if min(need.places) >= len(prompt)]
        behind += [found.statements[need.statement].start - max(need.places) for need in written]
    behind.sort()
    again = [f"{behind[int(len(behind) * q)]:,}" for q in (0.5, 0.9, 0.99)]
    assert row_of_the_card(family) == (f"{sum(shares) / len(shares):.1%}", again)


def test_doubts_of_the_card():
    """In 1,000 tokens of the training text of search: 60 reference traces."""
    rng, doubts, tokens = random.Random(0), 0, 0
    for _ in range(60):
        problem = prepare.FAMILIES["search"].draw_problem(rng, rng.randint(*prepare.SIZES["search"]))
        _, text = prepare.document(problem, rng)
        doubts += sum(thoughts.doubts(part) for part in text.split("\n\n")[1:])
        tokens += len(TOKENIZER.encode(text))
    card = (ROOT / "docs" / "embedded-model.md").read_text("utf-8")
    assert f"The training text has {1000 * doubts / tokens:.0f} doubts in 1,000 tokens" in " ".join(card.split())
