"""Eviction curves and shares of thoughts: tokens held over tokens generated, by policy (ThinKV, figures 10b and 10f).

Every policy answers the same problems by itself. After each generated token the fullest lane's tokens are counted,
the prompt's among them; a step evicts if there is not one more than before. A curve's point is the mean over the
texts that are still running there. Where a policy knows types of thoughts, their segments are counted, and with them
whatever the policy itself counts.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from minithink import counts, results
from minithink.analysis import plots
from minithink.analysis.premises import begin, common_arguments, finish
from minithink.analysis.segments import is_right
from minithink.commands import location, positive
from minithink.engine import Engine
from minithink.errors import UsageError
from minithink.figures import need_matplotlib
from minithink.kv.contract import Policy
from minithink.kv.manager import KVManager, check_budget
from minithink.policies import leaves_open, parse, split
from minithink.policies.thinkv import NAMES
from minithink.progress import progress
from minithink.stream import Stream, Track
from minithink.tasks import Problem

EVERY = 16  # generated tokens between two points of a curve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser)
    add = parser.add_argument
    add("--policies", type=split, default=["full", "thinkv", "rkv"], metavar="P,P,…", help="as of minithink.evaluate "
        "(default: full,thinkv,rkv)")  # fmt: skip
    add("--budget", type=positive, default=512, metavar="N", help="tokens of a lane, for those that take one "
        "(default: 512)")  # fmt: skip
    add("--calibration", type=location, metavar="FOLDER", help="of thoughts.json (default: beside the model)")
    add("--plot", type=location, metavar="FILE", help="also draw it (SVG)")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate under every policy, write the result, print a table."""
    if args.plot is not None:
        need_matplotlib()
        results.check(args.plot, "--plot")
    if twice := next((p for i, p in enumerate(args.policies) if p in args.policies[:i]), None):
        raise UsageError(f"The policy {twice} is named twice: leave one of the two out.")
    policies = {text: policy_of(text, args.budget) for text in args.policies}
    engine, problems, result = begin(args, "curve", argv, backend="auto")
    prompts = [engine.prompt_ids(p.question) for p in problems]
    for policy in policies.values():
        engine.calibrated(policy)
        check_budget(policy, max(map(len, prompts)))
    result["measurements"] = [
        {"policy": text, **held(engine, policy, problems, prompts, args, text)} for text, policy in policies.items()
    ]
    return finish(args, result, table(result["measurements"]), lambda: plots.curves(result["measurements"]))


def policy_of(text: str, budget: int) -> Policy:
    """UsageError: it makes no sense."""
    return parse(text, budget=budget if leaves_open(text, "budget") else None)


class Held:
    """Counts what the sequences of a stream hold; called after every forward pass."""

    def __init__(self, stream: Stream) -> None:
        assert isinstance(stream.cache, KVManager)
        self.cache = stream.cache
        self.tokens = defaultdict[int, list[int]](list)  # by sequence: after the prompt, and after each token

    def __call__(self, sequences: Sequence[Track]) -> None:
        for s in sequences:
            self.tokens[s.number].append(self.cache.held(s.number))


def held(
    engine: Engine, policy: Policy, problems: Sequence[Problem], prompts: Sequence[list[int]],
    args: argparse.Namespace, label: str,
) -> dict[str, Any]:  # fmt: skip
    """The curve of one policy, and what its texts came to."""
    stream = engine.stream(
        list(prompts), policy=policy, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=0,
        top_p=1.0, min_p=0.0, seed=args.seed, batch_size=args.batch_size,
    )  # fmt: skip
    stream.on_step, of_texts = (counted := Held(stream)), list[dict[str, int]]()
    with progress(len(prompts), 0, label) as advance:
        for advanced in stream.advances():
            for s in advanced:
                if s.finish_reason:
                    of_texts.append(s.counts)
                    advance(is_right(engine, problems[s.number], s.tokens))
    results = stream.results
    thoughts = sum((Counter(r.kv_thoughts) for r in results), Counter[str]())
    out: dict[str, Any] = {
        "sequences": len(results),
        "right": sum(is_right(engine, p, r.token_ids) for p, r in zip(problems, results, strict=True)) / len(results),
        "generated": sum(r.generated_tokens for r in results) / len(results),
        **curve(list(counted.tokens.values())),
    }
    if thoughts:
        out["thoughts"] = {name: thoughts[name] for name in reversed(NAMES)}
    if by_name := counts.total(of_texts):
        out["counts"] = by_name
    return out


def curve(held: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of every text, tokens held after its prompt and after each token → the mean of every EVERY-th, and more."""
    longest = max(map(len, held))
    points = [[of[t] for of in held if t < len(of)] for t in range(0, longest, EVERY)]
    steps = [(a, b) for of in held for a, b in pairwise(of)]
    return {
        "most_held": max(map(max, held)),
        "evicting_steps": sum(b <= a for a, b in steps) / max(1, len(steps)),
        "every": EVERY,
        "held": [sum(of) / len(of) for of in points],
        "running": [len(of) for of in points],
    }


def table(measurements: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line a policy."""
    yield f"{'right':>6} {'tokens':>7} {'most held':>9} {'evicting':>8} {'R / E / T':>17}  policy"
    for m in measurements:
        segments = sum(m.get("thoughts", {}).values())
        shares = " / ".join(f"{n / segments:.0%}" for n in m["thoughts"].values()) if segments else "–"
        yield (
            f"{m['right']:>6.1%} {m['generated']:>7,.0f} {m['most_held']:>9,} {m['evicting_steps']:>8.1%} "
            f"{shares:>17}  {m['policy']}" + (f" ({counts.said(m['counts'])})" if "counts" in m else "")
        )
