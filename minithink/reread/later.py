"""What oracles see and no method can: the attention that tokens of a whole text get later on.

A text is read again with full attention, `QUERIES` tokens at a time, so no matrix of the whole text is in memory.
Attention is the mean over layers and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from minithink.loaded import Loaded
from minithink.reread.attention import QUERIES, Tap, read


def thinking_of(loaded: Loaded, tokens: Sequence[int]) -> range:
    """The thinking tokens of a generated text, those between the tags: a range of its tokens. If the closing tag
    never comes, all tokens think."""
    opening, closing = loaded.tokenizer.think_ids
    end = next((i for i, token in enumerate(tokens) if token == closing), len(tokens))
    begin = 1 if tokens and tokens[0] == opening else 0
    return range(min(end, begin), end)


def answer_rows(loaded: Loaded, prompt: int, tokens: Sequence[int]) -> range:
    """Positions of the answer: behind the closing tag, without a token that ends the text. prompt: tokens before
    it."""
    end = len(tokens)
    if tokens and tokens[-1] in loaded.stop_ids:
        end -= 1
    return range(prompt + thinking_of(loaded, tokens).stop + 1, prompt + end)


def attention(
    loaded: Loaded,
    ids: Sequence[int],
    queries: Tensor,
    see: Callable[[Tensor, Tensor], None],
    tap: Tap | None = None,
) -> None:
    """Read a text, and call see(position, p) with some queries at a time.

    Args:
        loaded: the model, `Engine.loaded`.
        ids: the tokens of the text.
        queries: int64 [N], the positions of the queries that are shown, ascending.
        see: position: int64 [n], of these queries; p: float32 [n, S], their attention to the S tokens that are read
            so far, the mean over layers and heads.
        tap: as of `reading.read`.
    """
    layers = loaded.config.num_layers
    total = torch.zeros(0)  # [n, S], the sum over the layers so far
    shown = 0  # queries

    def see_layer(layer: int, logits: Tensor, seen: Tensor) -> None:
        nonlocal total, shown
        p = logits.flatten(1, 2).masked_fill(~seen, -torch.inf).softmax(-1).mean(1)
        total = p if layer == 0 else total + p
        if layer == layers - 1:
            see(queries[shown : shown + len(p)], total / layers)
            shown += len(p)

    read(loaded, ids, see_layer, queries=queries, at_once=QUERIES, tap=tap)


def later(
    loaded: Loaded, prompt: Sequence[int], tokens: Sequence[int], part: Literal["answer", "rest"], every: int
) -> Tensor:
    """The attention that the tokens of a text get later on.

    Args:
        loaded: the model, `Engine.loaded`.
        prompt, tokens: of a text, the generated ones behind the prompt.
        part: whose attention counts: the answer's, or that of all tokens from a moment on.
        every: generated tokens of a block.

    Returns:
        float32 [blocks, T]: row i counts queries from generated token i · every on; "answer": one row for all.
    """
    ids = [*prompt, *tokens]
    first = len(prompt)
    answer = answer_rows(loaded, first, tokens)
    if part == "answer":
        rows = answer
        blocks = 1
    else:
        rows = range(first, answer.stop)
        blocks = -(-max(1, len(tokens)) // every)
    out = torch.zeros(blocks, len(ids), device=loaded.device)

    def see(position: Tensor, p: Tensor) -> None:
        block = torch.zeros_like(position) if part == "answer" else (position - first) // every
        out[:, : p.shape[1]].index_add_(0, block, of_others(position, p))

    queries = torch.tensor(list(rows), dtype=torch.int64, device=loaded.device)
    attention(loaded, ids, queries, see)
    return out.flip(0).cumsum(0).flip(0)


def of_others(position: Tensor, p: Tensor) -> Tensor:
    """The same attention without that of a token to itself."""
    return p.scatter(1, position[:, None], 0.0)
