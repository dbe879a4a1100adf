"""Whatever is in the files of a checkpoint, it is loaded, or one sentence says why not.

    python -m pytest tests/checkpoint/test_damaged_checkpoints.py

Damaged tokenizers have tests of their own.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.checkpoint.weights import INDEX, SINGLE, load_decoder, save_checkpoint
from minithink.engine import load
from minithink.errors import MinithinkError
from tests.fixtures_checkpoint import write_checkpoint

GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "eos_token_id": [0, 5],
    "max_length": 4096,
    "repetition_penalty": 1.1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attn_factor": 0.9,
    "beta_fast": 32,
    "mscale": 1.0,
    "truncate": True,
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in one file, and the same in shards."""
    single = write_checkpoint(tmp_path_factory.mktemp("single"), generation=GENERATION, shape={"num_layers": 1})
    config = json.loads((single / "config.json").read_text()) | {"rope_parameters": YARN, "sliding_window": None}
    (single / "config.json").write_text(json.dumps(config))
    sharded = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(single, sharded)
    save_checkpoint(load_decoder(single), sharded, max_shard_bytes=20_000)
    return {SINGLE: single, "config.json": single, "generation_config.json": single, INDEX: sharded}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**63,
    2**64,
    10**400,
    -(10**400),
    0.0,
    -0.5,
    0.1,
    1e-320,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x" * 5000,
    "yarn",
    "dynamic",
    "F64",
    "I64",
    "a\x1b[31m\nb\u202e\ud800",
    [],
    {},
    [0, -1],
    [[1]],
    {"": None},
    {"a": {"b": 1}},
    nested(300),
    ["x" * 999] * 99,
]
NAMES = ["", "x" * 999, "rope_scaling", "dtype", "a\x1b\n\u202e", "top_h", "lm_head.weight", "num_experts"]
BYTES = [b"[" * 5000, b"9" * 5000, b"NaN", b"\xff", b"\0", b"{", b'"', b","]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = list(range(len(tree)))
    else:
        return []
    found = [(tree, key) for key in keys]
    for key in keys:
        found += places(tree[key])
    return found


def damage(chance: Random, tree: Any) -> None:
    """Change a value, rename a key, or remove or add an item, up to three times."""
    for _ in range(chance.randint(1, 3)):
        known = places(tree)
        if not known:
            return
        container, key = chance.choice(known)
        what = chance.choice(["change", "change", "change", "remove", "rename", "add"])
        if what == "change":
            container[key] = copy.deepcopy(chance.choice(VALUES))
        elif what == "remove":
            del container[key]
        elif isinstance(container, dict):
            value = container.pop(key) if what == "rename" else copy.deepcopy(chance.choice(VALUES))
            container[chance.choice(NAMES)] = value


def damaged(chance: Random, content: bytes) -> bytes:
    """JSON with a damaged tree, and sometimes with damaged bytes."""
    tree = json.loads(content)
    damage(chance, tree)
    out = bytearray(json.dumps(tree).encode())
    place = chance.randrange(len(out))
    what = chance.choice(["nothing", "nothing", "nothing", "nothing", "cut", "byte", "insert"])
    if what == "cut":
        del out[place:]
    elif what == "byte":
        out[place] = chance.randrange(256)
    elif what == "insert":
        out[place:place] = chance.choice(BYTES)
    return bytes(out)


def is_clear(sentence: str, folder: Path) -> bool:
    return 0 < len(sentence.replace(str(folder), "")) <= 400 and sentence.isprintable()


@pytest.mark.parametrize("name", [SINGLE, "config.json", "generation_config.json", INDEX])
@given(seed=st.integers(0, 2**32))
def test_damaged_files_load_or_are_refused_in_one_sentence(
    name: str, seed: int, originals: dict[str, Path], tmp_path: Path
) -> None:
    chance = Random(seed)
    folder = tmp_path / "damaged"
    if not folder.exists():
        shutil.copytree(originals[name], folder)
    content = (originals[name] / name).read_bytes()
    if name == SINGLE:
        length = int.from_bytes(content[:8], "little")
        header = damaged(chance, content[8 : 8 + length])
        content = len(header).to_bytes(8, "little") + header + content[8 + length :]
    else:
        content = damaged(chance, content)
    (folder / name).write_bytes(content)
    try:
        engine = load(folder, device="cpu")
        engine.generate([[1, 2]], max_new_tokens=1)
        sentences = [*engine.cautions, engine.generation_config.caution]
    except MinithinkError as error:
        sentences = [str(error)]
    for sentence in filter(None, sentences):
        assert is_clear(sentence, folder), sentence
