"""Crystal-KV: its two variants beside other methods that evict, its decay and hit share, its damping; its steps and
throughput beside a full cache (table I); what the answer attends to, and whether its score finds what is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from minithink.bench.methods import Case, Cases, Goal, Method, Result, Row, StandIn, StandIns, Sweep, Table
from minithink.bench.methods.settings import CHOSEN, RKV
from minithink.kv.contract import Shape, Step
from minithink.policies.crystal_kv import CrystalKV, CrystalKVLite
from minithink.tasks import families

# Crystal-KV protects the prompt, and these policies by default do not: so each is tried both ways.
OTHERS = (
    RKV,
    "rkv:buffer=16",
    "streaming_llm:protect_prompt=true",
    "streaming_llm",
    "window:protect_prompt=true",
    "window",
    "random:protect_prompt=true",
    "random",
)
LATER = tuple(CHOSEN[name] for name in ("ada_snapkv", "snapkv_decode", "raas", "h2o"))
LITE = "crystal_kv_lite:protect_prompt=true"  # as in the model's card
DECAYS = (0, 0.5, 0.6, 0.8, 1)  # λ: LRU, ½ (as all above 0 and up to ½), the default, a long memory, LFU
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # p
SMALL = (0.125, 0.25, 0.5)
# Budgets of the embedded model's layers and heads when texts of `search` end, found by `analysis budgets`.
BUDGETS = (
    (722, 676, 647, 287),
    (752, 806, 880, 844),
    (396, 699, 935, 884),
    (1000, 772, 690, 720),
    (1042, 1157, 829, 940),
    (780, 559, 347, 868),
    (694, 1002, 1028, 605),
    (690, 1007, 880, 823),
)

SWEEPS = {
    "crystal-kv": Sweep(
        "Crystal-KV with moving and with equal budgets, others with and without a protected prompt",
        ("crystal_kv", LITE, *OTHERS, *LATER, "thinkv"),
        budgets=(*SMALL, 0.75),
        split="test",
        beside=OTHERS[0],
    ),
    "crystal-kv-heat": Sweep(
        "the decay λ and the share p of the attention that makes a hit (figure 5)",
        tuple(f"crystal_kv:lam={lam:g},p={p:g}" for lam, p in product(DECAYS, SHARES)),
        budgets=(0.25,),
        problems=64,
    ),
    "crystal-kv-damping": Sweep(
        "algorithm 2 with damping and to the letter, and equal budgets",
        ("crystal_kv", "crystal_kv:damping=1", LITE),
        budgets=SMALL,
        beside="crystal_kv",
    ),
    "crystal-kv-floor": Sweep(
        "room that every head has beside the prompt",
        ("crystal_kv", *(f"crystal_kv:min_budget={n}" for n in (64, 128, 256))),
        budgets=(0.5,),
        beside="crystal_kv",
    ),
}

# Steps and throughput on synthetic caches --------------------------------------------------------------------------


class FilledLite(StandIn, CrystalKVLite):
    """Crystal-KV Lite where hits are noise."""

    capturable = True

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 2 * self.budget  # a full lane has been replaced once


class Filled(FilledLite, CrystalKV):
    """Crystal-KV where hits are noise. Its lanes share a budget, so at worst one lane holds it all."""

    capturable = True
    pooled = True


class Uneven(Filled):
    """Crystal-KV that moves its budgets once: a head gets the share that it had in a run on the embedded model, and a
    larger model repeats the pattern."""

    capturable = True

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 4 * self.budget  # the largest head is full, too

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        assert self.budget is not None
        layers, _, heads = shape.tables
        shares = torch.tensor(BUDGETS, dtype=torch.float64)
        shares = shares.repeat_interleave(-(-layers // len(shares)), 0)[:layers]
        shares = shares.repeat(1, -(-heads // shares.shape[1]))[:, :heads]
        target = (shares / shares.mean() * self.budget).floor().int()
        target[0, 0] += self.budget * layers * heads - int(target.sum())  # what rounding has left
        self.target = target[:, None].to(shape.device)

    def algorithm_2(self, step: Step, now: Tensor, kept: Tensor, fixed: Tensor, crf: Tensor) -> Tensor:
        return torch.where(now[None, :, None], self.target, step.budget)


def uneven(numbers: Mapping[str, int]) -> CrystalKV:
    """Crystal-KV with uneven budgets, as a method."""
    return Uneven(budget=numbers["budget"])


def _filled(cls: type[CrystalKVLite], policy: CrystalKVLite) -> CrystalKVLite:
    return cls(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})


STAND_INS: StandIns = {
    CrystalKVLite: lambda policy, share, seed, layers: _filled(FilledLite, policy),
    CrystalKV: lambda policy, share, seed, layers: _filled(Filled, policy),
}
METHODS: dict[str, Method] = {
    "full": "full",
    "window": "window:budget={budget}",
    "crystal_kv_lite": "crystal_kv_lite:budget={budget}",
    "crystal_kv": "crystal_kv:budget={budget}",
    "crystal_kv-tenth": "crystal_kv:budget={tenth}",
    "crystal_kv-uneven": uneven,
}
TENTH = "crystal_kv-tenth"  # a tenth of the generated tokens, the paper's second setting


def cases(batches: Sequence[int], shares: Sequence[float], pool: float = 1.0) -> list[Case]:
    """Steps of every method, then what table I has: bytes, one request, the largest batch."""
    out = [Case("step", method, batch) for batch in batches for method in METHODS if method != TENTH]
    out += [Case("bytes", method) for method in ("crystal_kv", TENTH)]
    for kind, batch in (("request", 1), ("throughput", 0)):
        out += [Case(kind, method, batch) for method in ("full", "crystal_kv", TENTH)]
    return out


def _table_1(throughput: float) -> Cases:
    """throughput: the goal, beside the full cache, at the largest batch."""
    return Cases(
        "Crystal-KV's steps beside a full cache that holds as many tokens, and its bytes and throughput (table I).",
        METHODS,
        {"budget": (1024, "tokens of a lane"), "tenth": (935, "tokens of a lane, a tenth of --tokens")},
        cases,
        goals=(
            Goal("step/crystal_kv/64", "step/full/64", 1 / 1.1),
            Goal("step/crystal_kv-uneven/64", "step/crystal_kv/64", 1 / 1.15),
            Goal("throughput/crystal_kv", "throughput/full", throughput),
        ),
        as_many=("full",),
        lines={"full": "#444444", "window": "#E69F00", "crystal_kv_lite": "#56B4E9", "crystal_kv": "#0072B2"},
    )


# The paper's lengths: --tokens 9350, and --tokens 18700 --tenth 1870.
CASES = {"crystal-kv": _table_1(2.8), "crystal-kv-16k": _table_1(5.5)}

LIFE = {
    "late": ("attention that comes after 64 tokens", "{:.0%}"),
    "at_end": ("attention of the last 64 queries, × the mean", "{:.2f}"),
    "episodes": ("runs of hits", "{:.2f}"),
    "last_hit": ("last hit, 0: birth, 1: end of thinking", "{:.2f}"),
}


def _life() -> Iterator[tuple[str, tuple[str, str]]]:
    """What LIFE says of the tokens that the answer attends to most and least, in the form of MEASURES."""
    for name, (what, fmt) in LIFE.items():
        for which in ("top", "bottom"):
            yield f"answer.{which}.{name}", (f"{which} 30 %: {what}", fmt)


MEASURES = {  # dotted path in the measurements → what it is, format
    "answer.concentration": ("answer's attention on the top tenth of the thinking", "{:.0%}"),
    "answer.agreement": ("top tenth that two of its rows share (by chance 10%)", "{:.0%}"),
    "answer.needs_in_top": ("answer's needs in the top 30 %", "{:.0%}"),
    **dict(_life()),
    "hits.tokens": ("tokens that a query hits", "{:,.0f}"),
    "hits.share": ("share of those it sees", "{:.0%}"),
    "needs.late_hits": ("hits of a needed token after its first 64 tokens", "{:,.0f}"),
    "needs.rest": ("tokens since its last hit", "{:,.0f}"),
    "needs.best_quarter.crf": ("needs in the best quarter by `crf`", "{:.0%}"),
    "needs.best_quarter.random": ("needs in the best quarter by `random`", "{:.0%}"),
}


def by_head(result: Result) -> Iterator[Row]:
    """Every measure: mean, least and most of all heads, and its value in the head with the fewest hits."""
    measured = result["measurements"]
    fewest = flat(measured["hits"]["tokens"]).index(min(flat(measured["hits"]["tokens"])))
    for path, (what, fmt) in MEASURES.items():
        found: Any = measured
        for name in path.split("."):
            found = found[name]
        values = [x for x in flat(found) if x is not None]
        if not values:  # no answer needs a token far back
            continue
        shown = {"mean": sum(values) / len(values), "least": min(values), "most": max(values)}
        said = {name: fmt.format(x) for name, x in (shown | {"sharp": values[fewest]}).items()}
        yield {"what": what, **said}


def flat(values: Iterable[Iterable[Any]]) -> list[Any]:
    """Values by layer and head, in one list."""
    return list(chain.from_iterable(values))


def texts(result: Result) -> list[str]:
    """What was read, as a sentence."""
    settings = result["settings"]
    m = result["measurements"]
    text = f"{settings['limit']} problems of `{settings['family']}`, {m['full_cache']['tokens']:,.0f} tokens; "
    text += f"{m['needs']['pairs']} needs whose tokens are more than 64 tokens old, {m['needs']['pairs_of_answer']} "
    return [text + f"of them of answers; λ = {settings['lam']:g}, p = {settings['p']:g}.", ""]


HEADS = Table(
    (
        ("", "what", "{}"),
        ("mean of heads", "mean", "**{}**"),
        ("least", "least", "{}"),
        ("most", "most", "{}"),
        ("head with the fewest hits", "sharp", "{}"),
    ),
    rows=by_head,
    said=texts,
)
NEEDS = Table(
    (
        ("in the best quarter by", "score", "`{}`"),
        ("all heads", "all.heads", "**{:.1%}**"),
        ("heads that read it", "all.readers", "{:.1%}"),
        ("some head", "all.somewhere", "{:.1%}"),
        ("as `crf`", "all.like_crf", "{:.1%}"),
        ("answer: all heads", "answer.heads", "**{:.1%}**"),
        ("heads that read it", "answer.readers", "{:.1%}"),
    ),
    rows=lambda result: result["measurements"]["needs"]["scores"],
    said=texts,
)
STEPS = Table(
    (
        ("method", "method", "`{}`"),
        ("sequences", "batch", "{:,}"),
        ("a step", "step_milliseconds", "**{:.2f} ms**"),
        ("of the limit", "share_of_limit", "{:.0%}"),
        ("attention", "parts_milliseconds.attention", "{:.2f} ms"),
        ("rest of the step", "parts_milliseconds.rest", "{:.2f} ms"),
        ("decision", "parts_milliseconds.eviction", "{:.2f} ms"),
    ),
    rows=lambda result: [m for m in result["measurements"] if m["kind"] == "step"],
    kind="step",
    goals=CASES["crystal-kv"].goals,
    file="crystal-kv",
)


def generations(result: Result) -> list[Row]:
    """Whole generations, then those of as many sequences as fit."""
    own = {kind: [m for m in result["measurements"] if m["kind"] == kind] for kind in ("request", "throughput")}
    return own["request"] + own["throughput"]


def table_1(name: str) -> Table:
    """Tokens a second of one sequence, then of as many as fit."""
    return Table(
        (
            ("method", "method", "`{}`"),
            ("sequences", "batch", "{:,}"),
            ("a step", "step_milliseconds", "{:.2f} ms"),
            ("tokens a second", "tokens_per_second", "**{:,.1f}**"),
            ("of the limit", "share_of_limit", "{:.0%}"),
        ),
        rows=generations,
        kind="throughput",
        goals=CASES[name].goals,
        file=name,
    )


def heat(result: Result) -> Iterator[Row]:
    """Each run with its λ and p."""
    for m in result["measurements"]:
        if m["budget"] is not None:
            yield {**m, **dict(x.split("=") for x in m["policy"].partition(":")[2].split(","))}


def heat_said(result: Result) -> list[str]:
    """What was run, and how wide the intervals are, as a sentence."""
    settings = result["settings"]
    rows = list(heat(result))
    wide = max(m["pass_at_1_high"] - m["pass_at_1_low"] for m in rows)
    text = f"Right answers of {settings['limit']} {settings['split']} problems of each family, "
    text += f"{rows[0]['budget']:.0%} of the tokens. "
    return [text + f"The widest interval has {100 * wide:.0f} points from end to end.", ""]


HEAT = Table(
    (("family", "family", "`{}`"), ("λ", "lam", "{}")),
    rows=heat,
    across="p",
    cells=(("p = {}", "pass_at_1", "{:.1%}"),),
    said=heat_said,
)


def moved(result: Result) -> list[str]:
    """Where budgets went, as a sentence."""
    settings = result["settings"]
    m = result["measurements"]
    text = f"{m['texts']} problems of `{settings['family']}`, {settings['budget']:,} tokens a head; in {m['moving']} "
    text += f"texts budgets moved. When these end, {m['moved']:.1%} of the slots are in other heads than with equal "
    text += f"budgets, and a head has {m['least']:,.0f} to {m['most']:,.0f} tokens. Over the heads, mean budget and "
    return [text + f"tokens that a query hits: correlation {m['correlation']:.2f}.", ""]


TABLES = {f"answer-attention-{family}": HEADS for family in families()}
for _family in families():
    TABLES[f"answer-attention-{_family}-needs"] = replace(NEEDS, file=f"answer-attention-{_family}")
TABLES |= {f"budgets-{family}": Table((), said=moved) for family in families()} | {"crystal-kv-steps": STEPS}
TABLES |= {f"{name}-table-1": table_1(name) for name in CASES} | {"sweep-crystal-kv-heat": HEAT}
