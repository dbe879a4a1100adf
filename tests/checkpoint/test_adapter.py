"""LoRA adapters: merged as PEFT merges them, to the same bits on every machine, or refused with a sentence.

To run it alone: pytest tests/checkpoint/test_adapter.py
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minithink.checkpoint.adapter import BLOCK, CONFIG, PREFIX, WEIGHTS, Adapter, added
from minithink.checkpoint.weights import checkpoint_hash, hash_of_merged, load_decoder, save_checkpoint, tensors_of
from minithink.config import ModelConfig
from minithink.engine import Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.generate import main
from tests.compare import assert_close, assert_same
from tests.drive import prompt_logits, transformers_model
from tests.fixtures_checkpoint import edit_json, write_checkpoint, write_json, write_tokenizer
from tests.strategies import example_config, random_decoder

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TYPES = (torch.float32, torch.bfloat16)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "all linear layers": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "a pattern of layers": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(q|down)_proj"},
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"], "layers_to_transform": [1]},
    "rsLoRA": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL},
    "ranks": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.(up|gate)_proj": 8},
        "target_modules": ALL,
    },
    "alphas": {
        "r": 4,
        "lora_alpha": 8,
        "alpha_pattern": {"model.layers.0.self_attn.k_proj": 16, "k_proj": 2},
        "target_modules": ALL,
    },
    "tokens": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "trainable_token_indices": [7, 3, 60]},
    "tokens by module": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "trainable_token_indices": {"embed_tokens": [5, 4]},
    },
}
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
HASH = "c164a8aefcaec53d"  # of `written`, on every machine


def steps(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Multiples of 1/8 from −1 to 1: sums of few products of them are exact in float32."""
    return torch.randint(-8, 9, shape, generator=generator) / 8


def gauss(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def peft_model(config: ModelConfig, dtype: torch.dtype, kind: dict[str, Any], draw: Callable[..., Tensor]) -> Any:
    """A random model with a random adapter, as PEFT has them. draw: makes the numbers."""
    import peft

    generator = torch.Generator().manual_seed(1)
    model = transformers_model(config)
    for parameter in model.parameters():
        parameter.copy_(draw(parameter.shape, generator))
    model = peft.get_peft_model(model.to(dtype), peft.LoraConfig(**kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(draw(parameter.shape, generator))
    return model


def written_by_peft(model: Any, folder: Path) -> tuple[Path, Path]:
    """The folders of its base model and of its adapter. The base model comes back as it was."""
    model.save_pretrained(folder / "adapter")
    base = model.unload()
    base.save_pretrained(folder / "base")
    return folder / "base", folder / "adapter"


def merged_tensors(base: Path, adapter: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The weights of a decoder that was loaded with the adapter."""
    found = Adapter(adapter, ModelConfig.from_folder(base))
    return tensors_of(load_decoder(base, dtype=dtype, merge=found.merge))


def both_merges(
    tmp_path: Path, config: ModelConfig, dtype: torch.dtype, kind: dict[str, Any], draw: Callable[..., Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names of all weights; our merge; PEFT's, which reads the same files."""
    import peft
    import transformers

    base, adapter = written_by_peft(peft_model(config, dtype, kind, draw), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    want = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    for name, got in merged_tensors(base, adapter).items():
        yield name, got, want[name]


# -- PEFT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_where_sums_are_exact_the_merge_is_that_of_peft(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = example_config(tie_embeddings=kind != "plain")
    for name, got, want in both_merges(tmp_path, config, dtype, KINDS[kind], steps):
        assert_same(name, got, want)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_is_merged_as_by_peft(architecture: str, tied: bool, tmp_path: Path) -> None:
    config = example_config(architecture, tie_embeddings=tied)
    kind = KINDS["tokens"] | ({} if tied else {"target_modules": [*ALL, "lm_head"]})
    for name, got, want in both_merges(tmp_path, config, torch.float32, kind, steps):
        assert_same(name, got, want)


@pytest.mark.parametrize("kind", ["plain", "rsLoRA", "ranks"])
def test_elsewhere_the_merge_differs_from_that_of_peft_by_its_rounding(kind: str, tmp_path: Path) -> None:
    """PEFT rounds each product, each sum, the scale and two results to float32. All terms together are below the sum
    of their sizes, which is at most 3 · r · 4.5² here, times the scale of at most 16."""
    for name, got, want in both_merges(tmp_path, example_config(), torch.float32, KINDS[kind], gauss):
        assert_close(name, got, want, atol=(8 + 4) * 2**-24 * (8 * 4.5**2 * 16 + 4.5))


@pytest.mark.parametrize("kind", ["plain", "rsLoRA", "ranks"])
def test_in_bfloat16_few_weights_differ_by_one_step(kind: str, tmp_path: Path) -> None:
    total = differing = 0
    for name, got, want in both_merges(tmp_path, example_config(), torch.bfloat16, KINDS[kind], gauss):
        assert_close(name, got, want, atol=1e-30, rtol=2**-7)
        differing += int((got != want).sum())
        total += got.numel()
    assert differing <= total / 1000


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_peft(architecture: str, tmp_path: Path) -> None:
    """With the factors apart in PEFT's model, and merged in ours."""
    import peft

    config = example_config(architecture)
    generator = torch.Generator().manual_seed(2)
    model = peft.get_peft_model(transformers_model(config), peft.LoraConfig(**KINDS["tokens"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    tokens = [3, 7, 60, 5, 9, 3, 6]
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    base, adapter = written_by_peft(model, tmp_path)
    plain = prompt_logits(load_decoder(base), tokens)
    found = Adapter(adapter, ModelConfig.from_folder(base))
    got = prompt_logits(load_decoder(base, merge=found.merge), tokens)
    assert_close("logits", got, want, atol=2e-4)
    assert (plain - want).abs().max() > 0.1


# -- the same bits everywhere


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 → the float32 that the dtype can hold, to the nearest, ties to even."""
    if dtype == torch.float32:
        return x
    if dtype == torch.float16:
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)


def oracle(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The equation in numpy, one number of the rank after the other."""
    total = np.zeros(weight.shape)
    left = b.double().numpy()
    right = a.double().numpy()
    for i in range(len(right)):
        total = total + left[:, i, None] * right[i]
    exact = weight.double().numpy() + scale * total
    return torch.from_numpy(rounded(exact.astype(np.float32), weight.dtype)).to(weight.dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_merge_is_the_equation_number_by_number(threads: int, dtype: torch.dtype) -> None:
    """On layers of more than one block, of which the last is not full."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = 1100, 257
    assert rows * columns > 2 * threads * BLOCK
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for factor in TYPES:
            a = torch.randn(5, columns, generator=generator).to(factor)
            b = torch.randn(rows, 5, generator=generator).to(factor)
            for scale in (2.0, 1 / 3, math.sqrt(8)):
                assert_same("merged", added(weight, a, b, scale), oracle(weight, a, b, scale))
    finally:
        torch.set_num_threads(before)


def test_single_numbers_in_plain_python() -> None:
    """Sums of float64, one after the other; a matrix product may add in another order."""
    draw = random.Random(4)
    a = torch.tensor([[draw.uniform(-1, 1)] for _ in range(64)])
    b = torch.tensor([[draw.uniform(-1, 1) for _ in range(64)]])
    weight = torch.tensor([[draw.uniform(-1, 1)]])
    total = 0.0
    for i in range(64):
        total = total + b[0, i].item() * a[i, 0].item()
    want = torch.tensor(weight.item() + 0.3 * total, dtype=torch.float64).float()
    assert added(weight, a, b, 0.3).item() == want.item()


def test_sums_have_the_order_of_the_rank() -> None:
    """2¹⁰⁰ − 2¹⁰⁰ + 1 is 1, and 1 − 2¹⁰⁰ + 2¹⁰⁰ is 0 in float64."""
    a = torch.tensor([[2.0**50], [2.0**50], [1.0]])
    b = torch.tensor([[2.0**50, -(2.0**50), 1.0]])
    assert added(torch.zeros(1, 1), a, b, 1.0).item() == 1
    assert added(torch.zeros(1, 1), a.flip(0), b.flip(1), 1.0).item() == 0


def numbers(shape: torch.Size, draw: random.Random) -> Tensor:
    """Python's own draws, which are the same everywhere: torch's follow the processor."""
    return torch.tensor([draw.random() - 0.5 for _ in range(shape.numel())]).view(shape)


def written(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Path, Path]:
    """A small model and an adapter for it, both without PEFT."""
    draw = random.Random(seed)
    config = example_config(tie_embeddings=True, hidden_size=48, intermediate_size=96)
    decoder = random_decoder(config)
    for view in tensors_of(decoder).values():
        view.copy_(numbers(view.shape, draw))
    save_checkpoint(decoder, folder / "base", dtype=dtype)
    write_adapter(folder / "adapter", config, draw)
    return folder / "base", folder / "adapter"


def write_adapter(folder: Path, config: ModelConfig, draw: random.Random, rank: int = 3) -> None:
    """Factors of all linear layers, and two tokens."""
    tensors = dict[str, Tensor]()
    for name, view in tensors_of(random_decoder(config)).items():
        if name.endswith("_proj.weight"):
            module = PREFIX + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = numbers(torch.Size((rank, view.shape[1])), draw)
            tensors[f"{module}.lora_B.weight"] = numbers(torch.Size((view.shape[0], rank)), draw)
    rows = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors[rows] = numbers(torch.Size((2, config.hidden_size)), draw)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 5, "target_modules": ALL, "bias": "none"}
    write_json(folder / CONFIG, fields | {"trainable_token_indices": [9, 2]})


@pytest.mark.parametrize("threads", [1, 2])
def test_the_hash_of_a_small_merge_is_known(threads: int, tmp_path: Path) -> None:
    """If it changes, calibrations of merged models lose their models."""
    base, adapter = written(tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert Adapter(adapter, ModelConfig.from_folder(base)).hash_over(base) == HASH
    finally:
        torch.set_num_threads(before)


HASH_OF = """
import sys
from pathlib import Path
from minithink.checkpoint.adapter import Adapter
from minithink.config import ModelConfig
base, adapter = map(Path, sys.argv[1:])
print(Adapter(adapter, ModelConfig.from_folder(base)).hash_over(base))
"""


def test_a_processor_without_vectors_makes_the_same_hash(tmp_path: Path) -> None:
    """torch has each operation several times, for processors of different width."""
    base, adapter = written(tmp_path)
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    words = [sys.executable, "-c", HASH_OF, str(base), str(adapter)]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [HASH], done.stderr


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_hash_is_that_of_the_merged_checkpoint(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    config = example_config(tie_embeddings=tied)
    save_checkpoint(random_decoder(config), tmp_path / "base", dtype=dtype, max_shard_bytes=8000)
    write_adapter(tmp_path / "adapter", config, random.Random(5))
    found = Adapter(tmp_path / "adapter", config)
    save_checkpoint(load_decoder(tmp_path / "base", merge=found.merge), tmp_path / "merged")
    assert hash_of_merged(tmp_path / "base", found.merge) == checkpoint_hash(tmp_path / "merged")
    assert found.hash_over(tmp_path / "base") == checkpoint_hash(tmp_path / "merged")


def test_loading_makes_the_hash_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging takes as long as reading the weights, and naming them needs the merged ones, too."""
    base, adapter = written(tmp_path)
    merged = list[str]()
    merge = Adapter.merge

    def counted(self: Adapter, name: str, weight: Tensor) -> Tensor:
        merged.append(name)
        return merge(self, name, weight)

    monkeypatch.setattr(Adapter, "merge", counted)
    for dtype in (torch.bfloat16, None):
        found = Adapter(adapter, ModelConfig.from_folder(base))
        decoder = found.load(base, dtype=dtype)
        want = merged_tensors(base, adapter, dtype)
        for name, got in tensors_of(decoder).items():
            assert_same(name, got, want[name])
        merged.clear()
        assert found.hash_over(base) == HASH
        assert not merged


def test_the_hash_follows_every_part_of_the_adapter(tmp_path: Path) -> None:
    base, adapter = written(tmp_path)
    config = ModelConfig.from_folder(base)
    tensors = load_file(adapter / WEIGHTS)
    hashes = {Adapter(adapter, config).hash_over(base), checkpoint_hash(base)}
    for name in (f"{Q0}.lora_A.weight", next(name for name in tensors if "tokens" in name)):
        save_file(tensors | {name: tensors[name] * 2}, adapter / WEIGHTS)
        hashes.add(Adapter(adapter, config).hash_over(base))
    save_file(tensors, adapter / WEIGHTS)
    edit_json(adapter / CONFIG, lora_alpha=6)
    hashes.add(Adapter(adapter, config).hash_over(base))
    assert len(hashes) == 5


def test_weights_are_merged_in_their_own_type_whatever_they_are_loaded_as(tmp_path: Path) -> None:
    base, adapter = written(tmp_path, torch.bfloat16)
    own = merged_tensors(base, adapter)
    for name, wide in merged_tensors(base, adapter, torch.float32).items():
        assert own[name].dtype == torch.bfloat16
        assert_same(name, wide, own[name].float())


# -- refusals


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path, torch.float32)


def refused(pair: tuple[Path, Path], *mentions: str) -> None:
    """Loading and merging fails with one sentence that mentions all of these."""
    with pytest.raises(MinithinkError) as caught:
        merged_tensors(*pair)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message.replace(str(pair[1]), "")) <= 400
    for mention in mentions:
        assert mention in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"peft_type": None}, "peft_type None"),
        ({"use_dora": True}, "use_dora = True (DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication = [[0, 1], [0, 2]]"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters = ['mlp.experts.down_proj']"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens = [1, 2]"),
        ({"what_comes_next_year": {"a": 1}}, "what_comes_next_year = {'a': 1}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"init_lora_weights": 1.5}, "init_lora_weights = 1.5"),
        ({"r": 0}, "the rank 0"),
        ({"r": True}, "the r True"),
        ({"r": 4}, "is due with this adapter_config.json and this model"),
        ({"rank_pattern": {"q_proj": 2}}, "[3, 48], and [2, 48] is due"),
        ({"rank_pattern": [2]}, "rank_pattern [2]"),
        ({"lora_alpha": "8"}, "the lora_alpha '8'"),
        ({"lora_alpha": math.nan}, "the lora_alpha nan"),
        ({"lora_alpha": 10**400}, "the lora_alpha 10000000"),
        ({"use_rslora": 1}, "use_rslora = 1"),
        ({"alpha_pattern": {"(": 2}}, "the pattern '(.*\\\\.)?(()'"),
        ({"target_modules": ["q_proj"]}, "does not name (['q_proj'])"),
        ({"target_modules": [*ALL, "embed_tokens", 3]}, "the target_modules ["),
        ({"target_modules": None}, "the target_modules None"),
        ({"trainable_token_indices": [9, 2, 3]}, "[2, 48], and [3, 48] is due"),
        ({"trainable_token_indices": [9, 9]}, "the tokens [9, 9]"),
        ({"trainable_token_indices": [9, -2]}, "the tokens [9, -2]"),
        ({"trainable_token_indices": [9, 61]}, "the token 61, and the model has 61 tokens"),
        ({"trainable_token_indices": 3}, "trainable_token_indices 3"),
        ({"trainable_token_indices": {"norm": [9, 2]}}, "tokens of norm"),
        ({"trainable_token_indices": {"embed_tokens": [9, 2], "lm_head": [1]}}, "lm_head, which is the embedding"),
        ({"trainable_token_indices": None}, "does not say of which"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(fields: dict[str, Any], said: str, pair: tuple[Path, Path]) -> None:
    edit_json(pair[1] / CONFIG, **fields)
    refused(pair, said)


def test_a_pattern_that_takes_too_long_is_refused(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(pattern: str, name: str, timeout: float) -> None:
        assert timeout > 0
        raise TimeoutError("regex timed out")

    edit_json(pair[1] / CONFIG, target_modules=".*")
    monkeypatch.setattr(regex, "fullmatch", never)
    refused(pair, "the pattern '.*', which cannot be used (regex timed out)")


def test_settings_that_are_off_change_nothing(pair: tuple[Path, Path]) -> None:
    """PEFT writes all of its fields."""
    want = merged_tensors(*pair)
    fields = {
        "use_dora": False,
        "modules_to_save": None,
        "loftq_config": {},
        "eva_config": None,
        "bias": "none",
    }
    edit_json(pair[1] / CONFIG, **fields, lora_dropout=0.1, task_type="CAUSAL_LM", init_lora_weights="gaussian")
    edit_json(pair[1] / CONFIG, base_model_name_or_path="../elsewhere", peft_version="0.18.0", inference_mode=True)
    for name, got in merged_tensors(*pair).items():
        assert_same(name, got, want[name])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{Q0}.lora_A.weight": None}, "lacks lora_A of model.layers.0.self_attn.q_proj"),
        ({f"{Q0}.lora_A.weight": None, f"{Q0}.lora_B.weight": None}, "lacks the factors of model.layers.0.self_attn"),
        ({f"{Q0}.lora_A.weight": torch.ones(3, 47)}, "[3, 47], and [3, 48] is due"),
        ({f"{Q0}.lora_B.weight": torch.ones(40)}, "[40], and [40, 3] is due"),
        ({f"{Q0}.lora_A.weight": torch.full((3, 48), math.inf)}, "no finite number"),
        ({f"{Q0}.lora_A.weight": torch.ones(3, 48, dtype=torch.float64)}, "stored as F64"),
        ({f"{Q0}.lora_magnitude_vector.weight": torch.ones(40)}, "lora_magnitude_vector.weight is no factor"),
        ({f"{Q0}.lora_embedding_A": torch.ones(3, 40)}, "lora_embedding_A is no factor"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(3, 48)}, "q_proj.lora_A.weight is no factor"),
        ({f"{PREFIX}lm_head.lora_A.weight": torch.ones(3, 48)}, "changes lm_head, which is no linear layer of this"),
        ({f"{PREFIX}model.layers.2.mlp.up_proj.lora_A.weight": torch.ones(3, 48)}, "changes model.layers.2.mlp"),
        ({f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": None}, "lacks the rows"),
    ],
)
def test_other_tensors_are_refused_by_name(
    changes: dict[str, Tensor | None], said: str, pair: tuple[Path, Path]
) -> None:
    tensors: dict[str, Tensor | None] = {**load_file(pair[1] / WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, pair[1] / WEIGHTS)
    refused(pair, said)


def test_files_that_are_missing_or_damaged_are_said(pair: tuple[Path, Path]) -> None:
    weights = pair[1] / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    refused(pair, "is truncated")
    weights.rename(pair[1] / "adapter_model.bin")
    refused(pair, f"has no {WEIGHTS} (adapter_model.bin can run code")
    (pair[1] / CONFIG).write_text("[]")
    weights.write_bytes(content)
    refused(pair, "holds a list")
    (pair[1] / CONFIG).unlink()
    refused(pair, f"has no {CONFIG}")
    refused((pair[0], pair[1] / WEIGHTS), "is no folder")


# -- the engine and the commands


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a tokenizer, and an adapter for it."""
    folder = tmp_path_factory.mktemp("model")
    base = write_checkpoint(folder / "base", generation={"temperature": 0.0, "max_new_tokens": 5})
    write_adapter(folder / "adapter", ModelConfig.from_folder(base), random.Random(6))
    return base, folder / "adapter"


def words(engine: Engine) -> list[int]:
    return engine.generate("Who sits?", max_new_tokens=12)[0].token_ids


def test_an_engine_with_an_adapter_is_that_of_the_merged_checkpoint(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = folders
    engine = load(base, adapter=adapter)
    merged = write_checkpoint(tmp_path / "merged", generation={"temperature": 0.0})
    save_checkpoint(engine.decoder, merged)
    again = load(merged)
    assert words(engine) == words(again)
    assert words(engine) != words(load(base))
    assert engine.loaded.home is not None
    assert again.loaded.home is not None
    assert engine.loaded.home.checkpoint == again.loaded.home.checkpoint == checkpoint_hash(merged)


def test_the_command_line_takes_an_adapter(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = folders
    options = ["--model", str(base), "Who sits?", "--json", "--max-new-tokens", "12"]
    assert main([*options, "--adapter", str(adapter)]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == words(load(base, adapter=adapter))
    assert main([*options, "--adapter", str(base)]) == 1
    assert f"has no {CONFIG}" in capsys.readouterr().err


def test_a_calibration_of_other_weights_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """It lies beside the adapter, and names the merged weights."""
    base, adapter = folders
    engine = load(base, adapter=adapter)
    with pytest.raises(MinithinkError, match=f"--model {base} .*--adapter {adapter}` makes it"):
        engine.calibration("thoughts.json")
    values = {"checkpoint": checkpoint_hash(base), "layers": [0], "thresholds": [0.1]}
    write_json(adapter / "thoughts.json", values)
    try:
        with pytest.raises(MinithinkError, match="was calibrated on the weights"):
            engine.calibration("thoughts.json")
        assert engine.loaded.home is not None
        write_json(adapter / "thoughts.json", values | {"checkpoint": engine.loaded.home.checkpoint})
        assert engine.calibration("thoughts.json")["layers"] == [0]
    finally:
        (adapter / "thoughts.json").unlink()


def test_the_adapter_s_own_tokenizer_and_defaults_are_used(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", generation={"do_sample": True, "temperature": 0.5})
    write_adapter(tmp_path / "adapter", ModelConfig.from_folder(base), random.Random(7))
    assert load(base, adapter=tmp_path / "adapter").generation_config.temperature == 0.5
    write_tokenizer(tmp_path / "adapter", template="{{ 'other' }}")
    write_json(tmp_path / "adapter" / "generation_config.json", {"do_sample": True, "temperature": 0.25})
    engine = load(base, adapter=tmp_path / "adapter")
    assert engine.tokenizer.chat_template == "{{ 'other' }}"
    assert engine.generation_config.temperature == 0.25


def test_an_empty_name_is_no_adapter(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="name is empty"):
        load(folders[0], adapter="")
