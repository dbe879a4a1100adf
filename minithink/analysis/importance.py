"""Counterfactual importance of thoughts: how much the answer's distribution changes without one (ThinKV, figure 4).

The paper: "the KL divergence between A's distributions obtained with and without Y_i, averaged over 50 rollouts", in
the manner of Bogdan et al. (2025), for the segments Y_i of a thought and its final answer A. Here, two ways:

    suppressed   the rest of the thinking stays as it is written and is read again without attention to Y_i
                 (`suppress.py`). Rollouts are answers, drawn at temperature 1 behind the whole thinking; each is
                 scored token by token, and the mean is the KL of the answers' distributions, without the noise of
                 counting answers
    resampled    (`--resample N`) N texts are written anew from the end of Y_i on, and N from its beginning on; KL of
                 the final answers' frequencies in \\boxed{}, one added to each count. Texts that come to no answer
                 count as one answer. A text of M segments has M + 1 such sets: for a GPU

The paper does not say which of the two it does. What differs from it in any case: segments are τ tokens long, with
types by sparsity and by keywords; and by default there are fewer rollouts than 50.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch

from minithink.analysis import plots
from minithink.analysis.plots import SOURCES
from minithink.analysis.premises import finish
from minithink.analysis.segments import Text, begin_segments, by_type, segment_arguments, summary, texts
from minithink.analysis.suppress import suppress
from minithink.commands import natural
from minithink.engine import Engine
from minithink.errors import MinithinkError
from minithink.tasks import boxed

LONGEST = 512  # tokens of an answer that is drawn
NONE = "no answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    segment_arguments(parser)
    add = parser.add_argument
    add("--rollouts", type=natural, default=8, metavar="N", help="answers that are drawn for a text; 0: the text's "
        "own alone (default: 8; the paper: 50)")  # fmt: skip
    add("--resample", type=natural, default=0, metavar="N", help="also write on N times from every segment's ends "
        "(default: 0: do not)")  # fmt: skip


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, suppress, write the result, print a table."""
    engine, problems, result, policy = begin_segments(args, "importance", argv)
    found, unanswered = list[dict[str, Any]](), 0
    for text in texts(engine, problems, policy, args):
        if text.answer:
            found.append({**text.said(), **look(engine, text, args)})
        else:
            unanswered += 1
    if not found:
        raise MinithinkError(
            f"None of {len(problems)} texts comes to an answer within {args.max_new_tokens} tokens: give more "
            "--max-new-tokens."
        )
    groups = {name: grouped(found, name) for name in ("suppressed", "resampled") if name in found[0]}
    result["measurements"] = {"unanswered": unanswered, "by_type": groups, "texts": found}
    lines = chain.from_iterable(summary(of, name) for name, of in groups.items())
    return finish(args, result, lines, lambda: plots.importance(found))


def grouped(found: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[dict[str, Any]]]:
    """One measure by type, for types of every source."""
    return {
        source: by_type([pair for text in found for pair in zip(text[source], text[name], strict=True)])
        for source in SOURCES
    }


def look(engine: Engine, text: Text, args: argparse.Namespace) -> dict[str, Any]:
    """The importance of every segment of a text, in nats."""
    drawn = Counter(rollouts(engine, text, args.rollouts, args) if args.rollouts else [tuple(text.answer)])
    _, answered = suppress(engine, text.context, text.spans, list(drawn))  # [answers, N]
    times = torch.tensor(list(drawn.values()), dtype=torch.float64)
    out: dict[str, Any] = {"answers": len(drawn), "suppressed": (times @ answered / times.sum()).tolist()}
    if args.resample:
        finals = resample(engine, text, args)
        out["resampled"] = [between(behind, before) for before, behind in pairwise(finals)]
    return out


def rollouts(engine: Engine, text: Text, number: int, args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Answers that the model draws behind the thinking, from its own distribution."""
    drawn = engine.generate(
        [text.context], num_samples=number, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=args.seed,
        max_new_tokens=LONGEST, batch_size=args.batch_size,
    )  # fmt: skip
    return [tuple(r.token_ids) for r in drawn]


def resample(engine: Engine, text: Text, args: argparse.Namespace) -> list[Counter[str]]:
    """Final answers of continuations, at every segment's beginning and behind the last one: N + 1 counts."""
    finals = list[Counter[str]]()
    for at in (*(start for start, _ in text.spans), text.spans[-1][1]):
        drawn = engine.generate(
            [text.context[:at]], num_samples=args.resample, temperature=args.temperature, top_k=0, top_p=1.0,
            min_p=0.0, seed=args.seed, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size,
        )  # fmt: skip
        finals.append(Counter(final(r.text) for r in drawn))
    return finals


def final(text: str) -> str:
    """The answer of a continuation that thinks first."""
    found = boxed(text) if "</think>" in text else None
    return NONE if found is None else re.sub(r"\s", "", found)


def between(p: Counter[str], q: Counter[str]) -> float:
    """KL(p ‖ q) of two counts, of which every one is raised by one, for answers that occur in either."""
    answers = sorted({*p, *q})
    total_p, total_q = p.total() + len(answers), q.total() + len(answers)
    pairs = [((p[a] + 1) / total_p, (q[a] + 1) / total_q) for a in answers]
    return sum(x * math.log(x / y) for x, y in pairs)
