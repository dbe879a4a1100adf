"""Pairwise association of thoughts: how much a thought depends on each earlier one (ThinKV, figure 5).

For two segments i < j attention to Y_i is suppressed in all layers and heads for all that follows it, and the
association is the KL divergence, with ‖ without, of the logits at Y_j, their mean (§3.3; `suppress.py`).
Beside the pairs the result has means by the two types; by the number of transitions among the segments behind i, up
to and with j (observation 3: with every transition, what came before matters less); and by the distance j − i, which
grows with that number.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from minithink.analysis import plots
from minithink.analysis.plots import SOURCES
from minithink.analysis.premises import finish
from minithink.analysis.segments import begin_segments, segment_arguments, texts
from minithink.analysis.suppress import suppress
from minithink.errors import MinithinkError
from minithink.policies.thinkv import NAMES


class Pair(NamedTuple):
    """Two segments i < j of a text."""

    earlier: str  # type
    later: str
    distance: int  # j − i
    transitions: int  # among i + 1, …, j
    value: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    segment_arguments(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, suppress, write the result, print tables."""
    engine, problems, result, policy = begin_segments(args, "association", argv)
    found = list[dict[str, Any]]()
    for text in texts(engine, problems, policy, args):
        if len(text.spans) > 1:
            thoughts, _ = suppress(engine, text.context, text.spans)
            rows = [row[:j].tolist() for j, row in enumerate(thoughts)]
            found.append({**text.said(), "association": rows})
    if not found:
        raise MinithinkError(
            f"None of {len(problems)} texts has two segments of {args.tau} tokens: give a smaller --tau, or more "
            "--max-new-tokens."
        )
    of = {source: [pair for text in found for pair in pairs(text, source)] for source in SOURCES}
    result["measurements"] = {
        **{
            name: {source: means(pairs, name) for source, pairs in of.items()}
            for name in ("types", "transitions", "distance")
        },
        "texts": found,
    }
    return finish(args, result, tables(result["measurements"]), lambda: plots.association(found))


def pairs(text: Mapping[str, Any], source: str) -> Iterator[Pair]:
    """The pairs of a text. text: as the result has it; source: of types."""
    kinds = text[source]
    for j, row in enumerate(text["association"]):
        for i, value in enumerate(row):
            yield Pair(kinds[i], kinds[j], j - i, kinds[i + 1 : j + 1].count("transition"), value)


def means(pairs: Sequence[Pair], by: str) -> list[dict[str, Any]]:
    """Mean associations. by: types | transitions | distance."""
    values = defaultdict[Any, list[float]](list)
    for pair in pairs:
        values[(pair.earlier, pair.later) if by == "types" else getattr(pair, by)].append(pair.value)
    if by == "types":
        keys: list[Any] = [(a, b) for b in reversed(NAMES) for a in reversed(NAMES) if (a, b) in values]
    else:
        keys = sorted(values)
    return [
        {
            **({"earlier": key[0], "later": key[1]} if by == "types" else {by: key}),
            "pairs": len(values[key]), "mean": sum(values[key]) / len(values[key]),
        }
        for key in keys
    ]  # fmt: skip


def tables(measurements: Mapping[str, Any]) -> Iterator[str]:
    """For people: nats by types (rows: later, columns: earlier) and by transitions in between."""
    for source in SOURCES:
        yield f"{'types by ' + source:<22}" + "".join(f"{'on ' + name:>16}" for name in reversed(NAMES))
        found = {(m["earlier"], m["later"]): m["mean"] for m in measurements["types"][source]}
        for later in reversed(NAMES):
            cells = (found.get((earlier, later)) for earlier in reversed(NAMES))
            yield f"{later:<22}" + "".join(f"{'–' if x is None else format(x, '.4g'):>16}" for x in cells)
        after = (f"{m['transitions']}: {m['mean']:.4g}" for m in measurements["transitions"][source])
        yield "by transitions since   " + "  ".join(after)
