"""The importance of thinking tokens, on which DynTS's predictor is trained: the attention that they get later on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.foresight import answer_rows, attention, of_others, thinking_of
from minithink.loaded import Loaded
from minithink.tasks import question_in
from minithink.tasks.needs import read


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
        sums[1, :n] += of_others(position, p).sum(0)

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
    question = question_in("".join(pieces[: len(prompt)]))
    if question is None:
        return None
    counts = torch.zeros(len(pieces))
    for need in read(question, pieces, len(prompt)).needs:
        if min(need.places) >= len(prompt):
            counts[max(need.places)] += 1
    return counts
