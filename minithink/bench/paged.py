"""Decoding from pages, beside the plain cache, in the same process.

Both sides run the embedded model step by step, in turns of some steps each, so that a machine that slows down slows
both. A ratio is paged / plain in tokens per second: below 1, pages are slower. In PyTorch reading pages costs a
gather; the kernels read them where they lie.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import cycle, islice

import torch

from minithink import results
from minithink.bench.decode import Ours, RandomModel, timed
from minithink.commands import positive
from minithink.engine import load
from minithink.results import Measurement
from minithink.tasks import load_problems

TARGETS = {1: 0.8, 8: 0.5}  # least ratio, by batch
TURN = 10  # steps of one side before it is the other's turn
POLICIES = {"plain": None, "paged": "full"}
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
    rows = (measure(n, args.prompt_tokens, args.new_tokens, args.repeats) for n in args.batch)
    return results.collect(results.output(args, DEFAULT), result, rows, line)


def line(m: Measurement) -> str:
    """For people."""
    said = ", ".join(f"{side} {m[side]['tokens_per_second']:,.1f} tok/s" for side in POLICIES)
    return f"batch {m['batch']}: {said}, ratio {m['ratio']:.2f}"


@torch.inference_mode()
def measure(batch: int, prompt: int, new: int, repeats: int) -> Measurement:
    """Median times of a step on both sides, and their ratio in every repeat."""
    engine = load(None, device="cpu", dtype="float32")
    model = RandomModel(engine.config, torch.device("cpu"), torch.float32, False, engine)
    text = cycle([id for problem in load_problems("validation") for id in engine.prompt_ids(problem.question)])
    prompts = torch.tensor([list(islice(text, prompt)) for _ in range(batch)])
    ratios, same, steps = [], True, {name: list[float]() for name in POLICIES}
    for repeat in range(repeats):
        sides = {name: Ours(model, batch, prompt + new + 1, prompt, policy) for name, policy in POLICIES.items()}
        for side in sides.values():
            side.read(prompts)
            side.start()
        times = {name: list[float]() for name in POLICIES}
        tokens = {name: list[list[int]]() for name in POLICIES}
        while len(times["plain"]) < new:
            for name in list(sides)[:: 1 if repeat % 2 else -1]:
                for _ in range(min(TURN, new - len(times[name]))):
                    times[name].append(timed(sides[name].step))
                    tokens[name].append(sides[name].tokens)
        same = same and tokens["plain"] == tokens["paged"]
        ratios.append(sum(times["plain"]) / sum(times["paged"]))
        for name in steps:
            steps[name] += times[name]
    out: Measurement = {"batch": batch, "same_tokens": same, "ratio": statistics.median(ratios), "ratios": ratios}
    for name, seconds in steps.items():
        step = statistics.median(seconds)
        out[name] = {"tokens_per_second": batch / step, "step_milliseconds": step * 1e3}
    if goal := TARGETS.get(batch):
        out |= {"target": goal, "target_reached": out["ratio"] >= goal}
    return out
