"""Bytes that each policy holds, by kind, at the end of a long text.

The text is given (problems with their reference traces, one after the other), so every policy reads the same tokens
and only what it keeps differs. The figures are the ledger's: the sizes of the tensors themselves, for one sequence
that runs alone, without the pool's reserve.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch

from minithink import results
from minithink.commands import positive
from minithink.engine import Engine, load
from minithink.figures import drawing
from minithink.kv.manager import KVManager
from minithink.policies import lookup, parse, split, takes_budget
from minithink.tasks.facts import draw_problem, draw_trace

POLICIES = (
    "full", "quant:fmt=nvfp4", "quant:fmt=int4", "kivi", "pm_kvq", "window", "streaming_llm", "sepllm", "random",
    "random_attention", "vase", "h2o", "tova", "scissorhands", "raas", "lazy_eviction", "morphkv",
    "snapkv:cap=100", "snapkv_decode", "ada_snapkv", "pyramidkv", "rkv", "seal", "skipkv", "crystal_kv",
    "crystal_kv_lite", "dynts", "thinkv", "tbe", "tbq",
)  # fmt: skip
KINDS = ("payload", "scales", "tables", "buffers", "state", "observations")
DEFAULT = "cache-bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench memory`."""
    add = parser.add_argument
    add("--policies", default=",".join(POLICIES), metavar="A:X=1,B", help="default: all of this version")
    add("--budget", type=positive, default=512, metavar="N", help="of those that take one (default 512)")
    add("--prompt-tokens", type=positive, default=200, metavar="N", help="default 200")
    add("--tokens", type=positive, default=2000, metavar="N", help="of the text (default 2000)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")
    add("--plot", metavar="FILE", help="also draw the bytes as stacked bars (SVG)")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write, print, draw."""
    result = results.new("memory", argv)
    names = ("budget", "prompt_tokens", "tokens")
    result["settings"] = {"device": "cpu", "dtype": "float32", **{name: getattr(args, name) for name in names}}
    engine = load(None, device="cpu", dtype="float32")
    ids = text(engine, args.tokens)
    rows = (measure(engine, policy, ids, args.prompt_tokens, args.budget) for policy in split(args.policies))
    results.collect(results.output(args, DEFAULT), result, rows, line)
    if args.plot:
        draw(result, Path(args.plot))
    return 0


def line(m: results.Measurement) -> str:
    """For people."""
    return f"{m['policy']:18} {m['tokens_held']:>6,} tokens {m['held'] / 2**20:>8,.2f} MiB {m['share']:>7.1%} of full"


def text(engine: Engine, count: int) -> list[int]:
    """Token ids of problems and their traces."""
    rng, ids = random.Random(0), list[int]()
    while len(ids) < count:
        problem = draw_problem(rng, derived=20)
        trace = "</think>".join(draw_trace(problem, rng))
        ids += engine.prompt_ids(problem.question) + engine.tokenizer.encode(trace)
    return ids[:count]


@torch.inference_mode()
def measure(engine: Engine, name: str, ids: list[int], prompt: int, budget: int) -> dict[str, Any]:
    """Read a text under a policy → what is held at its end, and at its fullest."""
    limited = all(takes_budget(lookup(part.partition(":")[0])) for part in name.split("+"))
    limited = limited and not re.search(r"\b(budget=|schedule=sawtooth)", name)  # they say it themselves
    policy = engine.calibrated(parse(name, budget=budget if limited else None))
    ops = engine.decoder.backend
    cache = KVManager(engine.config, engine.rope, policy, rows=1, tokens=len(ids), prompt=prompt, backend=ops)
    cache.join(0, len(ids), prompt)
    peak = 0
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(ids)))]:
        cache.begin_step([0], [end - start], ids[start:end])
        engine.decoder(torch.tensor(ids[start:end]), cache)
        cache.end_step()
        if start % 16 == 0 or end == len(ids):
            peak = max(peak, cache.ledger().held)
    ledger = cache.ledger()
    full = len(ids) * engine.config.kv_bytes_per_token(engine.dtype.itemsize)
    return {
        "policy": name,
        "budget": policy.budget,
        "tokens_held": cache.held(0),
        "full": full,
        "held": ledger.held,
        "peak": peak,
        "share": ledger.held / full,
        "kinds": {kind: getattr(ledger, kind) for kind in KINDS},
        "pool": ledger.total,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Stacked bars, one a policy."""
    rows = result["measurements"][::-1]
    left = [0.0] * len(rows)
    with drawing(path, 8, 0.4 * len(rows) + 1.2) as figure:
        axis = figure.subplots()
        for kind in KINDS:
            sizes = [row["kinds"][kind] / 2**20 for row in rows]
            if any(sizes):
                axis.barh([row["policy"] for row in rows], sizes, left=left, label=kind)
                left = [a + b for a, b in zip(left, sizes, strict=True)]
        axis.set_xlabel(f"MiB held after {result['settings']['tokens']:,} tokens")
        axis.legend()
    print(f"drawn to {path}", file=sys.stderr)
