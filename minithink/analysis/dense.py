"""Decoding with dense masks: every token stays in memory, and a mask says which tokens are still attended.

This saves no memory. It is the shortest way to ask what a text would be without some of its tokens: the slot of a
token is its position, and a masked slot is not attended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from minithink.engine import Engine
from minithink.ref.rope import rope
from minithink.text.tags import THINK

EVERY = 16  # steps from one call of `watch` to the next
READ = 128  # tokens of each prompt that are read at once: attention's logits are rows · heads · READ · longest
Steering = Callable[[Tensor, int, Tensor], Tensor]  # (last token [rows], layer, hidden [rows, d]) → hidden


class Dense:
    """Keys and values of `rows` sequences, and the mask `kept`; an `Attention` for the decoder."""

    def __init__(self, engine: Engine, rows: int, capacity: int) -> None:
        """capacity: tokens of a sequence."""
        c = engine.config
        device = engine.device
        self.rope = engine.rope
        self.groups = c.num_heads // c.num_kv_heads
        shape = (c.num_layers, rows, c.num_kv_heads, capacity)
        self.k, self.v = (torch.zeros(*shape, c.head_dim, dtype=engine.dtype, device=device) for _ in range(2))
        self.kept = torch.ones(shape, dtype=torch.bool, device=device)
        self.steer: Callable[[int, Tensor], Tensor] | None = None  # (layer, hidden) → hidden
        self.row = torch.arange(rows, device=device)[:, None]
        self.column = torch.arange(capacity, device=device)

    def begin(self, pos: Tensor, end: int) -> None:
        """Announce tokens: pos int64 [rows, n], all below `end`. A later token at a position replaces the older."""
        self.pos = pos
        self.end = end
        self.cos, self.sin = self.rope.at(pos.flatten())

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """qk: [rows·n, Hq + Hkv, D], v: [rows·n, Hkv, D] → [rows·n, Hq, D]."""
        rows, n = self.pos.shape
        hkv = v.shape[1]
        q, k = rope(qk, self.cos, self.sin).unflatten(0, (rows, n)).tensor_split((-hkv,), dim=2)
        self.k[layer][self.row, :, self.pos] = k.to(self.k.dtype)
        self.v[layer][self.row, :, self.pos] = v.unflatten(0, (rows, n)).to(self.v.dtype)
        k = self.k[layer, :, :, : self.end]
        v = self.v[layer, :, :, : self.end]
        grouped = q.unflatten(2, (hkv, self.groups))  # [rows, n, Hkv, G, D]
        logits = torch.einsum("bnhgd,bhtd->bhgnt", grouped, k) / q.shape[-1] ** 0.5
        past = self.column[: self.end] <= self.pos[..., None]  # [rows, n, T]
        seen = past[:, None, None] & self.kept[layer, :, :, None, None, : self.end]
        p = logits.float().masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("bhgnt,bhtd->bnhgd", p.to(v.dtype), v)
        return out.flatten(2, 3).flatten(0, 1)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden if self.steer is None or layer < 0 else self.steer(layer, hidden)


@torch.inference_mode()
def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    steer: Steering | None = None,
    masked: Tensor | None = None,
    watch: Callable[[int], object] = lambda tokens: None,
) -> list[list[int]]:
    """Generated tokens of every prompt, with the token that ended the text. Two runs with equal prompts and seed draw
    the same noise, so they write the same text until their logits differ.

    Args:
        steer: acts on generated tokens.
        masked: tokens of the prompts that are masked in all lanes when the prompts are read, bool [rows, longest];
            not their last tokens.
        watch: called every EVERY steps and at the end, with the number of tokens since the last call.
    """
    device = engine.device
    rows = len(prompts)
    stops = torch.tensor(sorted(engine.generation_config.stop_ids), device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    widest = int(lengths.max())
    tokens = torch.zeros(rows, widest, dtype=torch.long, device=device)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
    max_new_tokens = min(max_new_tokens, engine.config.max_position - widest)
    cache = Dense(engine, rows, widest + max_new_tokens)
    read = []
    for first in range(0, widest, READ):
        pos = cache.column[first : min(first + READ, widest)]
        cache.begin(pos.expand(rows, -1), first + len(pos))
        read.append(engine.decoder(tokens[:, pos].flatten(), cache).view(rows, len(pos), -1))
    hidden = torch.cat(read, 1)[cache.row[:, 0], lengths - 1]
    if masked is not None:
        cache.kept[..., :widest] &= ~masked[None, :, None]
        cache.begin((lengths - 1)[:, None], widest)  # the last token again: the first answer is drawn behind the mask
        hidden = engine.decoder(tokens[cache.row[:, 0], lengths - 1], cache)
    generator = torch.Generator(device).manual_seed(seed)
    out = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    written = torch.zeros((), dtype=torch.long, device=device)  # tokens of all rows since the last call of watch
    for step in range(max_new_tokens):
        logits = engine.decoder.logits(hidden).float()
        if temperature > 0:  # argmax(logits / T + Gumbel noise) is a draw from the softmax
            noise = torch.rand(logits.shape, generator=generator, device=device).clamp_min(1e-20)
            logits = logits / temperature - (-noise.log()).log()
        token = torch.where(done, stops[0], logits.argmax(-1))
        out[:, step] = token
        written += (~done).sum()
        done |= torch.isin(token, stops)
        if step % EVERY == EVERY - 1:
            watch(int(written))
            written.zero_()
            if bool(done.all()):
                break
        cache.begin((lengths + step)[:, None], widest + step + 1)
        cache.steer = partial(steer, token) if steer else None
        hidden = engine.decoder(token, cache)
    watch(int(written))
    ends = torch.isin(out, stops)
    ends[:, -1] = True
    return [row[: int(n) + 1] for row, n in zip(out.tolist(), ends.int().argmax(1), strict=True)]


def thinking_end(engine: Engine, generated: Sequence[int]) -> int:
    """How many generated tokens come before `</think>`; all, if it never comes."""
    close = engine.tokenizer.id_of(THINK.close)
    return next((i for i, t in enumerate(generated) if t == close), len(generated))


def batches(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size`."""
    return (slice(i, i + size) for i in range(0, count, size))
