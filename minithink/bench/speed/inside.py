"""Decoding inside transformers' `generate`, beside the same `generate` with its own cache.

    python -m minithink.bench hf --model smollm2                       policies of minithink, by `minithink.hf`
    python -m minithink.bench hf --model smollm2 --presses KeyDiffPress KnormPress    kvpress's `DecodingPress`

kvpress needs an older transformers than `minithink.hf`, so each runs in an environment of its own, and a number is a
ratio to the plain `generate` of the same environment. All read the same random prompts and generate as many tokens.
The sides run in turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink.bench.methods.inside import PLAIN
from minithink.bench.speed.clock import Deadline, in_turns, timed, wait
from minithink.bench.speed.peer import Peer
from minithink.checkpoint.weights import checkpoint_hash
from minithink.cli.commands import location, positive
from minithink.errors import MinithinkError, UsageError, alternatives, quoted
from minithink.policies import load as load_policy
from minithink.results import record

EVICTING = "budget={budget},schedule=interval:{interval}"  # keydiff and knorm, as a DecodingPress does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench hf`."""
    add = parser.add_argument
    add("--model", type=location, required=True, metavar="FOLDER", help="a checkpoint's folder")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="(default: cpu)")
    add("--dtype", default="float32", choices=["float32", "float16", "bfloat16"], help="(default: float32)")
    add(
        "--policies",
        nargs="+",
        type=load_policy,
        metavar="P",
        help="policies (default: full, keydiff, knorm, rkv, thinkv)",
    )
    add(
        "--pages",
        nargs="?",
        const="too",
        choices=["too", "only"],
        help="measure each policy in pages, too, or in pages only: on a GPU it has its kernels only there",
    )
    add("--presses", nargs="+", metavar="PRESS", help="scorers of kvpress instead of policies, such as KeyDiffPress")
    add("--budget", type=positive, default=512, metavar="N", help="tokens that are kept (default: 512)")
    add("--interval", type=positive, default=128, metavar="N", help="tokens between two evictions (default: 128)")
    add("--batch", nargs="+", type=positive, default=[1, 8], metavar="N", help="sequences (default: 1 8)")
    add("--prompt", type=positive, default=128, metavar="N", help="tokens of a prompt (default: 128)")
    add("--tokens", type=positive, default=1024, metavar="N", help="that each generates in a turn (default: 1024)")
    add("--turns", type=positive, default=3, metavar="N", help="of each side (default: 3)")
    add("--output", metavar="FILE", help="default: docs/results/hf-DEVICE.json, with presses hf-kvpress-DEVICE.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every line, print."""
    if args.presses is not None and (args.policies is not None or args.pages):
        other = "--policies" if args.policies is not None else "--pages"
        raise UsageError(
            f"--presses measures kvpress, and {other} policies of minithink, which need a newer transformers: "
            f"measure them in two runs, the one with --presses without {other}."
        )
    names = _texts(args) if args.presses is None else tuple(args.presses)
    presses = None if args.presses is None else _presses(args.presses)
    result = record.new("hf", argv, args.device)
    result["checkpoint"] = checkpoint_hash(args.model)
    result["settings"] = {
        "model": Path(args.model).name,
        "device": args.device,
        "dtype": args.dtype,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "budget": args.budget,
        "interval": args.interval,
        "turns": args.turns,
        "by": "minithink" if presses is None else f"kvpress {presses.version}",
    }
    name = f"hf-{args.device}" if presses is None else f"hf-kvpress-{args.device}"
    path = record.output(args, name)
    peer = Peer.from_folder(args.model, torch.device(args.device), getattr(torch, args.dtype))
    return record.collect(path, result, measurements(args, peer, names, presses), line)


def _texts(args: argparse.Namespace) -> tuple[str, ...]:
    """The policies' texts, with budgets where they take one."""
    if args.policies is not None:
        return tuple(args.policies)
    evicting = EVICTING.format(budget=args.budget, interval=args.interval)
    return (
        "full",
        f"keydiff:{evicting}",
        f"knorm:{evicting}",
        f"rkv:budget={args.budget},buffer={args.interval}",
        f"thinkv:types=1,budget={args.budget}",  # it needs no calibration
    )


class _Presses:
    """Scorers of kvpress, each in a `DecodingPress`."""

    def __init__(self, module: Any, version: str) -> None:
        self.module = module
        self.version = version

    def around(self, name: str, model: Any, budget: int, interval: int) -> AbstractContextManager[Any]:
        """Within it `generate` evicts: down to the budget, each `interval` tokens."""
        scorer = getattr(self.module, name)()
        press = self.module.DecodingPress(scorer, compression_interval=interval, target_size=budget)
        manager: AbstractContextManager[Any] = press(model)
        return manager


def _presses(names: Sequence[str]) -> _Presses:
    """MinithinkError: kvpress is not here, or has no such scorer."""
    try:
        module = importlib.import_module("kvpress")
    except ImportError:
        raise MinithinkError(
            "--presses needs kvpress, which is not installed: run `pip install kvpress` in an environment of its "
            "own, because it needs an older transformers."
        ) from None
    known = sorted(name for name in vars(module) if name.endswith("Press"))
    for name in names:
        if name not in known:
            raise MinithinkError(f"kvpress has no {quoted(name)}; {alternatives(name, known)}.")
    return _Presses(module, metadata.version("kvpress"))


def measurements(
    args: argparse.Namespace, peer: Peer, names: Sequence[str], presses: _Presses | None
) -> Iterator[record.Measurement]:
    """A measurement for every number of sequences and every side."""
    device = torch.device(args.device)
    for batch in args.batch:
        generator = torch.Generator().manual_seed(batch)
        vocabulary = peer.model.config.vocab_size
        prompts = torch.randint(vocabulary, (batch, args.prompt), generator=generator).to(device)
        sides = {PLAIN: _plain(peer, prompts)}
        for name in names:
            if presses is not None:
                sides[name] = _pressed(peer, prompts, name, presses, args)
                continue
            if args.pages != "only":
                sides[name] = _under(peer, prompts, name, pages=False)
            if args.pages is not None:
                sides[f"{name}, in pages"] = _under(peer, prompts, name, pages=True)
        for side in sides.values():
            side(args.tokens)  # a turn that does not count: on a GPU the first may take twice as long
        found = in_turns(
            {name: _timed(side, device) for name, side in sides.items()}, [args.tokens] * args.turns, Deadline(None)
        )
        for name, turns in found.items():
            yield summary(name, batch, args.tokens, turns, found[PLAIN])


Generates = Callable[[int], None]  # so many tokens of every sequence


def _plain(peer: Peer, prompts: Tensor) -> Generates:
    def generate(tokens: int) -> None:
        peer.generate(prompts, tokens)

    return generate


def _under(peer: Peer, prompts: Tensor, policy: str, pages: bool) -> Generates:
    from minithink.hf import cache  # here, because it needs a newer transformers than kvpress

    length = prompts.shape[1]

    def generate(tokens: int) -> None:
        own = cache(peer.model, policy, max_length=length + tokens, pages=pages)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers 5.24 has a new name for the argument
            peer.generate(prompts, tokens, past_key_values=own)

    return generate


def _pressed(peer: Peer, prompts: Tensor, name: str, presses: _Presses, args: argparse.Namespace) -> Generates:
    def generate(tokens: int) -> None:
        with presses.around(name, peer.model, args.budget, args.interval):
            peer.generate(prompts, tokens)

    return generate


def _timed(side: Generates, device: torch.device) -> Callable[[int], list[tuple[float, int | None]]]:
    """Its seconds and, on a GPU, the most bytes that torch had allocated beyond what was there before."""

    def turn(tokens: int) -> list[tuple[float, int | None]]:
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)

        def work() -> None:
            side(tokens)
            wait(device)

        seconds = timed(work)
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        return [(seconds, peak)]

    return turn


def summary(
    name: str,
    batch: int,
    tokens: int,
    turns: Sequence[tuple[float, int | None]],
    plain: Sequence[tuple[float, int | None]],
) -> record.Measurement:
    """What the turns of a side say, beside those of the plain cache: tokens a second, ratios of pairs of turns."""
    ratios = [base / seconds for (seconds, _), (base, _) in zip(turns, plain, strict=True)]
    seconds = statistics.median(seconds for seconds, _ in turns)
    peaks = [peak for _, peak in turns if peak is not None]
    return {
        "side": name,
        "batch": batch,
        "tokens_per_second": batch * tokens / seconds,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "peak_bytes": max(peaks) if peaks else None,
    }


def line(m: record.Measurement) -> str:
    """A measurement in one line, for people."""
    peak = "" if m["peak_bytes"] is None else f", {m['peak_bytes'] / 2**20:,.0f} MiB at most"
    return (
        f"{m['side']}, batch {m['batch']}: {m['tokens_per_second']:,.1f} tokens/s, {m['ratio']:.2f} × plain "
        f"({min(m['ratios']):.2f} to {max(m['ratios']):.2f}){peak}"
    )
