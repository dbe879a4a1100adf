"""How many bits a number takes under a policy: the average precision of ThinKV's tables 1, 4 and 13.

Texts are generated under each policy. When a text ends, its cache tells

    codes      bits of a number in the pages, keys and values together, without its share of the scales
    scales     that share. Scales that outlive their tokens count, too: a key scale by channel belongs to several
               tokens, and stays until the last of them is evicted
    segments   how many segments the policy gave each type, if it knows types
    written    bits of a number's code in the mean over these segments, as they were written. Eviction changes what a
               cache holds, so `codes` differs: the prompt is held, and some types lose more tokens than others

Tokens that wait in a full-precision buffer do not count. The mean over texts counts each of them once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from minithink.analysis import runs
from minithink.cli.commands import different, finite, location, natural, positive
from minithink.cli.models import add_model_arguments, model_name, model_options, model_settings
from minithink.engine import Engine, load
from minithink.kv.contract import Policy
from minithink.kv.sizes import mean_bits
from minithink.policies import parse, split
from minithink.results import record
from minithink.results.progress import progress
from minithink.sampling import SamplingParams
from minithink.sequence import Result
from minithink.tasks import Problem, families, load_problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `analysis bits`."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--policies", required=True, metavar="LIST", help="with their budgets, as in thinkv:budget=512,tbq")
    add(
        "--families",
        type=lambda text: different(text, "family", families()),
        default=[*families()],
        metavar="LIST",
        help=f"of validation problems (default: {','.join(families())})",
    )
    add("--limit", type=positive, default=4, metavar="N", help="problems of each family (default: 4)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--max-new-tokens", type=positive, default=4096, metavar="N", help="most tokens of a text (default: 4096)")
    add("--temperature", type=finite, default=0.6, help="0 is greedy (default: 0.6)")
    add("--seed", type=natural, default=0, help="seed of the draws (default: 0)")
    add("--output", type=location, required=True, metavar="FILE", help="where the result goes, as JSON")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate under each policy, write the result."""
    SamplingParams(args.temperature, seed=args.seed)
    record.check(args.output)
    named = split(args.policies)
    for text in named:
        parse(text)
    problems = list[Problem]()
    for family in args.families:
        problems += load_problems("validation", family)[: args.limit]
    engine = load(args.model, device=args.device, **model_options(args))
    assert engine.loaded.home is not None
    result = record.new("bits", argv, engine.device, program="minithink.analysis")
    result["checkpoint"] = engine.loaded.home.checkpoint
    result["settings"] = {
        "model": model_name(args.model, args.adapter),
        "policies": named,
        "families": args.families,
        "limit": args.limit,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        **model_settings(args),
    }
    rows = result["measurements"] = []
    for text in named:
        rows.append(measure(engine, problems, text, args))
        record.write(args.output, result)  # a policy takes minutes: an interrupted run leaves what it has
    return runs.finish(args, result, map(line, rows))


def measure(engine: Engine, problems: Sequence[Problem], text: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the caches of all texts tell under one policy. text: of the policy."""
    policy = engine.bind(parse(text))
    stream = engine.stream(
        [problem.question for problem in problems],
        policy=policy,
        fixed=True,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
    )
    with progress(len(problems), 0, text) as advance:
        for advanced in stream.advances():
            for sequence in advanced:
                if sequence.finish_reason:
                    advance(None)
    texts = []
    for problem, found in zip(problems, stream.results, strict=True):
        about = {"id": problem.id, "right": runs.is_right(found.text, problem)}
        texts.append({**about, **of_text(policy, found)})
    return {"policy": text, **summary(texts), "texts": texts}


def of_text(policy: Policy, found: Result) -> dict[str, Any]:
    """The bits of one text. None: its cache has no number in its pages, or the policy knows no types."""
    codes = scales = None
    if found.kv_bits is not None:
        payload = found.kv_ledger["payload"]
        codes = found.kv_bits * payload / (payload + found.kv_ledger["scales"])
        scales = found.kv_bits - codes
    return {
        "tokens": found.generated_tokens,
        "held": found.kv_tokens,
        "codes": codes,
        "scales": scales,
        "segments": found.kv_thoughts,
        "written": mean_bits(policy.storage, found.kv_thoughts),
    }


def summary(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the texts that have a value; `segments` are sums."""
    out: dict[str, Any] = {"right": sum(text["right"] for text in texts)}
    for name in ("tokens", "held", "codes", "scales", "written"):
        values = [text[name] for text in texts if text[name] is not None]
        out[name] = fmean(values) if values else None
    segments = dict[str, int]()
    for text in texts:
        for kind, count in text["segments"].items():
            segments[kind] = segments.get(kind, 0) + count
    return out | {"segments": segments}


def line(row: Mapping[str, Any]) -> str:
    """The findings of one policy, for people."""
    parts = list[str]()
    if row["codes"] is not None:
        parts.append(f"{row['codes']:.2f} bits a number, {row['codes'] + row['scales']:.2f} with its scales")
    if row["written"] is not None:
        parts.append(f"{row['written']:.2f} as written")
    if row["segments"]:
        parts.append(", ".join(f"{count} {kind}" for kind, count in sorted(row["segments"].items())))
    return f"{row['policy']}: {'; '.join(parts) or 'no number in pages'}"
