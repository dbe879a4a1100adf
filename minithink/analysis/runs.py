"""The common parts of the commands: options, the model and its problems, texts of the full cache, the result file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minithink.analysis.dense import Steering, batches, decode
from minithink.cli.commands import finite, location, natural, positive
from minithink.cli.models import add_model_arguments, model_options, model_settings
from minithink.engine import Engine, load
from minithink.errors import UsageError, counted
from minithink.results import record
from minithink.results.progress import progress
from minithink.sampling import SamplingParams
from minithink.tasks import Problem, families, grade, load_problems
from minithink.text import thoughts

SETTINGS = (  # options that decide a result
    "model",
    "family",
    "limit",
    "max_new_tokens",
    "temperature",
    "seed",
    "layer",
    "tau",
    "steered",
    "rollouts",
    "budget",
    "batch_size",
    "lam",
    "p",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of commands that generate texts."""
    add_model_arguments(parser, tags=False)  # they read texts with <think>
    add = parser.add_argument
    add("--family", default="facts", help=f"validation problems of {', '.join(families())} (default: facts)")
    add("--limit", type=positive, default=32, metavar="N", help="problems (default: 32)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--batch-size", type=positive, default=96, metavar="N", help="sequences at once (default: 96)")
    add("--max-new-tokens", type=positive, default=4096, metavar="N", help="most tokens of a text (default: 4096)")
    add("--temperature", type=finite, default=0.6, help="0 is greedy (default: 0.6)")
    add("--seed", type=natural, default=0, help="seed of the draws (default: 0)")
    add("--output", type=location, required=True, metavar="FILE", help="where the result goes, as JSON")


def add_trace_arguments(parser: argparse.ArgumentParser, limit: int) -> None:
    """The options of commands that read reference traces, and generate nothing. limit: traces, by default."""
    add_model_arguments(parser, tags=False)  # they read texts with <think>
    add = parser.add_argument
    add(
        "--limit",
        type=positive,
        default=limit,
        metavar="N",
        help=f"reference traces, of all families in turn (default: {limit})",
    )
    add("--seed", type=natural, default=0, help="of the draw of the traces, as in evaluate loss (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--output", type=location, required=True, metavar="FILE", help="where the result goes, as JSON")


def begin(args: argparse.Namespace, name: str, argv: list[str]) -> tuple[Engine, list[Problem], dict[str, Any]]:
    """The engine, the problems and a new result. args.layer, if there is one, gets its default.

    Raises:
        UsageError, MinithinkError: the options make no sense, before anything is generated.
    """
    SamplingParams(args.temperature, seed=args.seed)
    record.check(args.output)
    problems = load_problems("validation", args.family)
    if args.limit > len(problems):
        there = counted(len(problems), "problem")
        print(f"minithink.analysis: {args.family} has {there}: no more are taken", file=sys.stderr)
    problems = problems[: args.limit]
    engine = load(args.model, device=args.device, backend="reference", dtype="float32", **model_options(args))
    if "layer" in args:
        args.layer = layer_of(engine.config.num_layers, args.layer)
    context = engine.config.max_position
    if (longest := max(len(engine.prompt_ids(p.question)) for p in problems)) >= context:
        raise UsageError(f"A problem has {longest:,} tokens and the context holds {context:,}: give another --model.")
    result = record.new(name, argv, engine.device, program="minithink.analysis")
    result["settings"] = {n: getattr(args, n) for n in SETTINGS if n in args} | model_settings(args)
    return engine, problems, result


def layer_of(layers: int, given: int | None) -> int:
    """The layer whose output is steered, from 0; if none is given, the last of the first 0.7 of the layers, rounded
    (SkipKV: 20 of 28). UsageError: the model has no such layer."""
    layer = max(1, round(0.7 * layers)) - 1 if given is None else given
    if not 0 <= layer < layers:
        raise UsageError(f"--layer {layer} is none of the model's layers: give 0 to {layers - 1}.")
    return layer


def finish(args: argparse.Namespace, result: dict[str, Any], lines: Iterable[str] = ()) -> int:
    """Write the whole result, print the lines → 0."""
    record.write(args.output, result | {"complete": True})
    for line in lines:
        print(line)
    print(f"written to {args.output}", file=sys.stderr)
    return 0


def generate(
    engine: Engine,
    problems: Sequence[Problem],
    args: argparse.Namespace,
    steer: Callable[[], Steering] | None = None,
    label: str = "full cache",
) -> list[list[int]]:
    """Generated tokens of every problem, batch by batch, each with a new steering. label: for the progress."""
    out = list[list[int]]()
    with progress(len(problems), 0, label) as advance:
        for part in batches(len(problems), args.batch_size):
            prompts = [engine.prompt_ids(p.question) for p in problems[part]]
            options: dict[str, Any] = {"temperature": args.temperature, "seed": args.seed, "watch": advance.step}
            out += decode(engine, prompts, args.max_new_tokens, steer=steer() if steer else None, **options)
            ended(engine, problems[part], out[part], advance)
    return out


def ended(
    engine: Engine, problems: Sequence[Problem], generated: Sequence[list[int]], advance: Callable[[bool], None]
) -> None:
    """Tell the progress that the texts of some problems are whole."""
    for problem, tokens in zip(problems, generated, strict=True):
        advance(is_right(engine.tokenizer.decode(tokens), problem))


def is_right(text: str, problem: Problem) -> bool:
    """True if a text has an answer, and it is the problem's."""
    return "</think>" in text and grade(text, problem.answer)


def outcome(engine: Engine, problems: Sequence[Problem], generated: Sequence[list[int]]) -> dict[str, float]:
    """Accuracy, mean tokens and mean number of doubts (paragraphs) of some runs."""
    texts = [engine.tokenizer.decode(g) for g in generated]
    stops = engine.generation_config.stop_ids
    doubts = 0
    for text in texts:
        paragraphs = text.split("\n\n")
        doubts += sum(map(thoughts.doubts, paragraphs[1:]))
    return {
        "problems": len(problems),
        "right": sum(map(is_right, texts, problems)) / len(texts),
        "tokens": sum(map(len, generated)) / len(generated),
        "cut_off": sum(g[-1] not in stops for g in generated) / len(generated),
        "doubts": doubts / len(texts),
    }
