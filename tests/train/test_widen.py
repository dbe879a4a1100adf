"""Wider heads: the model computes the same, its new channels learn, and a folder of wide weights is a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

from minithink.checkpoint.weights import load_decoder, save_checkpoint
from minithink.engine import TINY
from minithink.errors import UsageError
from minithink.model import Decoder, Rope, rope_frequencies
from minithink.train import __main__ as train
from minithink.train.data import Recipe
from minithink.train.widen import turned, widened
from tests.compare import assert_close, assert_same
from tests.drive import prompt_logits
from tests.strategies import configs, example_config, random_decoder

ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


@given(config=configs(), seed=st.integers(0, 2**31), data=st.data())
def test_the_wide_model_computes_the_same(config, seed, data):
    decoder = random_decoder(config, seed)
    assume(config.rope.kind != "yarn" or same_frequencies(config))
    wide = widened(decoder, 2 * config.head_dim)
    assert wide.config == replace(config, head_dim=2 * config.head_dim)
    tokens = data.draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=12, max_size=config.max_position))
    assert_close("logits", prompt_logits(wide, tokens), prompt_logits(decoder, tokens), atol=1e-4)


def same_frequencies(config):
    wide = replace(config, head_dim=2 * config.head_dim)
    return torch.allclose(rope_frequencies(wide)[0][::2], rope_frequencies(config)[0])


@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_large_eps_is_no_exception(architecture, rope):
    decoder = random_decoder(example_config(architecture, rope, rms_norm_eps=1.0), 3)
    tokens = torch.randint(61, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_close("logits", prompt_logits(widened(decoder, 20), tokens), prompt_logits(decoder, tokens), atol=1e-4)


def test_the_embedded_model_computes_the_same():
    decoder = load_decoder(TINY, dtype=torch.float32)
    wide = widened(decoder, 128)
    tokens = torch.randint(1500, (600,), generator=torch.Generator().manual_seed(2)).tolist()
    got, want = prompt_logits(wide, tokens), prompt_logits(decoder, tokens)
    assert want.std() > 1
    assert_close("logits", got, want, atol=1e-3, rtol=1e-4)
    assert sum(p.numel() for p in wide.parameters()) == 11_426_048


def test_the_copy_is_turned_and_as_long():
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(4))
    assert_close("length", turned(x).norm(dim=-1), x.norm(dim=-1), atol=1e-6)
    assert_close("angle", (turned(x) * x).sum(-1), x.square().sum(-1) / 2**0.5, atol=1e-5)


def odd_channels(decoder, grads):
    """The gradients of the new channels: of q, k, v and o in the first layer, then in the next."""
    c = decoder.config
    for block in decoder.blocks:
        parts = grads[block.qkv].unflatten(-1, (-1, c.head_dim)).split((c.num_heads, *(c.num_kv_heads,) * 2), dim=1)
        yield from (part[..., 1::2] for part in (*parts, grads[block.o].t()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_channels_learn(architecture):
    """The new channels of q and o have gradients in the first step, those of k and v at the latest in the second."""
    decoder = widened(random_decoder(example_config(architecture), 5), 20).requires_grad_(True)
    table, tokens = Rope(decoder.config), torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(6))
    positions = torch.arange(30).repeat(2, 1)
    mask = train.dense_mask(train.last_query(tokens * 0, tokens < 0, 1))
    parameters = list(decoder.parameters())
    for step in range(2):
        hidden = decoder(tokens.flatten(), train.TrainAttention(table, positions, mask))
        loss = F.cross_entropy(decoder.logits(hidden), tokens.roll(-1, 1).flatten())
        grads = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        moved = [bool(g.ne(0).all(1).any()) for g in odd_channels(decoder, grads)]
        assert moved[::4] == moved[3::4] == [True] * decoder.config.num_layers
        assert step == 0 or all(moved)
        with torch.no_grad():
            for p, g in grads.items():
                p -= 0.1 * g


def test_a_wide_checkpoint_is_saved_and_loaded(tmp_path):
    wide = widened(random_decoder(example_config(), 7), 20)
    save_checkpoint(wide, tmp_path)
    loaded = load_decoder(tmp_path)
    assert loaded.config.head_dim == 20
    for name, p in loaded.named_parameters():
        assert_same(name, p, wide.get_parameter(name))


def test_what_cannot_be_widened_is_refused():
    decoder = random_decoder(example_config())
    assert widened(decoder, 10) is decoder
    for other in (8, 12, 30, 40):
        with pytest.raises(UsageError, match=rf"Heads of 10 channels cannot get {other}: give 20\."):
            widened(decoder, other)
    with pytest.raises(UsageError, match="The yarn frequencies"):
        widened(random_decoder(example_config(rope="yarn")), 20)


SMALL = [
    "--device",
    "cpu",
    "--workers",
    "0",
    "--context",
    "8192",
    "--row-tokens",
    "1024",
    "--batch-tokens",
    "2048",
    "--share",
    "facts=0.25,ledger=0.25,search=0.5",
    "--sizes",
    "facts=3-4-6,ledger=2-3-4,search=2-2-3",
    "--evict-share",
    "0.75",
    "--evict-rate",
    "0.8",
    "--evict-after",
    "0.2",
    "--warmup-steps",
    "1",
    "--lr",
    "1.5e-3",
]


def test_training_continues_with_wider_heads(tmp_path, capsys, monkeypatch):
    """The loss begins where that of the narrow model begins, and the checkpoint has wide heads."""
    start, out = tmp_path / "start", tmp_path / "out"
    narrow = Decoder(train.model_config(1600, layers=2, width=64))
    train.initialise(narrow, 8)
    save_checkpoint(narrow.requires_grad_(False), start)
    base = [*SMALL, "--init", str(start), "--tokenizer", str(TINY), "--tokens", "6144"]
    losses, forward = [], train.loss_of
    monkeypatch.setattr(train, "loss_of", lambda *args: [losses.append(forward(*args)), losses[-1]][1])
    assert train.main([*base, "--output", str(tmp_path / "same")]) == 0
    assert train.main([*base, "--output", str(out), "--head-dim", "128"]) == 0
    assert len(losses) == 6
    assert losses[3].item() == pytest.approx(losses[0].item(), rel=1e-5)
    assert losses[5] < losses[3]
    wide = load_decoder(out)
    assert json.loads((out / "config.json").read_text())["head_dim"] == wide.config.head_dim == 128
    assert train.main([*base, "--output", str(tmp_path / "none"), "--head-dim", "96"]) == 2
    assert "Heads of 64 channels cannot get 96: give 128." in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_new_models_may_have_wide_heads(tmp_path):
    new = ["--tokens", "2048", "--layers", "1", "--head-dim", "128"]
    assert train.main([*SMALL, "--output", str(tmp_path), *new]) == 0
    assert load_decoder(tmp_path).config.head_dim == 128


def test_a_run_is_resumed_with_the_same_head_dim(tmp_path):
    config = train.model_config(1600, layers=1, width=64)
    train.save_progress(tmp_path, Decoder(config), [], {"recipe": {}})
    with pytest.raises(UsageError, match=r"has a blocks\.0\.\w+ of the shape \[.*\], this one \[.*\]; give the"):
        train.train(Recipe(), replace(config, head_dim=128), TINY, tmp_path, device="cpu", workers=0, resume=True)
