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
from minithink.reading import QUERIES, read
from minithink.thinking import CLOSE, OPEN


def thinking_of(loaded: Loaded, tokens: Sequence[int]) -> range:
    """The thinking tokens of a generated text, those between the tags: a range of its tokens. If `</think>` never
    comes, all tokens think."""
    opening, closing = loaded.tokenizer.id_of(OPEN), loaded.tokenizer.id_of(CLOSE)
    end = next((i for i, token in enumerate(tokens) if token == closing), len(tokens))
    return range(min(end, int(bool(tokens) and tokens[0] == opening)), end)


def attention(
    loaded: Loaded, ids: Sequence[int], queries: Tensor, see: Callable[[Tensor, Tensor], None],
    tap: Callable[[int, Tensor], None] | None = None,
) -> None:  # fmt: skip
    """Read a text, and call see(position, p) with some queries at a time.

    Args:
        ids: the tokens of the text.
        queries: int64 [N], the positions of the queries that are shown, ascending.
        see: position: int64 [n], of these queries; p: float32 [n, S], their attention to the S tokens that are read
            so far, the mean over layers and heads.
        tap: as of `reading.read`.
    """
    layers, sums, at = loaded.config.num_layers, dict[int, Tensor](), 0

    def one(layer: int, logits: Tensor, seen: Tensor) -> None:
        nonlocal at
        p = logits.flatten(1, 2).masked_fill(~seen, -torch.inf).softmax(-1).mean(1)  # [n, S]
        sums[0] = p if layer == 0 else sums[0] + p
        if layer == layers - 1:
            see(queries[at : at + len(p)], sums.pop(0) / layers)
            at += len(p)

    read(loaded, ids, one, queries=queries, at_once=QUERIES, tap=tap)


def answer_rows(loaded: Loaded, prompt: int, tokens: Sequence[int]) -> range:
    """Positions of the answer: behind `</think>`, without a token that ends the text. prompt: tokens before it."""
    stop = len(tokens) - int(bool(tokens) and tokens[-1] in loaded.stop_ids)
    return range(prompt + thinking_of(loaded, tokens).stop + 1, prompt + stop)


def later(
    loaded: Loaded, prompt: Sequence[int], tokens: Sequence[int], part: Literal["answer", "rest"], every: int
) -> Tensor:
    """The attention that the tokens of a text get later on.

    Args:
        prompt, tokens: of a text, the generated ones behind the prompt.
        part: whose attention counts: the answer's, or that of all tokens from a moment on.
        every: generated tokens of a block.

    Returns:
        float32 [blocks, T]: row i counts queries from generated token i · every on; "answer": one row for all.
    """
    ids, m = [*prompt, *tokens], len(prompt)
    answer = answer_rows(loaded, m, tokens)
    rows = answer if part == "answer" else range(m, answer.stop)
    blocks = 1 if part == "answer" else -(-max(1, len(tokens)) // every)
    out = torch.zeros(blocks, len(ids), device=loaded.device)

    def see(position: Tensor, p: Tensor) -> None:
        block = torch.zeros_like(position) if part == "answer" else (position - m) // every
        out[:, : p.shape[1]].index_add_(0, block, of_others(position, p))

    attention(loaded, ids, torch.tensor(list(rows), dtype=torch.int64, device=loaded.device), see)
    return out.flip(0).cumsum(0).flip(0)


def of_others(position: Tensor, p: Tensor) -> Tensor:
    """The same attention without that of a token to itself."""
    return p.scatter(1, position[:, None], 0.0)
