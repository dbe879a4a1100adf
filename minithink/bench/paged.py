"""Decoding from pages, beside the plain cache, in the same process.

Both sides run the embedded model step by step, in turns of some steps each, so that a machine that slows down slows
both. A ratio is paged / plain in tokens per second: below 1, pages are slower. In PyTorch reading pages costs a
gather; the kernels read them where they lie.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from minithink import results
from minithink.bench.clock import Deadline, in_turns, timed
from minithink.bench.steady import Ours, RandomModel, Settings, Steady
from minithink.commands import positive
from minithink.engine import load
from minithink.kv.full import FullCache
from minithink.results import Measurement
from minithink.tasks import load_problems

TARGETS = {1: 0.8, 8: 0.5}  # least ratio, by batch
TURN = 10  # steps of one side before it is the other's turn
SIDES = ("plain", "paged")
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
    said = ", ".join(f"{side} {m[side]['tokens_per_second']:,.1f} tok/s" for side in SIDES[::-1])
    return f"batch {m['batch']}: {said}, ratio {m['ratio']:.2f}"


@torch.inference_mode()
def measure(batch: int, prompt: int, new: int, repeats: int) -> Measurement:
    """Median times of a step on both sides, and their ratio in every repeat."""
    engine = load(None, device="cpu", dtype="float32")
    model = RandomModel(engine.config, torch.device("cpu"), torch.float32, engine)
    text = cycle([id for problem in load_problems("validation") for id in engine.prompt_ids(problem.question)])
    prompts = torch.tensor([list(islice(text, prompt)) for _ in range(batch)])
    settings, turns = Settings(prompt=prompt, lockstep=True), [min(TURN, new - n) for n in range(0, new, TURN)]
    ratios, same, steps = [], True, {name: list[float]() for name in SIDES}
    for repeat in range(repeats):
        paged = Ours(Steady(model, "full", batch, settings, new + 1, prompts=prompts))
        sides: dict[str, Plain | Ours] = {"plain": Plain(model, prompts, new + 1), "paged": paged}
        tokens = {name: list[list[int]]() for name in sides}

        def turn(side: Plain | Ours, chosen: list[list[int]], n: int) -> list[float]:
            times = []
            for _ in range(n):
                times.append(timed(side.step))
                chosen.append(side.tokens)
            return times

        order = SIDES[:: 1 if repeat % 2 else -1]
        times = in_turns({name: partial(turn, sides[name], tokens[name]) for name in order}, turns, Deadline(None))
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


class Plain:
    """Greedy steps over the plain cache, whose prompts are read."""

    def __init__(self, model: RandomModel, prompts: Tensor, room: int) -> None:
        self.decoder, self.sequences = model.decoder, range(len(prompts))
        self.cache = FullCache(model.config, model.rope, dtype=model.dtype, backend=model.decoder.backend)
        for i in self.sequences:
            self.cache.join(i, prompts.shape[1] + room, prompts.shape[1])
        self.tokens = [self._forward([i], prompts[i])[-1] for i in self.sequences]

    def step(self) -> None:
        """One token further."""
        self.tokens = self._forward(self.sequences, torch.tensor(self.tokens))

    def _forward(self, sequences: Sequence[int], tokens: Tensor) -> list[int]:
        """The best next token behind each of these."""
        self.cache.begin_step(sequences, [len(tokens) // len(sequences)] * len(sequences))
        hidden = self.decoder(tokens, self.cache)
        self.cache.end_step()
        best: list[int] = self.decoder.logits(hidden).argmax(-1).tolist()
        return best
