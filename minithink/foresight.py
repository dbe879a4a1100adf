"""What oracles see and no method can: the attention that tokens of a whole text get later on, and what a text may
still read. The importance of thinking tokens, on which DynTS's predictor is trained, is made of the same sums.

A text is read again with full attention, `QUERIES` tokens at a time, so no matrix of the whole text is in memory.
Attention is the mean over layers and heads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Live
from minithink.loaded import Loaded
from minithink.reading import QUERIES, read
from minithink.tasks import question_in
from minithink.tasks.needs import reader
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
        out[:, : p.shape[1]].index_add_(0, block, _of_others(position, p))

    attention(loaded, ids, torch.tensor(list(rows), dtype=torch.int64, device=loaded.device), see)
    return out.flip(0).cumsum(0).flip(0)


def _of_others(position: Tensor, p: Tensor) -> Tensor:
    """The same attention without that of a token to itself."""
    return p.scatter(1, position[:, None], 0.0)


def importance(loaded: Loaded, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """What DynTS's predictor is trained on: a text's thinking tokens, each with its scores.

        answer      Σ over the answer's tokens of their attention (eq. 6)
        hindsight   Σ over all later tokens of their attention
        needs       how many later statements need a content that this token is the newest to carry, where no token
                    of the prompt carries it; missing if the text is of no task family

    Scores are divided by their mean over the thinking tokens, so they do not depend on the answer's length.

    Returns:
        hidden: float32 [L, d], last hidden states after the final norm.
        targets: name → float32 [L]. All 0, if the sum is 0.
    """
    ids, m, think = [*prompt, *tokens], len(prompt), thinking_of(loaded, tokens)
    own = slice(m + think.start, m + think.stop)
    answer = answer_rows(loaded, m, tokens)
    hidden, sums = list[Tensor](), torch.zeros(2, len(ids), device=loaded.device)

    def see(position: Tensor, p: Tensor) -> None:
        n = p.shape[1]
        sums[0, :n] += p[(position >= answer.start) & (position < answer.stop)].sum(0)
        sums[1, :n] += _of_others(position, p).sum(0)

    def tap(layer: int, x: Tensor) -> None:
        if layer == -1:
            hidden.append(x.float())

    attention(loaded, ids, torch.arange(m, answer.stop, device=loaded.device), see, tap)
    found = {"answer": sums[0, own], "hindsight": sums[1, own]}
    if (counts := _needs(loaded, prompt, tokens)) is not None:
        found["needs"] = counts[own].to(loaded.device)
    targets = {name: x / x.mean() if float(x.sum()) > 0 else torch.zeros_like(x) for name, x in found.items()}
    return torch.cat(hidden)[own], targets


def _needs(loaded: Loaded, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
    """How often each token of a text is needed: float32 [T]; None: the text is of no task family."""
    pieces = loaded.tokenizer.pieces([*prompt, *tokens])
    if (question := question_in("".join(pieces[: len(prompt)]))) is None:
        return None
    text = reader(question, pieces[: len(prompt)])
    for piece in pieces[len(prompt) :]:
        text.add(piece)
    text.finish()
    counts = torch.zeros(len(pieces))
    for need in text.reading.needs:
        if min(need.places) >= len(prompt):
            counts[max(need.places)] += 1
    return counts


class _Follower:
    """A text that is followed token by token (`contract.Live`)."""

    def __init__(self, texts: Sequence[str], question: str, prompt: Sequence[int]) -> None:
        self._texts, self._reader = texts, reader(question, [texts[i] for i in prompt])

    def add(self, token: int) -> None:
        self._reader.add(self._texts[token])

    def live(self) -> tuple[list[int], list[int]]:
        found = sorted(self._reader.live())
        beside = list[int]()
        for statement in self._reader.reading.statements:
            if bisect_left(found, statement.start) < bisect_left(found, statement.end):
                beside += range(statement.start, statement.end)
        return found, beside


def followers(loaded: Loaded) -> Callable[[Sequence[int]], Live]:
    """The function that begins to follow a text: the ids of its prompt → `contract.Live`.

    It raises UsageError if the prompt holds no question of the task families.
    """
    texts = list[str]()  # of all tokens, from the first text on

    def begin(prompt: Sequence[int]) -> Live:
        if not texts:
            texts.extend(loaded.tokenizer.pieces(range(loaded.config.vocab_size)))
        question = question_in("".join(texts[i] for i in prompt))
        if question is None:
            raise UsageError(
                f"needs_oracle reads texts by the rules of the task families, and a prompt of {len(prompt)} tokens "
                "holds no question of theirs."
            )
        return _Follower(texts, question, prompt)

    return begin
