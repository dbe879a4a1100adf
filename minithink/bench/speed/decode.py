"""Decoding speed, beside transformers on the same weights in the same process.

Shapes:
    embedded        the embedded model on real problems: float32 on a CPU, bfloat16 on a GPU. Each side's own
                    generation loop runs, greedily and without stop tokens, and neither makes texts.
                    `tokens_per_second` counts all that a caller waits for, reading the prompts included;
                    `decode_tokens_per_second` leaves that out: the time of N new tokens less the time of one. Both
                    sides must generate the same tokens up to the first step at which rounding may decide; how far
                    that is stands in the result (in bfloat16 it may be no step at all).
    embedded-steps  the same weights, random prompts: single decoding steps of ours
    llama-8b        random weights in the shape of R1-Distill-Llama-8B, bfloat16, random prompts: single decoding
                    steps, ours as the engine runs them, beside the time that reading the weights and the cache takes
                    at the least. With --policy the sequences are spread over its cycle (`steady.py`).
    smollm2-135m    the same in the shape of SmolLM2-135M

The two sides take turns, and they take turns to begin, so that a machine that slows down slows both.
A ratio is ours / theirs in tokens per second: above 1, minithink is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink.bench.speed.clock import Deadline, in_turns, timed, wait
from minithink.bench.speed.peer import CACHES, Peer, Theirs, transformers
from minithink.bench.speed.steady import CONFIGS, Ours, RandomModel, Settings, Steady
from minithink.cli.commands import positive
from minithink.engine import TINY, Engine, load
from minithink.errors import MinithinkError, UsageError, counted
from minithink.policies import load as load_policy
from minithink.results import record
from minithink.tasks import load_problems

TARGETS = {("cpu", 1): 1.8, ("cpu", 8): 1.3}  # least ratio to transformers, by device and batch, embedded model
# Logits of the two sides differ by rounding; where the best two are closer than this, either token is right.
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.5}
FAR = 0.2  # of the logits' own spread: two bfloat16 passes of the same random model differ by less
QUESTION = 32  # tokens at the end of a prompt that cutting spares: what is asked
BLOCK = 16  # steps of one side before it is the other's turn
SHAPES = ("embedded", "embedded-steps", "llama-8b", "smollm2-135m")
NUMBERS = ("threads", "prompt_tokens", "new_tokens", "repeats", "context", "steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench decode`."""
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--peer", action=argparse.BooleanOptionalAction, default=True, help="measure transformers too (default)")
    add(
        "--peer-cache",
        nargs="+",
        choices=CACHES,
        help="caches of transformers to try, of which the fastest counts (default: both on a CPU; dynamic on a GPU, "
        "where transformers compiles the model for the static one, which takes minutes)",
    )
    add("--threads", type=positive, default=2, metavar="N", help="of torch, on the CPU (default 2)")
    add("--shapes", nargs="+", choices=SHAPES, help="default: embedded; all of them on a GPU")
    add("--batch", nargs="+", type=positive, metavar="N", help="default: 1 8; 1 32 on a GPU")
    add("--prompt-tokens", type=positive, default=200, metavar="N", help="embedded model (default 200)")
    add("--new-tokens", type=positive, metavar="N", help="embedded model (default 512; 256 on a GPU)")
    add("--repeats", type=positive, default=3, metavar="N", help="embedded model (default 3)")
    add("--context", type=positive, default=2048, metavar="N", help="tokens read first, other shapes")
    add(
        "--policy",
        type=load_policy,
        metavar="NAME:X=1",
        help="under which other shapes run, ours alone (default: the full cache)",
    )
    add("--steps", type=positive, default=64, metavar="N", help="decoding steps timed, other shapes")
    add("--time-budget", type=positive, metavar="SECONDS", help="begin nothing later (default on a GPU: 200)")
    add("--output", type=Path, metavar="FILE", help="default: docs/results/decode-cpu.json, decode-gpu.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every section, print."""
    gpu = args.device == "cuda"
    if gpu and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu.")
    args.shapes = args.shapes or (SHAPES if gpu else SHAPES[:1])
    args.batch = args.batch or ([1, 32] if gpu else [1, 8])
    args.new_tokens = args.new_tokens or (256 if gpu else 512)
    args.peer_cache = tuple(dict.fromkeys(args.peer_cache or (CACHES[:1] if gpu else CACHES))) if args.peer else ()
    if args.peer:
        transformers()  # a missing one is said before anything is measured
    result = record.new("decode", argv, args.device)
    result["settings"] = {"device": args.device} | {name: getattr(args, name) for name in NUMBERS}
    left_out = result["left_out"] = list[str]()
    path = record.output(args, "decode-gpu" if gpu else "decode-cpu")
    with _threads(args.threads):
        record.collect(path, result, sections(args, left_out), line)
    differing = [m for m in result["measurements"] if "same" in m and not m["same"]["ok"]]
    if differing:
        where = "; ".join(f"{m['shape']}, batch {m['batch']}" for m in differing)
        raise MinithinkError(f"Both sides run the same weights and did not compute the same ({where}).")
    if left_out:
        raise MinithinkError(f"Not everything was measured: {'; '.join(left_out)}.")
    return 0


def sections(args: argparse.Namespace, left_out: list[str]) -> Iterator[record.Measurement]:
    """A measurement for each shape and batch. left_out: is told of those that there is no time or memory for."""
    device = torch.device(args.device)
    deadline = Deadline(args.time_budget or (200 if args.device == "cuda" else None))
    model: Embedded | Single | None = None
    loaded = ""
    for shape, batch in product(args.shapes, args.batch):
        name = f"{shape}, batch {batch}"
        if deadline.over():
            left_out.append(f"{name}: the time budget of {deadline.seconds:g} s is used up")
            continue
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        try:
            if loaded != shape:
                model = None  # free the one before
                model = _side(shape, device, args)
                loaded = shape
            assert model is not None
            yield {"shape": shape, "device": device.type, **model.measure(batch, args, deadline)}
        except UsageError:
            raise
        except (MinithinkError, torch.OutOfMemoryError) as error:
            left_out.append(f"{name}: {str(error).splitlines()[0]}")


def _side(shape: str, device: torch.device, args: argparse.Namespace) -> Embedded | Single:
    if shape == "embedded":
        return Embedded(device, args.peer)
    engine = load("tiny", device=device.type, dtype="bfloat16") if shape == "embedded-steps" else None
    model = RandomModel(engine.config if engine else CONFIGS[shape], device, torch.bfloat16, engine)
    return Single(model, args.peer and engine is None and args.policy is None)


def line(m: record.Measurement) -> str:
    """For people."""
    ours = m["ours"]
    peer = m.get("peer")
    said = [f"{m['shape']:14} batch {m['batch']:3}  {ours['tokens_per_second']:10,.1f} tok/s"]
    if peer:
        said.append(f"{m['ratio']:.2f} x transformers with its {peer['cache']} cache")
        must = m["same"].get("steps_that_must_agree")
        if must:
            steps = counted(min(m["same"]["steps_that_agree"]), "step")
            said.append(f"same tokens for {steps} ({min(must)} required)")
    if "target" in m:
        said.append(f"target {m['target']} {'reached' if m['target_reached'] else 'missed'}")
    if "share_of_limit" in ours:
        said.append(f"{ours['share_of_limit']:.0%} of the byte limit")
    return ", ".join(said)


class Embedded:
    """The embedded model on both sides."""

    def __init__(self, device: torch.device, peer: bool) -> None:
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        engine = load("tiny", device=device.type, dtype=str(self.dtype).removeprefix("torch."))
        never = replace(engine.generation_config, stop_ids=frozenset())
        self.engine = Engine(engine.decoder, engine.tokenizer, never)
        self.peer = Peer.from_folder(TINY, device, self.dtype) if peer else None

    def measure(self, batch: int, args: argparse.Namespace, deadline: Deadline) -> dict[str, Any]:
        """Time both sides' own generation loops: `args.repeats` runs of each side, of `args.new_tokens` tokens.

        Of the peer each of `args.peer_cache` runs, and the fastest is reported.
        """
        new_tokens = args.new_tokens
        device = self.device
        prompts = make_prompts(self.engine, batch, args.prompt_tokens, new_tokens)
        sides: dict[str, Callable[[int], list[list[int]]]] = {"ours": partial(self.generate, prompts)}
        tokens = self.generate(prompts, new_tokens)  # also the warm-up
        out: dict[str, Any] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch": batch,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": new_tokens,
        }
        peer = self.peer
        if peer:
            rows = torch.tensor(prompts, device=device)
            theirs, margins = peer.margins(rows, new_tokens)
            out["same"] = same_tokens(tokens, theirs, margins, CLOSE[self.dtype])
            sides |= {cache: partial(peer.generate, rows, cache=cache) for cache in args.peer_cache}
            for cache in {*args.peer_cache} - {"dynamic"}:
                sides[cache](new_tokens)

        def seconds(side: Callable[[int], object], n: int) -> list[tuple[float, float]]:
            return [(timed(lambda: side(n)), timed(lambda: side(1)))]

        for side in sides.values():
            side(1)
        both = {name: partial(seconds, side) for name, side in sides.items()}
        times = in_turns(both, [new_tokens] * args.repeats, deadline)
        out["repeats"] = len(times["ours"])
        speeds = {name: _speeds(found, batch, new_tokens) for name, found in times.items()}
        out["ours"] = speeds.pop("ours")
        if speeds:
            out |= fastest("transformers generate, sdpa", speeds)
            best = out["peer"]["cache"]
            pairs = [(*a, *b) for a, b in zip(times["ours"], times[best], strict=True)]
            out["ratios"] = [theirs / ours for ours, _, theirs, _ in pairs]
            out["ratio"] = statistics.median(out["ratios"])
            if new_tokens > 1:
                out["decode_ratio"] = statistics.median((y - y1) / (x - x1) for x, x1, y, y1 in pairs)
            target = TARGETS.get((device.type, batch))
            if target:
                out["target"] = target
                out["target_reached"] = out["ratio"] >= target
        return out

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The new tokens of every prompt, greedy."""
        stream = self.engine.stream(prompts, max_new_tokens=new_tokens, temperature=0.0, batch_size=len(prompts))
        for _ in stream.steps():
            pass
        return [s.tokens for s in stream.sequences]


def _speeds(times: list[tuple[float, float]], batch: int, new_tokens: int) -> dict[str, Any]:
    """Medians over the repeats, in tokens per second of the whole batch, and the seconds behind them."""
    out: dict[str, Any] = {"tokens_per_second": statistics.median(batch * new_tokens / t for t, _ in times)}
    if new_tokens > 1:
        decode = [batch * (new_tokens - 1) / (t - one) for t, one in times]
        out["decode_tokens_per_second"] = statistics.median(decode)
    return out | {"seconds": [t for t, _ in times], "seconds_of_one_token": [one for _, one in times]}


def fastest(name: str, speeds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The peer with its fastest cache, and the tokens per second of the others. speeds: by cache."""
    best = max(speeds, key=lambda cache: speeds[cache]["tokens_per_second"])
    others = {cache: speed["tokens_per_second"] for cache, speed in speeds.items() if cache != best}
    return {"peer": {"name": name, "cache": best, **speeds[best]}, "other_caches": others}


def make_prompts(engine: Engine, batch: int, length: int, new_tokens: int) -> list[list[int]]:
    """Problems of the validation split as token ids, all of the same length, because the peer would have to pad.

    The shortest problems that are long enough are taken, and the few tokens too many are cut from their facts, just
    before what is asked.
    """
    if length + new_tokens > engine.config.max_position:
        raise UsageError(
            f"--prompt-tokens {length} and --new-tokens {new_tokens} are more than the context of "
            f"{engine.config.max_position:,} tokens: lower one of them."
        )
    if length <= QUESTION:
        raise UsageError(f"--prompt-tokens is {length}; it must be above {QUESTION}, for the question to remain.")
    prompts = sorted((engine.prompt_ids(p.question) for p in load_problems("validation")), key=len)
    long = [p for p in prompts if len(p) >= length]
    if not long:
        raise UsageError(f"--prompt-tokens is {length}, and the longest problem has {len(prompts[-1])}: lower it.")
    # With more rows than problems, problems repeat.
    return [p[: length - QUESTION] + p[-QUESTION:] for p in (long[i % len(long)] for i in range(batch))]


def same_tokens(ours: list[list[int]], theirs: list[list[int]], margins: Tensor, close: float) -> dict[str, Any]:
    """Whether both sides generated the same up to the first step at which the reference could as well choose another.

    Args:
        ours, theirs: tokens of every row.
        margins: [B, n], of the reference: its best logit minus its second.
        close: below this margin, the choice is one of rounding, and all that follows may differ.

    Returns:
        ok; for every row how many steps had to agree, and how many did, counted from the first.
    """
    must = []
    did = []
    for a, b, margin in zip(ours, theirs, margins, strict=True):
        must.append(next((i for i, m in enumerate(margin.tolist()) if m < close), len(b)))
        did.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b)))
    ok = all(d >= m for m, d in zip(must, did, strict=True))
    return {"ok": ok, "close": close, "steps_that_must_agree": must, "steps_that_agree": did}


class Single:
    """Single steps of a model with random weights, which a peer has copies of; or of the embedded one, alone."""

    def __init__(self, model: RandomModel, peer: bool) -> None:
        self.model = model
        self.peer = Peer.from_decoder(model.decoder) if peer else None

    @torch.inference_mode()
    def measure(self, batch: int, args: argparse.Namespace, deadline: Deadline) -> dict[str, Any]:
        """Time `args.steps` single steps of each side, in turns of BLOCK.

        Of the peer each of `args.peer_cache` runs, and the fastest is reported. Each sequence holds `args.context`
        tokens when the first step begins; `args.policy` decides which stay.
        """
        model = self.model
        context = args.context
        policy = args.policy
        warm = BLOCK + (args.steps if policy else 0)  # decisions are captured, too, when one is first needed
        if context + warm + args.steps > model.config.max_position:
            raise UsageError(
                f"--context {context} and --steps {args.steps} exceed {model.config.max_position:,} tokens."
            )
        settings = Settings(prompt=context, lockstep=policy is None, seed=1)
        ours = Steady(model, policy or "full", batch, settings, warm + args.steps)
        out: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch."), "batch": batch, "context": context}
        out |= {"policy": policy} if policy else {}
        prefill = {"ours": ours.read_seconds}
        sides = {"ours": Ours(ours).step}
        caches = args.peer_cache if self.peer else ()
        differences = []
        for cache in caches:
            assert self.peer is not None
            theirs = Theirs(self.peer, model.device, cache, context + warm + args.steps)
            prefill[cache] = timed(partial(theirs.read, ours.prompts))
            difference = float((ours.last.float() - theirs.last.float()).square().mean().sqrt())
            differences.append(difference / float(theirs.last.float().std()))
            sides[cache] = theirs.step
        if differences:
            worst = max(differences)
            out["same"] = {"ok": worst < FAR, "difference_of_logits": worst, "allowed": FAR}

        def seconds(step: Callable[[], None], n: int) -> list[float]:
            wait(model.device)
            return [timed(step) for _ in range(n)]

        for step in sides.values():
            seconds(step, warm)
        turns = [min(BLOCK, args.steps - done) for done in range(0, args.steps, BLOCK)]
        times = in_turns({name: partial(seconds, step) for name, step in sides.items()}, turns, deadline)
        done = len(times["ours"])

        # What a step cannot do without: read every weight once (of the embedding only some rows, unless it is the
        # head too), and every key and value held.
        weights = sum(p.nbytes for p in model.decoder.parameters())
        if not model.config.tie_embeddings:
            weights -= model.decoder.embed.nbytes
        held = context + BLOCK + (done + 1) / 2  # tokens, the mean over the timed steps
        cache = int(batch * held * model.config.kv_bytes_per_token(model.dtype.itemsize))
        if policy:  # as many as are held at the end, which is a random moment of every sequence's cycle
            cache = sum(ours.cache.account(i).held for i in ours.sequences)
        limit = (weights + cache) / model.bandwidth
        out |= {
            "steps": done,
            "weight_bytes": weights,
            "cache_bytes": cache,
            "copy_bytes_per_second": model.bandwidth,
            "limit_milliseconds": limit * 1e3,
        }
        for name, own in times.items():
            step_seconds = statistics.mean(own) if policy else statistics.median(own)  # some steps evict
            out[name] = {
                "tokens_per_second": batch / step_seconds,
                "step_milliseconds": step_seconds * 1e3,
                "median_milliseconds": statistics.median(own) * 1e3,
                "slowest_milliseconds": max(own) * 1e3,
                "share_of_limit": limit / step_seconds,
                "prefill_seconds": prefill[name],
            }
        if caches:
            out |= fastest("transformers forward loop, sdpa", {cache: out.pop(cache) for cache in caches})
            out["ratio"] = out["ours"]["tokens_per_second"] / out["peer"]["tokens_per_second"]
        return out


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads within, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
