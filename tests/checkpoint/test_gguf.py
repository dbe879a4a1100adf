"""GGUF files give transformers' weights and logits and the ids of `tokenizers`, or one sentence says why not.

python -m pytest tests/checkpoint/test_gguf.py
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import _type_traits
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors, trainers

from minithink import generate
from minithink.checkpoint.adapter import Adapter
from minithink.checkpoint.gguf_file import GGUF
from minithink.checkpoint.weights import checkpoint_hash, load_decoder, resolve, save_checkpoint, tensors_of
from minithink.config import ModelConfig
from minithink.engine import Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.generation import GenerationConfig
from minithink.text.tokenizer import Tokenizer
from tests.checkpoint.test_adapter import write_adapter
from tests.compare import assert_close, assert_same
from tests.drive import prompt_logits
from tests.gguf_files import add_tokenizer, write_gguf
from tests.text.test_tokenizer import CORPUS, TEXTS

torch.set_num_threads(1)

# As they are published, in the tokenizer.json of Llama 3, and of Qwen2, Qwen3 and DeepSeek-R1-Distill-Qwen.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ["llama-bpe", "qwen2", "deepseek-r1-qwen", "smollm", "gpt-2"]
ADDED = [
    AddedToken("<|begin|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<|endoftext|>", special=True, normalized=False),
    AddedToken("<think>", normalized=False),
    AddedToken("<｜User｜>", special=True, normalized=False),
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}"
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
ONE_FIELD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)  # the beginning of a file without tensors
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, *range(40), *range(39, -1, -1)]


def published(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer with the published normalizer, pre-tokenizer and post-processor."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre == "llama-bpe"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2"))
    first = {
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN), "isolated")],
        "deepseek-r1-qwen": [pre_tokenizers.Split(Regex(QWEN), "isolated")],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
    }[pre]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
    tokenizer.decoder = decoders.ByteLevel()
    if QWEN in str(first) or pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    for token in ADDED:
        tokenizer.add_tokens([token])
    if pre == "llama-bpe":
        begin = [("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=begin)
    return tokenizer


def with_tokenizer(tokenizer: tokenizers.Tokenizer, pre: str, **fields: Any) -> Any:
    """For `write_gguf`: add a tokenizer, and fields by name."""

    def add(writer: GGUFWriter) -> None:
        add_tokenizer(writer, json.loads(tokenizer.to_str()), pre)
        writer.add_bos_token_id(tokenizer.token_to_id("<|begin|>"))
        writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
        writer.add_chat_template(TEMPLATE)
        add_fields(writer, fields)

    return add


def add_fields(writer: GGUFWriter, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tokenizer, which tests only read."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    tokenizer = published("qwen2")
    vocab_size = tokenizer.get_vocab_size()
    write_gguf(path, "llama", add=with_tokenizer(tokenizer, "qwen2"), vocab_size=vocab_size, num_hidden_layers=1)
    return path


def refused(path: Path, *mentions: str) -> None:
    """Loading fails with one short sentence that mentions all of these."""
    with pytest.raises(MinithinkError) as caught:
        load_decoder(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message.replace(str(path.parent), "")) <= 400
    for mention in mentions:
        assert mention in message


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_and_logits_equal_transformers(architecture: str, rope: str, tie: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, architecture, ROPES[rope], tie_word_embeddings=tie)
    check(path, model)


@pytest.mark.parametrize(
    ("rope", "fields"),
    [
        ("linear", {"llama.rope.scaling.factor": 4.0}),
        ("linear", {"llama.rope.scale_linear": 4.0}),
        ("linear", {"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 4.0}),
        ("default", {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        ("default", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}),
        ("default", {"llama.rope.scaling.type": "linear"}),
    ],
)
def test_scaling_is_linear_where_no_type_is_given(rope: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """And a factor of 0 scales nothing: both as llama.cpp reads a file."""

    def change(writer: GGUFWriter) -> None:
        for name in ("type", "factor"):
            writer.kv_data[0].pop(f"llama.rope.scaling.{name}", None)
        add_fields(writer, fields)

    path = tmp_path / "model.gguf"
    check(path, write_gguf(path, "llama", ROPES[rope], add=change))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, *sorted(_type_traits)])
def test_every_type_that_the_package_knows_is_read_exactly(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    path = tmp_path / "model.gguf"
    check(path, write_gguf(path, "llama", kind=kind, head_dim=64, **shape))


def test_a_llama_with_biases(tmp_path: Path) -> None:
    """Their order is that of the rows."""
    path = tmp_path / "model.gguf"
    check(path, write_gguf(path, "llama", attention_bias=True))


def check(path: Path, model: Any) -> None:
    decoder = load_decoder(path, dtype=torch.float32)
    state = model.state_dict()
    views = tensors_of(decoder)
    assert views.keys() == state.keys() - ({"lm_head.weight"} if decoder.config.tie_embeddings else set())
    for name, view in views.items():
        assert_same(name, view, state[name])
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert want.std() > 0.1
    assert_close("logits", prompt_logits(decoder, TOKENS), want, atol=1e-4)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0"])
def test_the_number_type_is_that_of_most_numbers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", kind=GGMLQuantizationType[kind])
    own = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    assert load_decoder(path).embed.dtype == own
    assert load_decoder(path, dtype=torch.float32).embed.dtype == torch.float32


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minithink.checkpoint import gguf_weights

    path = tmp_path / "model.gguf"
    model = write_gguf(path, "llama")
    monkeypatch.setattr(gguf_weights, "PIECE", 1000)
    check(path, model)


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_saved_as_safetensors_it_is_the_same_model(rope: str, tmp_path: Path) -> None:
    """transformers reads the folder, too, with RoPE's factors as they were."""
    import transformers

    path = tmp_path / "model.gguf"
    model = write_gguf(path, "llama", ROPES[rope])
    decoder = load_decoder(path, dtype=torch.float32)
    save_checkpoint(decoder, tmp_path / "folder")
    assert ModelConfig.from_folder(tmp_path / "folder") == load_decoder(tmp_path / "folder").config
    assert_same("ours", prompt_logits(load_decoder(tmp_path / "folder"), TOKENS), prompt_logits(decoder, TOKENS))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    with torch.inference_mode():
        tokens = torch.tensor([TOKENS])
        assert_close("theirs", again(tokens).logits, model(tokens).logits, atol=1e-4)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", "qwen2", split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    check(parts[0], model)
    before = checkpoint_hash(parts[0])
    refused(parts[1], "is a part of a model", parts[0].name)
    content = bytearray(parts[-1].read_bytes())
    content[-1] ^= 1
    parts[-1].write_bytes(content)
    assert checkpoint_hash(parts[0]) != before
    swapped = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    refused(parts[0], parts[1].name, "is not part 2")
    parts[1].write_bytes(swapped)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(parts[0].read_bytes())
    refused(alone, "is one of", "parts")
    parts[1].unlink()
    refused(parts[0], parts[1].name, "is missing")


# --- the tokenizer ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Ours, read from a file, and the published one."""
    found = {}
    for pre in PRE_TOKENIZERS:
        path = tmp_path_factory.mktemp("pre") / f"{pre}.gguf"
        theirs = published(pre)
        write_gguf(path, "qwen2", add=with_tokenizer(theirs, pre), num_hidden_layers=1)
        found[pre] = (Tokenizer.from_folder(path), theirs)
    return found


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=TEXTS)
def test_ids_equal_those_of_the_published_tokenizer(pre: str, text: str, pairs: Any) -> None:
    ours, theirs = pairs[pre]
    text = f"{text}<think>{text}<|im_end|> <｜User｜>{text}"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    ids = theirs.encode(text).ids
    assert ours.encode(text, add_special_tokens=True) == ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_special_tokens_and_the_template(pre: str, pairs: Any) -> None:
    ours, theirs = pairs[pre]
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.bos_id == theirs.token_to_id("<|begin|>")
    assert ours.eos_id == theirs.token_to_id("<|im_end|>")
    assert ours.special_ids == {theirs.token_to_id(token.content) for token in ADDED if token.special}
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "<user>x<|begin|>"


def written(path: Path, pre: str = "gpt-2", **fields: Any) -> Path:
    """A file with these fields."""
    tokenizer = published("gpt-2")
    add = with_tokenizer(tokenizer, pre, **fields)
    write_gguf(path, "qwen2", add=add, num_hidden_layers=1, vocab_size=tokenizer.get_vocab_size())
    return path


def test_bos_and_eos_are_put_around_a_text_if_the_file_says_so(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_folder(written(tmp_path / "x.gguf", **fields))
    assert tokenizer.encode("a", add_special_tokens=True) == [
        tokenizer.bos_id,
        *tokenizer.encode("a"),
        tokenizer.eos_id,
    ]


@pytest.mark.parametrize(
    ("pre", "fields", "said"),
    [
        ("falcon", {}, "the pre-tokenizer 'falcon' is not supported; there are llama-bpe, qwen2"),
        ("qwen3", {}, "the pre-tokenizer 'qwen3' is not supported; did you mean qwen2"),
        ("gpt-2", {"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix is true"),
        ("gpt-2", {"tokenizer.ggml.unknown_token_id": 10**6}, "unknown_token_id is 1000000"),
    ],
)
def test_other_tokenizers_are_refused_by_name(pre: str, fields: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(MinithinkError) as caught:
        Tokenizer.from_folder(written(tmp_path / "x.gguf", pre, **fields))
    assert said in str(caught.value)


def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, "llama", add=lambda writer: writer.add_tokenizer_model("llama"))
    with pytest.raises(MinithinkError, match="the tokenizer is 'llama', and only byte-level BPE"):
        Tokenizer.from_folder(path)


# --- the whole model ----------------------------------------------------------------------------------------


def test_a_file_is_a_model_everywhere(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = load(whole, device="cpu")
    [result] = engine.generate([[1, 2, 3]], max_new_tokens=4)
    assert 1 <= len(result.token_ids) <= 4
    assert engine.loaded.home is not None
    assert engine.loaded.home.calibration == whole.parent
    assert generate.main(["--model", str(whole), "--device", "cpu", "--max-new-tokens", "2", "hello"]) == 0
    assert "hello" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_adapter_is_merged_into_the_numbers_of_a_file(architecture: str, kind: str, tmp_path: Path) -> None:
    """As into a float32 folder of the same numbers, to the same bits and the same hash, in whatever type the model is
    then held."""
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, kind=GGMLQuantizationType[kind])
    config = ModelConfig.from_folder(path)
    save_checkpoint(load_decoder(path, dtype=torch.float32), tmp_path / "folder")
    write_adapter(tmp_path / "adapter", config, Random(0))
    adapter = Adapter(tmp_path / "adapter", config)
    for dtype in (torch.float32, torch.bfloat16):
        want = tensors_of(load_decoder(tmp_path / "folder", dtype=dtype, merge=adapter.merge))
        got = tensors_of(load_decoder(path, dtype=dtype, merge=adapter.merge))
        plain = tensors_of(load_decoder(path, dtype=dtype))
        for name, tensor in want.items():
            assert_same(name, got[name], tensor)
            assert torch.equal(tensor, plain[name]) == (name not in {*adapter.factors, *adapter.rows})
    assert adapter.load(path).embed.dtype == load_decoder(path).embed.dtype
    known = adapter.hash_over(path)
    assert known == Adapter(tmp_path / "adapter", config).hash_over(path)
    assert known == Adapter(tmp_path / "adapter", config).hash_over(tmp_path / "folder")


def test_a_command_takes_a_file_and_an_adapter(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer is the file's, and calibrations lie beside the adapter."""
    write_adapter(tmp_path / "adapter", ModelConfig.from_folder(whole), Random(1))
    engine = load(whole, adapter=tmp_path / "adapter", device="cpu")
    assert engine.loaded.home is not None
    assert engine.loaded.home.calibration == tmp_path / "adapter"
    assert engine.loaded.home.checkpoint != checkpoint_hash(whole)
    options = ["--adapter", str(tmp_path / "adapter"), "--device", "cpu", "--max-new-tokens", "8", "hello", "--json"]
    assert generate.main(["--model", str(whole), *options]) == 0
    [want] = engine.generate("hello", max_new_tokens=8)
    assert json.loads(capsys.readouterr().out)["token_ids"] == want.token_ids


def test_tokens_that_end_a_text(whole: Path) -> None:
    """That which the file names, and those that llama.cpp knows by their text."""
    engine = load(whole, device="cpu")
    ends = {engine.tokenizer.id_of("<|endoftext|>"), engine.tokenizer.id_of("<|im_end|>")}
    assert engine.generation_config.stop_ids == ends
    assert engine.generation_config.temperature == 0


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    fields = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
        "general.sampling.penalty_repeat": 1.1,
    }
    path = written(tmp_path / "x.gguf", **fields)
    found = GenerationConfig.from_folder(path, ModelConfig.from_folder(path), Tokenizer.from_folder(path))
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert found.ignored == ("repetition_penalty = 1.1",)


@pytest.mark.parametrize("value", ["x", [1, 2], 1.5, -1])
@pytest.mark.parametrize("name", ["tokenizer.ggml.eot_token_id", "general.sampling.temp", "general.sampling.top_k"])
def test_recommendations_that_make_no_sense_stop_nothing(name: str, value: Any, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        with_tokenizer(published("gpt-2"), "gpt-2")(writer)
        add_fields(writer, {name: value} if value != -1 else {name: float(value)})

    path = tmp_path / "x.gguf"
    write_gguf(path, "qwen2", add=change, num_hidden_layers=1, vocab_size=published("gpt-2").get_vocab_size())
    engine = load(path, device="cpu")
    assert engine.generation_config.stop_ids
    assert engine.generation_config.temperature >= 0


def test_the_hash_is_of_the_file(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other.GGUF"
    copy.write_bytes(whole.read_bytes())
    assert checkpoint_hash(copy) == checkpoint_hash(whole)
    copy.write_bytes(whole.read_bytes()[:-1] + b"\1")
    assert checkpoint_hash(copy) != checkpoint_hash(whole)


def test_resolve(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    assert resolve("model.gguf") == Path("model.gguf")
    with pytest.raises(UsageError, match="is a file, which has no revision 'v1'"):
        resolve("model.gguf", "v1")
    with pytest.raises(MinithinkError, match="does not exist: no such file"):
        resolve("other.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert resolve(str(tmp_path / "folder.gguf")) == tmp_path / "folder.gguf"


# --- files that are refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8, and minithink supports only 0"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64, which is not supported"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0 is not known to minithink"),
        ({"llama.rope.scaling.type": "longrope"}, "is 'longrope', and minithink reads none, linear and yarn"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"general.alignment": 0}, "general.alignment is 0"),
        ({"split.count": [1, 2]}, "is one of [1, 2] parts"),
    ],
)
def test_fields_that_change_the_computation_are_refused(fields: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, "llama", add=lambda writer: add_fields(writer, fields))
    refused(path, said)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("general.architecture", "gemma3", "the architecture is 'gemma3'; there are llama, qwen2, qwen3"),
        ("general.architecture", [1, 2], "the architecture is [1, 2]; there are llama"),
        ("general.type", "adapter", "holds no model but a 'adapter'"),
        ("llama.block_count", None, "llama.block_count is missing"),
        ("llama.block_count", "x", "llama.block_count is 'x', not a whole number"),
        ("llama.block_count", 3, "blk.2.attn_norm.weight [64] is missing"),
        ("llama.block_count", 1, "blk.1."),
        ("llama.embedding_length", 32, "the file's fields call for [40, 32]"),
        ("llama.attention.value_length", 8, "value_length is 8, and minithink supports only 16"),
        ("llama.rope.dimension_count", 8, "dimension_count is 8"),
        ("llama.attention.layer_norm_rms_epsilon", "x", "rms_norm_eps is 'x'"),
        ("llama.attention.head_count_kv", [2, 1], "layers that differ are not supported"),
    ],
)
def test_other_models_are_refused(name: str, value: Any, said: str, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        del writer.kv_data[0][name]
        if value is not None:
            add_fields(writer, {name: value})

    path = tmp_path / "x.gguf"
    write_gguf(path, "llama", add=change)
    refused(path, said)


def test_types_that_the_package_does_not_dequantize_are_named(tmp_path: Path) -> None:
    def add_head(writer: GGUFWriter) -> None:
        writer.add_tensor("output.weight", np.zeros((40, 64)))

    path = tmp_path / "x.gguf"
    write_gguf(path, "llama", tie_word_embeddings=True, add=add_head)
    content = path.read_bytes()
    refused(path, "output.weight is stored as F64, which the package gguf does not dequantize")
    place = content.index(b"output.weight") + len(b"output.weight") + 4 + 2 * 8
    path.write_bytes(content[:place] + struct.pack("<I", 999) + content[place + 4 :])
    refused(path, "output.weight is stored in the type 999", "update it")


def test_the_package_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, "A GGUF file needs the package gguf", "pip install 'gguf>=0.18'")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no valid GGUF file"),
        (b"GG", "it begins with b'GG'"),
        (b"PK\3\4" + bytes(99), "it begins with b'PK"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(99), "its version is 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(99), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), "truncated"),
        (ONE_FIELD + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 2**63) + bytes(99), "truncated"),
        (ONE_FIELD + struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**63) + bytes(99), "truncated"),
        (ONE_FIELD + struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 2**63) + bytes(99), "type 9"),
        (ONE_FIELD + struct.pack("<Q1sI", 1, b"a", 77) + bytes(99), "unknown type 77"),
        (ONE_FIELD + struct.pack("<Q", 2**63) + bytes(99), "truncated"),
        (ONE_FIELD + struct.pack("<Q1sI", 1, b"\xff", 0) + bytes(99), "no UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"a", 2**31) + bytes(99), "dimensions"),
    ],
)
def test_hostile_headers_are_refused_at_once(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    refused(path, said)


def test_a_long_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with path.open("wb") as file:
        file.write(ONE_FIELD + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 2**63))
        file.truncate(2**26)  # of empty texts
    refused(path, "its header is longer than")


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    import os

    path = tmp_path / "x.gguf"
    os.mkfifo(path)
    refused(path, "it is no regular file")


@given(data=st.data())
def test_truncated_files(data: st.DataObject, whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    length = data.draw(st.integers(0, len(content) - 33) | st.integers(0, 2000))  # the last 32 bytes may be padding
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:length])
    refused(path, "cut.gguf")


MORE_FIELDS = [
    "general.alignment",
    "general.sampling.temp",
    "general.sampling.top_k",
    "split.no",
    "split.count",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.add_bos_token",
    "llama.attention.sliding_window",
    "llama.rope.scale_linear",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
]
# Values of fields, odd ones included.
NUMBERS = [0, -1, 1, 2, 2**63, 2.5, -0.0, 1e300, float("nan"), float("inf")]
STRINGS = ["", "none", "yarn", "linear", "x" * 5000, "\x1b[31m\u202e"]
LISTS: list[Any] = [[], [1], [1, 2], ["a"], ["a", "a"], [float("nan")], ["x" * 999] * 9]
VALUES: list[Any] = [None, True, False, *NUMBERS, *STRINGS, *LISTS]


@given(data=st.data())
def test_fields_of_any_value_load_or_are_refused_in_one_sentence(data: st.DataObject, whole: Path) -> None:
    """What a header may hold, however wrong it is."""
    original = GGUF.read(whole)
    fields = dict(original.fields)
    for _ in range(data.draw(st.integers(1, 2))):
        fields[data.draw(st.sampled_from([*original.fields, *MORE_FIELDS]))] = data.draw(st.sampled_from(VALUES))
    changed = replace(original, fields={name: value for name, value in fields.items() if value is not None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUF, "read", lambda path: changed)
        loads_or_is_refused(whole)


def loads_or_is_refused(path: Path) -> None:
    sentences: list[str] = []
    try:
        engine: Engine = load(path, device="cpu")
        engine.generate([[1, 2]], max_new_tokens=1)
        sentences += engine.cautions
        sentences.append(engine.generation_config.caution)
    except MinithinkError as error:
        sentences.append(str(error))
    for sentence in filter(None, sentences):
        shown = sentence.replace(str(path.parent), "")
        assert 0 < len(shown) <= 400, shown
        assert shown.isprintable(), shown


@given(seed=st.integers(0, 2**32))
def test_damaged_files_load_or_are_refused_in_one_sentence(seed: int, whole: Path, tmp_path: Path) -> None:
    chance = Random(seed)
    content = bytearray(whole.read_bytes())
    # Half of the changes are in the fields and tensors outside of the long lists of the tokenizer.
    ends = (2000, content.index(b"output_norm.weight") + 3000)
    for _ in range(chance.randint(1, 3)):
        place = chance.choice([chance.randrange(ends[0]), chance.randrange(ends[1] - 5000, ends[1])])
        content[place] = chance.choice([0, 1, 2, 8, 9, 127, 255, content[place] ^ 1, chance.randrange(256)])
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    loads_or_is_refused(path)
