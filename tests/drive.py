"""The step protocol in the few lines that the tests need, and transformers' side of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink.config import ModelConfig
from minithink.kv.full import FullCache
from minithink.model import Decoder, Rope
from tests.strategies import random_weights


def full_cache(decoder: Decoder, **options: Any) -> FullCache:
    """A FullCache in the dtype of the decoder."""
    return FullCache(decoder.config, Rope(decoder.config), dtype=decoder.embed.dtype, **options)


@torch.inference_mode()
def step(decoder: Decoder, cache: FullCache, seqs: Sequence[int], chunks: Sequence[Sequence[int]]) -> list[Tensor]:
    """One forward pass: sequence seqs[i] gets the tokens chunks[i]; returns its logits, [len(chunks[i]), V] each."""
    counts = [len(chunk) for chunk in chunks]
    cache.begin_step(seqs, counts)
    hidden = decoder(torch.tensor([token for chunk in chunks for token in chunk]), cache)
    cache.end_step()
    return list(decoder.logits(hidden).split(counts))


def prompt_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits [n, V] of all tokens of one prompt in one pass."""
    cache = full_cache(decoder)
    cache.join(0, len(tokens))
    return step(decoder, cache, [0], [tokens])[0]


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], list[Tensor]]:
    """`count` most likely tokens for each prompt, all in one ragged batch, and the logits [count, V] of each."""
    cache, seqs = full_cache(decoder), range(len(prompts))
    for seq in seqs:
        cache.join(seq, len(prompts[seq]) + count)
    chunks = [list(prompt) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in seqs]
    logits: list[list[Tensor]] = [[] for _ in seqs]
    for _ in range(count):
        for seq, rows in enumerate(step(decoder, cache, seqs, chunks)):
            logits[seq].append(rows[-1])
            tokens[seq].append(int(rows[-1].argmax()))
            chunks[seq] = tokens[seq][-1:]
    return tokens, [torch.stack(rows) for rows in logits]


def transformers_model(config: ModelConfig, seed: int = 0) -> Any:
    """transformers' model of the same shape with `random_weights`; nothing of minithink's reading is involved."""
    import transformers  # here, because it is slow to import and most tests do without

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    r = config.rope
    rope: dict[str, Any] = {"rope_type": r.kind, "rope_theta": config.rope_theta}
    if r.kind != "default":
        rope["factor"] = r.factor
    if r.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = r.original_max_position
    if r.kind == "llama3":
        rope |= {"low_freq_factor": r.low_freq_factor, "high_freq_factor": r.high_freq_factor}
    if r.kind == "yarn":
        rope |= {"beta_fast": r.beta_fast, "beta_slow": r.beta_slow, "truncate": r.truncate}
        optional = {"attention_factor": r.attention_factor, "mscale": r.mscale, "mscale_all_dim": r.mscale_all_dim}
        rope |= {name: value for name, value in optional.items() if value is not None}
    fields: dict[str, Any] = {} if config.architecture == "Qwen2ForCausalLM" else {"attention_bias": config.qkv_bias}
    hf_config = getattr(transformers, config.architecture.removesuffix("ForCausalLM") + "Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=list(config.eos_token_ids) or None,
        pad_token_id=None,
        **fields,
    )
    model = getattr(transformers, config.architecture)(hf_config).eval().requires_grad_(False)
    state = dict(model.state_dict())
    if config.tie_embeddings:
        del state["lm_head.weight"]
    for tensor_name, tensor in random_weights({n: t.shape for n, t in state.items()}, seed).items():
        state[tensor_name].copy_(tensor)
    return model


def transformers_checkpoint(config: ModelConfig, folder: Path, seed: int = 0) -> Any:
    """Write a checkpoint with transformers' own `save_pretrained`; returns its model."""
    model = transformers_model(config, seed)
    model.save_pretrained(folder)
    return model
