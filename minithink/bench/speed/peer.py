"""The peer of the decode benchmark: transformers, with its best ordinary setting.

eval mode, inference mode, sdpa attention; `generate` runs greedily and with no stop token, on the same weights.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink.bench.speed.clock import wait
from minithink.checkpoint.weights import tensors_of
from minithink.config import ModelConfig
from minithink.errors import MinithinkError
from minithink.model import Decoder

CACHES = ("dynamic", "static")  # transformers' default, and its preallocated one
CHUNK = 512  # tokens of each sequence per forward pass, when `Theirs` reads prompts


def transformers() -> Any:
    """The module, which is slow to import and an extra of this package."""
    try:
        module = importlib.import_module("transformers")
    except ImportError:
        raise MinithinkError(
            "The comparison needs transformers, which is not installed: run `pip install 'transformers>=5'`, "
            "or drop the comparison with --no-peer."
        ) from None
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


class Peer:
    """A model of transformers that generates a fixed number of tokens."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        # min_new_tokens would forbid the stop token, and so change the text: without a stop token none is needed.
        self.model.generation_config = transformers().GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0
        )

    @classmethod
    def from_folder(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> Peer:
        """The model of a checkpoint folder."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the folder is here: nothing is to be looked up
        auto = transformers().AutoModelForCausalLM
        return cls(auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device))

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> Peer:
        """A model with a copy of a decoder's weights, in transformers' own memory layout."""
        module = transformers()
        fields = decoder.config.to_dict()
        config = module.AutoConfig.for_model(fields.pop("model_type"), **fields)
        with decoder.embed.device:
            model = module.AutoModelForCausalLM.from_config(
                config, dtype=decoder.embed.dtype, attn_implementation="sdpa"
            )
        views = tensors_of(decoder)
        parameters = dict(model.named_parameters())
        if views.keys() != parameters.keys():
            raise MinithinkError(f"transformers names its tensors differently: {sorted(views.keys() ^ parameters)}.")
        with torch.no_grad():
            for name, view in views.items():
                parameters[name].copy_(view)
        return cls(model)

    @torch.inference_mode()
    def generate(self, prompts: Tensor, new_tokens: int, cache: str = "dynamic", **options: Any) -> list[list[int]]:
        """prompts: [B, T] → `new_tokens` token ids of every row. options: more arguments of `generate`."""
        return self._generate(prompts, new_tokens, cache, **options)[:, prompts.shape[1] :].tolist()

    @torch.inference_mode()
    def margins(self, prompts: Tensor, new_tokens: int) -> tuple[list[list[int]], Tensor]:
        """The same tokens, and by how much each won: largest minus second largest logit, [B, new_tokens] float32."""
        out = self._generate(prompts, new_tokens, "dynamic", output_logits=True, return_dict_in_generate=True)
        top = torch.stack([logits.float().topk(2, dim=-1).values for logits in out.logits], dim=1)  # [B, n, 2]
        return out.sequences[:, prompts.shape[1] :].tolist(), (top[..., 0] - top[..., 1]).cpu()

    def _generate(self, prompts: Tensor, new_tokens: int, cache: str, **options: Any) -> Any:
        if cache != "dynamic":
            options["cache_implementation"] = cache
        mask = torch.ones_like(prompts)
        return self.model.generate(prompts, attention_mask=mask, max_new_tokens=new_tokens, **options)


class Theirs:
    """transformers' forward pass, without the bookkeeping of its `generate`.

    Args:
        cache: "dynamic", or "static". With a static cache transformers' `generate` compiles the model on a GPU for
            single steps, and so does this class.
        tokens: of each sequence, at most; a static cache has room for so many from the start.
    """

    def __init__(self, peer: Peer, device: torch.device, cache: str = "dynamic", tokens: int = 0) -> None:
        self.model = peer.model
        self.device = device
        self.cache: Any = None
        self.last = self.tokens = torch.empty(0)
        self._one_token = self.model
        if cache == "static":
            self.cache = transformers().StaticCache(config=self.model.config, max_cache_len=tokens)
            if device.type == "cuda":
                self._one_token = self.model.get_compiled_call(transformers().CompileConfig())

    def read(self, prompts: Tensor) -> None:
        """Read prompts [B, T], and choose the first tokens. `last` has their logits, [B, V]."""
        for start in range(0, prompts.shape[1], CHUNK):
            self._forward(self.model, prompts[:, start : start + CHUNK].to(self.device))

    def hold(self, config: ModelConfig, batch: int, context: int, dtype: torch.dtype) -> None:
        """So many tokens of noise instead of a prompt."""
        self.cache = None  # before the new one is made
        self.cache = transformers().DynamicCache()
        noise = torch.randn(1, config.num_kv_heads, context, config.head_dim, device=self.device, dtype=dtype)
        for layer in range(config.num_layers):
            keys = noise.expand(batch, -1, -1, -1)
            self.cache.update(keys, keys, layer)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=self.device)

    def step(self) -> None:
        """One token further; chosen tokens stay on the device."""
        self._forward(self._one_token, self.tokens[:, None])

    def _forward(self, model: Any, tokens: Tensor) -> None:
        done = model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = done.past_key_values
        self.last = done.logits[:, -1]
        self.tokens = self.last.argmax(-1)
        wait(self.device)
