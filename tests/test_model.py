"""The decoder computes what transformers' Llama, Qwen2 and Qwen3 compute."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.checkpoint.weights import load_decoder
from minithink.config import ModelConfig, RopeScaling
from minithink.errors import MinithinkError
from minithink.model import Decoder, Rope, rope_frequencies
from tests.compare import assert_close, margins, rope_tolerance
from tests.drive import greedy, prompt_logits, transformers_checkpoint, transformers_model
from tests.strategies import configs, example_config, random_decoder

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other

ALL = [
    (a, r)
    for a in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    for r in ("default", "linear", "llama3", "yarn", "dynamic")
]


def assert_logits_match(config: ModelConfig, tokens: list[int], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = transformers_checkpoint(config, Path(folder), seed)
        decoder = load_decoder(folder)
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    assert want.std() > 0.1, "the comparison means nothing when all logits are alike"
    assert_close(f"logits of {config}", prompt_logits(decoder, tokens), want, atol=1e-4)


@given(config=configs(), data=st.data(), seed=st.integers(0, 2**31))
def test_logits_equal_transformers(config: ModelConfig, data: st.DataObject, seed: int) -> None:
    tokens = data.draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=12, max_size=config.max_position))
    assert_logits_match(config, tokens, seed)


@pytest.mark.parametrize(("architecture", "rope"), ALL)
def test_every_architecture_with_every_rope_kind(architecture: str, rope: str) -> None:
    tokens = torch.randint(61, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_logits_match(example_config(architecture, rope), tokens, seed=2)


def yarn(factor: float, original: int, fast: float, slow: float, theta: float = 1e4, **more: Any) -> Any:
    """An `example` for the properties below."""
    rope = RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, **more)
    return example(config=replace(example_config(head_dim=20, rope_theta=theta), rope=rope))


@given(config=configs())
@yarn(1.5, 64, 4.0, 1.0, theta=50.0)  # the ramp begins inside
@yarn(4.0, 8, 32.0, 2.0)  # a step at 0
@yarn(4.0, 64, 1.0, 1.0, truncate=False)  # a step between dimensions
@yarn(4.0, 64, 32.0, 0.5, theta=2.0)  # the ramp would end outside
@yarn(4.0, 64, 32.0, 1.0, mscale=1.0, mscale_all_dim=0.5)
@yarn(4.0, 64, 32.0, 1.0, mscale_all_dim=0.5)  # alone it means nothing
def test_rope_frequencies_equal_transformers(config: ModelConfig) -> None:
    rotary = transformers_model(example_config(config.architecture, num_layers=1)).model.rotary_emb
    reference = type(rotary)(transformers_model(config).config)
    freq, scale = rope_frequencies(config)
    assert_close(f"frequencies of {config}", freq, reference.inv_freq, atol=0, rtol=rope_tolerance(config.rope))
    assert scale == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    "rope",
    [
        RopeScaling("yarn", 4.0, 64, mscale=1.0, mscale_all_dim=-10 / math.log(4.0)),
        RopeScaling("yarn", 4.0, 64, beta_fast=1e-320),
        RopeScaling("yarn", 4.0, 64, attention_factor=math.inf),
        RopeScaling("linear", 1e-320, 64),
        RopeScaling("linear", 1e-37, 64),
    ],
)
def test_frequencies_that_are_no_numbers_are_refused(rope: RopeScaling) -> None:
    with pytest.raises(MinithinkError, match=rf"RoPE fields .*'{rope.kind}'.* no finite numbers"):
        rope_frequencies(replace(example_config(), rope=rope))


def test_rope_table_holds_every_position() -> None:
    config = example_config(max_position=33)
    cos, sin = Rope(config).at(torch.arange(33))
    assert cos.shape == sin.shape == (33, 1, config.head_dim)
    assert_close("cos² + sin²", cos.square() + sin.square(), torch.ones_like(cos), atol=1e-6)
    assert cos[0].eq(1).all()
    assert sin[0].eq(0).all()


# transformers generates token by token at several milliseconds each, so four configurations instead of a hundred.
GREEDY = [
    ("LlamaForCausalLM", "default"),
    ("LlamaForCausalLM", "llama3"),
    ("Qwen2ForCausalLM", "linear"),
    ("Qwen3ForCausalLM", "yarn"),
]


@pytest.mark.parametrize(("architecture", "rope"), GREEDY)
def test_greedy_continuations_equal_transformers(architecture: str, rope: str) -> None:
    """Alone and in a ragged batch, until the reference itself is undecided (top two logits within 2e-4)."""
    config = example_config(architecture, rope)
    model, decoder = transformers_model(config, seed=3), random_decoder(config, seed=3)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in (1, 37, 6)]
    batched, _ = greedy(decoder, prompts, 200)
    compared = 0
    for prompt, from_batch in zip(prompts, batched, strict=True):
        want = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=200,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = want.sequences[0, len(prompt) :].tolist()
        assert len(tokens) == 200
        undecided = (margins(torch.cat(want.logits)) < 2e-4).nonzero().flatten().tolist()
        steps = undecided[0] if undecided else 200
        alone, _ = greedy(decoder, [prompt], 200)
        assert alone[0][:steps] == tokens[:steps], f"{architecture}, {rope}, alone, prompt of {len(prompt)}"
        assert from_batch[:steps] == tokens[:steps], f"{architecture}, {rope}, batch, prompt of {len(prompt)}"
        compared += steps
    assert compared > 300, "the reference was undecided too early for this to be a test: choose another seed"


# Half precision is compared with float32 arithmetic on the same (rounded) weights. Every product rounds to 2^-9
# (bfloat16) or 2^-12 (float16) relative, some twenty times in a row in two layers, and logits have a standard
# deviation of about 2: a mean error of some 1 % (0.2 %) is expected, and five times that is a bug.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_half_precision(architecture: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    transformers_model(example_config(architecture), seed=5).to(dtype).save_pretrained(tmp_path)
    half, full = load_decoder(tmp_path), load_decoder(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in half.parameters()} == {dtype}
    assert {p.dtype for p in full.parameters()} == {torch.float32}
    tokens = torch.randint(61, (100,), generator=torch.Generator().manual_seed(6)).tolist()
    got, want = prompt_logits(half, tokens), prompt_logits(full, tokens)
    assert got.dtype == dtype
    error = (got.float() - want).square().mean().sqrt() / want.std()
    assert error < tolerance, f"{architecture} in {dtype}: relative error {error:.4f}"


class _Spy:
    """An `Attention` that returns zeros and records what it was shown."""

    def __init__(self) -> None:
        self.attended: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.tapped: list[int] = []

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        self.attended.append((layer, tuple(qk.shape), tuple(v.shape)))
        return torch.zeros_like(qk[:, : qk.shape[1] - v.shape[1]])

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        self.tapped.append(layer)
        return hidden + 1 if layer == -1 else hidden


def test_the_cache_sees_every_layer_and_may_steer() -> None:
    config = example_config()
    decoder, spy = random_decoder(config), _Spy()
    hidden = decoder(torch.tensor([1, 2, 3]), spy)
    qk, v = (3, config.num_heads + config.num_kv_heads, config.head_dim), (3, config.num_kv_heads, config.head_dim)
    assert spy.attended == [(0, qk, v), (1, qk, v)]
    assert spy.tapped == [0, 1, -1]
    steered = hidden - 1  # what the tap after the final norm added reaches the caller

    class Silent(_Spy):
        def tap(self, layer: int, hidden: Tensor) -> Tensor:
            return hidden

    assert_close("steering", steered, decoder(torch.tensor([1, 2, 3]), Silent()), atol=1e-6)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, apart = Decoder(example_config(tie_embeddings=True)), Decoder(example_config(tie_embeddings=False))
    assert tied.head is None
    assert sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in tied.parameters()) == 61 * 24
