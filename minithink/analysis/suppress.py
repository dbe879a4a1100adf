"""Suppress segments one by one, and measure how the distributions of later tokens change.

For a segment Y_i, every later token reads the context with attention to Y_i masked in all layers and heads, so that
nothing of it is left, not even in the states of the tokens in between. Text and positions stay. The measure is the KL
divergence of the next token's distribution, with ‖ without, at the same token of the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.analysis.dense import Dense
from minithink.engine import Engine

QUERIES = 256  # tokens that are read at once: bounds the memory of their logits


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p · log(p / q) of every row, in nats. p, q: logits [n, V] → float64 [n], on the CPU."""
    log_p, log_q = (x.cpu().double().log_softmax(-1) for x in (p, q))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@torch.inference_mode()
def suppress(
    engine: Engine, context: Sequence[int], spans: Sequence[tuple[int, int]], answers: Sequence[Sequence[int]] = ()
) -> tuple[Tensor, Tensor]:
    """The divergence at later segments and in the answers, without each segment.

    Args:
        context: tokens of the prompt and the thinking.
        spans: the segments' positions in it, start and end, in order.
        answers: tokens that may follow it. The first one's distribution is that of the context's last token, so this
            token should be in no segment.

    Returns:
        thoughts: float64 [N, N]; [j, i], j > i: without segment i, the mean over the tokens of segment j of the
            divergence of their logits; else NaN.
        answered: float64 [answers, N]: the sum over the answer's tokens, which on average over answers that the model
            draws is KL(p(answer) ‖ p(answer without segment i)), by the chain rule.
    """
    device = engine.device
    end = len(context)
    cache = Dense(engine, 1, end + max(map(len, answers), default=0))

    def read(tokens: Sequence[int], first: int) -> Tensor:
        """Read tokens at positions from `first` on → hidden [n, d]. They replace the cached tokens from there on."""
        out = [torch.empty(0, engine.config.hidden_size, dtype=engine.dtype, device=device)]
        for at in range(first, first + len(tokens), QUERIES):
            part = list(tokens[at - first : at - first + QUERIES])
            cache.begin(torch.arange(at, at + len(part), device=device)[None], at + len(part))
            out.append(engine.decoder(torch.tensor(part, device=device), cache))
        return torch.cat(out)

    def apart(a: Tensor, b: Tensor) -> Tensor:
        """The divergence at every token. a, b: hidden [n, d], with and without."""
        logits = engine.decoder.logits
        parts = zip(a.split(QUERIES), b.split(QUERIES), strict=True)
        return torch.cat([divergence(logits(x), logits(y)) for x, y in parts])

    whole = read(context, 0)
    whole_answers = [torch.cat((whole[-1:], read(answer[:-1], end))) for answer in answers]
    thoughts = torch.full((len(spans), len(spans)), torch.nan, dtype=torch.float64)
    answered = torch.zeros(len(answers), len(spans), dtype=torch.float64)
    for i in reversed(range(len(spans))):  # from the last on: the cache before a segment is unchanged
        first, behind = spans[i]
        cache.kept.fill_(True)
        cache.kept[..., first:behind] = False
        hidden = read(context[behind:], behind)
        for j in range(i + 1, len(spans)):
            start, stop = spans[j]
            thoughts[j, i] = apart(whole[start:stop], hidden[start - behind : stop - behind]).mean()
        for k, answer in enumerate(answers):
            without = torch.cat((hidden[-1:], read(answer[:-1], end)))
            answered[k, i] = apart(whole_answers[k], without).sum()
    return thoughts, answered
