"""Mutated tokenizer files are read or refused in one sentence. Alone: pytest tests/text/test_tokenizer_fuzz.py

CI draws as many folders as take a few seconds, always the same; HYPOTHESIS_PROFILE=nightly draws new ones for longer.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from minithink.errors import MinithinkError
from minithink.text.tokenizer import Tokenizer
from tests.conftest import PROFILE

FOLDERS = {"sanitize": 20, "ci": 1000}.get(PROFILE, 30_000)
TEXTS = ["", " ", "ab <think>AB</think> 12345", "é 我们\n\n  x", "<s>[PAD]<|x|>", "a\x00\u0301", "word words"]

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": r" ?\p{L}+|\s+(?!\S)"}, "behavior": "Isolated", "invert": False}
DIGITS = {"type": "Digits", "individual_digits": True}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [260], "tokens": ["<s>"]}},
}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
VOCAB = {symbol: id for id, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FILES: dict[str, Any] = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [{"id": 260, "content": "<s>", **FLAGS}, {"id": 261, "content": "<think>", **FLAGS}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": " "}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, DIGITS, LEVEL]},
        "post_processor": {"type": "Sequence", "processors": [LEVEL, TEMPLATE]},
        "decoder": LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "fuse_unk": False,
            "ignore_merges": True,
            "vocab": VOCAB | {"ab": 256, "Ġab": 257, "Ġa": 258, "ĠA": 259},
            "merges": ["a b", ["Ġ", "ab"], "Ġ a", "Ġ A"],
        },
    },
    "tokenizer_config.json": {
        "bos_token": "<s>",
        "eos_token": {"content": "<|x|>", **FLAGS},
        "image_token": "<i>",
        "additional_special_tokens": ["word"],
        "added_tokens_decoder": {"262": {"content": "<|x|>", **FLAGS}},
        "chat_template": "{{ messages[0].content }}",
    },
    "special_tokens_map.json": {"pad_token": "[PAD]", "additional_special_tokens": ["<s>"]},
    "added_tokens.json": {"</think>": 263},
}
STRANGE: list[Any] = [
    *(None, True, False, 0, 1, -1, -5, 1.5, 1e9, 261, 10**9, 2**64, 10**400, float("nan"), float("inf")),
    *("", "a", "5", "-1", "x" * 100_000, "\ud800", "\u202e\x1b[31m", "(?:a|aa)+", "[", "Ġ Ġ", "NFC", "Sequence"),
    *([], [1], ["a", "b"], [[]], [None], {}, {"type": "Sequence"}, {"content": "<n>"}, {"Regex": "a"}, {"a": {}}),
]


DEEP = "<deep>"  # stands for sequences in sequences, until the files are written


def nested(draw: random.Random) -> str:
    """The JSON of a Sequence in a Sequence, and so on."""
    field = draw.choice(["pretokenizers", "normalizers", "processors", "decoders"])
    depth = draw.choice([5, 40, 400, 100_000])
    return f'{{"type": "Sequence", "{field}": [' * depth + "]}" * depth


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container below a value with every key in it; of the vocabulary only a few."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = [*value][-12:]
    elif isinstance(value, list):
        keys = [*range(len(value))]
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate(files: dict[str, Any], draw: random.Random) -> None:
    """Replace, remove, double or rename one value somewhere in the files."""
    container, key = draw.choice([*places(files)])
    kind = 0 if container is files else draw.randrange(6)
    if kind == 1:
        del container[key]
    elif kind == 2 and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif kind == 3 and isinstance(container, dict):
        container[draw.choice(["", "x", "type", "5", "262", "<s>"])] = container.pop(key)
    elif kind == 4:
        other, name = draw.choice([*places(files)])
        container[key] = copy.deepcopy(other[name])
    elif kind == 5 and draw.random() < 0.1:
        container[key] = DEEP
    else:
        container[key] = copy.deepcopy(draw.choice(STRANGE))


def folder(seed: int, path: Path) -> None:
    """Write the files of a seed, and sometimes cut or change one of them as text."""
    draw = random.Random(seed)
    files = copy.deepcopy(FILES)
    if draw.random() < 0.5:
        del files["tokenizer_config.json"]["added_tokens_decoder"]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        mutate(files, draw)
    for name, content in files.items():
        text = json.dumps(content)
        if DEEP in text:
            text = text.replace(f'"{DEEP}"', nested(draw))
        data = text.encode()
        if draw.random() < 0.02:
            data = data[: draw.randrange(len(data) + 1)]
        if draw.random() < 0.02 and data:
            at = draw.randrange(len(data))
            data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        (path / name).write_bytes(data)


def check(path: Path) -> str:
    """What became of a folder. AssertionError: neither a consistent tokenizer nor one sentence."""
    try:
        tokenizer = Tokenizer.from_folder(path)
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=True)
            assert all(type(id) is int and tokenizer.token_bytes(id) for id in ids)
            stream = tokenizer.stream(skip_special_tokens=True)
            assert "".join(map(stream.put, ids)) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=True)
        for id in tokenizer.special_ids:
            assert tokenizer.encode(tokenizer.decode([id])) or tokenizer.token_bytes(id)
        assert type(tokenizer.bos_id) in (int, type(None))
        assert tokenizer.chat_template is None or isinstance(tokenizer.chat_template, str)
    except MinithinkError as error:
        message = str(error)
        assert message.endswith("."), message
        assert len(message) < 500 + len(str(path)), message
        assert message.isprintable(), ascii(message)
        return "refused"
    return "read"


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minithink.text.pieces.SECONDS", 0.5)


def test_mutated_files_are_read_or_refused_in_one_sentence(tmp_path: Path) -> None:
    outcomes: dict[str, int] = {}
    first = 0 if PROFILE == "ci" else random.randrange(2**32)
    for seed in range(first, first + FOLDERS):
        folder(seed, tmp_path)
        try:
            outcome = check(tmp_path)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert min(outcomes.get("read", 0), outcomes.get("refused", 0)) > FOLDERS // 10, outcomes


def test_the_files_that_are_mutated_are_read(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert check(tmp_path) == "read"
