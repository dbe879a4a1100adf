"""Measure how a text changes without one of its segments: the importance and the association of thoughts (ThinKV,
figures 4 and 5).

The thinking of full-cache texts is cut into segments of τ tokens. The rest of a text is read again without attention
to one segment Y_i, in all layers and heads (`suppress.py`):

    importance   of Y_i for the answer: the KL divergence of the answers' distributions, with ‖ without. Answers are
                 drawn at temperature 1 behind the whole thinking. Each is scored token by token, and the mean counts
    association  of Y_i with a later Y_j: the mean KL divergence, with ‖ without, of the logits at Y_j (§3.3)

Beside the values of every text, in nats, the result has means by type. Keywords give a segment its type
(`minithink/text/thoughts.py`). Association also has means by two numbers: how many of the segments i + 1 to j are
transitions (observation 3: with each transition, earlier segments matter less), and the distance j − i, which grows
with that number. The paper does not say how a segment is taken out. It draws 50 answers.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from minithink.analysis import runs
from minithink.analysis.dense import decode, thinking_end
from minithink.analysis.suppress import suppress
from minithink.cli.commands import natural, positive
from minithink.engine import Engine
from minithink.errors import MinithinkError, counted
from minithink.results.progress import progress
from minithink.text.thoughts import NAMES, kinds, segments

LONGEST = 512  # tokens of an answer that is drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser)
    add = parser.add_argument
    add("--tau", type=positive, default=128, metavar="N", help="τ, tokens of a segment (default: 128)")
    add(
        "--rollouts",
        type=natural,
        default=8,
        metavar="N",
        help="answers that are drawn for a text; 0: only the text's own (default: 8)",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, suppress, write the result, print means."""
    engine, problems, result = runs.begin(args, "segments", argv)
    found = list[dict[str, Any]]()
    texts = runs.generate(engine, problems, args)
    with progress(len(problems), 0, "suppressing segments") as advance:
        for problem, generated in zip(problems, texts, strict=True):
            text = cut(engine, engine.prompt_ids(problem.question), generated, args.tau)
            right = runs.is_right(engine.tokenizer.decode(generated), problem)
            if text.spans and (text.answer or len(text.spans) > 1):
                about = {"id": problem.id, "right": right, "tokens": len(generated), "types": text.types}
                found.append({**about, **without_each(engine, text, args)})
            advance(right)
    if not found:
        raise MinithinkError(
            f"None of {counted(len(problems), 'text')} comes to an answer, or has two segments of {args.tau} tokens: "
            "give more --max-new-tokens, or a smaller --tau."
        )
    every = [*chain.from_iterable(map(pairs, found))]
    of_types = list[tuple[str, float]]()
    for one in found:
        if "importance" in one:
            of_types += zip(one["types"], one["importance"], strict=True)
    important = means(of_types)
    by = {name: means((getattr(p, name), p.value) for p in every) for name in ("types", "transitions", "distance")}
    result["measurements"] = {"importance": important, "association": by, "texts": found}
    lines = []
    for what, of in (("importance", important), ("association, earlier → later", by["types"])):
        for m in of:
            types = m["of"] if isinstance(m["of"], str) else " → ".join(m["of"])
            lines.append(f"{what}: {types} {m['mean']:.4g} ({m['count']:,})")
    return runs.finish(args, result, lines)


class Text(NamedTuple):
    """A text, cut."""

    context: list[int]  # the prompt, the thinking, and `</think>` if it comes
    answer: list[int]  # the tokens behind `</think>`, with the one that ends the text; empty: no answer
    spans: list[tuple[int, int]]  # of the segments: positions in `context`, start and end
    types: list[str]  # of the segments


def cut(engine: Engine, prompt: Sequence[int], generated: Sequence[int], tau: int) -> Text:
    """Segments of τ tokens of the thinking; the last one may be shorter."""
    n = thinking_end(engine, generated)
    start = len(prompt)
    spans = [(start + i, start + min(i + tau, n)) for i in range(0, n, tau)]
    types = [NAMES[kind] for kind in segments(kinds(engine.tokenizer.pieces(generated[:n])), tau)]
    return Text([*prompt, *generated[: n + 1]], list(generated[n + 1 :]), spans, types)


def without_each(engine: Engine, text: Text, args: argparse.Namespace) -> dict[str, Any]:
    """`association` of every segment with each earlier one; and where there is an answer, `importance` of every
    segment, and the number of different `answers`."""
    drawn = [text.answer] if text.answer else []
    if drawn and args.rollouts:
        drawn = decode(engine, [text.context] * args.rollouts, LONGEST, temperature=1.0, seed=args.seed)
    counted = Counter(map(tuple, drawn))
    thoughts, answered = suppress(engine, text.context, text.spans, list(counted))  # [N, N], [answers, N]
    out: dict[str, Any] = {"association": [row[:j].tolist() for j, row in enumerate(thoughts)]}
    if counted:
        times = torch.tensor(list(counted.values()), dtype=torch.float64)
        out |= {"answers": len(counted), "importance": (times @ answered / times.sum()).tolist()}
    return out


class Pair(NamedTuple):
    """Two segments i < j of a text."""

    types: tuple[str, str]  # of i and j
    transitions: int  # among i + 1, …, j
    distance: int  # j − i
    value: float


def pairs(text: Mapping[str, Any]) -> Iterator[Pair]:
    """The pairs of a text, as the result has it."""
    types = text["types"]
    for j, row in enumerate(text["association"]):
        for i, value in enumerate(row):
            yield Pair((types[i], types[j]), types[i + 1 : j + 1].count("transition"), j - i, value)


def means(values: Iterable[tuple[Any, float]]) -> list[dict[str, Any]]:
    """The mean of every group, in order. values: (group, value)."""
    groups = defaultdict[Any, list[float]](list)
    for group, value in values:
        groups[group].append(value)
    return [{"of": group, "count": len(own), "mean": sum(own) / len(own)} for group, own in sorted(groups.items())]
