"""Texts of the full cache, cut into segments of τ tokens as ThinKV cuts them, with their types from two sources.

By sparsity: what `thinkv` would measure with the full cache, at the beginning of every segment, by the layers and
thresholds of the calibration file. By keywords: `minithink/thoughts.py`. Only the thinking is cut; the answer, which
stands behind `</think>`, is what the thinking is for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from minithink import results
from minithink.analysis.dense import thinking_end
from minithink.analysis.plots import SOURCES
from minithink.analysis.premises import begin, common_arguments
from minithink.calibrate.reading import averaged, sparsity
from minithink.commands import location, positive
from minithink.engine import Engine
from minithink.errors import MinithinkError
from minithink.figures import need_matplotlib
from minithink.policies.thinkv import NAMES, ThinKV, type_of
from minithink.progress import progress
from minithink.tasks import Problem, grade
from minithink.thoughts import kinds, segments


class Text(NamedTuple):
    """A problem's text, cut."""

    id: str
    right: bool
    context: list[int]  # the prompt, the thinking, and `</think>` where it comes
    answer: list[int]  # what stands behind, with the token that stops; empty: there is none
    spans: list[tuple[int, int]]  # of the segments: positions in `context`, start and end
    types: dict[str, list[str]]  # of the segments, by their source

    def said(self) -> dict[str, Any]:
        """As results have it."""
        tokens = len(self.context) + len(self.answer) - self.spans[0][0]
        return {"id": self.id, "right": self.right, "tokens": tokens, **self.types}


def segment_arguments(parser: argparse.ArgumentParser) -> None:
    """What importance and association share."""
    common_arguments(parser)
    add = parser.add_argument
    add("--tau", type=positive, default=128, metavar="N", help="τ, tokens of a segment (default: 128)")
    add("--sparsity-rows", type=positive, default=1, metavar="N", help="last queries whose sparsity is "
        "averaged (default: 1)")  # fmt: skip
    add("--calibration", type=location, metavar="FOLDER", help="of thoughts.json (default: beside the model)")
    add("--plot", type=location, metavar="FILE", help="also draw it (SVG)")


def begin_segments(
    args: argparse.Namespace, name: str, argv: list[str]
) -> tuple[Engine, list[Problem], dict[str, Any], ThinKV]:
    """As `begin`, and the policy whose types are measured.

    Raises:
        UsageError, MinithinkError: also where the model is not calibrated, or matplotlib is missing.
    """
    if args.plot is not None:
        need_matplotlib()
        results.check(args.plot, "--plot")
    engine, problems, result = begin(args, name, argv)
    policy = ThinKV(tau=args.tau, g=1, sparsity_rows=args.sparsity_rows)
    policy.calibrated(calibration := engine.calibration("thoughts.json"))
    if outside := [layer for layer in policy.measured if layer >= engine.config.num_layers]:
        raise MinithinkError(
            f"The calibration measures layer {outside[0]}, and the model has {engine.config.num_layers}: "
            "calibrate it again."
        )
    if calibration.get("fallback"):
        print("minithink.analysis: the calibration found no layers with three modes, so that types by sparsity have "
              "the shares that its fallback gave them, and may mean nothing", file=sys.stderr)  # fmt: skip
    result["calibration"] = {n: calibration.get(n) for n in ("checkpoint", "layers", "thresholds", "chosen")}
    return engine, problems, result, policy


def texts(engine: Engine, problems: Sequence[Problem], policy: ThinKV, args: argparse.Namespace) -> Iterator[Text]:
    """Generate with the full cache and cut, as texts end; how far that got is shown. Texts without a thought are left
    out."""
    prompts = [engine.prompt_ids(p.question) for p in problems]
    stream = engine.stream(
        prompts, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=0, top_p=1.0, min_p=0.0,
        seed=args.seed, batch_size=args.batch_size,
    )  # fmt: skip
    with progress(len(prompts), 0, "full cache") as advance:
        for advanced in stream.advances():
            for s in advanced:
                if s.finish_reason:
                    if (text := cut(engine, policy, problems[s.number], s.prompt, s.tokens)) is not None:
                        yield text
                    advance(is_right(engine, problems[s.number], s.tokens))


def is_right(engine: Engine, problem: Problem, generated: Sequence[int]) -> bool:
    """Whether it answers, and with the problem's answer."""
    text = engine.tokenizer.decode(list(generated))
    return "</think>" in text and grade(text, problem.answer)


def cut(
    engine: Engine, policy: ThinKV, problem: Problem, prompt: Sequence[int], generated: Sequence[int]
) -> Text | None:
    """Segments and types of one text; None: it has no thought."""
    n, start, tau = thinking_end(engine, generated), len(prompt), policy.tau
    if n == 0:
        return None
    thinking = list(generated[:n])
    spans = [(start + i, start + min(i + tau, n)) for i in range(0, n, tau)]
    # after the prompt, and after every token but the last: what begins there is measured there
    u = sparsity(engine, [*prompt, *thinking[:-1]], max(0, start - policy.sparsity_rows))
    at_refresh = averaged(u, policy.sparsity_rows, n)[::tau, list(policy.measured)]  # [segments, L*]
    by_sparsity = type_of(at_refresh.mean(1), policy.theta).tolist()
    by_keywords = segments(kinds([engine.tokenizer.decode([t]) for t in thinking]), tau)
    types = {name: [NAMES[k] for k in of] for name, of in zip(SOURCES, (by_sparsity, by_keywords), strict=True)}
    right = is_right(engine, problem, generated)
    return Text(problem.id, right, [*prompt, *generated[: n + 1]], list(generated[n + 1 :]), spans, types)


def by_type(found: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Values by type: how many, their share, mean, quartiles and the largest. found: (type, value)."""
    out = list[dict[str, Any]]()
    for name in reversed(NAMES):
        own = torch.tensor([value for kind, value in found if kind == name], dtype=torch.float64)
        if not len(own):
            continue
        low, median, high = own.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        out.append(
            {
                "type": name, "segments": len(own), "share": len(own) / len(found), "mean": float(own.mean()),
                "lower_quartile": low, "median": median, "upper_quartile": high, "largest": float(own.max()),
            }
        )  # fmt: skip
    return out


def summary(groups: Mapping[str, Sequence[Mapping[str, Any]]], what: str) -> Iterator[str]:
    """A table of `by_type`, by source. what: is measured."""
    head = f"{'types by':<10}{'type':<12}{'segments':>8} {'share':>6}  {what + ': mean':>18}"
    yield f"{head} {'median':>10} {'largest':>10}"
    for source, rows in groups.items():
        for row in rows:
            yield (
                f"{source:<10}{row['type']:<12}{row['segments']:>8,} {row['share']:>6.0%}  {row['mean']:>18.4g} "
                f"{row['median']:>10.4g} {row['largest']:>10.4g}"
            )
