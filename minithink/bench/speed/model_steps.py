"""Decoding steps of a model of one's own under each policy: how much do its decisions and its cache cost?

Prompts are random tokens, so all are equally long. The model then generates as it always does, without stop tokens,
and the policy decides what stays. The steps in the middle of the generation are timed: policies that evict hold their
budget by then, and those that do not hold about as many tokens as they do on average.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from minithink.bench.methods import collected
from minithink.bench.speed.clock import timed, wait
from minithink.cli.commands import positive
from minithink.engine import DTYPES, Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.plan import Spec, budgets, plan
from minithink.evaluate.summary import FULL, Budget
from minithink.policies import load as load_policy
from minithink.results import record
from minithink.stream import Stream

DEFAULT = "model-steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench model-steps`."""
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="a checkpoint's folder (default: the embedded model)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=tuple(DTYPES), help="default: the checkpoint's own on a GPU, float32 elsewhere")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--policies", nargs="+", type=load_policy, metavar="P", help="policies")
    which.add_argument(
        "--comparison", choices=tuple(collected("SWEEPS")), metavar="NAME", help="the policies of a comparison"
    )
    add(
        "--budgets",
        type=budgets,
        default=[0.25],
        metavar="N,N,…",
        help="of policies that evict: the prompt and that share of --tokens (default: 0.25); or tokens",
    )
    add("--batch", type=positive, default=64, metavar="N", help="sequences (default: 64)")
    add("--prompt-tokens", type=positive, default=512, metavar="N", help="of each prompt (default: 512)")
    add(
        "--tokens",
        type=positive,
        default=1600,
        metavar="N",
        help="that a sequence is supposed to generate; the timed steps begin after half of them (default: 1600)",
    )
    add("--steps", type=positive, default=256, metavar="N", help="that are timed (default: 256)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every policy, print."""
    if args.steps > args.tokens // 2:
        raise UsageError(f"--steps {args.steps} is more than the second half of --tokens {args.tokens}: give less.")
    path = record.output(args, DEFAULT)
    engine = load(args.model, device=args.device, dtype=args.dtype or "auto")
    result = record.new(DEFAULT, argv, engine.device)
    result["settings"] = {
        name: getattr(args, name) for name in ("batch", "prompt_tokens", "tokens", "steps", "comparison")
    }
    result["settings"] |= {
        "dtype": str(engine.dtype).removeprefix("torch."),
        "weights": engine.loaded.home.checkpoint if engine.loaded.home else None,
    }
    result["left_out"] = list[dict[str, str]]()
    return record.collect(path, result, measurements(engine, args, result["left_out"]), line)


def measurements(
    engine: Engine, args: argparse.Namespace, left_out: list[dict[str, str]]
) -> Iterator[record.Measurement]:
    """The full cache, then every policy at every budget. What cannot run goes to `left_out`, with the reason."""
    draw = torch.Generator().manual_seed(0)
    shape = args.batch, args.prompt_tokens
    prompts = torch.randint(engine.config.vocab_size, shape, generator=draw).tolist()
    policies: Sequence[str] = args.policies or collected("SWEEPS")[args.comparison].policies
    for cell in plan([Spec(policy) for policy in dict.fromkeys((FULL, *policies))], args.budgets):
        tokens = tokens_of(cell.budget, args)
        try:
            seconds = step_seconds(engine, cell.policy, tokens, prompts, args)
        except MinithinkError as error:
            left_out.append({"policy": cell.policy, "budget": str(cell.budget), "why": str(error)})
            print(f"{cell}: left out: {error}", flush=True)
            continue
        yield {
            "policy": cell.policy,
            "budget": cell.budget,
            "budget_tokens": tokens,
            "step_milliseconds": 1000 * seconds,
            "tokens_per_second": args.batch / seconds,
        }


def tokens_of(budget: Budget, args: argparse.Namespace) -> int | str | None:
    """A budget as the engine takes it: a share is the prompt and that part of what is to be generated."""
    return args.prompt_tokens + round(budget * args.tokens) if isinstance(budget, float) else budget


def step_seconds(
    engine: Engine, policy: str, budget: int | str | None, prompts: list[list[int]], args: argparse.Namespace
) -> float:
    """The mean time of the timed steps. Some of them evict and others do not, so a median would leave out a part."""
    stream: Stream = engine.stream(
        prompts,
        policy=policy,
        budget=budget,
        max_new_tokens=args.tokens // 2 + args.steps + 2,
        batch_size=len(prompts),
    )
    stream.stop_ids = frozenset()  # no sequence ends before the others
    stream.accounts = False
    counts = stream.steps()
    # A count is how many sequences a step has advanced: before all prompts are read it is less than all.
    for count in counts:
        if count == len(prompts):
            break
    _take(counts, args.tokens // 2)
    wait(engine.device)

    def steps() -> None:
        _take(counts, args.steps)
        wait(engine.device)

    return timed(steps) / args.steps


def _take(counts: Iterator[int], steps: int) -> None:
    for _ in islice(counts, steps):
        pass


def line(m: record.Measurement) -> str:
    """A measurement in one line, for people."""
    of = "" if m["budget"] is None else f" at {m['budget_tokens']} tokens"
    return f"{m['policy']}{of}: {m['step_milliseconds']:.2f} ms a step, {m['tokens_per_second']:,.0f} tokens/s"
