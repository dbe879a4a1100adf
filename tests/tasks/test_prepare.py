"""The tokenizer and the splits can be made again, and documents are rendered as the chat template renders them."""

from __future__ import annotations

import json
import random

import pytest

from minithink.engine import TINY
from minithink.tasks import facts, prepare
from minithink.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


def test_the_tokenizer_is_trained_again_identically():
    assert prepare.train_tokenizer(1600) == json.loads((TINY / "tokenizer.json").read_text())


def test_names_and_numbers_are_single_tokens(tokenizer):
    assert 1000 <= tokenizer.vocab_size <= 2000
    assert all(len(tokenizer.encode(f" {name}")) == 1 for name in facts.NAMES)
    assert all(len(tokenizer.encode(str(n))) == 1 for n in range(facts.MODULUS))


def test_training_documents_are_what_the_chat_template_renders(tokenizer):
    rng = random.Random(0)
    problem = facts.draw_problem(rng, 5)
    prompt, response = prepare.document(problem, rng)
    assert prompt == tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])
    assert response.endswith("<|end|>")
    assert tokenizer.decode(tokenizer.encode(prompt + response)) == prompt + response


def test_earlier_thinking_is_dropped_from_a_conversation(tokenizer):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    assert tokenizer.apply_chat_template(turns) == "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|><think>\n"


def test_a_split_is_drawn_the_same_twice_and_only_from_itself(monkeypatch):
    monkeypatch.setitem(prepare.COUNTS, "validation", (3, 2, 1))
    first, second = (prepare.draw_split("validation", TINY) for _ in range(2))
    assert first == second
    assert len(first) == 6
