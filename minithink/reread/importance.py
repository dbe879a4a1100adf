"""The importance of thinking tokens, on which DynTS's predictor is trained: the attention that they get later on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.loaded import Loaded
from minithink.reread.later import answer_rows, attention, of_others, thinking_of
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
    ids = [*prompt, *tokens]
    first = len(prompt)
    thinking = thinking_of(loaded, tokens)
    own = slice(first + thinking.start, first + thinking.stop)
    answer = answer_rows(loaded, first, tokens)
    hidden = list[Tensor]()
    from_answer = torch.zeros(len(ids), device=loaded.device)
    from_all = torch.zeros(len(ids), device=loaded.device)

    def see(position: Tensor, p: Tensor) -> None:
        seen = slice(p.shape[1])
        answers = (position >= answer.start) & (position < answer.stop)
        from_answer[seen] += p[answers].sum(0)
        from_all[seen] += of_others(position, p).sum(0)

    def tap(layer: int, x: Tensor) -> None:
        if layer == -1:
            hidden.append(x.float())

    queries = torch.arange(first, answer.stop, device=loaded.device)
    attention(loaded, ids, queries, see, tap)
    found = {"answer": from_answer[own], "hindsight": from_all[own]}
    counts = _needs(loaded, prompt, tokens)
    if counts is not None:
        found["needs"] = counts[own].to(loaded.device)
    targets = {name: _relative(sums) for name, sums in found.items()}
    return torch.cat(hidden)[own], targets


def _relative(sums: Tensor) -> Tensor:
    """Divided by their mean; all 0, if their sum is 0."""
    if float(sums.sum()) > 0:
        return sums / sums.mean()
    return torch.zeros_like(sums)


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
