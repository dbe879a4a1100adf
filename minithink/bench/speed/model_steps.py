"""Decoding steps of a model of one's own under each policy: how much do its decisions and its cache cost?

Prompts are random tokens, so all are equally long. The model then generates as in `minithink.evaluate`, but without
stop tokens, and the policy decides what stays. Steps around the middle of the generation are timed, where a policy
that evicts nothing holds as many tokens as it does on average. A policy whose budget is not full by then is left out.
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
from minithink.evaluate.summary import FULL, Budget, budget_text
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
        help="of policies that evict: the prompt and that share of --tokens (default: 0.25); or tokens; or bytes, "
        "as in 2MiB",
    )
    add("--batch", type=positive, default=64, metavar="N", help="sequences (default: 64)")
    add("--prompt-tokens", type=positive, default=512, metavar="N", help="of each prompt (default: 512)")
    add(
        "--tokens",
        type=positive,
        default=1600,
        metavar="N",
        help="that a sequence is supposed to generate; the steps around the middle are timed (default: 1600)",
    )
    add("--steps", type=positive, default=256, metavar="N", help="that are timed (default: 256)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every policy, print."""
    if args.steps >= args.tokens:
        raise UsageError(f"--steps {args.steps} must be less than --tokens {args.tokens}.")
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
            # A kernel that is first needed in the timed steps is compiled there, so the first pass does not count.
            step_seconds(engine, cell.policy, tokens, prompts, args)
            seconds = step_seconds(engine, cell.policy, tokens, prompts, args)
        except MinithinkError as error:
            left_out.append({"policy": cell.policy, "budget": str(cell.budget), "why": str(error)})
            print(f"{cell}: left out: {error}", flush=True)
            continue
        yield {
            "policy": cell.policy,
            "budget": cell.budget,
            "budget_tokens": None if isinstance(tokens, str) else tokens,
            "step_milliseconds": 1000 * seconds,
            "tokens_per_second": args.batch / seconds,
        }


def tokens_of(budget: Budget, args: argparse.Namespace) -> int | str | None:
    """A budget as the engine takes it: a share is the prompt and that part of what is to be generated."""
    return args.prompt_tokens + round(budget * args.tokens) if isinstance(budget, float) else budget


def step_seconds(
    engine: Engine, policy: str, budget: int | str | None, prompts: list[list[int]], args: argparse.Namespace
) -> float:
    """The mean time of the timed steps. Some of them evict and others do not, so a median would leave out a part.

    MinithinkError: the policy cannot run so, or the time would not be that of its steady state.
    """
    before = (args.tokens - args.steps) // 2
    most = engine.config.max_position - args.prompt_tokens
    if before + args.steps > most:
        raise MinithinkError(f"the model has room for {most:,} tokens after the prompt, fewer than are generated.")
    stream: Stream = engine.stream(
        prompts,
        policy=policy,
        budget=budget,
        max_new_tokens=min(most, before + args.steps + len(prompts) + 2),
        batch_size=len(prompts),
    )
    stream.stop_ids = frozenset()  # no sequence ends before the others
    stream.accounts = False
    stream.ahead = True  # as in `minithink.evaluate`
    counts = stream.steps()
    # A count is how many sequences a step has advanced: before all prompts are read it is less than all.
    for count in counts:
        if count == len(prompts):
            break
    _take(counts, before, len(prompts))
    kept = stream.budget
    if kept is not None and kept > args.prompt_tokens + before:
        raise MinithinkError(
            f"its budget of {kept:,} tokens is not full after {args.prompt_tokens + before:,}: give more --tokens."
        )
    wait(engine.device)

    def steps() -> None:
        _take(counts, args.steps, len(prompts))
        wait(engine.device)

    return timed(steps) / args.steps


def _take(counts: Iterator[int], steps: int, batch: int) -> None:
    """Take so many steps. MinithinkError: a step has not advanced all sequences."""
    taken = [*islice(counts, steps)]
    if taken != [batch] * steps:
        raise MinithinkError(f"not all of {batch} sequences took {steps} steps: give fewer, or a shorter text.")


def line(m: record.Measurement) -> str:
    """A measurement in one line, for people."""
    of = "" if m["budget"] is None else f" at {budget_text(m['budget'])}"
    return f"{m['policy']}{of}: {m['step_milliseconds']:.2f} ms a step, {m['tokens_per_second']:,.0f} tokens/s"
