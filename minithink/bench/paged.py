"""Decoding from pages, beside the plain cache, in the same process.

Both sides run the embedded model in a plain loop of single steps, without a policy, in turns of some steps each, so
that a machine that slows down slows both. A ratio is paged / plain in tokens per second: below 1, pages are slower.
In PyTorch reading pages costs a gather; the kernels read them where they lie.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from minithink import results
from minithink.bench.decode import timed
from minithink.commands import positive
from minithink.engine import Engine, load
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.policies import parse
from minithink.tasks import load_problems

TARGETS = {1: 0.8, 8: 0.5}  # least ratio, by batch
TURN = 10  # steps of one side before it is the other's turn
DEFAULT = "cache-speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench paged`."""
    add = parser.add_argument
    add("--threads", type=positive, default=2, metavar="N", help="of torch (default 2)")
    add("--batch", nargs="+", type=positive, default=[1, 8], metavar="N", help="default: 1 8")
    add("--prompt-tokens", type=positive, default=500, metavar="N", help="default 500")
    add("--new-tokens", type=positive, default=200, metavar="N", help="default 200")
    add("--repeats", type=positive, default=3, metavar="N", help="default 3")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write, print."""
    torch.set_num_threads(args.threads)
    result = results.new("paged", argv)
    names = ("threads", "prompt_tokens", "new_tokens", "repeats")
    result["settings"] = {"device": "cpu", "dtype": "float32", **{name: getattr(args, name) for name in names}}
    engine = load(None, device="cpu", dtype="float32")
    rows = (measure(engine, n, args.prompt_tokens, args.new_tokens, args.repeats) for n in args.batch)
    return results.collect(results.output(args, DEFAULT), result, rows, line)


def line(m: results.Measurement) -> str:
    """For people."""
    said = ", ".join(f"{side} {m[side]['tokens_per_second']:,.1f} tok/s" for side in ("paged", "plain"))
    return f"batch {m['batch']}: {said}, ratio {m['ratio']:.2f}"


@torch.inference_mode()
def measure(engine: Engine, batch: int, prompt: int, new: int, repeats: int) -> dict[str, Any]:
    """Median times of a step on both sides, and their ratio in every repeat."""
    ratios, steps = [], {"plain": list[float](), "paged": list[float]()}
    same = True
    for repeat in range(repeats):
        sides = {name: _Side(engine, name, batch, prompt, new) for name in steps}
        times: dict[str, list[float]] = {name: [] for name in sides}
        order = list(sides) if repeat % 2 else list(sides)[::-1]
        while len(times["plain"]) < new:
            for name in order:
                times[name] += [timed(sides[name].step) for _ in range(min(TURN, new - len(times[name])))]
        ratios.append(sum(times["plain"]) / sum(times["paged"]))
        same = same and sides["plain"].tokens == sides["paged"].tokens
        for name in steps:
            steps[name] += times[name]
    out: dict[str, Any] = {"batch": batch, "same_tokens": same, "ratio": statistics.median(ratios), "ratios": ratios}
    for name, seconds in steps.items():
        step = statistics.median(seconds)
        out[name] = {"tokens_per_second": batch / step, "step_milliseconds": step * 1e3}
    if goal := TARGETS.get(batch):
        out |= {"target": goal, "target_reached": out["ratio"] >= goal}
    return out


class _Side:
    """One cache with its sequences, prompts read."""

    def __init__(self, engine: Engine, name: str, batch: int, prompt: int, new: int) -> None:
        self.engine, self.sequences = engine, range(batch)
        config, room = engine.config, prompt + new + 1
        self.cache: FullCache | KVManager
        if name == "plain":
            self.cache = FullCache(config, engine.rope, backend=engine.decoder.backend)
        else:
            policy = parse("full")
            self.cache = KVManager(
                config, engine.rope, policy, rows=batch, tokens=room, backend=engine.decoder.backend
            )
        problems = load_problems("validation")
        self.last = []
        for i in self.sequences:
            ids: list[int] = []
            while len(ids) < prompt:  # problems one after the other, until the prompt is long enough
                ids += engine.prompt_ids(problems[(i + len(ids)) % len(problems)].question)
            self.cache.join(i, room, prompt)
            self.cache.begin_step([i], [prompt], ids[:prompt])
            hidden = engine.decoder(torch.tensor(ids[:prompt]), self.cache)
            self.cache.end_step()
            self.last.append(int(engine.decoder.logits(hidden[-1:]).argmax()))
        self.tokens = [self.last]

    def step(self) -> None:
        """One token further, chosen greedily."""
        self.cache.begin_step(self.sequences, [1] * len(self.last), self.last)
        hidden = self.engine.decoder(torch.tensor(self.last), self.cache)
        self.cache.end_step()
        self.last = self.engine.decoder.logits(hidden).argmax(-1).tolist()
        self.tokens.append(self.last)
