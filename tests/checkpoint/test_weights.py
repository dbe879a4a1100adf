"""Checkpoints are read exactly or refused with a sentence; what is written, transformers reads."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minithink.checkpoint import weights
from minithink.checkpoint.weights import checkpoint_hash, load_decoder, resolve, save_checkpoint, tensors_of
from minithink.config import ModelConfig
from minithink.errors import MinithinkError, UsageError, quoted
from tests.compare import assert_close, assert_same
from tests.drive import prompt_logits, transformers_checkpoint
from tests.hub_server import HubServer
from tests.strategies import configs, example_config, random_decoder

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
Q0 = "model.layers.0.self_attn.q_proj.weight"
Q_NORM, K_NORM = (f"model.layers.0.self_attn.{x}_norm.weight" for x in "qk")


def same_weights(got: torch.nn.Module, want: torch.nn.Module) -> None:
    a, b = dict(got.named_parameters()), dict(want.named_parameters())
    assert a.keys() == b.keys()
    for name in a:
        assert_same(name, a[name], b[name])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint in one file, for a test to damage."""
    save_checkpoint(random_decoder(example_config()), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good checkpoint in several shards."""
    save_checkpoint(random_decoder(example_config()), tmp_path / "model", max_shard_bytes=8000)
    return tmp_path / "model"


def refused(folder: Path, *mentions: str, error: type[MinithinkError] = MinithinkError) -> None:
    """Loading fails with one sentence that mentions all of these."""
    with pytest.raises(error) as caught:
        load_decoder(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message.replace(str(folder), "")) <= 400
    for mention in mentions:
        assert mention in message


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None deletes."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of model.safetensors; None deletes."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, path)


# --- reading and writing ------------------------------------------------------------------------------------


@settings(max_examples=30)  # each writes and reads four checkpoints, twice through transformers
@given(config=configs(), shard=st.sampled_from([1, 500, 5000]))
def test_round_trip(config: ModelConfig, shard: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers → load → save, single and sharded → transformers, load: the same numbers everywhere."""
    import transformers

    tmp = tmp_path_factory.mktemp("round")
    model = transformers_checkpoint(config, tmp / "theirs")
    decoder = load_decoder(tmp / "theirs")
    save_checkpoint(decoder, tmp / "single")
    save_checkpoint(decoder, tmp / "shards", max_shard_bytes=shard)
    assert (len(list((tmp / "shards").glob("model*"))) == 1) == (tmp / "shards" / "model.safetensors").exists()
    tokens = torch.tensor([[t % config.vocab_size for t in TOKENS]])
    for name in ("single", "shards"):
        same_weights(load_decoder(tmp / name), decoder)
        assert ModelConfig.from_folder(tmp / name) == decoder.config == config
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp / name).eval()
        with torch.inference_mode():
            assert_same(f"logits of {name}", again(tokens).logits, model(tokens).logits)
    for path in tmp.glob("*/*"):
        path.unlink()


def test_the_norms_of_q_and_k_are_one_parameter_and_two_tensors(folder: Path) -> None:
    q, k = torch.rand(10), torch.rand(10)
    rewrite(folder, **{Q_NORM: q, K_NORM: k})
    decoder = load_decoder(folder)
    assert_same("loaded", decoder.blocks[0].qk_norm, torch.stack((q, k)))
    save_checkpoint(decoder, folder)
    tensors = load_file(folder / "model.safetensors")
    assert_same("q's", tensors[Q_NORM], q)
    assert_same("k's", tensors[K_NORM], k)


def test_parameters_need_no_gradient(folder: Path) -> None:
    assert not any(p.requires_grad or p.is_meta for p in load_decoder(folder).parameters())


def test_dtypes(folder: Path) -> None:
    decoder = load_decoder(folder)
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    half = load_decoder(folder, dtype=torch.bfloat16)
    assert_same("rounded", half.embed, decoder.embed.bfloat16())
    save_checkpoint(decoder, folder, dtype=torch.float16)
    assert load_decoder(folder).embed.dtype == torch.float16
    assert ModelConfig.from_folder(folder).dtype == "float16"
    rewrite(folder, **{"model.norm.weight": torch.ones(24, dtype=torch.bfloat16)})
    assert load_decoder(folder).embed.dtype == torch.float32  # the smallest that holds float16 and bfloat16


def test_saving_replaces_the_earlier_checkpoint_and_nothing_else(sharded: Path) -> None:
    (sharded / "tokenizer.json").write_text("{}")
    other = random_decoder(example_config(num_layers=1), seed=9)
    save_checkpoint(other, sharded, extra_config={"transformers_version": "x"})
    assert sorted(p.name for p in sharded.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    same_weights(load_decoder(sharded), other)
    assert json.loads((sharded / "config.json").read_text())["transformers_version"] == "x"
    save_checkpoint(other, sharded, max_shard_bytes=1)
    assert not (sharded / "model.safetensors").exists()
    same_weights(load_decoder(sharded), other)


def test_shards_respect_their_limit(sharded: Path) -> None:
    for path in sharded.glob("*.safetensors"):
        tensors = load_file(path)
        assert sum(t.nbytes for t in tensors.values()) <= 8000 or len(tensors) == 1
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in load_decoder(sharded).parameters())


def test_every_file_of_a_checkpoint_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_checkpoint(random_decoder(example_config()), tmp_path, max_shard_bytes=8000)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_a_failed_save_leaves_the_old_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint_hash(folder)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full_disk)
    with pytest.raises(MinithinkError, match=r"cannot be written.*No space left"):
        save_checkpoint(random_decoder(example_config(), seed=1), folder)
    assert checkpoint_hash(folder) == before
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_saving_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MinithinkError, match="cannot be written"):
        save_checkpoint(random_decoder(example_config()), tmp_path / "file")


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_hash(layout: str, request: pytest.FixtureRequest) -> None:
    """One flipped bit in the last file changes it; files that are no weights do not."""
    folder: Path = request.getfixturevalue(layout)
    first = checkpoint_hash(folder)
    assert len(first) == 16
    assert int(first, 16) >= 0
    (folder / "README.md").write_text("not a weight")
    assert checkpoint_hash(folder) == first
    with open(sorted(folder.glob("*.safetensors"))[-1], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert checkpoint_hash(folder) != first


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_a_parameter_with_other_numbers_is_named(layout: str, request: pytest.FixtureRequest) -> None:
    where = request.getfixturevalue(layout)
    own = {name: torch.nn.Parameter(value) for name, value in tensors_of(load_decoder(where)).items()}
    assert weights.other_value(where, own) == ""
    rounded = {name: torch.nn.Parameter(value.half().float()) for name, value in own.items()}
    assert weights.other_value(where, rounded) == ""
    for name, value in own.items():
        assert weights.other_value(where, own | {name: torch.nn.Parameter(value * 1.01)}) == name


def test_a_parameter_that_may_be_quantized_is_no_other_one(folder: Path) -> None:
    value = tensors_of(load_decoder(folder))[Q0] + 1
    assert weights.other_value(folder, {Q0: torch.nn.Parameter(value)}) == Q0

    class Packed(torch.nn.Parameter):
        pass

    elsewhere = torch.nn.Parameter(value.to("meta"))  # as with `device_map`, if memory is short
    for other in (Packed(value), value.to(torch.int8), torch.nn.Parameter(value[1:]), elsewhere):
        assert weights.other_value(folder, {Q0: other}) == ""
    assert weights.other_value(folder, {"base_model.q_proj.weight": torch.nn.Parameter(value)}) == ""


def test_saved_decoder_runs_the_same(folder: Path) -> None:
    want = prompt_logits(random_decoder(example_config()), TOKENS)
    assert_same("logits", prompt_logits(load_decoder(folder), TOKENS), want)


MEMORY = """
import os, sys, threading, time
import torch
from minithink.checkpoint import weights
from minithink.model import Decoder

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

torch.set_num_threads(1)
weights.load_decoder(sys.argv[1])  # a tiny one: whatever is imported or set up once is in the baseline
folders = sys.argv[2:]
for last in folders[:-1]:  # each in a process of its own, which begins with the same memory
    if os.fork() == 0:
        folders = [last]
        break
    os.wait()
folder = folders[-1]
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
decoder = weights.load_decoder(folder)
done.set()
thread.join()
peak = max(peak, anonymous())
print(peak - before, sum(p.nbytes for p in decoder.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc")
def test_loading_allocates_the_weights_and_no_more(tmp_path: Path) -> None:
    """Peak anonymous memory (what the kernel cannot drop, unlike the mapped file) ≤ 1.2 × the checkpoint.

    Of a checkpoint in one file, and of one in shards.
    """
    save_checkpoint(random_decoder(example_config()), tmp_path / "tiny")
    big = example_config(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=6,
        vocab_size=20000,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
    )
    decoder = weights.Decoder(big).to(torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.view(torch.int16).random_(0, 1 << 14)
    save_checkpoint(decoder, tmp_path / "one")
    save_checkpoint(decoder, tmp_path / "shards", max_shard_bytes=50_000_000)
    del decoder
    folders = [str(tmp_path / name) for name in ("tiny", "one", "shards")]
    command = [sys.executable, "-c", MEMORY, *folders]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = out.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        peak, size = map(int, line.split())
        assert 190e6 < size < 260e6
        assert size * 0.98 < peak <= 1.2 * size, f"peak {peak / 1e6:.0f} MB for a checkpoint of {size / 1e6:.0f} MB"
    for folder in folders[1:]:
        shutil.rmtree(folder)


# --- damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [(Q0, "[40, 24]"), (Q_NORM, "[10]"), (K_NORM, "[10]")])
def test_missing_tensor(name: str, shape: str, folder: Path) -> None:
    rewrite(folder, **{name: None})
    refused(folder, "model.safetensors", name, shape, "missing")


def test_extra_tensor(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(40)})
    refused(folder, "model.safetensors", "model.layers.0.self_attn.q_proj.bias", "[40]", "no place")


@pytest.mark.parametrize(("name", "shape"), [(Q0, "[40, 24]"), (Q_NORM, "[10]"), (K_NORM, "[10]")])
def test_misshapen_tensor(name: str, shape: str, folder: Path) -> None:
    rewrite(folder, **{name: torch.zeros(24, 39)})
    refused(folder, "model.safetensors", name, "[24, 39]", shape)


def test_vocabulary_of_another_size(folder: Path) -> None:
    edit(folder, vocab_size=64)
    refused(folder, "model.embed_tokens.weight", "vocab_size is 64", "[61, 24]")


def test_harmless_leftovers(folder: Path) -> None:
    """Buffers of old versions, of whatever type, follow from the config."""
    want = load_decoder(folder)
    rewrite(
        folder,
        **{
            "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(5),
            "model.rotary_emb.original_inv_freq": torch.zeros(5, dtype=torch.float64),
            "model.layers.0.self_attn.rotary_emb.cos_cached": torch.zeros(2, 5),
            "model.position_ids": torch.arange(8),
            "position_ids": torch.arange(8),
            "model.layers.0.self_attn.masked_bias": torch.zeros((), dtype=torch.bool),
        },
    )
    same_weights(load_decoder(folder), want)


def logits_of_transformers(folder: Path) -> torch.Tensor:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def test_tied_head(tmp_path: Path) -> None:
    decoder = random_decoder(example_config(tie_embeddings=True))
    save_checkpoint(decoder, tmp_path)
    rewrite(tmp_path, **{"lm_head.weight": decoder.embed.clone()})
    same_weights(load_decoder(tmp_path), decoder)
    rewrite(tmp_path, **{"lm_head.weight": torch.zeros(60, 24)})
    refused(tmp_path, "lm_head.weight has the shape [60, 24]", "calls for [61, 24]")


@pytest.mark.parametrize("place", [(60, 23), (0, 0)])
def test_another_head_is_used_although_the_config_ties_it(
    tmp_path: Path, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ROWS", 16)  # so that the last rows are compared apart from the first
    decoder = random_decoder(example_config(tie_embeddings=True))
    save_checkpoint(decoder, tmp_path)
    head = decoder.embed.clone()
    head[place] += 1
    rewrite(tmp_path, **{"lm_head.weight": head})
    loaded = load_decoder(tmp_path)
    assert loaded.head is not None
    assert_same("head", loaded.head, head)
    assert not loaded.config.tie_embeddings
    [caution] = loaded.config.cautions
    assert "another lm_head.weight, which is used, as in transformers" in caution
    assert_close("logits", prompt_logits(loaded, TOKENS), logits_of_transformers(tmp_path), atol=1e-4)


def test_a_tied_head_without_embeddings_is_both(tmp_path: Path) -> None:
    decoder = random_decoder(example_config(tie_embeddings=True))
    save_checkpoint(decoder, tmp_path)
    rewrite(tmp_path, **{"lm_head.weight": decoder.embed.clone(), weights.EMBED: None})
    same_weights(load_decoder(tmp_path), decoder)
    assert_close("logits", prompt_logits(decoder, TOKENS), logits_of_transformers(tmp_path), atol=1e-4)


def test_an_untied_head_that_is_missing_may_be_tied(folder: Path) -> None:
    rewrite(folder, **{"lm_head.weight": None})
    refused(folder, "the output head lm_head.weight [61, 24] is missing", "set tie_word_embeddings")
    edit(folder, tie_word_embeddings=True)
    assert load_decoder(folder).head is None


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("_orig_mod.model.", "_orig_mod.lm_head.weight"),
        ("x'\u202e.", "lm_head.weight"),
    ],
)
def test_another_prefix_is_read_and_said(prefix: str, head: str, shards: bool, tmp_path: Path) -> None:
    want = random_decoder(example_config())
    ours = {name: view.contiguous() for name, view in tensors_of(want).items()}
    theirs = {head if n == "lm_head.weight" else prefix + n.removeprefix("model."): x for n, x in ours.items()}
    save_checkpoint(want, tmp_path)
    if shards:
        (tmp_path / "model.safetensors").unlink()
        files = {name: f"model-{i:05}.safetensors" for i, name in enumerate(theirs)}
        for name, file in files.items():
            save_file({name: theirs[name]}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(theirs, tmp_path / "model.safetensors")
    got = load_decoder(tmp_path)
    same_weights(got, want)
    assert got.config.cautions == (
        f"{tmp_path}: the names of the tensors begin with {prefix!r}, which is read as 'model.'",
    )


def test_a_part_of_another_model_is_refused_with_its_names(folder: Path) -> None:
    tensors = {f"model.language_{n}": x for n, x in load_file(folder / "model.safetensors").items()}
    tensors["model.visual.blocks.0.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    there = "model.embed_tokens.weight [61, 24] is missing, and there are model.language_model.embed_tokens.weight, "
    refused(folder, there, "and 23 more")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.0.self_attn.q_proj.qweight", "quantized weights, which are not read: use the original ones"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "quantized weights"),
        ("model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", "quantized weights"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "an adapter: merge it"),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "an adapter: merge it"),
    ],
)
def test_quantized_weights_and_adapters_are_recognized(folder: Path, name: str, why: str) -> None:
    rewrite(folder, **{name: torch.zeros(4), Q0: None})
    refused(folder, f"model.safetensors: {name} belongs to {why}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool, torch.uint8])
def test_weights_of_quantized_types_are_refused(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, **{Q0: torch.zeros(40, 24).to(dtype)})
    refused(folder, Q0, "model.safetensors", "F32, F16, BF16, F64", "quantized: use the original weights")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex64])
def test_weights_of_other_types_are_refused(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, **{Q0: torch.zeros(40, 24).to(dtype)})
    refused(folder, Q0, "reads only F32, F16, BF16, F64: store it as one of them")


def test_64_bits_are_read_as_32(folder: Path) -> None:
    want = load_decoder(folder)
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, **{"model.norm.weight": tensors["model.norm.weight"].double()})
    same_weights(load_decoder(folder), want)
    rewrite(folder, **{name: x.double() for name, x in tensors.items()})
    same_weights(load_decoder(folder), want)


def test_quantized(folder: Path) -> None:
    edit(folder, quantization_config={"quant_method": "awq"})
    refused(folder, "quantization_config")


@given(data=st.data())
def test_truncated_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Wherever the file ends, the error names it; past the header, also the first tensor that is cut off."""
    folder = tmp_path_factory.mktemp("cut")
    save_checkpoint(random_decoder(example_config(num_layers=1)), folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    length = data.draw(st.integers(0, header) | st.integers(header, len(content) - 1) | st.just(len(content) - 1))
    path.write_bytes(content[:length])
    refused(folder, str(path), *(["is truncated", ".weight ["] if length > header else []))


@given(position=st.integers(0, 3000), value=st.integers(0, 255))
def test_corrupt_header(position: int, value: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any byte of the header changed: a MinithinkError, or the same weights (spaces, metadata)."""
    folder = tmp_path_factory.mktemp("corrupt")
    decoder = random_decoder(example_config(num_layers=1))
    save_checkpoint(decoder, folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    position %= 8 + int.from_bytes(content[:8], "little")
    changed = content[position] != value
    content[position] = value
    path.write_bytes(content)
    try:
        same_weights(load_decoder(folder), decoder)
    except MinithinkError:
        assert changed


def header(entry: dict[str, Any]) -> bytes:
    """A file of one tensor of 4 bytes."""
    about = json.dumps({"model.embed_tokens.weight": entry}).encode()
    return len(about).to_bytes(8, "little") + about + bytes(4)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 8,
        b"\x02" + b"\x00" * 7 + b"[]",
        b"<!doctype html>",
        b"\x0f" + b"\x00" * 7 + b'{"a": {"b": 1}}',
        header({"dtype": "F32", "shape": [math.inf], "data_offsets": [0, 4]}),
        header({"dtype": "F32", "shape": [math.nan], "data_offsets": [0, 4]}),
        header({"dtype": "F32", "shape": [1], "data_offsets": [0, math.inf]}),
        header({"dtype": "F32", "shape": [1], "data_offsets": [0, 10**400]}),
        header({"dtype": "F32", "shape": [10**400], "data_offsets": [0, 4]}),
        header({"dtype": "x\x1b" * 999, "shape": [1] * 999, "data_offsets": [0, 4]}),
    ],
)
def test_no_safetensors_file(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors")


def test_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(sharded, str(shard), "truncated", "weight [")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, str(shard), "missing")


def index_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    "shard",
    [
        "../elsewhere.safetensors",
        "/etc/model.safetensors",
        "a/b.safetensors",
        "..",
        "",
        "C:x.safetensors",
        "..\\x.safetensors",
        "pytorch_model.bin",
        7,
        None,
        "x" * 9999,
    ],
)
def test_index_that_leaves_the_folder(sharded: Path, shard: Any) -> None:
    path, index = index_of(sharded)
    save_file({Q0: torch.zeros(40, 24)}, sharded.parent / "elsewhere.safetensors")  # it is there, and still refused
    index["weight_map"][Q0] = shard
    path.write_text(json.dumps(index))
    refused(sharded, "index.json", Q0, quoted(shard))


def test_shards_with_names_that_no_file_can_have_are_missing(sharded: Path) -> None:
    path, index = index_of(sharded)
    index["weight_map"][Q0] = "x" * 999 + "\0.safetensors"
    path.write_text(json.dumps(index))
    refused(sharded, f"{'x' * 79}… is missing", Q0)


def test_a_pipe_is_no_weights(folder: Path) -> None:
    """It would be opened for ever."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "model.safetensors is no regular file")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "config.json cannot be read: it is no regular file")


def test_shards_may_be_links(sharded: Path, tmp_path: Path) -> None:
    """The hub's cache is made of links to blobs in another folder."""
    want = load_decoder(sharded)
    (tmp_path / "blobs").mkdir()
    for i, path in enumerate(list(sharded.iterdir())):
        path.rename(tmp_path / "blobs" / str(i))
        path.symlink_to(Path("..") / "blobs" / str(i))
    same_weights(load_decoder(sharded), want)


def test_index_disagrees_with_shards(sharded: Path) -> None:
    path, index = index_of(sharded)
    good = path.read_text()
    index["weight_map"]["model.extra"] = index["weight_map"][Q0]
    path.write_text(json.dumps(index))
    refused(sharded, "lacks model.extra", index["weight_map"][Q0])
    index = json.loads(good)
    shard = index["weight_map"].pop(Q0)
    path.write_text(json.dumps(index))
    refused(sharded, Q0, shard, "index.json")


@pytest.mark.parametrize("content", ["", '{"weight_map": {"a', "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_damaged_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "model.safetensors.index.json")


def test_pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    refused(folder, "pickled", "safetensors")
    with pytest.raises(MinithinkError, match="pickled"):
        checkpoint_hash(folder)


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "does not exist")


def test_mapping_covers_every_parameter_once() -> None:
    """Fill each parameter through the views: every element is written, and none twice."""
    decoder = random_decoder(example_config("LlamaForCausalLM", qkv_bias=True, o_bias=True))
    for parameter in decoder.parameters():
        parameter.zero_()
    for view in tensors_of(decoder).values():
        view.add_(1)
    for name, parameter in decoder.named_parameters():
        assert_close(name, parameter, torch.ones_like(parameter), atol=0)


# --- finding a checkpoint -----------------------------------------------------------------------------------


def test_resolve_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(folder)) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/model") == folder
    monkeypatch.chdir(folder.parent)
    assert resolve("model") == Path("model")  # a folder here wins over a model of that name elsewhere
    with pytest.raises(UsageError, match="no revision 'v1'"):
        resolve(str(folder), "v1")


@pytest.mark.parametrize("path", ["./model", "../x", "/no/such", "~/nothing", "~nobody_at_all/x", "a/b/c", ""])
def test_resolve_path_that_is_no_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # nothing lies in it or beside it
    with pytest.raises(MinithinkError, match="no such folder"):
        resolve(path)


def test_resolve_file(folder: Path) -> None:
    with pytest.raises(MinithinkError, match="is a file"):
        resolve(str(folder / "config.json"))


# Its children begin where it is: torch is imported, huggingface_hub is not.
RESOLVE = """
import json
import os
import signal
import sys
import traceback
import minithink.checkpoint.weights
from minithink.errors import MinithinkError

assert "huggingface_hub" not in sys.modules


def answer(model):
    try:
        return [str(minithink.checkpoint.weights.resolve(*model.split("@"))), ""]
    except MinithinkError as error:
        return ["", str(error)]


for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps(f"the child ended with the status {status}"), flush=True)
        continue
    try:
        signal.alarm(60)  # no answer takes longer, whatever the network does
        os.environ.update(asked["env"])
        print(json.dumps([answer(model) for model in asked["models"]]), flush=True)
    except BaseException:
        print(json.dumps(traceback.format_exc()), flush=True)
    os._exit(0)
"""


class Hub:
    """Runs `resolve` in a process of its own, because huggingface_hub reads the environment when it is imported."""

    def __init__(self, asker: Asker, endpoint: str, home: Path) -> None:
        self.asker = asker
        self.env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HOME": str(home)}

    def resolve(self, *models: str, **env: str) -> list[tuple[str, str]]:
        """For each model (`name` or `name@revision`) the folder and no error, or no folder and the error."""
        answers = self.asker.ask({"models": models, "env": self.env | env})
        assert isinstance(answers, list), answers
        for _, error in answers:
            assert "\n" not in error
        return [(folder, error) for folder, error in answers]


class Asker:
    """A process that has imported minithink, and forks a child for every question."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RESOLVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"]},
            cwd=ROOT,
        )

    def ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    it = Asker()
    yield it
    it.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    tmp = tmp_path_factory.mktemp("hub")
    save_checkpoint(random_decoder(example_config()), tmp / "good", max_shard_bytes=8000)
    others = ("tokenizer.json", "chat_template.jinja", "README.md", "pytorch_model.bin", "evil.py")
    for name in (*others, "consolidated.safetensors"):
        (tmp / "good" / name).write_text("{}")
    (tmp / "pickled").mkdir()
    (tmp / "pickled" / "config.json").write_text("{}")
    (tmp / "pickled" / "pytorch_model.bin").write_text("")
    (tmp / "pickled" / "consolidated.safetensors").write_text("")
    with HubServer({"some/good": tmp / "good", "some/pickled": tmp / "pickled", "some/gated": tmp / "good"}) as it:
        it.gated.add("some/gated")
        yield it


def test_hub_download_then_offline(asker: Asker, server: HubServer, tmp_path: Path) -> None:
    hub = Hub(asker, server.endpoint, tmp_path)
    ((folder, error),) = hub.resolve("some/good")
    assert not error
    got = load_decoder(folder)  # its files are links into the cache
    same_weights(got, load_decoder(server.models["some/good"]))
    names = {p.name for p in Path(folder).iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} < names
    assert not names & {"pytorch_model.bin", "README.md", "evil.py", "consolidated.safetensors"}
    seen = len(server.requests)
    first, named, (_, error) = hub.resolve("some/good", "some/good@main", "some/good@v2", HF_HUB_OFFLINE="1")
    assert first == named == (folder, "")
    assert len(server.requests) == seen, "offline means offline"
    assert "v2" in error
    assert "HF_HUB_OFFLINE" in error


def test_what_is_downloaded_is_what_is_read() -> None:
    from huggingface_hub.utils import filter_repo_objects

    read = [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/default.jinja",
    ]
    other = ["consolidated.safetensors", "adapter_model.safetensors", "original/model.safetensors", "model.bin"]
    assert list(filter_repo_objects([*read, *other], allow_patterns=list(weights.FILES))) == read


def test_hub_errors(asker: Asker, server: HubServer, tmp_path: Path) -> None:
    expected = {
        "some/nothing": ["some/nothing", "is not at", "check the spelling"],
        "some/gated": ["some/gated", "gated", "accept its terms", "hf auth login"],
        "some/good@v99": ["some/good", "no revision 'v99'"],
        "some/pickled": ["some/pickled", "pytorch_model.bin"],
        "--what--": ["--what--", "neither a folder nor a valid Hugging Face id"],
    }
    results = Hub(asker, server.endpoint, tmp_path).resolve(*expected)
    for (folder, error), mentions in zip(results, expected.values(), strict=True):
        assert not folder
        for mention in mentions:
            assert mention in error, error


def test_hub_offline_without_cache(asker: Asker, server: HubServer, tmp_path: Path) -> None:
    ((_, error),) = Hub(asker, server.endpoint, tmp_path).resolve("some/good", HF_HUB_OFFLINE="1")
    assert "some/good" in error
    assert "HF_HUB_OFFLINE" in error


def test_hub_down(asker: Asker, server: HubServer, tmp_path: Path) -> None:
    """Connection refused fails within seconds, or takes what is cached."""
    down = "http://127.0.0.1:9"  # the discard port, where nothing listens
    ((_, error),) = Hub(asker, down, tmp_path).resolve("some/good")
    assert "some/good" in error
    assert "check the network" in error
    assert error.endswith("refused)."), f"the end says what happened, in whole words: {error}"
    cached = Hub(asker, server.endpoint, tmp_path).resolve("some/good")
    assert Hub(asker, down, tmp_path).resolve("some/good") == cached
