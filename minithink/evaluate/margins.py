"""Count where another batch size may change what is drawn, and where it did.

The full cache generates the same sequences in batches of several sizes. The texts of the first size go through the
model once more, as prompts, which gives the margin of each draw: how far the winner's logit, noise included, was
above the second one. Sums of another shape differ in their last bits. So sequences of two batch sizes may differ from
a draw on whose margin is below NEAR, and from no other draw on. This holds in float32: in 16 bits a rounding is
larger than NEAR. The margins are rounded, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from minithink.cli.commands import location, positive
from minithink.cli.models import model_options
from minithink.engine import Engine, load
from minithink.errors import UsageError, counted, escaped
from minithink.evaluate import runner
from minithink.evaluate.datasets import load_dataset
from minithink.evaluate.job import Job
from minithink.evaluate.plan import Cell, Spec
from minithink.evaluate.summary import FULL
from minithink.kv.full import FullCache
from minithink.ref.gumbel_argmax import gumbel
from minithink.results import record
from minithink.sampling import SamplingParams, filter_logits
from minithink.sequence import Track

NEAR = 1e-5  # in logits
HELP = (
    "Generates the problems with the full cache at the first batch size, and again at each other one; prints how "
    f"many draws had a margin below {NEAR:g}, and which sequences differ from which token on. The exit code is 1 "
    "where one differs at a larger margin."
)


class Parting(NamedTuple):
    """The token at which a sequence began to differ from that of the first batch size."""

    number: int  # of the sequence
    batch_size: int
    token: int  # number of tokens that were generated before
    margin: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate margins`."""
    runner.add_drawing_arguments(parser)
    parser.add_argument(
        "--batch-sizes",
        type=_sizes,
        default=[1, 8],
        metavar="N,N,…",
        help="rows of the batches that are compared, two sizes at least (default: 1,8)",
    )
    parser.add_argument("--output", type=location, metavar="FILE", help="write what was counted there, as JSON, too")


def _sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def said_of(parted: int) -> str:
    """How many sequences differ, with its verb."""
    return f"{counted(parted, 'sequence')} {'differs' if parted == 1 else 'differ'}"


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate at every size, compare, print and write → 1 if a sequence differs where the margin is not small."""
    if len(args.batch_sizes) < 2:
        raise UsageError(f"--batch-sizes names {len(args.batch_sizes)} size, and two are compared: give 1,8.")
    SamplingParams(
        args.temperature or 0,
        top_k=args.top_k or 0,
        top_p=1 if args.top_p is None else args.top_p,
        seed=args.seed,
    )
    examples = load_dataset(args.dataset, args.split, args.limit, fields=args.fields)
    for note in runner.said_of_limit(Job.of(args), examples):
        print(f"minithink.evaluate: {escaped(note)}", file=sys.stderr)
    if args.output is not None:
        record.check(args.output)
    engine = load(
        args.model,
        **model_options(args),
        device=args.device,
        dtype=args.dtype,
        backend=args.backend,
    )
    runs = []
    settings = dict[str, Any]()
    for size in args.batch_sizes:
        job = replace(Job.of(args), batch_size=size)
        evaluation = runner.Evaluation(engine, examples, job, [FULL])
        stream = evaluation.stream(Cell(Spec(FULL), None), 0.0)
        for _ in stream.steps():
            pass
        runs.append(stream.sequences)
        params = stream.sampler.params
        settings = evaluation.settings | {"batch_size": args.batch_sizes}
    margins = {s.number: draw_margins(engine, s, params) for s in runs[0]}
    parted = []
    for size, other in zip(args.batch_sizes[1:], runs[1:], strict=True):
        parted += partings(runs[0], other, size, margins)
    every_margin = [*chain.from_iterable(margins.values())]
    draws = sum(map(len, margins.values()))
    near = sum(margin < NEAR for margin in every_margin)
    print(
        f"{counted(len(runs[0]), 'sequence')}, {counted(draws, 'draw')}; {near} with a margin below {NEAR:g}; "
        f"batch sizes {', '.join(map(str, args.batch_sizes))}; {str(engine.dtype).removeprefix('torch.')}"
    )
    for p in parted:
        print(
            f"sequence {p.number} differs at batch size {p.batch_size} from token {p.token} on: margin {p.margin:.3g}"
        )
    unexplained = sum(p.margin >= NEAR for p in parted)
    print(f"{said_of(len(parted))}, {unexplained} of them at a larger margin")
    if args.output is not None:
        m = {
            "sequences": len(runs[0]),
            "draws": draws,
            "limit": NEAR,
            "near": near,
            "smallest_margin": min(every_margin, default=None),
            "parted": [p._asdict() for p in parted],
            "unexplained": unexplained,
        }
        result = record.new("margins", argv, engine.device, program="minithink.evaluate")
        record.write(args.output, result | {"settings": settings, "measurements": [m], "complete": True})
    return int(unexplained > 0)


@torch.inference_mode()
def draw_margins(engine: Engine, s: Track, params: SamplingParams) -> list[float]:
    """How far the winner of each draw was above the second, in logits divided by the temperature."""
    cache = FullCache(engine.config, engine.rope, device=engine.device, dtype=engine.dtype)
    text = [*s.prompt, *s.tokens[:-1]]
    cache.join(0, len(text))
    cache.begin_step([0], [len(text)])
    hidden = engine.decoder(torch.tensor(text, device=engine.device), cache)
    logits = engine.decoder.logits(hidden[len(s.prompt) - 1 :]).float()  # [tokens, V]
    if not params.greedy:
        positions = torch.arange(len(s.prompt), len(s.prompt) + len(s.tokens), device=engine.device)
        noise = gumbel(params.seed, torch.full_like(positions, s.number), positions, logits.shape[-1])
        logits = filter_logits(logits, params) + noise
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    out: list[float] = (best - second).tolist()
    return out


def partings(
    want: Sequence[Track], got: Sequence[Track], batch_size: int, margins: dict[int, list[float]]
) -> list[Parting]:
    """Where sequences began to differ from those of the first batch size.

    Args:
        want: sequences of the first batch size.
        got: the same ones at another batch size.
        margins: of the draws in `want`, by the number of the sequence.
    """
    out = []
    for a, b in zip(want, got, strict=True):
        if a.tokens != b.tokens:
            pairs = zip(a.tokens, b.tokens, strict=False)
            first = next(i for i, (x, y) in enumerate(pairs) if x != y)
            out.append(Parting(a.number, batch_size, first, margins[a.number][first]))
    return out
