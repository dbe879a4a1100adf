"""Methods side by side at their steady state: step time, call rates, parts of a step, bytes, throughput.

`bench/methods` lists the methods and the cases; each entry of CASES is a command of its own, such as
`bench thinkv`. The model has random weights in the shape of R1-Distill-Llama-8B. `steady.py` makes its caches, and
says which parts of them are synthetic. A case is a line of the result. If the file has a case with the same settings,
it is not measured again. Names of cases, which `--cases` takes with * and ?:

    step/METHOD/BATCH/T30    single steps after --start tokens: their time, and how often each part is called. T30:
                             30 % of the thoughts are drawn as transitions, for methods with thought types
    bytes/METHOD/T30         bytes of a sequence of --tokens, everything included, against the full cache
    request/METHOD/1/T30     --tokens generated for a single sequence: the time of the whole generation follows from
                             a few steps at each of --levels evenly spaced lengths
    throughput/METHOD/T30    the same at the largest batch that fits into --memory. Its limit is the time of the bytes
                             or of the products, whichever is longer. Its bound is the measured time of attention, and
                             for the rest of a step the least time of the weights and their products. With --pool 0.55
                             cases of methods with types are called throughput/METHOD/T30/P55

throughput/transformers is transformers' full cache. Several GPUs can share the cases: each writes a file of its own,
and a last call reads all files with --join. The parts of a step are measured alone: as captured graphs of their own
between two CUDA events, or by wall time without CUDA.

    attention   over the pages of all layers, in their formats
    refresh     attention's mass in the watched layers, and the part of the decision that needs it
    eviction    the rest of the policy's decision, without the gather
    gather      moves the tokens that stay together, one call; if overlapped, it is also in the rest
    flush       full buffers are quantized
    rest        of the step's graph: projections, MLP, append, logits
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import torch

from minithink.bench.methods import Case, Cases, StandIn
from minithink.bench.speed import plots
from minithink.bench.speed.clock import Deadline, timed
from minithink.bench.speed.compare import comparisons
from minithink.bench.speed.parts import GATHERS, TimedLoop, attention_seconds, counted, parts, seconds
from minithink.bench.speed.peer import Peer, Theirs
from minithink.bench.speed.steady import CONFIGS, RandomModel, Settings, Steady, policy_of, pool_bytes
from minithink.bench.tables.markdown import ABOUT
from minithink.cli.commands import finite, location, natural, positive
from minithink.errors import MinithinkError, UsageError, quoted
from minithink.evaluate import counts
from minithink.kv.sizes import check_budget
from minithink.results import record
from minithink.results.figures import need_matplotlib

PEER = "transformers"  # its full cache; a method without a policy
GIB = 2**30
MOST = 2**16  # sequences of a batch
SOME = 32  # sequences whose bytes are counted at once: bounds the memory of the count


NUMBERS = {
    "prompt-tokens": (128, "tokens of each prompt"),
    "start": (4096, "tokens before steps are measured"),
    "steps": (256, "measured steps"),
    "warm": (16, "steps before the measured steps"),
    "tokens": (32_768, "tokens of a sequence, for bytes and throughput"),
    "levels": (8, "lengths at which requests and throughput are measured"),
    "level-steps": (32, "measured steps at each level"),
    "few": (16, "sequences with types that are filled where many are measured; the others are copies"),
    "byte-rows": (2, "sequences whose bytes are averaged"),
}


SAID = {  # field of a case → its words on the screen
    "step_milliseconds": "{:.2f} ms a step",
    "tokens_per_second": "{:,.0f} tokens a second",
    "share_of_limit": "{:.0%} of the limit",
    "overhead": "{:.1%} refresh and eviction",
    "share": "{:.2%} of the full cache",
}


class Command:
    """`bench NAME`, for an entry of CASES."""

    def __init__(self, name: str, entry: Cases) -> None:
        self.name = name
        self.entry = entry
        self.__doc__ = entry.what

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The options. The numbers of `entry.numbers` are filled into the texts of the methods."""
        add = parser.add_argument
        n = positive
        share = _number("share between 0 and 1", lambda x: 0 <= x <= 1)
        some = _number("share above 0 and at most 1", lambda x: 0 < x <= 1)
        gib = _number("size in GiB", lambda x: 0 < x < math.inf)
        add("--device", default="cpu", choices=("cpu", "cuda"))
        add("--model-shape", default="llama-8b", choices=tuple(CONFIGS))
        add("--layers", type=n, metavar="N", help="layers of the shape; fewer for a quick look (default: all)")
        add("--cases", nargs="+", default=["*"], metavar="NAME", help="cases, such as 'step/*/64/*' (default: all)")
        add(
            "--batch",
            nargs="+",
            type=n,
            default=[1, 8, 64, 256],
            metavar="N",
            help="sequences of the step cases (default 1 8 64 256)",
        )
        add(
            "--transition-share",
            nargs="+",
            type=share,
            default=[0.3, 0.1, 0.5],
            metavar="X",
            help="drawn share of transitions (default 0.3 0.1 0.5; throughput has the first)",
        )
        for name, (value, what) in (*self.entry.numbers.items(), *NUMBERS.items()):
            add(f"--{name}", type=n, default=value, metavar="N", help=f"{what} (default {value:,})")
        add("--memory", type=gib, metavar="GIB", help="memory (default: the GPU's; 8 on a CPU)")
        add(
            "--headroom",
            type=gib,
            metavar="GIB",
            help="memory kept free of weights and cache (default 8; 1 on a CPU)",
        )
        add(
            "--pool",
            type=some,
            default=1.0,
            metavar="X",
            help="pages of methods with types or a shared budget, as a share of the worst case's; too few pages end "
            "a case (default 1)",
        )
        add("--lockstep", action="store_true", help="all sequences are at the same token (default: spread)")
        add("--seed", type=natural, default=0, metavar="N", help="seed of types and tokens (default 0)")
        add("--time-budget", type=n, metavar="SECONDS", help="begin no case after this time")
        add("--join", type=Path, nargs="+", default=[], metavar="FILE", help="also take these files' measurements")
        add(
            "--plot",
            type=location,
            metavar="DIR",
            help=f"draw steps, DIR/{self.name}-parts.svg and -latency.svg"
            + (", and generations, -levels.svg" if self.entry.by_level else ""),
        )
        add("--plot-only", action="store_true", help="measure nothing: draw what the output holds")
        add("--output", metavar="FILE", help=f"default: docs/results/{self.name}.json")

    def run(self, args: argparse.Namespace, argv: list[str]) -> int:
        """Measure the cases that the file lacks, write after every case, print a table."""
        entry = self.entry
        device = torch.device(args.device)
        if args.headroom is None:
            args.headroom = 8.0 if device.type == "cuda" else 1.0
        every = entry.cases(args.batch, args.transition_share, args.pool)
        chosen = [case for case in every if any(fnmatch(case.name, pattern) for pattern in args.cases)]
        if not chosen:
            kinds = ", ".join(dict.fromkeys(f"{case.kind}/*" for case in every))
            raise UsageError(
                f"--cases {' '.join(args.cases)} matches no case; there are {kinds} (names are {every[0].name}, "
                f"{every[-1].name} and the like; python -m minithink.bench {self.name} --help)."
            )
        path = Path(args.output) if args.output else record.default_path(self.name)
        if args.plot_only and args.plot is None:
            raise UsageError("--plot-only draws to the folder that --plot names: give it.")
        if args.plot is not None:
            need_matplotlib()
            record.check(Path(args.plot, "picture.svg"), "--plot")
        if not args.plot_only:
            record.check(path)
            for method in dict.fromkeys(case.method for case in chosen if case.method != PEER):
                policy = policy_of(entry.methods[method], settings_of(entry, args), CONFIGS[args.model_shape])
                check_budget(policy, args.prompt_tokens)
            self.measure(path, every, chosen, args, argv)
        for picture in plots.draw(self.name, entry, self.read(path), args.plot) if args.plot is not None else ():
            print(f"drawn to {picture}", file=sys.stderr)
        return 0

    def measure(
        self, path: Path, every: Sequence[Case], chosen: Sequence[Case], args: argparse.Namespace, argv: list[str]
    ) -> None:
        """Measure the chosen cases that neither `path` nor a joined file has. MinithinkError: not one fits."""
        entry = self.entry
        device = torch.device(args.device)
        others = {file: self.read(file) for file in (*([path] if path.exists() else []), *args.join)}
        there: dict[str, dict[str, Any]] = {}  # the cases that are measured already; of several files the last one's
        for other in others.values():
            about = {x: other[x] for x in ABOUT}
            for m in other["measurements"]:
                if m["method"] in (*entry.methods, PEER):  # others are no longer listed
                    there[m["case"]] = about | m
        todo = [c for c in chosen if c.name not in there or there[c.name]["settings"] != _settings(entry, args, c)]
        if todo and device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu.")
        result = record.new(self.name, argv, device if todo else "cpu")
        if not todo:  # nothing is measured in this call
            result |= {x: [*others.values()][-1][x] for x in ("machine", "versions", *ABOUT)}
        for file, other in others.items():
            theirs = _place(other)
            ours = _place(result)
            if theirs != ours:
                raise UsageError(
                    f"{file} was measured on {theirs}, and this is {ours}: ratios need one machine; give another "
                    "--output."
                )
        left = ("cases", "output", "command", "join", "plot", "plot_only")
        result["settings"] = {key: x for key, x in vars(args).items() if key not in left}
        result["measurements"] = []
        result["left_out"] = []

        def write(ended: bool = False) -> None:
            result["measurements"] = [*there.values()]
            result["missing"] = sorted({case.name for case in every} - {*there})
            result["complete"] = ended and not result["missing"]
            record.write(path, result)

        deadline = Deadline(args.time_budget)
        bench = None
        for case in chosen:
            if case not in todo:
                print(f"{case.name}: is there", file=sys.stderr)
                continue
            if deadline.over():
                result["left_out"].append(f"{case.name}: the time budget of {deadline.seconds:g} s is used up")
                continue
            print(f"measuring {case.name} ...", file=sys.stderr, flush=True)
            bench = bench or Bench(entry, args, device)
            try:
                began = time.monotonic()
                m = bench.measure(case) | {"seconds_in_all": time.monotonic() - began}
                there.pop(case.name, None)  # a case that is measured again goes to the end
                about = {"case": case.name, **asdict(case), "settings": _settings(entry, args, case)}
                there[case.name] = about | {x: result[x] for x in ABOUT} | m
            except UsageError:
                raise
            except (MinithinkError, torch.OutOfMemoryError) as error:
                result["left_out"].append(f"{case.name}: {str(error).splitlines()[0].rstrip('.')}")
            write()
            gc.collect()
            torch.cuda.empty_cache()  # nothing without CUDA
        write(ended=True)
        for text in (
            *map(line, result["measurements"]),
            *map(str, comparisons(entry.goals, result["measurements"])),
            *(f"left out: {text}" for text in result["left_out"]),
        ):
            print(text)
        print(f"written to {path}", file=sys.stderr)
        if todo and len(result["left_out"]) == len(todo) and not deadline.over():
            raise MinithinkError(f"Nothing was measured: {result['left_out'][0]}.")

    def read(self, path: Path) -> dict[str, Any]:
        """A result of this benchmark. MinithinkError: there is no such file, or it is another benchmark's."""
        result = record.read(path)
        name = result.get("benchmark")
        if name != self.name or any("case" not in m for m in result["measurements"]):
            raise MinithinkError(f"{path} is a result of {name}, not of {self.name}: name another file.")
        return result


def _number(what: str, good: Callable[[float], bool]) -> Callable[[str], float]:
    """For argparse: reads a number for which good(number); `what` names the kind in the error."""

    def read(text: str) -> float:
        try:
            value = finite(text)
        except argparse.ArgumentTypeError:
            value = math.nan
        if not good(value):
            raise argparse.ArgumentTypeError(f"{quoted(text)} is no {what}")
        return value

    return read


def settings_of(entry: Cases, args: argparse.Namespace, drawn: float | None = None) -> Settings:
    """The settings of a case's cache. drawn: the case's share; None: it draws no types."""
    numbers = tuple((name, getattr(args, name)) for name in entry.numbers)
    return Settings(numbers, args.prompt_tokens, drawn or 0.0, args.lockstep, args.seed, args.pool)


def _settings(entry: Cases, args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """The options that a case depends on."""
    names = ["device", "model_shape", "layers", *entry.numbers, "prompt_tokens", "lockstep", "seed", "pool"]
    names += {
        "step": ["start", "steps", "warm"],
        "bytes": ["tokens", "byte_rows", "levels"],
    }.get(case.kind, ["tokens", "levels", "level_steps", "warm"])
    names += ["memory", "headroom"] if case.kind == "throughput" else []
    names += ["few"] if case.kind in ("request", "throughput") and case.batch != 1 and case.drawn is not None else []
    return {name: getattr(args, name) for name in names}


def _place(result: dict[str, Any]) -> str:
    """The kind of machine, and the versions that decide how fast it is."""
    versions = ", ".join(f"{name} {result['versions'].get(name)}" for name in ("torch", "triton"))
    return f"{result['machine'].get('gpu') or result['machine']['cpu']} with {versions}"


class Bench:
    """A model, and the measurements with it."""

    def __init__(self, entry: Cases, args: argparse.Namespace, device: torch.device) -> None:
        config = CONFIGS[args.model_shape]
        self.config = replace(config, num_layers=args.layers or config.num_layers)
        self.entry = entry
        self.args = args
        self.device = device
        self.model = RandomModel(self.config, device, torch.bfloat16)
        whole = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else 8.0
        self.memory = (args.memory or whole) * GIB
        # bytes read in every step; of the embedding a step reads a few rows only
        self.weights = sum(p.nbytes for p in self.model.decoder.parameters()) - self.model.decoder.embed.nbytes
        self.flops = flop_rate(device)

    def measure(self, case: Case) -> dict[str, Any]:
        """One case. MinithinkError: it does not fit into the memory."""
        if case.method == PEER:
            return self.theirs()
        of = {"step": self.step, "bytes": self.bytes, "request": self.generation, "throughput": self.generation}
        return of[case.kind](case)

    def steady(self, case: Case, batch: int, tokens: int, few: int | None = None) -> Steady:
        """A cache that is filled with prompts. MinithinkError: it does not fit into the memory."""
        s = settings_of(self.entry, self.args, case.drawn)
        if not self.fits(case, batch, s, tokens, few):
            raise MinithinkError(f"{batch} sequences do not fit into {self.memory / GIB:,.3g} GiB")
        return Steady(self.model, self.entry.methods[case.method], batch, s, tokens, few)

    def fits(self, case: Case, batch: int, s: Settings, tokens: int, few: int | None = None) -> bool:
        """Whether weights, cache and headroom fit into the memory, and the slots can be numbered. few: sequences of
        the second cache, from which this one is copied."""
        try:
            text = self.entry.methods[case.method]
            cache = pool_bytes(self.config, text, batch, s, tokens)
            if few is not None and few < batch and case.drawn is not None:
                cache += pool_bytes(self.config, text, few, s, tokens)
        except UsageError:  # more slots than can be numbered
            return False
        weights = self.weights + self.model.decoder.embed.nbytes
        return weights + cache + self.args.headroom * GIB <= self.memory

    def largest(self, case: Case, s: Settings, tokens: int, few: int | None = None) -> int:
        """The largest batch that fits; 0: none does."""
        return bisect_left(range(1, MOST), True, key=lambda batch: not self.fits(case, batch, s, tokens, few))

    def step(self, case: Case) -> dict[str, Any]:
        """Steps at the steady state."""
        a = self.args
        s = settings_of(self.entry, self.args)
        policies = [policy_of(text, s, self.config) for text in self.entry.methods.values()]
        # one period to capture all graphs, and two for gathers that are timed alone
        period = max(cast(StandIn, policy).period for policy in policies)
        start = self.start(case)
        steady = self.steady(case, case.batch, start + a.warm + a.steps + 3 * period + GATHERS)
        steady.reach(start)
        loop = TimedLoop(steady)
        m = {"filled": steady.generated} | loop.measure(a.warm + steady.period, a.steps)
        return m | self.limit(steady, m["step_milliseconds"]) | parts(loop, m)

    def start(self, case: Case) -> int:
        """Tokens that are generated before the steps of a case are measured."""
        a = self.args
        if case.method not in self.entry.as_many:
            return int(a.start)
        return max(0, a.budget - a.prompt_tokens - a.warm - a.steps // 2)

    def bytes(self, case: Case) -> dict[str, Any]:
        """Bytes of a sequence, the mean over a few, and of a full cache of the same length."""
        steady = self.steady(case, self.args.byte_rows, self.args.tokens)
        pages = 0
        for i in range(1, self.args.levels + 1):
            steady.reach(self.args.tokens * i // self.args.levels)
            pages = max(pages, steady.pages)
        cache = steady.cache
        rows = steady.sequences
        ledgers = [cache.account(i).as_dict() for i in rows]
        kinds = {kind: statistics.mean(x[kind] for x in ledgers) for kind in ledgers[0]}
        free = kinds.pop("reserve")  # free slots of the sequence's pages
        length = statistics.mean(cache.length(i) for i in rows)
        if steady.enough is not None:  # the cache was filled to its steady state only
            length += max(0, self.args.tokens - steady.enough)
        full = length * self.config.kv_bytes_per_token(2)
        return {
            "rows": len(rows),
            "length": length,
            "held_tokens": max(cache.held(i) for i in rows),
            "kinds": kinds,
            "bytes": sum(kinds.values()),
            "full_bytes": full,
            "share": sum(kinds.values()) / full,
            "free_share": free / full,
            "pool_share": cache.ledger().total / len(rows) / full,
            "pages_share": pages / cache.store.slots.table.free_pages.count,
            **counted(steady),
        }

    @property
    def levels(self) -> list[int]:
        """Tokens at which a generation is measured, the middle of each of its parts."""
        return [(2 * i + 1) * self.args.tokens // (2 * self.args.levels) for i in range(self.args.levels)]

    def generation(self, case: Case) -> dict[str, Any]:
        """A whole generation at the case's batch, or at the largest."""
        a = self.args
        s = settings_of(self.entry, self.args, case.drawn)
        room = a.tokens + a.warm + a.level_steps
        batch = case.batch or self.largest(case, s, room, a.few)
        if not batch:
            raise MinithinkError(f"not one sequence fits into {self.memory / GIB:,.3g} GiB")
        steady = self.steady(case, batch, room, a.few)
        loop = TimedLoop(steady)
        levels = []
        # Sequences are spread over the policy's cycle: within `turn` steps some sequence ends a cycle.
        turn = math.ceil(steady.period / (1 if a.lockstep else batch))
        steps = math.ceil(a.level_steps / turn) * turn if case.batch else a.level_steps
        for level in self.levels:
            steady.reach(level - a.warm)
            m = {"level": level, "filled": steady.generated} | loop.measure(a.warm, steps)
            if case.drawn is not None:
                m |= parts(loop, m)
                attention = m["parts_milliseconds"]["attention"]
            else:
                attention = attention_seconds(steady) * 1e3
            weights = max(self.weights / self.model.bandwidth, batch * self.weights / self.flops) * 1e3
            m |= {"attention_milliseconds": attention, "bound_milliseconds": attention + weights}
            levels.append(m | self.limit(steady, m["step_milliseconds"]))
        bound = statistics.mean(m["bound_milliseconds"] for m in levels)
        return self.whole(batch, levels) | {
            "bound_milliseconds": bound,
            "bound_tokens_per_second": batch / bound * 1e3,
            **counted(steady),
        }

    def whole(self, batch: int, levels: list[dict[str, Any]]) -> dict[str, Any]:
        """A generation, from the steps at each of its levels."""
        step, limit = (statistics.mean(m[x] for m in levels) for x in ("step_milliseconds", "limit_milliseconds"))
        return {
            "batch": batch,
            "memory": self.memory,
            "tokens_per_second": batch / step * 1e3,
            "step_milliseconds": step,
            "limit_milliseconds": limit,
            "share_of_limit": limit / step,
            "levels": levels,
        }

    def theirs(self) -> dict[str, Any]:
        """A whole generation of transformers, at the largest batch that it has memory for. The last case: our weights
        make room for its own."""
        a = self.args
        decoder = self.model.decoder
        room = a.tokens + a.level_steps + 1
        weights = self.weights + decoder.embed.nbytes
        batch = int((self.memory - a.headroom * GIB - weights) / self.config.kv_bytes_per_token(2) // room)
        peer = Peer.from_decoder(decoder)
        decoder.to_empty(device="meta")
        while batch > 0:
            try:
                self.theirs_at(peer, batch, a.tokens, 1)  # the full length must fit
                levels = [self.theirs_at(peer, batch, level, a.level_steps) for level in self.levels]
                return self.whole(batch, levels)
            except torch.OutOfMemoryError:
                batch -= max(1, batch // 8)
            torch.cuda.empty_cache()
        raise MinithinkError(f"not one sequence fits into {self.memory / GIB:,.3g} GiB beside transformers")

    def theirs_at(self, peer: Peer, batch: int, level: int, steps: int) -> dict[str, Any]:
        """transformers' steps over `level` tokens."""
        c = self.config
        side = Theirs(peer, self.device)
        side.hold(c, batch, level, self.model.dtype)
        side.step()
        milliseconds = statistics.mean(timed(side.step) for _ in range(steps)) * 1e3
        lanes = batch * c.num_layers * c.num_kv_heads
        limit = self.limit_of(batch, batch * level * c.kv_bytes_per_token(2), lanes * level, milliseconds)
        return {"level": level, "filled": level, "step_milliseconds": milliseconds} | limit

    def limit(self, steady: Steady, milliseconds: float) -> dict[str, Any]:
        """The least time of a step: reading weights and cache, or the products, whichever takes longer."""
        store = steady.cache.store
        rows = list(steady.sequences)
        held = sum(store.account(rows[i : i + SOME]).held for i in range(0, len(rows), SOME))
        return self.limit_of(len(rows), held, int(store.lists.count.sum()) * store.shape.sharing, milliseconds)

    def limit_of(self, batch: int, held: int, tokens: int, milliseconds: float) -> dict[str, Any]:
        """The same from numbers. held: bytes of the cache; tokens: of all lanes."""
        c = self.config
        # 2 for each weight (of 2 bytes) and sequence; 2 for each query head, channel and token in q·k, and 2 in p·v
        flops = batch * self.weights + 4 * tokens * c.num_heads // c.num_kv_heads * c.head_dim
        by_bytes = (self.weights + held) / self.model.bandwidth
        by_flops = flops / self.flops
        limit = 1e3 * max(by_bytes, by_flops)
        return {
            "weight_bytes": self.weights,
            "cache_bytes": held,
            "flops": flops,
            "copy_bytes_per_second": self.model.bandwidth,
            "matmul_flops_per_second": self.flops,
            "limit_by": "bytes" if by_bytes >= by_flops else "flops",
            "limit_milliseconds": limit,
            "share_of_limit": limit / milliseconds,
        }


def flop_rate(device: torch.device) -> float:
    """Floating-point operations a second of a large product in bfloat16, the fastest of several."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device)


def line(m: dict[str, Any]) -> str:
    """A case for people."""
    said = [text.format(m[name]) for name, text in SAID.items() if name in m]
    return f"{m['case']}: {', '.join(said)}; counted: {counts.said(m.get('counts'))}"
