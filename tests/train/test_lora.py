"""Training an adapter: gradients are autograd's, the model stays, the adapter is PEFT's.

To run it alone: pytest tests/train/test_lora.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minithink.checkpoint.adapter import CONFIG, WEIGHTS, Adapter
from minithink.checkpoint.weights import EMBED, checkpoint_hash, load_decoder, save_checkpoint, tensors_of
from minithink.config import ModelConfig
from minithink.engine import TINY, load
from minithink.errors import UsageError
from minithink.text.tokenizer import Tokenizer
from minithink.train import __main__ as train
from minithink.train.data import Recipe
from minithink.train.lora import Lora, Shape
from tests.compare import assert_close, assert_same
from tests.drive import prompt_logits
from tests.strategies import example_config, random_decoder

RECIPE = Recipe(
    tokens=61_440,
    batch_tokens=3_072,
    row_tokens=512,
    warmup_steps=2,
    lr=1e-2,
    share={"facts": 0.5, "ledger": 0.5},
    sizes={"facts": [1, 2, 2], "ledger": [1, 2, 2]},
    long_share=0.0,
)
TOKENS = ("<|user|>", "<think>")


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads add the gradients of the embedding in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """The folder of a random model of the embedded one's kind, with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = train.model_config(tokenizer.vocab_size, layers=2, width=64, context=1024)
    save_checkpoint(random_decoder(config), folder, dtype=torch.bfloat16)
    for path in TINY.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_bytes((TINY / "chat_template.jinja").read_bytes())
    return folder


def shape_of(tokenizer):
    return Shape(4, 8, tuple(tokenizer.id_of(name) for name in TOKENS))


def run(folder, model, recipe, lora, **options):
    config = ModelConfig.from_folder(model)
    return train.train(recipe, config, model, folder, device="cpu", workers=0, init=model, lora=lora, **options)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_autograd(architecture, tied):
    """Which differentiates through W₀ + s · B · A; two passes show that old gradients do not stay."""
    config = example_config(architecture, tie_embeddings=tied)
    generator = torch.Generator().manual_seed(0)
    decoder, plain = random_decoder(config), random_decoder(config)
    lora = Lora(decoder, Shape(3, 6.0, (5, 2)), seed=1)
    for parameter in lora.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    base = {name: view.clone() for name, view in tensors_of(plain).items()}
    for tokens in ([5, 2, 7, 5, 1], [2, 9, 5]):
        lora.merge()
        decoder_loss = prompt_loss(decoder, tokens)
        decoder_loss.backward()
        lora.pull_gradients()
        merged = dict(base)
        for name in lora.layers:
            merged[name] = base[name] + 2.0 * lora.b[name] @ lora.a[name]
        merged[EMBED] = base[EMBED].index_copy(0, torch.tensor([5, 2]), lora.rows)
        want_loss = prompt_loss(plain, tokens, fused(config, merged))
        want = torch.autograd.grad(want_loss, list(lora.parameters()))
        assert_close("loss", decoder_loss, want_loss, atol=1e-5)
        for (name, parameter), gradient in zip(lora.named_parameters(), want, strict=True):
            assert_close(name, parameter.grad, gradient, atol=1e-5, rtol=1e-3)
            assert gradient.abs().max() > 1e-4


def fused(config, tensors):
    """The parameters of a decoder, as functions of the tensors of a checkpoint."""
    out = {"embed": tensors[EMBED], "norm": tensors["model.norm.weight"]}
    if not config.tie_embeddings:
        out["head"] = tensors["lm_head.weight"]
    for i in range(config.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        parts = [tensors[f"{attn}{x}_proj.weight"].t() for x in "qkv"]
        out[f"blocks.{i}.qkv"] = torch.cat(parts, dim=1)
        out[f"blocks.{i}.o"] = tensors[f"{attn}o_proj.weight"].t()
        out[f"blocks.{i}.gate_up"] = torch.cat([tensors[f"{mlp}{x}_proj.weight"].t() for x in ("gate", "up")], dim=1)
        out[f"blocks.{i}.down"] = tensors[f"{mlp}down_proj.weight"].t()
    return out


class Reader(torch.nn.Module):
    """A decoder and the loss of a text, as one function of the parameters."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens):
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens))[None]
        mask = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).tril()
        labels = ids.roll(-1)
        return train.loss_of(self.decoder, train.Rope(self.decoder.config), ids, labels, positions, mask)


def prompt_loss(decoder, tokens, parameters=None):
    reader = Reader(decoder)
    if parameters is None:
        return reader(tokens)
    given = {f"decoder.{name}": value for name, value in parameters.items()}
    return torch.func.functional_call(reader, given, (tokens,))


def test_the_first_step_begins_with_the_model_as_it_is():
    decoder = random_decoder(example_config())
    before = {name: view.clone() for name, view in tensors_of(decoder).items()}
    lora = Lora(decoder, Shape(4, 8.0, (1,)), seed=0)
    lora.merge()
    for name, view in tensors_of(decoder).items():
        assert_same(name, view, before[name])
    assert all(a.abs().max() > 0 for a in lora.a.values())


def test_the_loss_falls_and_the_adapter_is_what_was_trained(tmp_path, model, tokenizer):
    weights = (model / "model.safetensors").read_bytes()
    shape = shape_of(tokenizer)
    losses = run(tmp_path / "run", model, RECIPE, shape)
    assert losses[-1] < losses[0] - 0.3
    assert (model / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / "run" / "model.safetensors").exists()
    tensors = load_file(tmp_path / "run" / WEIGHTS)
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
    assert len(tensors) == 2 * 7 * 2 + 1
    stored = json.loads((tmp_path / "run" / "training.json").read_text())
    assert stored["lora"] == {"rank": 4, "alpha": 8, "tokens": list(shape.tokens)}
    assert stored["init"] == checkpoint_hash(model)
    engine = load(model, adapter=tmp_path / "run", device="cpu")
    assert engine.generate("Facts (mod 100): zum = 1. Find zum.", max_new_tokens=5)[0].generated_tokens <= 5
    changed = (engine.decoder.embed != load_decoder(model, dtype=torch.float32).embed).any(dim=1).nonzero().flatten()
    assert changed.tolist() == sorted(shape.tokens)


def test_peft_loads_the_adapter(tmp_path, model, tokenizer):
    import peft
    import transformers

    run(tmp_path / "run", model, replace(RECIPE, tokens=9_216), shape_of(tokenizer))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run")
    loaded = peft.get_peft_model_state_dict(theirs)
    stored = load_file(tmp_path / "run" / WEIGHTS)
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert_same(name, loaded[name], tensor.float())
    tokens = [tokenizer.id_of("<|user|>"), 40, 41, tokenizer.id_of("<think>"), 42]
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens])).logits[0]
    found = Adapter(tmp_path / "run", ModelConfig.from_folder(model))
    decoder = load_decoder(model, dtype=torch.float32, merge=found.merge)
    plain = prompt_logits(load_decoder(model, dtype=torch.float32), tokens)
    error = (prompt_logits(decoder, tokens) - want).abs().max()
    assert error < (plain - want).abs().max() / 20  # the merged weights are bfloat16


def test_an_interrupted_run_resumes_to_the_same_adapter(tmp_path, model, tokenizer, monkeypatch):
    recipe = replace(RECIPE, tokens=24_576)
    shape = shape_of(tokenizer)
    run(tmp_path / "whole", model, recipe, shape)
    steps = iter(range(100))
    forward = train.loss_of

    def interrupted(*args):
        if next(steps) == 5:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(train, "loss_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", model, recipe, shape)
    monkeypatch.setattr(train, "loss_of", forward)
    with pytest.raises(train.UsageError, match=r"another adapter, \{'rank': 4"):
        run(tmp_path / "parts", model, recipe, replace(shape, alpha=9), resume=True)
    run(tmp_path / "parts", model, recipe, shape, resume=True)
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_command_line_trains_an_adapter(tmp_path, model):
    words = ["--init", str(model), "--lora-rank", "2", "--train-tokens", ",".join(TOKENS), "--workers", "0"]
    sizes = ["--tokens", "4096", "--batch-tokens", "2048", "--row-tokens", "512", "--share", "facts=1"]
    sizes += ["--sizes", "facts=1-2-2", "--long-share", "0"]
    assert train.main([*words, *sizes, "--device", "cpu", "--output", str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "run" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    tokenizer = Tokenizer.from_folder(Path(model))
    assert config["trainable_token_indices"] == [tokenizer.id_of(name) for name in TOKENS]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora-rank", "4"], "give its folder with --init"),
        (["--init", "MODEL", "--lora-alpha", "4"], "--lora-alpha is for an adapter"),
        (["--init", "MODEL", "--train-tokens", "a"], "--train-tokens is for an adapter"),
        (["--init", "MODEL", "--lora-rank", "4", "--head-dim", "128"], "leave --head-dim out"),
        (["--init", "MODEL", "--lora-rank", "4", "--train-tokens", "<no>"], "has no token '<no>'"),
        (["--init", "MODEL", "--lora-rank", "4", "--train-tokens", "<think>,<think>"], "'<think>' twice"),
        (["--init", "MODEL", "--lora-rank", "4", "--train-tokens", "<think>,"], "without a text"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, model, capsys, options, said):
    words = [str(model) if word == "MODEL" else word for word in options]
    with pytest.raises(SystemExit) as end:
        sys.exit(train.main(["--output", str(tmp_path / "run"), "--device", "cpu", *words]))
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_an_adapter(tmp_path, model, tokenizer):
    """The first step begins with the factors of the file, and the run is named by the merged weights."""
    shape = shape_of(tokenizer)
    first = run(tmp_path / "first", model, RECIPE, shape)
    more = replace(RECIPE, seed=1, lr=1e-9, tokens=30_720)
    second = run(tmp_path / "second", model, more, shape, adapter_folder=tmp_path / "first")
    assert second[0] < (first[0] + first[-1]) / 2
    began = json.loads((tmp_path / "second" / "training.json").read_text())["init"]
    config = ModelConfig.from_folder(model)
    assert began == Adapter(tmp_path / "first", config).hash_over(model) != checkpoint_hash(model)
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("first", "second"))
    for name, tensor in before.items():
        assert_close(name, after[name].float(), tensor.float(), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rank": 2, "alpha": 4},
            "has a base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight of the shape",
        ),
        ({"alpha": 4}, "counts its factors [2.0] times, this run 1.0 times: give its --lora-alpha."),
        ({"tokens": ()}, "do not train the same tensors, as base_model.model.model.embed_tokens.token_adapter"),
        ({"tokens": (7, 8)}, ", this run [7, 8]: name the same ones."),
    ],
)
def test_an_adapter_of_another_shape_is_refused(change, said, tmp_path, model, tokenizer):
    run(tmp_path / "first", model, replace(RECIPE, tokens=3_072), shape_of(tokenizer))
    other = replace(shape_of(tokenizer), **change)
    with pytest.raises(UsageError) as error:
        run(tmp_path / "second", model, RECIPE, other, adapter_folder=tmp_path / "first")
    assert said in str(error.value)
