"""ThinKV: comparisons of its settings and with other methods, and its steps beside R-KV and a full cache."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from minithink.bench.methods import (
    LAYERS,
    MEASURED,
    Case,
    Cases,
    Column,
    Goal,
    Inputs,
    Operation,
    Result,
    Row,
    StandIn,
    StandIns,
    Sweep,
    Table,
)
from minithink.bench.methods.settings import CHOSEN, RKV
from minithink.bench.methods.thinkv_controls import (
    BestScale,
    Counted,
    HeadRows,
    NoCase1,
    RandomSurvivors,
    RandomTypes,
)
from minithink.engine import TINY
from minithink.kv.contract import Shape, Step
from minithink.policies.thinkv import Tbe, ThinKV
from minithink.results import record
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION

# Answers: settings of the method, and other methods ----------------------------------------------------------------


def _of(*options: str) -> tuple[str, ...]:
    return tuple(f"thinkv:{option}" if option else "thinkv" for option in options)


def _settings(what: str, *options: str) -> Sweep:
    """A comparison of settings with the defaults."""
    return Sweep(what, _of(*options), beside="thinkv")


def _shares_under_eviction() -> str:
    """Options that draw types in other shares: those that the embedded model's calibration found under eviction."""
    calibration = json.loads((TINY / "thoughts.json").read_text(encoding="utf-8"))
    shares = calibration["measurements"]["eviction"]["shares_of_types"]
    return f"transition={shares['transition']:.2f},execution={shares['execution']:.2f}"


def _head_rows() -> str:
    """ThinKV that counts before it averages, with layers and thresholds of that rule."""
    measured = json.loads(record.default_path("thinkv-averaging").read_text(encoding="utf-8"))
    found = measured["measurements"]["rules"]["shares"]
    layers, thresholds = ("/".join(map(str, found[name])) for name in ("layers", "thresholds"))
    return f"{HeadRows.name}:layers={layers},thresholds={thresholds}"


FOUR = "precision=R4E4T4"  # equal bits, so that types only decide what is evicted
PRECISIONS = ("R8E8T8", "R8E4T2", "R4E4T4", "R4E2T2", "R2E4T2", "R4E4T0", "R2E2T2")  # beside R4E4T2
EIGHT = "R8E8T8"
SENSITIVE = [EIGHT.replace(f"{kind}8", f"{kind}{bits}") for kind in "RET" for bits in (4, 2)]  # one type's bits
RETENTIONS = ("64", "64/32", "64/32/16", "64/32/16/8", "64/32/16/8/4/2", "64/32/16/8/4/0")  # beside 64/32/16/8/4
WIDE = (0.125, 0.25, 0.5, 0.75)
OTHERS = (RKV, CHOSEN["random_attention"])  # in full precision, the prompt stays
SWEEPS = {
    "main": Sweep(
        "ThinKV, its two halves and other methods",
        (
            "thinkv",
            "thinkv:types=1",
            "tbq",
            "tbe",
            *OTHERS,
            "rkv",
            "kivi",
            "kivi:bits=4",
            "pm_kvq",
            "pm_kvq:max_len=2048",
        ),
        budgets=WIDE,
        split="test",
        beside=RKV,
    ),
    "main-few": Sweep(
        "others with so few tokens that they take as few bytes as ThinKV",
        OTHERS,
        budgets=(0.03125, 0.0625),
        split="test",
        beside=RKV,
    ),
    "recall": Sweep(
        "of the tokens that full attention looks at most, how many are held",
        ("thinkv", "tbe", "rkv"),
        budgets=WIDE,
        recall=True,
    ),
    "formats": _settings("floating points and integers of 4 and 2 bits", "", "four=int4s,two=int2s"),
    "precision": _settings("bits by thought type", "", *(f"precision={p}" for p in PRECISIONS)),
    "sensitivity": Sweep(
        "bits of the keys, or of the values, of one type, with 8 for all others and no eviction",
        (
            f"tbq:precision={EIGHT}",
            *(f"tbq:precision={one},v_precision={EIGHT}" for one in SENSITIVE),
            *(f"tbq:precision={EIGHT},v_precision={one}" for one in SENSITIVE),
        ),
        budgets=(),
    ),
    "tau": _settings("the tokens of a segment, τ", "tau=32", "tau=64", "", "tau=256"),
    "types": _settings("the number of types, |T|", "types=1", "types=2", ""),
    "retention": _settings("the last number of the retention schedule", *(f"retention={r}" for r in RETENTIONS), ""),
    "block": _settings("slots of a page", "block=4", "", "block=16", "block=32"),
    "key-axis": Sweep(
        "a scale for each channel of a group of keys, or for each key",
        (
            *_of("", "key_axis=channel", "precision=R4E2T2", "precision=R4E2T2,key_axis=channel"),
            "tbq",
            "tbq:key_axis=channel",
        ),
        beside="thinkv",
    ),
    "thinkv-controls": Sweep(
        "ThinKV without one of its parts: types, K-means, case 1, the hard budget, and scales in other ways",
        (
            "thinkv",
            Counted.name,
            # φ: types by words, by lot, or one type
            "thinkv:thoughts=keyword",
            RandomTypes.name,
            f"{RandomTypes.name}:{_shares_under_eviction()}",
            "thinkv:types=1",
            _head_rows(),
            # TBE: tokens by lot, no case 1, the paper's soft budget
            RandomSurvivors.name,
            NoCase1.name,
            "thinkv:hard_budget=false",
            # the same with equal bits
            f"thinkv:{FOUR}",
            f"thinkv:thoughts=keyword,{FOUR}",
            f"{RandomTypes.name}:{FOUR}",
            f"{RandomSurvivors.name}:{FOUR}",
            f"{NoCase1.name}:{FOUR}",
            # TBQ: other scales of 2 bits, and of keys
            BestScale.name,
            "thinkv:two=int2s",
            "thinkv:two=tq2",
            "thinkv:key_axis=channel",
        ),
        budgets=(0.25, 0.5),
        beside=Counted.name,  # the same policy: it only counts what it does
    ),
    "snapkv": Sweep("a prompt that is cut, too", ("thinkv", "snapkv:cap=128+thinkv"), beside="thinkv"),
}

# Steps: caches whose types of thoughts are drawn -------------------------------------------------------------------


class Drawn(StandIn, ThinKV):
    """ThinKV that measures sparsity, but takes the type that was drawn for the segment."""

    capturable = True
    typed = pooled = True
    shares: list[float]  # of segments, by type
    seed: int

    @property
    def period(self) -> int:
        return self.tau

    @property
    def watched(self) -> tuple[int, ...]:
        return self.measured

    def counters(self) -> dict[str, Tensor]:
        return {"case_1": self.cases[0], "case_2": self.cases[1]}

    def alone(self) -> dict[str, Callable[[Any], object]]:
        return {"refresh": self.classify}

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        draw = torch.Generator().manual_seed(self.seed)
        chances = torch.tensor(self.shares).expand(shape.rows, 3)
        self.drawn = torch.multinomial(chances, self.kind.shape[1], replacement=True, generator=draw)
        self.drawn = self.drawn.to(torch.uint8).to(shape.device)  # [B, segments]

    def classify(self, step: Step) -> Tensor:
        super().classify(step)
        return self.drawn[step.row, (step.clock // self.tau).long()]


class DrawnTbe(Drawn, Tbe):
    """The same for ThinKV's eviction alone (`tbe`)."""

    capturable = True


def _drawn(cls: type[Drawn], policy: ThinKV, share: float, seed: int, layers: int) -> ThinKV:
    """The stand-in of a policy. share: of segments that are transitions; reasoning and execution share the rest
    equally."""
    own = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init}
    measured = sorted({i * layers // MEASURED for i in range(MEASURED)})
    # any thresholds do: types are drawn
    out = cls(**own | {"layers": "/".join(map(str, measured)), "thresholds": "0.5/0.8"})
    chances = {TRANSITION: share, EXECUTION: (1 - share) / 2, REASONING: (1 - share) / 2}
    out.shares = [chances[kind] for kind in range(3)]
    out.seed = seed
    return out


STAND_INS: StandIns = {ThinKV: partial(_drawn, Drawn), Tbe: partial(_drawn, DrawnTbe)}

SLOTS = {f"thinkv-block{n}": n for n in (4, 16, 32)}  # of a page, where they are not the default (figure 10e)
OWN = "thinkv:budget={budget},tau={tau}"
OTHER = "rkv:budget={budget},buffer={buffer}"
EVERY = "rkv:budget={budget},buffer=0"  # evicts at every step
METHODS = {
    "full": "full",
    "thinkv": OWN,
    "thinkv-channel": f"{OWN},key_axis=channel",
    "tbe": "tbe:budget={budget},tau={tau}",
    "rkv": OTHER,
    "rkv-gather": f"{OTHER},compaction=gather",
    "rkv-overlapped": f"{OTHER},compaction=overlapped",
    "rkv-every": EVERY,
    "rkv-every-gather": f"{EVERY},compaction=gather",
    "rkv-every-overlapped": f"{EVERY},compaction=overlapped",
    **{name: f"{OWN},block={n}" for name, n in SLOTS.items()},
}
PEER = "transformers"  # its full cache; no policy
TYPED = ("thinkv", "thinkv-channel", "tbe", *SLOTS)  # methods that draw types
REQUEST = (("full", 1), ("rkv", 1), ("rkv-gather", 1), ("rkv-overlapped", 1), ("thinkv", 1), ("thinkv", 64))
THROUGHPUT = ("full", "rkv", "thinkv", "thinkv-channel", PEER)


def cases(batches: Sequence[int], shares: Sequence[float], pool: float = 1.0) -> list[Case]:
    """All cases. shares: of segments that are transitions."""

    def case(kind: str, method: str, batch: int = 0, share: float = shares[0], pool: float = 1.0) -> Case:
        return Case(kind, method, batch, share if method in TYPED else None, pool if method in TYPED else 1.0)

    def drawn(method: str) -> Sequence[float]:
        return shares if method in TYPED and method not in SLOTS else shares[:1]

    out = [case("bytes", method, share=share) for method in ("thinkv", "thinkv-channel") for share in shares]
    for batch in batches:
        for method in METHODS:
            if method not in SLOTS or batch == max(batches):
                out += [case("step", method, batch, share) for share in drawn(method)]
    out += [case("request", method, batch) for method, batch in REQUEST]
    return out + [case("throughput", method, pool=pool) for method in THROUGHPUT]


# Pictures leave out R-KV that evicts at every step: its steps are so long that other lines would be flat.
LINES = {"full": "#444444", "thinkv": "#0072B2", "thinkv-channel": "#56B4E9", "tbe": "#009E73", "rkv": "#D55E00"}
PARTS = ("attention", "refresh", "eviction", "gather", "flush", "rest")
CASES = {
    "thinkv": Cases(
        "ThinKV at its steady state beside R-KV and a full cache: steps and their parts, bytes, throughput.",
        METHODS,
        {
            "budget": (1024, "tokens of a lane"),
            "tau": (128, "tokens of a segment"),
            "buffer": (128, "tokens that R-KV gathers before it evicts"),
        },
        cases,
        goals=(
            Goal("step/tbe/256/T30", "step/rkv-every-overlapped/256", 3.0),
            Goal("step/tbe/256/T30", "step/rkv/256", 1.0),
            Goal("throughput/thinkv/T30", "throughput/full", 15.0),
            Goal("throughput/thinkv/T30", "throughput/transformers", 28.0),
            Goal("throughput/thinkv/T30", "throughput/rkv", 0.85, of_bound=True),
        ),
        parts=PARTS,
        lines=LINES,
        unplotted=(*SLOTS, "rkv-every", "rkv-every-gather", "rkv-every-overlapped"),
    )
}

# Kernels: what types of thoughts cost beside attention --------------------------------------------------------------

SCHEDULE = (128, 64, 32, 16, 8, 4)  # τ, R
HEADS = 8  # KV heads
DIM = 128  # channels


def segments(device: str, tokens: int) -> Inputs:
    """Two segments of whole numbers, one of them not full, and how many tokens each keeps."""
    keys = torch.randint(-2, 3, (2, tokens, 64), device=device).to(torch.bfloat16)
    valid = torch.arange(tokens, device=device) < torch.tensor([[tokens], [tokens - 3]], device=device)
    return keys, valid, torch.tensor([tokens // 2, 3], device=device)


def weights(device: str, tokens: int) -> Inputs:
    """Rows of attention weights, and which tokens are there."""
    valid = torch.arange(tokens, device=device) < torch.tensor([[tokens], [tokens - 3]], device=device)
    return torch.rand(2, HEADS, tokens, device=device).pow(4), valid[:, None]


def shrinking(lengths: Sequence[int], due: Sequence[int], bytes: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """Segments on their way down the retention schedule, in all layers."""
    for n, (tokens, kept) in product(due, pairwise(SCHEDULE)):
        sets = n * LAYERS
        size = sets * tokens * HEADS * DIM * 2
        x = torch.randn(-(-bytes // size), sets, tokens, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        valid = torch.ones(sets, tokens, dtype=torch.bool, device="cuda")
        count = torch.full((sets,), kept, dtype=torch.int32, device="cuda")
        yield f"{n} × {LAYERS} segments, {tokens} → {kept} tokens", size, [(one, valid, count) for one in x]


def due_rows(lengths: Sequence[int], due: Sequence[int], bytes: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """Rows that are due, in the measured layers. They are in the GPU's cache, as after attention has written them."""
    for length, n in product(lengths, due):
        p = torch.rand(MEASURED, n, HEADS, length, device="cuda")
        valid = torch.ones(MEASURED, n, 1, length, dtype=torch.bool, device="cuda")
        yield f"{n} × {MEASURED} rows of {length:,} tokens", p.nbytes + valid.nbytes, [(p, valid)] * 16


# The twin of `kmeans` waits for the device, to learn whether a cluster is empty.
OPERATIONS = {
    "sparsity": Operation(weights, due_rows),
    "kmeans": Operation(segments, shrinking, capturable=False),
}

# Tables of steps ---------------------------------------------------------------------------------------------------

SEQUENCES = (64, 256)  # of the steps whose parts are shown
BOTH = "{:,} / {:,}"  # how often segments were annealed as a transition ended (case 1), and for room (case 2)


def title(m: Row) -> str:
    """A method with the share of its transitions and its pool."""
    types = f", T {m['drawn']:.0%}" if m["drawn"] is not None else ""
    pool = m["settings"]["pool"]
    return f"{m['method']}{types}" + (f", pool of {pool:.0%}" if pool != 1 and types else "")


def of_kind(result: Result, kind: str) -> list[Row]:
    """The cases of one kind, sorted by batch, then by method."""
    order = [*METHODS, PEER]
    found = [m for m in result["measurements"] if m["kind"] == kind and m["method"] not in SLOTS]
    return sorted(found, key=lambda m: (m["batch"] if kind == "step" else 0, order.index(m["method"])))


def slots(result: Result) -> list[Row]:
    """ThinKV's steps by the slots of a page."""
    own = [m for m in result["measurements"] if m["kind"] == "step" and m["method"] in SLOTS]
    batches = {m["batch"] for m in own}
    shares = {m["drawn"] for m in own}
    own += [m for m in of_kind(result, "step") if m["method"] == "thinkv" and m["batch"] in batches]
    found = [{**m, "slots": SLOTS.get(m["method"], ThinKV.block)} for m in own if m["drawn"] in shares]
    return sorted(found, key=lambda m: m["slots"])


def growing(result: Result) -> list[Row]:
    """Every measured length of whole generations, of many sequences with types."""
    own = [m for m in of_kind(result, "request") if m["batch"] > 1] + of_kind(result, "throughput")
    own = [m for m in own if m["drawn"] is not None and all("overhead" in x for x in m["levels"])]
    return [{**m, **x} for m in own for x in m["levels"]]


def seconds(m: Row) -> float:
    """How long a sequence waits for all its tokens."""
    return float(m["step_milliseconds"] / 1e3 * m["settings"]["tokens"])


# Table 14 of the paper: seconds of a request with R1-Distill-Llama-8B on AIME, by method and budget. Its R-KV (seq)
# and R-KV (ovl) gather as rkv-gather and rkv-overlapped do.
PAPER_FULL = 259.6
PAPER_REQUESTS = {
    "rkv-gather": {512: 242.6, 1024: 247.8, 2048: 254.2},
    "rkv-overlapped": {512: 240.8, 1024: 246.0, 2048: 253.7},
    "thinkv": {512: 237.5, 1024: 243.6, 2048: 251.0},
}
PAPER_BUDGETS = (512, 1024, 2048)


def requests(result: Result) -> Iterable[Row]:
    """Requests of one sequence alone, with shares of the full cache's time: here, and in the paper."""
    rows = [m for m in of_kind(result, "request") if m["batch"] == 1]
    full = next((seconds(m) for m in rows if m["method"] == "full"), None)
    for m in rows:
        paper = {budget: s / PAPER_FULL for budget, s in PAPER_REQUESTS.get(m["method"], {}).items()}
        yield {**m, "of_full": seconds(m) / full if full else None, "paper": paper}


def requests_said(result: Result) -> Iterable[str]:
    """What the columns of the paper mean."""
    budgets = sorted({m["settings"]["budget"] for m in of_kind(result, "request")})
    yield (
        f"*Of full*: of the full cache's time, here with {' and '.join(f'{n:,}' for n in budgets)} tokens. *The "
        f"paper*: the same from its table 14, by budget; its full cache takes {PAPER_FULL} s. Its R-KV (seq) stands "
        "beside rkv-gather, R-KV (ovl) beside rkv-overlapped."
    )
    yield ""


def of_paper(budget: int) -> Column:
    """The share of the full cache's time in table 14."""
    return (f"the paper: {budget:,}", lambda m: m["paper"].get(budget), "{:.1%}")


def of_bound(m: Row) -> float | None:
    """The share of the bound that is reached."""
    return m["bound_milliseconds"] / m["step_milliseconds"] if "bound_milliseconds" in m else None


def annealed(m: Row) -> tuple[Any, Any]:
    """The two cases of annealing."""
    counts = m.get("counts") or {}
    return counts.get("case_1"), counts.get("case_2")


def decided(m: Row) -> float:
    """Milliseconds of refresh and eviction."""
    return float(m["parts_milliseconds"]["refresh"] + m["parts_milliseconds"]["eviction"])


def steps_said(result: Result) -> Iterable[str]:
    """The number of steps that the means are of, as a sentence."""
    own = of_kind(result, "step")
    counts = [m["settings"]["steps"] for m in own]
    usual = statistics.mode(counts) if counts else 0
    said = f"Means of {usual} steps"
    for m, count in zip(own, counts, strict=True):
        if count != usual:
            said += f"; {title(m)}, {m['batch']}: {count}"
    return [f"{said}.", ""]


def bytes_said(result: Result) -> Iterable[str]:
    """The meaning of the columns of bytes, as a sentence."""
    for m in of_kind(result, "bytes")[:1]:
        yield (
            f"After {m['length']:,} tokens, of which a lane holds {m['held_tokens']:,}. *Whole pool*: with all that "
            "is reserved, of the full cache. *Pages used*: of those that are "
            "needed if, at worst, all thoughts are of one type, whichever that is."
        )
    yield ""


def levels_said(result: Result) -> Iterable[str]:
    """The meaning of the lengths, as a sentence."""
    rows = growing(result)
    parts = len({m["level"] for m in rows})
    said = f"Lengths are the middles of {parts} equal parts of a generation. Both cases: of all sequences, in the "
    return [said + "steps that were measured.", ""]


def mib(kind: str) -> Callable[[Row], float]:
    """A kind of bytes of a sequence, in MiB; "rest": all other kinds."""
    main = ("payload", "scales", "buffers")
    return lambda m: (m["bytes"] - sum(m["kinds"][k] for k in main) if kind == "rest" else m["kinds"][kind]) / 2**20


def called(name: str) -> Callable[[Row], float | None]:
    """The share of one sequence's steps in which a part is called; None: never."""
    return lambda m: m["rates"].get(name, {}).get("sequence_steps") or None


METHOD: Column = ("method", title, "{}")
MANY: Column = ("sequences", "batch", "{:,}")
STEP: Column = ("a step", "step_milliseconds", "**{:.2f} ms**")
SPEED: Column = ("tokens a second", "tokens_per_second", "{:,.0f}")
LIMIT: Column = ("of the limit", "share_of_limit", "{:.0%}")
ANNEALED: Column = ("case 1 / case 2", annealed, BOTH)
STEP_TABLES = {
    "thinkv-steps": Table(
        (
            METHOD,
            MANY,
            STEP,
            SPEED,
            LIMIT,
            ("refresh + eviction", "overhead", "{:.1%}"),
            ("gather", "parts_shares.gather", "{:.1%}"),
            ANNEALED,
        ),
        rows=partial(of_kind, kind="step"),
        said=steps_said,
        kind="step",
        goals=CASES["thinkv"].goals,
    ),
    "thinkv-parts": Table(
        (
            METHOD,
            ("sequences", "batch", "{}"),
            *((part, f"layer_microseconds.{part}", "{:,.1f} µs") for part in PARTS),
            *((f"steps with {name}", called(name), "{:.2%}") for name in ("refresh", "eviction", "flush")),
            ANNEALED,
        ),
        rows=lambda result: [m for m in of_kind(result, "step") if m["batch"] in SEQUENCES],
        kind="step",
        said=lambda result: ["Times of one layer. Steps are those of one sequence, in which it is called.", ""],
    ),
    "thinkv-blocks": Table(
        (
            ("slots of a page", "slots", "{}"),
            MANY,
            STEP,
            SPEED,
            ("attention of a layer", "layer_microseconds.attention", "{:,.1f} µs"),
            ANNEALED,
        ),
        rows=slots,
        kind="*",
    ),
    "thinkv-bytes": Table(
        (
            METHOD,
            ("of the full cache", "share", "**{:.2%}**"),
            ("a sequence", lambda m: m["bytes"] / 2**20, "{:,.1f} MiB"),
            ("codes", mib("payload"), "{:,.1f} MiB"),
            ("scales", mib("scales"), "{:,.1f} MiB"),
            ("buffers", mib("buffers"), "{:,.1f} MiB"),
            ("tables and the rest", mib("rest"), "{:,.1f} MiB"),
            ("whole pool", "pool_share", "{:.2%}"),
            ("pages used", "pages_share", "{:.0%}"),
            ANNEALED,
        ),
        rows=partial(of_kind, kind="bytes"),
        said=bytes_said,
        kind="bytes",
    ),
    "thinkv-requests": Table(
        (
            METHOD,
            ("a request", seconds, "**{:,.0f} s**"),
            ("of full", "of_full", "**{:.1%}**"),
            *(of_paper(budget) for budget in PAPER_BUDGETS),
            ("a step", "step_milliseconds", "{:.2f} ms"),
            LIMIT,
            ANNEALED,
        ),
        rows=requests,
        said=requests_said,
        kind="*",
    ),
    "thinkv-levels": Table(
        (
            METHOD,
            MANY,
            ("tokens", "level", "{:,}"),
            ("a step", "step_milliseconds", "{:.2f} ms"),
            ("attention", "parts_milliseconds.attention", "{:.2f} ms"),
            ("refresh + eviction", decided, "{:.2f} ms"),
            ("of the step", "overhead", "**{:.1%}**"),
            ("sequences that decide", "rates.decision.sequence_steps", "{:.1%}"),
            ANNEALED,
        ),
        rows=growing,
        said=levels_said,
        kind="*",
    ),
    "thinkv-throughput": Table(
        (
            METHOD,
            MANY,
            ("a step", "step_milliseconds", "{:.1f} ms"),
            ("tokens a second", "tokens_per_second", "**{:,.0f}**"),
            ("a request", seconds, "{:,.0f} s"),
            LIMIT,
            ("of the bound", of_bound, "{:.0%}"),
            ANNEALED,
        ),
        rows=partial(of_kind, kind="throughput"),
        kind="throughput",
        goals=CASES["thinkv"].goals,
    ),
}
TABLES = {name: replace(table, file="thinkv") for name, table in STEP_TABLES.items()}
