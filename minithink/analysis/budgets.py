"""Where Crystal-KV's budgets go: to each head, over time, beside the tokens that a query of that head hits.

Every text is generated under `crystal_kv`. A slot has changed heads if it is elsewhere than with equal budgets.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink.analysis import runs
from minithink.cli.commands import location, positive
from minithink.engine import Engine
from minithink.kv.contract import Edit, Step
from minithink.policies.crystal_kv import CrystalKV
from minithink.ref.lrfu import hit_set
from minithink.results import record
from minithink.results.figures import drawing, need_matplotlib
from minithink.results.progress import progress
from minithink.stream import Stream
from minithink.tasks import Problem


@dataclass
class Watched(CrystalKV):
    """Crystal-KV that counts the hits of every head. Its decisions are the same."""

    capturable = False  # `decide` counts the hits of every step

    def setup(self, shape: Any) -> None:
        super().setup(shape)
        self.hits = torch.zeros(shape.tables, dtype=torch.int64, device=shape.device)
        self.queries = torch.zeros(shape.tables[1], dtype=torch.int64, device=shape.device)

    def decide(self, step: Step) -> Iterator[Edit]:
        tracked = self._tracked(step) & (step.clock > 0)
        self.hits += (hit_set(step.mass(), step.pos() >= 0, self.p).sum(-1) * tracked[:, None]).long()
        self.queries += tracked
        yield from super().decide(step)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser)
    add = parser.add_argument
    add("--budget", type=positive, default=700, metavar="N", help="tokens of a head, on average (default: 700)")
    add("--plot", type=location, metavar="DIR", help="draw the budgets of the longest text here")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, count, write, print, draw."""
    if args.plot is not None:
        need_matplotlib()
        record.check(args.plot / "picture.svg", "--plot")
    engine, problems, result = runs.begin(args, "budgets", argv)
    texts, policy = generate(engine, problems, Watched(budget=args.budget), args)
    result["measurements"] = measured(texts, policy, args.budget)
    if args.plot is not None:
        longest = max(texts, key=len)
        draw(args.plot / f"{args.output.stem}.svg", torch.stack(longest), policy.realloc_every)
    m = result["measurements"]
    return runs.finish(
        args,
        result,
        [
            f"{m['moved']:.1%} of the slots have changed heads when texts end; budgets and hits of the heads: "
            f"correlation {m['correlation']:.2f}"
        ],
    )


def generate(
    engine: Engine, problems: list[Problem], policy: Watched, args: argparse.Namespace
) -> tuple[list[list[Tensor]], Watched]:
    """The budgets of every text, at its beginning and after each reallocation: int32 [L, Hkv] each. And the policy
    of the run, which has counted: the engine makes a copy of the one that is given."""
    prompts = [engine.prompt_ids(p.question) for p in problems]
    longest = min(args.max_new_tokens, engine.config.max_position - max(map(len, prompts)))
    stream = engine.stream(
        prompts,
        policy=policy,
        max_new_tokens=longest,
        temperature=args.temperature,
        seed=args.seed,
        batch_size=len(prompts),
        cache="paged",  # budgets are read from it
    )
    texts: list[list[Tensor]] = [[] for _ in problems]
    with progress(len(problems), 0, "crystal_kv") as advance:
        for tracks in stream.advances():
            advance.step(len(tracks))
            for track in tracks:
                if (len(track.tokens) - 1) % policy.realloc_every == 0 and not track.finish_reason:
                    texts[track.number].append(budgets_of(stream, track.number))
                if track.finish_reason:
                    text = engine.tokenizer.decode(track.tokens)
                    advance(runs.is_right(text, problems[track.number]))
    cache: Any = stream.cache
    return texts, cache.policy


def budgets_of(stream: Stream, number: int) -> Tensor:
    """The budgets of one sequence now: int32 [L, Hkv]."""
    cache: Any = stream.cache
    [budget] = cache.budgets.values()
    found: Tensor = budget[:, cache.row_of(number)].clone().cpu()
    return found


def measured(texts: list[list[Tensor]], policy: Watched, equal: int) -> dict[str, Any]:
    """Measures of the texts in which budgets moved: last budgets, hits of a query by head, their correlation."""
    last = [text[-1].double() for text in texts if len({tuple(b.flatten().tolist()) for b in text}) > 1]
    if not last:
        return {"texts": len(texts), "moving": 0, "moved": 0.0, "correlation": 0.0, "budgets": [], "hits": []}
    budgets = torch.stack(last).mean(0)
    hits = policy.hits.sum(1) / policy.queries.sum()
    return {
        "texts": len(texts),
        "moving": len(last),
        "moved": statistics.mean(float((b - equal).abs().sum() / 2 / b.sum()) for b in last),
        "correlation": float(torch.corrcoef(torch.stack((budgets.flatten(), hits.flatten().double())))[0, 1]),
        "least": min(float(b.min()) for b in last),
        "most": max(float(b.max()) for b in last),
        "budgets": budgets.tolist(),
        "hits": hits.tolist(),
    }


def draw(path: Path, budgets: Tensor, every: int) -> None:
    """The budgets of one text: a row for every head, a column for every reallocation. budgets: int [n, L, Hkv].

    Raises:
        MinithinkError: matplotlib is missing, or the file cannot be written.
    """
    n, layers, heads = budgets.shape
    with drawing(path, 7.5, 3.4) as figure:
        axis = figure.subplots()
        image = axis.imshow(
            budgets.flatten(1).T.numpy(),
            cmap="viridis",
            aspect="auto",
            interpolation="none",
            vmin=0,
            extent=(-every / 2, (n - 0.5) * every, layers * heads, 0),
        )
        for layer in range(1, layers):
            axis.axhline(layer * heads, color="w", lw=0.5)
        axis.set(xlabel="generated token", ylabel=f"layer ({heads} KV heads each)")
        axis.set_yticks([heads * (layer + 0.5) for layer in range(layers)], map(str, range(layers)))
        figure.colorbar(image, ax=axis).set_label("budget of the head, tokens")
