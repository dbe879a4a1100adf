"""A tiny random checkpoint with a tokenizer and a chat template, in the layout of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minithink.checkpoint.weights import save_checkpoint
from minithink.engine import Engine, load
from tests.strategies import example_config, random_decoder

CONTEXT = 128  # tokens
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<think>", "</think>"]
TEMPLATE = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|><think>\\n' }}{%- endif -%}"
)
CORPUS = ["Alpha sits left of Bravo. Who sits third from the left, and who sits beside whom? "] * 4 + ["äöü €12 34 "]


def write_tokenizer(folder: Path, special: list[str] = SPECIAL, template: str | None = TEMPLATE) -> int:
    """A byte-level BPE of a few hundred tokens; returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if template is not None:
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)
    return tokenizer.get_vocab_size()


def write_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    generation: dict[str, Any] | None = None,
    shape: dict[str, Any] | None = None,
    **tokenizer_options: Any,
) -> Path:
    """Random Qwen3 weights beside such a tokenizer; `generation` goes to generation_config.json, `shape` to the
    config."""
    vocab_size = write_tokenizer(folder, **tokenizer_options)
    fields = {"vocab_size": vocab_size, "max_position": CONTEXT, "eos_token_ids": (0,), "bos_token_id": None}
    config = example_config(**fields, **(shape or {}))
    save_checkpoint(random_decoder(config, seed), folder)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "random", generation={"eos_token_id": [0]})


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Engine:
    """That checkpoint, loaded on the CPU in float32."""
    return load(checkpoint, device="cpu")
