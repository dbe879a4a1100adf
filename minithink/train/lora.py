"""Train a LoRA adapter instead of the weights: two factors for each linear layer, and rows of the embedding.

    W = W₀ + s · B · A                     s = alpha / r; the decoder computes with W
    dA = s · Bᵀ · dW,   dB = s · dW · Aᵀ   the gradients of the factors follow from that of W

So nothing in the decoder changes. Before a step W is written into its weights; after the backward pass the gradients
of the factors are made from those of the weights. Our layers are fused (`qkv`, `gate_up`), and an adapter has factors
for q_proj, k_proj and so on: `tensors_of` shows each of these as a part of the fused weight, and of its gradient.

A starts as in PEFT (uniform, of a standard deviation of 1 / √(3 · in)), and B with zeros: the first step begins with
the model as it was. Rows start as the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from minithink.checkpoint.adapter import PREFIX, ROWS, WEIGHTS, Adapter, save_adapter
from minithink.checkpoint.weights import EMBED, tensors_of
from minithink.errors import UsageError, quoted
from minithink.model import Decoder
from minithink.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shape:
    """What an adapter consists of."""

    rank: int
    alpha: float
    tokens: tuple[int, ...] = ()  # ids whose rows are trained

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {"rank": self.rank, "alpha": self.alpha, "tokens": list(self.tokens)}

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def ids_of(names: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of tokens in their order. UsageError: the tokenizer lacks one, or one is named twice."""
    found = list[int]()
    for name in names:
        id = tokenizer.id_of(name)
        if id is None:
            raise UsageError(f"The tokenizer has no token {quoted(name)}: name its tokens in --train-tokens.")
        if id in found:
            raise UsageError(f"--train-tokens names the token {quoted(name)} twice: leave one out.")
        found.append(id)
    return tuple(found)


class Lora:
    """The parameters of an adapter, and the decoder that computes with them."""

    def __init__(self, decoder: Decoder, shape: Shape, seed: int) -> None:
        """
        Args:
            decoder: with the weights that stay, float32, where it is trained. Its parameters change from now on.
            shape: of the adapter.
            seed: of the draws for A.
        """
        self.decoder = decoder
        self.shape = shape
        self.weights = tensors_of(decoder)
        self.layers = [name for name in self.weights if name.endswith("_proj.weight")]
        changed = [*self.layers, EMBED] if shape.tokens else self.layers
        self.base = {name: self.weights[name].clone() for name in changed}
        self.gradients = _gradients(decoder, embed=bool(shape.tokens))
        self.a = dict[str, nn.Parameter]()  # by the names of the weights: [r, in]
        self.b = dict[str, nn.Parameter]()  # [out, r]
        generator = torch.Generator().manual_seed(seed)
        for name in self.layers:
            out, width = self.base[name].shape
            bound = 1 / math.sqrt(width)
            drawn = torch.empty(shape.rank, width).uniform_(-bound, bound, generator=generator)
            self.a[name] = nn.Parameter(drawn.to(decoder.embed.device))
            self.b[name] = nn.Parameter(torch.zeros(out, shape.rank, device=decoder.embed.device))
        self.rows: nn.Parameter | None = None  # [tokens, d]
        if shape.tokens:
            self.rows = nn.Parameter(self.base[EMBED][list(shape.tokens)])

    @torch.no_grad()
    def begin_with(self, folder: Path, model: Path) -> str:
        """Take the factors and rows of an adapter of the same shape → the hash of the weights with it.

        Args:
            folder: of the adapter.
            model: the folder of the weights that stay.

        Raises:
            MinithinkError: the adapter cannot be read.
            UsageError: it has another shape.
        """
        adapter = Adapter(folder, self.decoder.config)
        stored = load_file(folder / WEIGHTS)
        wanted = dict(self.named_parameters())
        if stored.keys() != wanted.keys():
            some = sorted(stored.keys() ^ wanted.keys())[0]
            raise UsageError(
                f"{folder} and this run do not train the same tensors, as {some}: give the same options."
            )
        for name, parameter in wanted.items():
            if stored[name].shape != parameter.shape:
                shapes = f"{list(stored[name].shape)}, here {list(parameter.shape)}"
                raise UsageError(f"{folder} has a {name} of the shape {shapes}: give the same options.")
        scales = {factors.scale for factors in adapter.factors.values()}
        if scales != {self.shape.scale}:
            raise UsageError(
                f"{folder} counts its factors {sorted(scales)} times, this run {self.shape.scale} times: give its "
                "--lora-alpha."
            )
        tokens = [rows.tokens for rows in adapter.rows.values()]
        if tokens and tokens != [self.shape.tokens]:
            raise UsageError(
                f"{folder} trains the tokens {list(tokens[0])}, this run {list(self.shape.tokens)}: "
                "name the same ones."
            )
        for name, parameter in wanted.items():
            parameter.copy_(stored[name])
        return adapter.hash_over(model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by the names of an adapter's file."""
        for name in self.layers:
            module = PREFIX + name.removesuffix(".weight")
            yield f"{module}.lora_A.weight", self.a[name]
            yield f"{module}.lora_B.weight", self.b[name]
        if self.rows is not None:
            yield PREFIX + EMBED.removesuffix(".weight") + ROWS, self.rows

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained."""
        for _, parameter in self.named_parameters():
            yield parameter

    @torch.no_grad()
    def merge(self) -> None:
        """Write W into the decoder."""
        for name in self.layers:
            merged = torch.addmm(self.base[name], self.b[name], self.a[name], alpha=self.shape.scale)
            self.weights[name].copy_(merged)
        if self.rows is not None:
            self.weights[EMBED][list(self.shape.tokens)] = self.rows

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Make the gradients of the factors and rows from those of the decoder, which become 0."""
        scale = self.shape.scale
        for name in self.layers:
            gradient = self.gradients[name]
            self.a[name].grad = scale * (self.b[name].t() @ gradient)
            self.b[name].grad = scale * (gradient @ self.a[name].t())
        if self.rows is not None:
            self.rows.grad = self.gradients[EMBED][list(self.shape.tokens)]
        for parameter in self.decoder.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """AdamW, with weight decay for the factors and without for the rows."""
        groups = [{"params": [*self.a.values(), *self.b.values()], "weight_decay": weight_decay}]
        if self.rows is not None:
            groups.append({"params": [self.rows], "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=self.decoder.embed.is_cuda)

    def save(self, folder: Path, base: str) -> None:
        """Write the adapter in PEFT's format, in bfloat16. base: the name of the model."""
        tensors = {name: parameter.detach().bfloat16() for name, parameter in self.named_parameters()}
        save_adapter(
            folder,
            tensors,
            rank=self.shape.rank,
            alpha=self.shape.alpha,
            tokens=self.shape.tokens,
            base=base,
        )


def _gradients(decoder: Decoder, embed: bool) -> dict[str, Tensor]:
    """Give the decoder's matrices gradients of 0, into which backward passes add, and show them as `tensors_of` shows
    weights. All other parameters stay as they are, without a gradient. embed: whether the embedding has one, too."""
    with torch.device("meta"):
        twin = Decoder(decoder.config)
    for path, parameter in decoder.named_parameters():
        place, _, name = path.rpartition(".")
        wanted = name in ("qkv", "o", "gate_up", "down") or (embed and name == "embed")
        parameter.requires_grad_(wanted)
        if wanted:
            parameter.grad = torch.zeros_like(parameter)
            setattr(twin.get_submodule(place), name, nn.Parameter(parameter.grad, requires_grad=False))
    return tensors_of(twin)
