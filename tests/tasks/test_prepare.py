"""The tokenizer and the splits can be made again, documents are rendered as the chat template renders them, and the
shipped splits are the committed ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from minithink import tasks
from minithink.engine import TINY
from minithink.errors import MinithinkError, UsageError
from minithink.tasks import BINS, DATA, SPLITS, boxed, grade, load_problems, prepare
from minithink.tasks.writing import MODULUS, NAMES
from minithink.text.tokenizer import Tokenizer

# The tokenizer was trained before search came, and of its words these were not in the text.
OF_SEVERAL_TOKENS = {"search": {" yes", " fits"}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


def test_the_tokenizer_is_trained_again_identically():
    assert prepare.train_tokenizer(1600) == json.loads((TINY / "tokenizer.json").read_text())


def test_names_and_numbers_are_single_tokens(tokenizer):
    assert 1000 <= tokenizer.vocab_size <= 2000
    assert all(len(tokenizer.encode(f" {name}")) == 1 for name in NAMES)
    assert all(len(tokenizer.encode(str(n))) == 1 for n in range(MODULUS))


@pytest.mark.parametrize("family", prepare.FAMILIES)
def test_training_documents_are_what_the_chat_template_renders(tokenizer, family):
    rng = random.Random(0)
    problem = prepare.FAMILIES[family].draw_problem(rng, 5)
    prompt, response = prepare.document(problem, rng)
    assert prompt == tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])
    assert grade(response, problem.answer)
    assert response.endswith("<|end|>")
    assert tokenizer.decode(tokenizer.encode(prompt + response)) == prompt + response


@pytest.mark.parametrize("family", prepare.FAMILIES)
def test_words_are_single_tokens(tokenizer, family):
    rng = random.Random(1)
    texts = [prepare.document(prepare.FAMILIES[family].draw_problem(rng, 20), rng) for _ in range(30)]
    words = set(re.findall(r" [a-z]+", "".join(map("".join, texts))))
    assert len(words) > 100
    assert {word for word in words if len(tokenizer.encode(word)) > 1} == OF_SEVERAL_TOKENS.get(family, set())


def test_earlier_thinking_is_dropped_from_a_conversation(tokenizer):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    assert tokenizer.apply_chat_template(turns) == "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|><think>\n"


@pytest.mark.parametrize("family", prepare.FAMILIES)
def test_a_split_is_drawn_the_same_twice_and_only_from_itself(monkeypatch, family):
    counts = [0, 3, 2, 1] if family == "search" else [3, 2, 1, 0]
    monkeypatch.setitem(prepare.COUNTS, family, {"validation": tuple(counts)})
    first, second = (prepare.draw_split(family, "validation", TINY) for _ in range(2))
    assert first == second
    assert len(first) == 6
    assert all(row["id"].startswith(f"{family}-validation-") and row["family"] == family for row in first)
    assert [sum(low <= row["thinking_tokens"] < high for row in first) for low, high in BINS] == counts


def test_families_and_splits_that_do_not_exist():
    with pytest.raises(UsageError, match=r"There is no family 'fact'; did you mean facts\? There are facts, ledger"):
        load_problems("test", "fact")
    with pytest.raises(UsageError, match="The split 'train' does not exist; there are validation, test"):
        load_problems("train")


def test_the_splits_are_the_committed_ones():
    sums = dict(reversed(line.split()) for line in (DATA / "SHA256SUMS").read_text().splitlines())
    assert sorted(sums) == sorted(f"{family}-{split}.jsonl" for family in prepare.FAMILIES for split in SPLITS)
    for name, expected in sums.items():
        assert hashlib.sha256(gzip.decompress((DATA / f"{name}.gz").read_bytes())).hexdigest() == expected


DAMAGED = {
    "not compressed": b"no gzip",
    "not a problem": gzip.compress(b'{"id": 3}', mtime=0),
    "cut off": gzip.compress(b"{" * 99, mtime=0)[:-9],
}


@pytest.mark.parametrize("whole", DAMAGED.values(), ids=DAMAGED)
def test_damaged_problems_are_refused(tmp_path, monkeypatch, whole):
    (tmp_path / "facts-test.jsonl.gz").write_bytes(whole)
    monkeypatch.setattr(tasks, "DATA", tmp_path)
    with pytest.raises(MinithinkError, match=r"facts-test.jsonl.gz is damaged \(.+\): install the package again"):
        load_problems("test")


@pytest.mark.parametrize("family", prepare.FAMILIES)
def test_the_splits_are_large_enough_and_apart(family):
    ids, questions = {}, {}
    for split in SPLITS:
        problems = load_problems(split, family)
        ids[split], questions[split] = {p.id for p in problems}, {p.question for p in problems}
        assert len(ids[split]) == len(questions[split]) == len(problems) >= 500
        counts = tuple(sum(low <= p.thinking_tokens < high for p in problems) for low, high in BINS)
        assert counts == prepare.COUNTS[family][split]
        assert all(p.id.startswith(f"{family}-{split}-") and p.family == family for p in problems)
    assert not ids["test"] & ids["validation"]
    assert not questions["test"] & questions["validation"]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", prepare.FAMILIES)
def test_shipped_problems_are_the_ones_that_are_drawn(tokenizer, family, split):
    shipped = {p.id: p for p in load_problems(split, family)}
    found = 0
    problems = prepare.draw_problems(family, split, random.Random(f"{split}7"))
    for problem in islice(problems, 9):
        assert problem.split() == split
        match = shipped.get(prepare.id_of(problem))
        if match is not None:
            thinking, _ = prepare.reference_trace(problem)
            assert (match.question, match.answer) == (problem.question, problem.answer)
            assert match.thinking_tokens == len(tokenizer.encode(thinking))
            found += 1
    assert found >= 3


def test_boxed_takes_the_last_one_after_the_thinking():
    assert boxed(r"\boxed{1}</think> \boxed{2} then \boxed{3, {4}}!") == "3, {4}"
    assert boxed(r"\boxed{1}</think> none") is None
    assert boxed(r"</think>\boxed{1") is None
    assert grade(r"</think>\boxed{ 1,2 , 3}", "1, 2, 3")
    assert not grade(r"</think>\boxed{1, 23}", "1, 2, 3")
    assert not grade(r"\boxed{1, 2, 3}</think>", "1, 2, 3")


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--vocab-size", "261"], "--vocab-size is 261; bytes and tags alone are 262 tokens.", 2),
        ([], "cannot be written", 1),
    ],
)
def test_bad_input(words: list[str], says: str, code: int, tmp_path: Path, capsys) -> None:
    path = tmp_path / "file"
    path.write_text("not a folder")
    assert prepare.main(["--output", str(path), *words]) == code
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert path.read_text() == "not a folder"
