"""Decoding speed, beside transformers on the same weights in the same process.

Shapes:
    embedded   the embedded model on real problems: float32 on a CPU, bfloat16 on a GPU. Each side's own generation
               loop runs, greedily and without stop tokens, and neither makes texts. `tokens_per_second` counts all
               that a caller waits for, reading the prompts included; `decode_tokens_per_second` leaves that out:
               the time of N new tokens less the time of one. Both sides must generate the same tokens up to the
               first step at which rounding may decide; how far that is stands in the result (in bfloat16 it may be
               no step at all).
    llama-8b   random weights in the shape of R1-Distill-Llama-8B, bfloat16, random prompts: single decoding steps,
               ours as the engine runs them, beside the time that reading the weights and the cache takes at the
               least.

Runs of the two sides alternate, so that a machine that slows down slows both. A ratio is ours / theirs in tokens per
second: above 1, minithink is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink import results
from minithink.backend import choose
from minithink.bench.attention import copy_speed
from minithink.bench.markdown import aligned
from minithink.bench.peer import CACHES, Peer, transformers
from minithink.commands import positive
from minithink.config import ModelConfig, RopeScaling
from minithink.engine import TINY, Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.loop import DecodeLoop
from minithink.model import Decoder, Rope
from minithink.policies import parse
from minithink.sampling import SamplingParams
from minithink.tasks import load_problems

TARGETS = {("cpu", 1): 1.8, ("cpu", 8): 1.3}  # least ratio to transformers, by device and batch, embedded model
# Logits of the two sides differ by rounding; where the best two are closer than this, either token is right.
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.5}
FAR = 0.2  # of the logits' own spread: two bfloat16 passes of the same random model differ by less
QUESTION = 32  # tokens at the end of a prompt that cutting spares: what is asked
CHUNK = 512  # tokens of each sequence per forward pass, when random prompts are read
BLOCK = 16  # steps of one side before it is the other's turn
SHAPES: dict[str, ModelConfig | None] = {
    "embedded": None,  # its own generation loop
    "embedded-steps": None,  # the same weights, step by step
    "llama-8b": ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_position=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope=RopeScaling("llama3", factor=8.0, original_max_position=8192), dtype="bfloat16",
    ),
}  # fmt: skip
HEADINGS = ("shape", "batch", "ours tok/s", "peer tok/s", "ratio", "decode only", "of byte limit", "note")


class Deadline:
    """How much time is left."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.end = None if seconds is None else time.monotonic() + seconds

    def over(self, needed: float = 0.0) -> bool:
        """Whether less than `needed` seconds are left."""
        return self.end is not None and time.monotonic() + needed > self.end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench decode`."""
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--peer", action=argparse.BooleanOptionalAction, default=True, help="measure transformers too (default)")
    add(
        "--peer-cache", nargs="+", choices=CACHES,
        help="caches of transformers to try, of which the fastest counts (default: both on a CPU; dynamic on a GPU, "
        "where transformers compiles the model for the static one, which takes minutes)",
    )  # fmt: skip
    add("--threads", type=positive, default=2, metavar="N", help="of torch, on the CPU (default 2)")
    add("--shapes", nargs="+", choices=tuple(SHAPES), help="default: embedded; all of them on a GPU")
    add("--batch", nargs="+", type=positive, metavar="N", help="default: 1 8; 1 32 on a GPU")
    add("--prompt-tokens", type=positive, default=200, metavar="N", help="embedded model (default 200)")
    add("--new-tokens", type=positive, metavar="N", help="embedded model (default 512; 256 on a GPU)")
    add("--repeats", type=positive, default=3, metavar="N", help="embedded model (default 3)")
    add("--context", type=positive, default=2048, metavar="N", help="tokens read first, other shapes")
    add("--policy", metavar="NAME:X=1", help="under which other shapes run, ours alone (default: the full cache)")
    add("--steps", type=positive, default=64, metavar="N", help="decoding steps timed, other shapes")
    add("--time-budget", type=positive, metavar="SECONDS", help="begin nothing later (default on a GPU: 200)")
    add("--output", type=Path, metavar="FILE", help="default: docs/results/decode-cpu.json, decode-gpu.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every section, print a table."""
    gpu = args.device == "cuda"
    if gpu and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu.")
    shapes = args.shapes or (list(SHAPES) if gpu else ["embedded"])
    batches = args.batch or ([1, 32] if gpu else [1, 8])
    new_tokens = args.new_tokens or (256 if gpu else 512)
    caches = tuple(dict.fromkeys(args.peer_cache or (CACHES[:1] if gpu else CACHES))) if args.peer else ()
    deadline = Deadline(args.time_budget or (200 if gpu else None))
    device = torch.device(args.device)
    output = args.output or results.default_path("decode-gpu" if gpu else "decode-cpu")
    if caches:
        transformers()  # a missing one is said before anything is measured

    result = results.new("decode", argv, device)
    result["settings"] = {
        "device": args.device,
        "threads": args.threads,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": args.repeats,
        "context": args.context,
        "steps": args.steps,
    }
    result["measurements"], result["left_out"] = [], []
    sections = [(shape, batch) for shape in shapes for batch in batches]
    model: Embedded | RandomModel | None = None
    loaded = ""
    with _threads(args.threads):
        for shape, batch in sections:
            name = f"{shape}, batch {batch}"
            if deadline.over():
                result["left_out"].append(f"{name}: the time budget of {deadline.seconds:g} s is used up")
                results.write(output, result)
                continue
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            try:
                if loaded != shape:
                    model = None  # free the one before
                    model, loaded = _model(shape, device, bool(caches) and args.policy is None), shape
                if isinstance(model, Embedded):
                    m = model.measure(batch, args.prompt_tokens, new_tokens, args.repeats, caches, deadline)
                else:
                    assert model is not None
                    m = model.measure(batch, args.context, args.steps, deadline, args.policy)
                result["measurements"].append({"shape": shape, "device": device.type, **m})
            except UsageError:
                raise
            except (MinithinkError, torch.OutOfMemoryError) as error:
                reason = str(error).splitlines()[0]
                result["left_out"].append(f"{name}: {reason}")
            results.write(output, result)
    result["complete"] = not result["left_out"]
    results.write(output, result)
    _print_table(result)
    print(f"written to {output}", file=sys.stderr)
    differing = [m for m in result["measurements"] if "same" in m and not m["same"]["ok"]]
    if differing:
        where = "; ".join(f"{m['shape']}, batch {m['batch']}" for m in differing)
        raise MinithinkError(f"Both sides run the same weights and did not compute the same ({where}).")
    if result["left_out"]:
        raise MinithinkError(f"Not everything was measured: {'; '.join(result['left_out'])}.")
    return 0


def _model(shape: str, device: torch.device, peer: bool) -> Embedded | RandomModel:
    config = SHAPES[shape]
    if shape == "embedded-steps":
        engine = load("tiny", device=device.type, dtype="bfloat16")
        return RandomModel(engine.config, device, torch.bfloat16, False, engine)
    return Embedded(device, peer) if config is None else RandomModel(config, device, torch.bfloat16, peer)


class Embedded:
    """The embedded model on both sides."""

    def __init__(self, device: torch.device, peer: bool) -> None:
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        engine = load("tiny", device=device.type, dtype=str(self.dtype).removeprefix("torch."))
        never = replace(engine.generation_config, stop_ids=frozenset())
        self.engine = Engine(engine.decoder, engine.tokenizer, never)
        self.peer = Peer.from_folder(TINY, device, self.dtype) if peer else None

    def measure(
        self, batch: int, prompt_tokens: int, new_tokens: int, repeats: int, caches: Sequence[str], deadline: Deadline
    ) -> dict[str, Any]:
        """Time both sides' own generation loops.

        Args:
            batch: sequences at once.
            prompt_tokens, new_tokens: of each sequence.
            repeats: runs of every side; fewer if the deadline comes, at least one.
            caches: of the peer; each runs, and the fastest is reported as the peer.
            deadline: begin no repeat after it.
        """
        prompts = make_prompts(self.engine, batch, prompt_tokens, new_tokens)
        sides: dict[str, Callable[[int], list[list[int]]]] = {"ours": lambda n: self.generate(prompts, n)}
        tokens = self.generate(prompts, new_tokens)  # also the warm-up
        out: dict[str, Any] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch": batch,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
        }
        if peer := self.peer:
            rows = torch.tensor(prompts, device=self.device)
            theirs, margins = peer.margins(rows, new_tokens)
            out["same"] = same_tokens(tokens, theirs, margins, CLOSE[self.dtype])
            for cache in caches:
                sides[cache] = lambda n, cache=cache: peer.generate(rows, n, cache)  # type: ignore[misc]
                if cache != "dynamic":
                    sides[cache](new_tokens)
        for generate in sides.values():
            generate(1)
        # seconds of `new_tokens`, and of one
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for i in range(repeats):
            began = time.monotonic()
            for side, generate in sides.items():
                times[side].append((timed(lambda f=generate: f(new_tokens)), timed(lambda f=generate: f(1))))  # type: ignore[misc]
            if i + 1 < repeats and deadline.over(time.monotonic() - began):
                break
        out["repeats"] = len(times["ours"])
        speeds = {side: _speeds(t, batch, new_tokens) for side, t in times.items()}
        out["ours"] = speeds.pop("ours")
        if speeds:
            best = max(speeds, key=lambda cache: speeds[cache]["tokens_per_second"])
            out["peer"] = {"name": "transformers generate, sdpa", "cache": best, **speeds[best]}
            out["other_caches"] = {c: speed["tokens_per_second"] for c, speed in speeds.items() if c != best}
            out["ratios"] = [b[0] / a[0] for a, b in zip(times["ours"], times[best], strict=True)]
            out["ratio"] = statistics.median(out["ratios"])
            if new_tokens > 1:
                pairs = zip(times["ours"], times[best], strict=True)
                out["decode_ratio"] = statistics.median((b[0] - b[1]) / (a[0] - a[1]) for a, b in pairs)
            if target := TARGETS.get((self.device.type, batch)):
                out["target"], out["target_reached"] = target, out["ratio"] >= target
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
    if not (long := [p for p in prompts if len(p) >= length]):
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
    must, did = [], []
    for a, b, margin in zip(ours, theirs, margins, strict=True):
        must.append(next((i for i, m in enumerate(margin.tolist()) if m < close), len(b)))
        did.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b)))
    ok = all(d >= m for m, d in zip(must, did, strict=True))
    return {"ok": ok, "close": close, "steps_that_must_agree": must, "steps_that_agree": did}


class RandomModel:
    """A shape with random weights, the same on both sides; or the embedded model's own, step by step."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, peer: bool, engine: Engine | None = None
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.bandwidth = copy_bandwidth(device)
        if engine is not None:
            self.decoder, self.rope, self.peer = engine.decoder, engine.rope, None
            return
        with torch.device("meta"):
            decoder = Decoder(config, choose("auto", device))
        self.decoder = decoder.to(dtype).to_empty(device=device).requires_grad_(False)
        torch.manual_seed(0)
        for name, p in self.decoder.named_parameters():
            if p.dim() == 1 or name.endswith("norm"):
                p.fill_(1.0)
            else:
                p.normal_(0.0, 0.02)
        self.rope = Rope(config, device)
        self.peer = Peer.from_decoder(self.decoder) if peer else None

    @torch.inference_mode()
    def measure(
        self, batch: int, context: int, steps: int, deadline: Deadline, policy: str | None = None
    ) -> dict[str, Any]:
        """Time single steps at a cache of `context` tokens.

        Args:
            batch: sequences at once.
            context: tokens that each holds when the first step begins.
            steps: that are timed on every side, in turns of BLOCK; fewer if the deadline comes.
            deadline: begin no turn after it.
            policy: what stays in the cache. The sequences are at different points of its cycle then.
        """
        room = context + BLOCK + steps
        if room > self.config.max_position:
            raise UsageError(f"--context {context} and --steps {steps} exceed {self.config.max_position:,} tokens.")
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, self.config.vocab_size, (batch, context), generator=generator)
        out: dict[str, Any] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch": batch,
            "context": context,
            **({"policy": policy} if policy else {}),
        }
        ours = Ours(self, batch, room + (2 * batch + steps if policy else 0), context, policy)
        sides: dict[str, Ours | Theirs] = {"ours": ours}
        if self.peer:
            sides["peer"] = Theirs(self.peer, self.device)
        logits, prefill = {}, {}
        for name, side in sides.items():
            began = time.perf_counter()
            logits[name] = side.read(prompts).float()
            _wait(self.device)
            prefill[name] = time.perf_counter() - began
        if self.peer:
            spread = float(logits["peer"].std())
            difference = float((logits["ours"] - logits["peer"]).square().mean().sqrt()) / spread
            out["same"] = {"ok": difference < FAR, "difference_of_logits": difference, "allowed": FAR}
        for side in sides.values():  # the warm-up
            side.start()
            for _ in range(BLOCK):
                side.step()
        if policy:
            ours.stagger()
            for _ in range(steps):  # decisions are recorded, too, when one is first needed
                ours.step()
        times: dict[str, list[float]] = {name: [] for name in sides}
        while len(times["ours"]) < steps and not (times["ours"] and deadline.over()):
            turn = min(BLOCK, steps - len(times["ours"]))
            for name, side in sides.items():
                _wait(self.device)
                times[name].extend(timed(side.step) for _ in range(turn))
        done = len(times["ours"])

        # What a step cannot do without: read every weight once (of the embedding only some rows, unless it is the
        # head too), and every key and value held.
        weights = sum(p.nbytes for p in self.decoder.parameters())
        if not self.config.tie_embeddings:
            weights -= self.decoder.embed.nbytes
        held = context + BLOCK + (done + 1) / 2  # tokens, the mean over the timed steps
        cache = int(batch * held * self.config.kv_bytes_per_token(self.dtype.itemsize))
        if policy:  # as many as are held at the end, which is a random moment of every sequence's cycle
            cache = sum(ours.cache.held_bytes(i) for i in ours.sequences)
        limit = (weights + cache) / self.bandwidth
        out |= {
            "steps": done,
            "weight_bytes": weights,
            "cache_bytes": cache,
            "copy_bytes_per_second": self.bandwidth,
            "limit_milliseconds": limit * 1e3,
        }
        for name, seconds in times.items():
            step = statistics.mean(seconds) if policy else statistics.median(seconds)  # some steps evict
            out[name] = {
                "tokens_per_second": batch / step,
                "step_milliseconds": step * 1e3,
                "median_milliseconds": statistics.median(seconds) * 1e3,
                "slowest_milliseconds": max(seconds) * 1e3,
                "share_of_limit": limit / step,
                "prefill_seconds": prefill[name],
            }
        if self.peer:
            out["peer"] = {"name": "transformers forward loop, sdpa", "cache": "dynamic", **out["peer"]}
            out["ratio"] = out["ours"]["tokens_per_second"] / out["peer"]["tokens_per_second"]
        return out


class Ours:
    """The decoder over a full cache or a policy's, as the engine runs it."""

    def __init__(self, model: RandomModel, batch: int, room: int, prompt: int, policy: str | None) -> None:
        self.model, self.sequences = model, list(range(batch))
        backend = model.decoder.backend
        options: dict[str, Any] = {"device": model.device, "dtype": model.dtype, "backend": backend}
        self.cache: FullCache | KVManager
        self.loop: DecodeLoop | None = None
        if backend.recordable or policy:
            self.cache = KVManager(
                model.config, model.rope, parse(policy or "full"), rows=batch, tokens=room, prompt=prompt,
                columns="fit" if backend.recordable else None, **options,
            )  # fmt: skip
            self.loop = DecodeLoop(model.decoder, self.cache, SamplingParams(temperature=0))
        else:
            self.cache = FullCache(model.config, model.rope, **options)
        for i in self.sequences:
            self.cache.join(i, room, prompt)
        self.last, self.tokens = torch.empty(0), list[int]()

    def read(self, prompts: Tensor) -> Tensor:
        """prompts: [B, T] → logits [B, V] of the last tokens."""
        batch, length = prompts.shape
        for start in range(0, length, CHUNK):
            chunk = prompts[:, start : start + CHUNK]
            hidden = self._forward([chunk.shape[1]] * batch, chunk.flatten().tolist())
        ends = torch.arange(1, batch + 1, device=hidden.device) * chunk.shape[1] - 1
        self.last = self.model.decoder.logits(hidden[ends])
        return self.last

    def start(self) -> None:
        """Choose the first tokens."""
        self.tokens = self.last.argmax(-1).tolist()

    def step(self) -> None:
        """One token further, chosen tokens on the host."""
        if self.loop is not None:
            self.tokens = self.loop.step(self.sequences, self.tokens)
            return
        self.last = self.model.decoder.logits(self._forward([1] * len(self.tokens), self.tokens))
        self.start()

    def stagger(self) -> None:
        """Let sequence i run 2·i steps ahead."""
        for done in range(2 * len(self.sequences)):
            some = [i for i in self.sequences if done < 2 * i]
            if some and self.loop is not None:
                tokens = self.loop.step(some, [self.tokens[i] for i in some])
                for i, token in zip(some, tokens, strict=True):
                    self.tokens[i] = token

    def _forward(self, counts: list[int], tokens: list[int]) -> Tensor:
        self.cache.begin_step(self.sequences, counts)
        hidden: Tensor = self.model.decoder(torch.tensor(tokens, device=self.model.device), self.cache)
        self.cache.end_step()
        return hidden


class Theirs:
    """transformers' forward pass over its dynamic cache, without the bookkeeping of its `generate`."""

    def __init__(self, peer: Peer, device: torch.device) -> None:
        self.model, self.device = peer.model, device
        self.cache: Any = None
        self.last = self.tokens = torch.empty(0)

    def read(self, prompts: Tensor) -> Tensor:
        """prompts: [B, T] → logits [B, V] of the last tokens."""
        for start in range(0, prompts.shape[1], CHUNK):
            self._forward(prompts[:, start : start + CHUNK].to(self.device))
        return self.last

    def hold(self, config: ModelConfig, batch: int, context: int, dtype: torch.dtype) -> None:
        """So many tokens of noise instead of a prompt."""
        self.cache = None  # before the new one is made
        self.cache = transformers().DynamicCache()
        noise = torch.randn(1, config.num_kv_heads, context, config.head_dim, device=self.device, dtype=dtype)
        for layer in range(config.num_layers):
            keys = noise.expand(batch, -1, -1, -1)
            self.cache.update(keys, keys, layer)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=self.device)

    def start(self) -> None:
        """Choose the first tokens."""
        self.tokens = self.last.argmax(-1)
        _wait(self.device)

    def step(self) -> None:
        """One token further; chosen tokens stay on the device."""
        self._forward(self.tokens[:, None])
        self.start()

    def _forward(self, tokens: Tensor) -> None:
        done = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.last = done.past_key_values, done.logits[:, -1]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a plain copy, the fastest of several."""
    if device.type == "cuda":
        return copy_speed()
    size = 2**27
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    b.copy_(a)
    return 2 * size / min(timed(lambda: b.copy_(a)) for _ in range(5))


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes, which returns when all of it is done."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    """Until the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads within, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _print_table(result: dict[str, Any]) -> None:
    """What was measured, on standard output."""
    rows: list[Sequence[str]] = [HEADINGS]
    for m in result["measurements"]:
        peer, note = m.get("peer"), []
        if peer:
            note.append(f"{peer['cache']} cache")
            note.append("" if m["same"]["ok"] else "NOT THE SAME")
            if must := m["same"].get("steps_that_must_agree"):
                note.append(f"same tokens for {min(m['same']['steps_that_agree'])} steps ({min(must)} required)")
        if "target" in m:
            note.append(f"target {m['target']} {'reached' if m['target_reached'] else 'missed'}")
        share = m["ours"].get("share_of_limit")
        rows.append((
            m["shape"], str(m["batch"]), f"{m['ours']['tokens_per_second']:,.1f}",
            f"{peer['tokens_per_second']:,.1f}" if peer else "-", f"{m['ratio']:.2f}" if peer else "-",
            f"{m['decode_ratio']:.2f}" if "decode_ratio" in m else "-", f"{share:.0%}" if share else "-",
            ", ".join(filter(None, note)),
        ))  # fmt: skip
    print(aligned(rows))
    for line in result["left_out"]:
        print(f"left out: {line}")
