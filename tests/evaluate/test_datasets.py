"""Every kind of dataset loads as it should, or is refused with a sentence that says where and what."""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.errors import MinithinkError, UsageError
from minithink.evaluate import datasets
from minithink.evaluate.datasets import (
    CHOOSE,
    ENTRIES,
    INSTRUCTION,
    Example,
    check_graders,
    fields_of,
    load_dataset,
)
from minithink.evaluate.grading import GRADERS, grade
from minithink.tasks import BINS, SPLITS, families, load_problems, search
from minithink.tasks.answers import short_answer
from tests.hub_server import HubServer

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"  # invented problems in the formats of the ready entries
PARQUET = {"AIME24": "aime24", "AMC23": "amc23", "GSM8K": "gsm8k"}  # whose fixtures become parquet at test time
has_pyarrow = importlib.util.find_spec("pyarrow") is not None
FROZEN = ["(A) chlorine, Cl2", "(B) neon", "(C) nitrogen", "(D) oxygen"]
needs_pyarrow = pytest.mark.skipif(not has_pyarrow, reason="needs the extra datasets")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def fixture_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def refused(name: str | Path, *mentions: str, split: str | None = None, error: type = MinithinkError) -> str:
    """Loading fails with one sentence that mentions all of these."""
    with pytest.raises(error) as caught:
        load_dataset(str(name), split)
    sentence = str(caught.value)
    for mention in mentions:
        assert mention in sentence, sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


# --- the embedded families


@pytest.mark.parametrize("family", families())
def test_the_embedded_families(family):
    for split in SPLITS:
        problems = load_problems(split, family)
        got = load_dataset(family, split)
        assert [(e.id, e.question, e.answer) for e in got] == [(p.id, p.question, p.answer) for p in problems]
        assert {e.grader for e in got} == {"exact"}
        for e, p in zip(got, problems, strict=True):
            (inside,) = [f"{low}–{high}" for low, high in BINS if low <= p.thinking_tokens < high]
            assert e.group == inside
    assert load_dataset("facts") == load_dataset("facts", "test")
    assert load_dataset("facts", limit=3) == load_dataset("facts")[:3]
    refused("facts", "train", "validation, test", split="train", error=UsageError)


def test_search_in_one_redundancy():
    """The same problems under the same ids; the question's last sentence is that of the redundancy."""
    own = load_dataset("search", "validation")
    for level, words in enumerate(search.WORDING):
        asked = load_dataset(f"search:{level}", "validation")
        assert [(e.id, e.answer, e.group) for e in asked] == [(e.id, e.answer, e.group) for e in own]
        assert all(e.question.endswith(f". {words}") for e in asked)
        same = [a.question == b.question for a, b in zip(asked, own, strict=True)]
        assert 0.2 < sum(same) / len(same) < 0.5
        assert {e.question.removesuffix(words) for e in asked} == {
            next(e.question.removesuffix(w) for w in search.WORDING if e.question.endswith(w)) for e in own
        }
    refused("search:3", "search:2", error=UsageError)
    refused("facts:1", "facts", error=UsageError)


# --- files


def test_fields_are_found_in_their_order(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "q?", "problem": "p?", "question": "a?", "answer": "1", "solution": "2", "group": "easy"},
        {"prompt": "q?", "problem": "p?", "question": " ", "answer": None, "target": 2, "solution": "3"},
        {"id": 7, "prompt": "q?", "solution": r"It is \boxed{1} and \boxed{\frac{1}{2}}.", "grader": "math"},
        {"id": "x", "prompt": "q?", "solution": "5"},
        {"question": "f?", "answer": 27.0},
        {"question": "g?", "answer": 0.5, "expected_answer": "no"},
        {"question": "h?", "answer": 10**400},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert load_dataset(str(path)) == [
        Example("p-1", "a?", "1", "exact", "easy"),
        Example("p-2", "p?", "2", "exact"),
        Example("7", "q?", r"\frac{1}{2}", "math"),
        Example("x", "q?", "5", "exact"),
        Example("p-5", "f?", "27", "exact"),
        Example("p-6", "g?", "0.5", "exact"),
        Example("p-7", "h?", "1" + "0" * 400, "exact"),
    ]
    assert [e.grader for e in load_dataset(str(path), grader="number")][:3] == ["number", "number", "math"]
    assert len(load_dataset(str(path), limit=2)) == 2


def load_rows(path: Path, *rows: dict[str, Any]) -> list[Example]:
    """The examples of a file with these rows."""
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return load_dataset(str(path))


# Rows as datasets publish them (the problems are invented), and their short answers.
PUBLISHED = [
    ({"question": "q?", "answer": "3*4=<<3*4=12>>12.\n#### 1,012"}, "1012"),  # GSM8K
    ({"problem": "q?", "level": "Level 1", "type": "Algebra", "solution": r"So $x=\boxed 7$."}, "7"),  # MATH
    ({"problem": "q?", "type": "Algebra", "solution": r"So \fbox{17}."}, "17"),  # MATH
    ({"problem": "q?", "solution": r"So $\boxed{\frac{1}{2}}$.", "answer": "0.5"}, "0.5"),  # MATH-500
    ({"ID": "2024-I-1", "Problem": "q?", "Solution": r"So $\boxed{204}$.", "Answer": 204}, "204"),  # AIME
    ({"problem_idx": 1, "problem": "q?", "answer": 70, "problem_type": ["Algebra"]}, "70"),  # AIME 2025
    ({"id": 0, "problem": "q?", "answer": 27.0, "url": "u"}, "27"),  # AMC
    ({"question": "q?", "answer": ["27.0"]}, "27.0"),  # AMC
    ({"problem": "q?", "solution": r"\[s=\boxed{1.6} \mathrm{~cm}\]", "type": "A", "idx": 0}, "1.6"),  # Minerva
    (
        {"question": "q?", "solution": ["Long."], "final_answer": ["$\\frac{1}{2}$"], "is_multiple_answer": False},
        r"\frac{1}{2}",
    ),  # OlympiadBench
    ({"question": "q?", "final_answer": ["$1$", "$2$"], "is_multiple_answer": True}, "1, 2"),  # OlympiadBench
    ({"question": "q?", "final_answer": None, "solution": ["So the answer is 5."]}, "5"),
]


@pytest.mark.parametrize(("row", "answer"), PUBLISHED)
def test_published_rows_have_short_answers(tmp_path, row, answer):
    [example] = load_rows(tmp_path / "p.jsonl", row)
    assert (example.question, example.answer) == ("q?", answer)
    assert check_graders([example]) == []
    assert grade(rf"</think>So \boxed{{{answer}}}.", example.answer, example.grader).right


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"context": "A ball falls.", "question": "How far?", "final_answer": ["1"]}, "A ball falls.\nHow far?"),
        ({"context": None, "question": "How far?", "final_answer": ["1"]}, "How far?"),
        ({"context": " ", "question": "How far?", "final_answer": ["1"]}, "How far?"),
        (
            {"ID": "chal-1", "Body": "Ann has 3 pens. ", "Question": "How many are left?", "Answer": 1.0},
            "Ann has 3 pens. How many are left?",
        ),
        ({"body": "3 pens.", "problem": "Ann has 3 pens. How many?", "answer": 1}, "Ann has 3 pens. How many?"),
        ({"context": {"title": ["a"], "sentences": [["b"]]}, "question": "q?", "answer": 1}, "q?"),
    ],
    ids=["OlympiadBench", "no context", "an empty context", "SVAMP", "a question that holds it", "HotpotQA"],
)
def test_what_a_question_refers_to_stands_in_front_of_it(tmp_path, row, question):
    [example] = load_rows(tmp_path / "p.jsonl", row)
    assert (example.question, example.answer) == (question, "1")


def test_a_right_answer_that_no_reply_equals_is_found():
    """The reply is the short answer in a box, and not the dataset's text itself."""
    with pytest.raises(UsageError, match=r"exact would take no text for right in 1 of 1 .*'It is 12.\\n#### 12'"):
        check_graders([Example("a", "q?", "It is 12.\n#### 12", "exact")])
    solution = "First we add the two of them. Then we take half of it. " + "So we are done with it. " * 9
    [note] = check_graders([Example("a\x1b", "q?", solution, "exact"), Example("b", "q?", "5", "exact")])
    assert "1 of 2 problems look like whole solutions" in note
    assert "a\\x1b" in note
    assert solution not in note, "it is quoted briefly"


# Any character that UTF-8 has. (Before 3.11 Python's csv refuses NUL.)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip)
rows_of_words = st.lists(st.tuples(words, words, words), min_size=1, max_size=5, unique_by=lambda row: row[0])


@given(rows_of_words, st.booleans())
@example([("a", 'x,"\r\n\u2028\x85y', "\ufeff")], False)
def test_what_is_written_is_read(tmp_path, rows, escape):
    fields = [dict(zip(("id", "question", "answer"), row, strict=True)) for row in rows]
    want = [Example(id, question, short_answer(answer), "exact") for id, question, answer in rows]

    lines, listed, table = tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "a.csv"
    lines.write_text("".join(json.dumps(f, ensure_ascii=escape) + "\n" for f in fields), encoding="utf-8")
    assert load_dataset(str(lines)) == want
    listed.write_text(json.dumps(fields, ensure_ascii=escape), encoding="utf-8")
    assert load_dataset(str(listed)) == want
    shutil.copy(lines, listed)  # lines under the name of a list
    assert load_dataset(str(listed)) == want
    with table.open("w", encoding="utf-8-sig" if escape else "utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "question", "answer"])
        writer.writeheader()
        writer.writerows(fields)
    assert load_dataset(str(table)) == want


@needs_pyarrow
def test_parquet(tmp_path):
    write_parquet(tmp_path / "p.parquet", [{"problem": "é?", "answer": 5}, {"problem": "2?", "answer": 6}])
    got = load_dataset(str(tmp_path / "p.parquet"))
    assert got == [Example("p-1", "é?", "5", "exact"), Example("p-2", "2?", "6", "exact")]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    refused(tmp_path / "broken.parquet", "broken.parquet cannot be read as parquet")
    write_parquet(tmp_path / "q.parquet", [{"problem": "1?", "answer": "5"}, {"problem": "2?", "answer": None}])
    refused(tmp_path / "q.parquet", "q.parquet, row 2 has no answer")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "p.parquet").write_bytes(b"")
    refused(tmp_path / "p.parquet", "p.parquet needs pyarrow", "pip install 'pyarrow>=17'")


GOOD = '{"question": "1?", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("file", "content", "mentions"),
    [
        ("a.jsonl", "", ["a.jsonl holds no examples"]),
        ("a.jsonl", "\n \n", ["a.jsonl holds no examples"]),
        ("a.json", "[]", ["a.json holds no examples"]),
        ("a.csv", "question,answer\n", ["a.csv holds no examples"]),
        ("a.jsonl", GOOD + "\n{", ["a.jsonl, line 3 is no JSON"]),
        ("a.jsonl", GOOD + "[1]\n", ["a.jsonl, line 2 is no JSON object"]),
        ("a.json", f"[{GOOD}, 5]", ["a.json, row 2 is no JSON object"]),
        ("a.json", f"[{GOOD}", ["a.json cannot be read as json"]),
        ("a.jsonl", "[" * 100_000, ["a.jsonl, line 1 is no JSON"]),
        ("a.jsonl", GOOD + '{"answer": "1"}', ["line 2 has no question", "problem or prompt"]),
        ("a.jsonl", '{"question": " \\n", "answer": "1"}', ["line 1 has no question", "field 'question' is empty"]),
        (
            "a.jsonl",
            '{"problem": "", "answer": "1"}',
            ["field 'problem' is empty: fill it in, or leave the line out"],
        ),
        ("a.jsonl", '{"question": "1?", "answer": ""}', ["line 1 has no answer", "field 'answer' is empty"]),
        ("a.jsonl", '{"question": "1?", "answer": [["1"]]}', ["line 1 has ['1'] as its answer", "neither text"]),
        ("a.jsonl", '{"question": "1?", "answer": []}', ["line 1 has no answer"]),
        ("a.jsonl", '{"question": "1?", "answer": {"a": 1}}', ["line 1 has {'a': 1} as its answer"]),
        ("a.jsonl", '{"question": "1?", "answer": true}', ["line 1 has True as its answer"]),
        ("a.jsonl", '{"question": "1?", "answer": NaN}', ["line 1 has nan as its answer"]),
        ("a.jsonl", '{"question": "1?", "answer": -Infinity}', ["line 1 has -inf as its answer"]),
        ("a.jsonl", '{"question": "\\ud83d", "answer": "1"}', ["line 1 has half a character", "question"]),
        ("a.jsonl", '{"question": "1?", "answer": "1", "grader": "gut"}', ["line 1", "'gut'", "exact, math"]),
        ("a.jsonl", '{"id": 1, "question": "1?", "answer": "1"}\n' * 2, ["line 2 has the id '1' of line 1"]),
        ("a.jsonl", GOOD + '{"id": "a-1", "question": "1?", "answer": "1"}', ["line 2 has the id 'a-1' of line 1"]),
        ("a.csv", 'question,answer\n"1\n?",1\n2?\n', ["a.csv, line 4 has no answer"]),
        ("a.csv", "question,answer\n1?,1,1\n", ["a.csv, line 2 has more fields than the 2 of the header"]),
        ("a.csv", 'question,answer\n"1?,1\n', ["a.csv cannot be read as csv"]),
        ("a.csv", "frage,antwort\n1?,1\n", ["a.csv, line 2 has no question"]),
        ("a.csv", b"question,answer\n\xff,1\n", ["a.csv is not in UTF-8", "convert it"]),
        ("a.jsonl", b"\xff\n", ["a.jsonl is not in UTF-8", "byte 0"]),
    ],
)
def test_bad_files(tmp_path, file, content, mentions):
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(path, str(path), *mentions)


def test_what_there_is_not(tmp_path):
    refused(tmp_path / "none.csv", "none.csv does not exist")
    (tmp_path / "folder.jsonl").mkdir()
    refused(tmp_path / "folder.jsonl", "folder.jsonl cannot be read")
    (tmp_path / "a.jsonl").write_text(GOOD)
    refused(tmp_path / "a.jsonl", "has no split 'test'", split="test", error=UsageError)
    sentence = refused("MATH500", "no dataset 'MATH500'", "facts", "*.jsonl", "hub:owner/name", error=UsageError)
    assert all(name in sentence for name in ENTRIES)
    refused("MATH-500", "MATH-500 has no split 'train'; there is test", split="train", error=UsageError)
    for name in ("hub:gsm8k", "hub:", "hub:a/b/c"):
        refused(name, repr(name), "hub:owner/name", error=UsageError)
    refused("hub:a/b:*", "words of a file's path", error=UsageError)
    refused("hub:a/b", "words of a file's path", split="../x", error=UsageError)
    with pytest.raises(UsageError, match="limit of 0"):
        load_dataset("facts", limit=0)
    with pytest.raises(UsageError, match="no grader 'gut'"):
        load_dataset("facts", grader="gut")


# --- ready entries


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The ready entries' repositories as folders, filled with the fixtures; `download` gives these."""
    for name, entry in ENTRIES.items():
        for file in entry.files.values():
            path = tmp_path / entry.repo / file.replace("*train*", "data-train.jsonl")
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix != ".parquet":
                shutil.copy(FIXTURES / {"GPQA-Diamond": "gpqa_diamond.csv"}.get(name, f"{name.lower()}.jsonl"), path)
            elif has_pyarrow:
                write_parquet(path, fixture_rows(PARQUET[name]))

    def download(repo, patterns, revision=None, kind="model"):
        assert kind == "dataset"
        return tmp_path / repo

    monkeypatch.setattr(datasets, "download", download)
    return tmp_path


def entry_names():
    return [pytest.param(n, marks=needs_pyarrow if n in PARQUET else ()) for n in ENTRIES]


@pytest.mark.parametrize("name", entry_names())
def test_every_entry_loads_its_fixture(hub, name):
    got = load_dataset(name)
    assert len(got) == 2
    assert load_dataset(name.lower(), "test", limit=1) == got[:1]
    for e in got:
        assert "Please reason step by step, and put your final answer within \\boxed{}." in e.question
        assert e.grader == ENTRIES[name].grader
        assert e.grader in GRADERS
        if e.grader == "math" and not importlib.util.find_spec("math_verify"):
            continue
        assert GRADERS[e.grader](rf"</think>It is \boxed{{{e.answer}}}", e.answer)
    assert len({e.id for e in got}) == 2


def test_math500(hub):
    first, second = load_dataset("MATH-500")
    assert first == Example(
        "test/prealgebra/1.json",
        f"What is $\\frac{{1}}{{4}} + \\frac{{1}}{{4}}$?\n\n{INSTRUCTION}",
        r"\frac{1}{2}",
        "math",
        "level 1",
    )
    assert second.group == "level 2"


def test_aime25(hub):
    assert [(e.id, e.answer) for e in load_dataset("AIME25")] == [("0", "7"), ("1", "588")]


def test_a_copy_of_an_entry_in_a_file_is_read_as_from_the_hub(hub, tmp_path):
    copied = tmp_path / "mine.jsonl"
    shutil.copy(FIXTURES / "math-500.jsonl", copied)
    assert load_dataset(f"math-500={copied}") == load_dataset("MATH-500")
    choices = tmp_path / "mine.csv"
    shutil.copy(FIXTURES / "gpqa_diamond.csv", choices)
    assert load_dataset(f"GPQA-Diamond={choices}", limit=1) == load_dataset("GPQA-Diamond")[:1]


def test_another_file_in_place_of_an_entry_is_asked_and_graded_as_the_entry(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1 + 1?", "solution": "So it is \\\\boxed{2}."}\n')
    assert load_dataset(f"AIME24={path}") == [Example("mine-1", f"1 + 1?\n\n{INSTRUCTION}", "2", "math")]
    (asked,) = load_dataset(f"AIME24={path}", fields={"answer": "question"})
    assert (asked.answer, asked.grader) == ("1 + 1?", "math"), "--fields names the fields of that file"
    refused(f"AIME24={tmp_path / 'none.jsonl'}", "does not exist")
    with pytest.raises(UsageError, match="no dataset 'AIME99=mine'"):
        load_dataset("AIME99=mine")


@needs_pyarrow
def test_parquet_entries(hub):
    assert [(e.id, e.answer) for e in load_dataset("AIME24")] == [("60", "204"), ("61", "025")]
    assert [(e.id, e.answer) for e in load_dataset("AMC23")] == [("0", "27.0"), ("1", "36.0")]
    assert [(e.id, e.answer) for e in load_dataset("GSM8K")] == [("GSM8K-test-1", "18"), ("GSM8K-test-2", "70,000")]
    assert [e.id for e in load_dataset("GSM8K", "train")] == ["GSM8K-train-1", "GSM8K-train-2"]
    write_parquet(
        hub / "openai/gsm8k/main/test-00000-of-00001.parquet", [{"question": "1?", "answer": "#### 4\n#### 5"}]
    )
    assert [e.answer for e in load_dataset("GSM8K")] == ["5"]
    write_parquet(hub / "openai/gsm8k/main/test-00000-of-00001.parquet", [{"question": "1?", "answer": "5"}])
    refused("GSM8K", "row 1 has no", "####")


def test_gpqa_shuffles_the_choices_by_the_question(hub):
    first, second = load_dataset("GPQA-Diamond")
    assert (first.id, first.group, second.id, second.group) == ("recAAA", "Chemistry", "recBBB", "Physics")
    question, choices, ask = first.question.split("\n\n")
    assert question == "Which of these is a noble gas,\nat room temperature?"
    assert ask == f"{INSTRUCTION} {CHOOSE}"
    assert sorted(line[4:] for line in choices.split("\n")) == ["chlorine, Cl2", "neon", "nitrogen", "oxygen"]
    assert [line[:4] for line in choices.split("\n")] == ["(A) ", "(B) ", "(C) ", "(D) "]
    # Frozen: another order would make results incomparable.
    assert choices.split("\n") == FROZEN
    for e, right in ((first, "neon"), (second, "3")):
        assert f"({e.answer}) {right}" in e.question.split("\n")


@given(words, st.lists(words, min_size=4, max_size=4, unique_by=str.strip))
def test_gpqa_order_is_a_permutation(question, choices):
    names = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    fields = dict(zip(names, choices, strict=True)) | {"Question": question}
    message, letter = datasets._gpqa(datasets._Row(fields, Path("x"), 1, "line"))
    assert (message, letter) == datasets._gpqa(datasets._Row(fields, Path("y"), 2, "line"))
    order = sorted(range(4), key=lambda i: hashlib.sha256(f"{question.strip()}\n{i}".encode()).digest())
    shown = [f"({mark}) {choices[i].strip()}" for mark, i in zip("ABCD", order, strict=True)]
    assert message == "\n\n".join([question.strip(), "\n".join(shown), f"{INSTRUCTION} {CHOOSE}"])
    assert shown["ABCD".index(letter)] == f"({letter}) {choices[0].strip()}"


def test_gpqa_has_its_answer_everywhere():
    """No letter is right more often than chance allows."""
    fields = {f: f for f in ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")}
    rows = [datasets._Row({**fields, "Question": f"Question {i}?"}, Path("x"), i, "line") for i in range(1000)]
    letters = [datasets._gpqa(row)[1] for row in rows]
    assert all(200 < letters.count(letter) < 300 for letter in "ABCD")


def test_an_entry_that_lost_a_field_or_a_file(hub):
    path = hub / "math-ai/aime25/test.jsonl"
    path.write_text('{"id": 1, "problem": "1?", "solution": "1"}')
    refused("AIME25", "test.jsonl, line 1 has no answer")
    path.write_text('{"id": 1, "problem": "1?", "answer": 1}\n' * 2)
    refused("AIME25", "line 2 has the id '1' of line 1")
    path.unlink()
    refused("AIME25", "math-ai/aime25 has no file test.jsonl any more")


# --- a hub


class Client:
    """Loads datasets in a process of its own, because huggingface_hub reads the environment when it is imported."""

    def __init__(self, endpoint: str, home: Path) -> None:
        self.env = {"PATH": os.environ["PATH"], "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HOME": str(home)}

    def load(self, *names: str, fields: dict[str, str] | None = None, **env: str) -> list[Any]:
        """For each name (or `name@split`) the examples' ids, questions and answers, or the error."""
        code = (
            "import json, sys\nfrom minithink.errors import MinithinkError\n"
            "from minithink.evaluate.datasets import load_dataset\n"
            "fields = json.loads(sys.argv[1])\n"
            "for name in sys.argv[2:]:\n"
            "    try: examples = load_dataset(*name.split('@'), fields=fields)\n"
            "    except MinithinkError as e: print(json.dumps(str(e)))\n"
            "    else: print(json.dumps([(e.id, e.question, e.answer) for e in examples]))"
        )
        args = [sys.executable, "-c", code, json.dumps(fields), *names]
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        env = self.env | path | env
        done = subprocess.run(args, capture_output=True, text=True, env=env, cwd=ROOT, timeout=60)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    tmp = tmp_path_factory.mktemp("hub")
    line = '{"question": "%s?", "answer": "1"}\n'
    for file in (
        "main/test-00000-of-00002.jsonl",
        "main/test-00001-of-00002.jsonl",
        "main/train.jsonl",
        "test/hard.jsonl",
        "latest.jsonl",
        "main/test.py",
        "main/test.pkl",
    ):
        (tmp / "many" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp / "many" / file).write_text(line % file)
    (tmp / "plain").mkdir()
    for file in ("test.csv", "latest.csv"):
        (tmp / "plain" / file).write_text("question,answer\n1?,1\n")
    for folder, fixture in (("math", "math-500.jsonl"), ("gpqa", "gpqa_diamond.csv")):
        (tmp / folder).mkdir()
        shutil.copy(FIXTURES / fixture, tmp / folder / {"math": "test.jsonl"}.get(folder, fixture))
    folders = {
        "some/many": "many",
        "some/plain": "plain",
        "HuggingFaceH4/MATH-500": "math",
        "Idavidrein/gpqa": "gpqa",
    }
    with HubServer({f"datasets/{name}": tmp / folder for name, folder in folders.items()}) as it:
        it.gated.add("datasets/Idavidrein/gpqa")
        yield it


def test_datasets_of_a_hub(server, tmp_path):
    names = ["hub:some/plain", "hub:some/many:main", "hub:some/many:hard", "hub:some/many:main@train", "MATH-500"]
    plain, main, hard, train, entry = first = Client(server.endpoint, tmp_path).load(*names)
    assert plain == [["plain-test-1", f"1?\n\n{INSTRUCTION}", "1"]]
    assert [(id, q.split("?")[0]) for id, q, _ in main] == [
        ("many-test-1", "main/test-00000-of-00002.jsonl"),
        ("many-test-2", "main/test-00001-of-00002.jsonl"),
    ]
    assert [q.split("?")[0] for _, q, _ in hard] == ["test/hard.jsonl"]
    assert [q.split("?")[0] for _, q, _ in train] == ["main/train.jsonl"]
    assert [id for id, _, _ in entry] == ["test/prealgebra/1.json", "test/precalculus/2.json"]
    assert not any(path.suffix in (".py", ".pkl") for path in tmp_path.rglob("*")), "data, and no code"

    seen = len(server.requests)
    assert Client(server.endpoint, tmp_path).load(*names, HF_HUB_OFFLINE="1") == first
    assert len(server.requests) == seen, "offline means offline"


def test_refusals_of_a_hub(server, tmp_path):
    expected = {
        "hub:some/many": ["several files of the split 'test': main/test.jsonl, test/hard.jsonl", "hub:some/many:"],
        "hub:some/many@dev": ["some/many has no file", "of the split 'dev'"],
        "hub:some/many:soft": ["no file", "of the split 'test' and the config 'soft'"],
        "hub:some/nothing": ["The dataset some/nothing is not at", "check the spelling"],
        "GPQA-Diamond": ["Idavidrein/gpqa is gated", f"{server.endpoint}/datasets/Idavidrein/gpqa", "hf auth login"],
        "AIME25": ["The dataset math-ai/aime25 is not at"],
    }
    got = Client(server.endpoint, tmp_path).load(*expected)
    for sentence, mentions in zip(got, expected.values(), strict=True):
        assert isinstance(sentence, str)
        for mention in mentions:
            assert mention in sentence, sentence
    (sentence,) = Client(server.endpoint, tmp_path / "empty").load("MATH-500", HF_HUB_OFFLINE="1")
    assert "The dataset HuggingFaceH4/MATH-500" in sentence
    assert "HF_HUB_OFFLINE" in sentence


# Rows of a math dataset: the question and the answer have names that are found without --fields, too, but others are
# meant.
OWN = [
    {"uid": "a", "prompt": "no", "statement": "1?", "answer": "no", "result": r"So \boxed{1}.", "topic": "sums"},
    {"uid": "b", "prompt": "no", "statement": "2?", "answer": "no", "result": 2, "topic": None},
]
FIELDS = {"question": "statement", "answer": "result", "id": "uid", "group": "topic"}


def write_rows(path: Path) -> Path:
    if path.suffix == ".parquet":
        write_parquet(path, [{**row, "result": str(row["result"])} for row in OWN])
    else:
        path.write_text("\n".join(json.dumps(row) for row in OWN))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", pytest.param(".parquet", marks=needs_pyarrow)])
def test_fields_may_be_named(tmp_path, suffix):
    path = write_rows(tmp_path / f"p{suffix}")
    assert load_dataset(str(path), fields=FIELDS) == [
        Example("a", "1?", "1", "exact", "sums"),
        Example("b", "2?", "2", "exact"),
    ]
    only = load_dataset(str(path), fields={"question": "Statement", "id": "UID"})  # capitals do not matter
    assert [(e.id, e.question, e.answer) for e in only] == [("a", "1?", "no"), ("b", "2?", "no")]


@pytest.mark.parametrize(
    ("fields", "mentions"),
    [
        ({"question": "problem"}, ["line 1 has nothing in its field 'problem', which --fields names", "'statement'"]),
        ({"answer": "solution"}, ["'solution'", "'result'"]),
        ({"id": "name"}, ["'name'", "'uid'"]),
        ({"group": "level"}, ["'level'", "'topic'"]),
        ({"grader": "checker"}, ["'checker'"]),
    ],
)
def test_a_named_field_must_be_there(tmp_path, fields, mentions):
    path = write_rows(tmp_path / "p.jsonl")
    with pytest.raises(MinithinkError) as caught:
        load_dataset(str(path), fields=fields)
    for mention in mentions:
        assert mention in str(caught.value)


def test_a_row_without_a_question_says_how_to_name_its_field(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"text": "1?", "label": "1"}))
    refused(path, "it has 'text', 'label'", "--fields question=FIELD")


@pytest.mark.parametrize("name", ["facts", "search:2", "MATH-500"])
def test_fields_of_a_known_dataset_cannot_be_named(name):
    with pytest.raises(UsageError, match=f"those of {name} are known"):
        load_dataset(name, fields=FIELDS)


def test_how_fields_are_written():
    assert fields_of("question=problem,answer=solution") == {"question": "problem", "answer": "solution"}
    assert fields_of("id=a=b") == {"id": "a=b"}
    for text, said in [
        ("question", "write WHAT=FIELD"),
        ("question=", "write WHAT=FIELD"),
        ("", "write WHAT=FIELD"),
        ("question=a,", "write WHAT=FIELD"),
        ("questions=a", "did you mean question?"),
        ("answer=a,answer=b", "twice"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(said)):
            fields_of(text)


def test_fields_of_a_dataset_of_the_hub_may_be_named(server, tmp_path):
    endpoint = Client(server.endpoint, tmp_path)
    [examples] = endpoint.load("hub:some/plain", fields={"question": "answer"})
    assert examples == [["plain-test-1", f"1\n\n{INSTRUCTION}", "1"]]


def test_problems_without_answers_need_the_grader_none(tmp_path):
    path = tmp_path / "p.jsonl"
    graded = {"question": "3?", "answer": "5", "grader": "exact"}
    rows = [{"question": "1?"}, {"question": "2?", "answer": None}, graded]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    refused(path, "line 1 has no answer")
    examples = load_dataset(str(path), grader="none")
    assert [(e.answer, e.grader) for e in examples] == [("", "none"), ("", "none"), ("5", "exact")]
    assert check_graders(examples) == []
    path.write_text(json.dumps({"question": "1?", "grader": "none"}))
    assert load_dataset(str(path))[0].grader == "none"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_pipes_devices_and_names_that_are_too_long_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    refused(tmp_path / "pipe.jsonl", "cannot be read as jsonl: it is a pipe or a device.")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    refused(tmp_path / "zero.csv", "cannot be read as csv: it is a pipe or a device.")
    assert len(refused("x" * 5000 + ".jsonl", "cannot be read as jsonl: File name too long")) < 200
    refused("a\0b.jsonl", "a\\x00b.jsonl cannot be read as jsonl")


@pytest.mark.parametrize("name", ["x" * 5000, "hub:" + "x" * 5000, "facts", "hub:a/b"])
def test_names_and_splits_are_quoted_briefly(name):
    sentence = refused(name, split="*" * 5000 if len(name) < 100 else None, error=UsageError)
    assert len(sentence) < 500
