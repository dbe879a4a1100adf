"""DynTS: three targets of its predictor and oracles beside others that keep as many tokens (table 1), its ablation
(table 2), its windows (figures 6 and 17) and budgets (figures 8 and 16); steps and throughput (figures 5 and 14); how
well its predictors do (figures 7 and 15)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise, product
from typing import Any

import torch

from minithink.bench.methods import Case, Cases, Goal, Inputs, Operation, Result, Row, StandIn, StandIns, Sweep, Table
from minithink.bench.methods.settings import CHOSEN, LOCAL, RATIO, SAME, at_once
from minithink.engine import TINY
from minithink.kv.contract import Shape
from minithink.policies.dynts import DynTS
from minithink.policies.dynts_cost import length, predictor_flops
from minithink.tasks import families

# Others have the triggers of DynTS and keep as many tokens. SepLLM keeps fewer, but for the paper's form.
OTHERS = (
    f"window:{SAME}",
    f"streaming_llm:{SAME}",
    f"rkv:{SAME}",
    f"crystal_kv_lite:{SAME}",
    f"random:{SAME}",
    f"skipkv:tau=0.9,at=boundary,{SAME}",
)
LATER = tuple(at_once(CHOSEN[name]) for name in ("sepllm", "h2o", "snapkv_decode"))
# C.3: DynTS's local window, as a share of the tokens that stay; SepLLM fills up with the newest tokens.
RECENT = f"recent={LOCAL / (LOCAL + RATIO * (1 - LOCAL)):.2f}"
AS_THE_PAPER = (
    at_once(f"rkv:{RECENT}"),
    at_once(f"h2o:{RECENT}"),
    at_once(f"snapkv_decode:{RECENT}"),
    at_once("sepllm:fill=true,separators=1000,window=1,initial=0"),
)
TARGETS = ("dynts", "dynts:target=hindsight", "dynts:target=needs")
ORACLES = ("answer_oracle", "hindsight_oracle", "needs_oracle")
ABLATION = (
    "dynts",
    "dynts:local=0",
    "dynts:question=false",
    "dynts:ratio=0",
    "dynts:select=random",
    "dynts:select=bottom",
)

SWEEPS = {
    "dynts": Sweep(
        "DynTS by what its predictor has learned, oracles in the same windows, others that keep as many tokens",
        (*TARGETS, *ORACLES, *OTHERS, *LATER, *AS_THE_PAPER),
        budgets=(0.25, 0.5),
        split="test",
        needed=True,
        beside=f"random:{SAME}",
    ),
    "dynts-ablation": Sweep(
        "DynTS without its local window, question, thinking tokens; thinking tokens by lot and from the bottom",
        ABLATION,
        budgets=(0.25, 0.5),
        split="test",
        beside="dynts:select=random",
    ),
    "dynts-windows": Sweep(
        "the local window and the share of the selection window that stays",
        tuple(f"dynts:local={x:g},ratio={r:g}" for x, r in product((0.1, 0.2, 0.4, 0.6), (0.1, 0.3, 0.5, 0.7))),
        budgets=(0.5,),
        problems=64,
        beside="dynts:local=0.4,ratio=0.3",
    ),
    "dynts-budget": Sweep("budgets", ("dynts",), budgets=(0.125, 0.25, 0.375, 0.5, 0.625, 0.75)),
}

# Steps and throughput on synthetic caches --------------------------------------------------------------------------


class Filled(StandIn, DynTS):
    """DynTS with a predictor of random weights; while a cache is filled, scores are drawn."""

    capturable = True

    @property
    def period(self) -> int:
        """K for a question of PROMPT tokens."""
        window, k, _ = self.sizes(self.budget, PROMPT)
        return max(1, window - k)

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return self.budget + self.period  # the first trigger is over

    def setup(self, shape: Shape) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        sizes = pairwise((shape.hidden, 2 * shape.hidden, shape.hidden // 2, 1))
        if shape.device.type == "meta":
            self._weights = tuple(torch.empty(size, device="meta") for size in sizes)
        else:
            self._weights = tuple(torch.randn(size, generator=draw) / math.sqrt(size[0]) for size in sizes)
        super().setup(shape)
        self._score.uniform_()

    def reset(self, row: int) -> None:
        """Scores stay as they were drawn."""

    def watch(self, step: Any) -> None:
        if not self.filling:
            super().watch(step)


def _filled(policy: DynTS, share: float, seed: int, layers: int) -> DynTS:
    return Filled(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})


PROMPT = 128  # tokens, as `bench dynts` has them by default
STAND_INS: StandIns = {DynTS: _filled}
METHODS = {
    "full": "full",
    "window": "window:budget={budget},protect_prompt=true,schedule=share:0.3/{local}",
    "dynts": "dynts:budget={budget},local={local}",
}


def cases(batches: Sequence[int], shares: Sequence[float], pool: float = 1.0) -> list[Case]:
    """Whole generations and steps at each batch, and bytes."""
    each = product(batches, ("request", "step"), METHODS)
    out = [Case(kind, method, batch) for batch, kind, method in each]
    return [*out, Case("bytes", "dynts"), *(Case("throughput", method) for method in METHODS)]


def of_kind(result: Result, kind: str) -> list[Row]:
    """The cases of one kind, sorted by batch, then by method."""
    order = [*METHODS]
    found = [m for m in result["measurements"] if m["kind"] == kind]
    return sorted(found, key=lambda m: (m["batch"], order.index(m["method"])))


HIDDEN = {"llama-8b": 4096, "smollm2-135m": 576, "tiny": 32, "embedded": 256}  # d of the shapes that are measured


def by_level(result: Result) -> list[Row]:
    """Every measured length of whole generations; `flops_in_all` adds a predictor's operations (eq. 12)."""
    own = sorted(of_kind(result, "request"), key=lambda m: m["batch"])
    each = predictor_flops(HIDDEN[result["settings"]["model_shape"]])
    rows = list[Row]()
    for m in own:
        more = m["batch"] * each if m["method"] == "dynts" else 0
        rows += [{**m, **level, "flops_in_all": level["flops"] + more} for level in m["levels"]]
    return rows


def held(method: str, settings: Row) -> list[int]:
    """Cached tokens of one sequence after 0, 1, 2 … steps: all, or eq. 13, which is also that of `window`."""
    prompt = settings["prompt_tokens"]
    budget = settings["budget"]
    steps = range(settings["tokens"] + 1)
    window, k, _ = DynTS(budget=budget, local=settings["local"]).sizes(budget, prompt)
    return [prompt + i if method == "full" else length(i, prompt, budget, window - k) for i in steps]


# The paper's setting: --batch 20 48 --tokens 16384 --start 16000.
CASES = {
    "dynts": Cases(
        "DynTS's generations beside the full cache's, its steps and bytes (figures 5 and 14).",
        METHODS,
        {"budget": (5000, "B, tokens of a sequence"), "local": (2000, "W_l, tokens of the local window")},
        cases,
        goals=tuple(Goal(f"request/dynts/{n}", f"request/full/{n}", 0.8, of_bound=True) for n in (20, 48)),
        lines={"full": "#444444", "window": "#E69F00", "dynts": "#0072B2"},
        by_level=by_level,
        held=held,
    )
}


def _weights(d: int, device: str) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(size, device=device, dtype=torch.bfloat16) / 64 for size in pairwise((d, 2 * d, d // 2, 1))
    )


def ones(device: str, tokens: int) -> Inputs:
    """Sums so large that softplus is exact."""
    weights = tuple(torch.ones(size, device=device) for size in pairwise((64, 128, 32, 1)))
    return torch.ones(3, 64, device=device), weights


def by_rows(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """The predictor of an 8 B Llama for more and more rows, beside torch's products, which are its twin. Where the
    backend leaves the rows to torch, the name of the case says so."""
    from minithink.kernels.predict import FEW_ROWS  # here: it needs Triton

    d = 4096
    device = "cuda"
    own = 2 * (3 * d * d + d // 2)
    for rows in (1, 4, 8, 16, 20, 32, 48, 64, 128, 256):
        inputs = [(torch.randn(rows, d, device=device), _weights(d, device)) for _ in range(-(-size // own))]
        yield f"{rows} rows, d = {d:,}{' (torch)' if rows > FEW_ROWS else ''}", own, inputs


def lanes(n: int, tokens: int, device: str) -> Inputs:
    """Sequences that hold `tokens` tokens each, every second position, of which 100 are the question's."""
    held = torch.full((1, n, 1), tokens, dtype=torch.int32, device=device)
    pos = (2 * torch.arange(tokens, dtype=torch.int32, device=device)).expand(1, n, 1, tokens).contiguous()
    score = torch.randint(1 << 20, (n, 2 * tokens), device=device).float()
    first = torch.full((n,), 200, dtype=torch.int32, device=device)
    part = tokens * 2 // 5
    local = torch.full_like(held, part)
    keep = torch.full_like(held, (tokens - 100 - part) * 3 // 10)
    return score, pos, held, torch.arange(n, device=device), first, local, keep, torch.ones_like(held).bool()


def selections(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """Windows of several sequences at once; bytes: position and score of each token, and whether it goes."""
    for tokens, n in product(lengths, due):
        yield f"{n} × {tokens:,} tokens", 9 * n * tokens, [lanes(n, tokens, "cuda") for _ in range(4)]


OPERATIONS = {
    "predict": Operation(ones, by_rows),
    "select": Operation(lambda device, tokens: lanes(2, tokens + 200, device), selections),
}

# How well predictors do --------------------------------------------------------------------------------------------


def _both(name: str, form: str) -> tuple[Any, str]:
    """A measure of the predictor, and of the one by position."""
    return (name, f"position.{name}"), f"**{form}** ({form})"


def texts_of(result: Result) -> list[str]:
    """What the predictors learned from."""
    texts = result["texts"]
    settings = result["settings"]
    return [
        f"{texts['right']} right texts of {settings['num_prompts']} training problems, {texts['thinking_tokens']:,} "
        f"thinking tokens; {settings['held_out']:.0%} of the problems are held out. {settings['epochs']} epochs, "
        f"{settings['batch']} texts a step, learning rate {settings['lr']:g}. In brackets: the predictor that knows "
        "only positions.",
        "",
    ]


def together(result: Result) -> Iterator[Row]:
    """Predictors that are trained on all datasets."""
    return (row for row in result["measurements"] if row["trained"] == "all")


def transfer(result: Result) -> Iterator[Row]:
    """Predictors that are trained on one dataset, on each of them."""
    datasets = {row["dataset"] for row in result["measurements"]} - {"all"}
    return (row for row in result["measurements"] if {row["trained"], row["dataset"]} <= datasets)


PREDICTOR = Table(
    (
        ("target", "target", "{}"),
        ("held-out problems of", "dataset", "{}"),
        ("texts", "traces", "{:,}"),
        ("variance", "variance", "{:.2f}"),
        ("MSE", *_both("mse", "{:.2f}")),
        ("Kendall's τ", *_both("tau", "{:.2f}")),
        ("top 20 % in the top 30 %", *_both("top_30", "{:.0%}")),
    ),
    rows=together,
    said=texts_of,
    shipped=(TINY / "predictor.json",),
)
TRANSFER = Table(
    (("target", "target", "{}"), ("trained on", "trained", "{}")),
    rows=transfer,
    across="dataset",
    cells=(("{}: MSE, of the variance", lambda m: m["mse"] / m["variance"], "{:.0%}"), ("τ", "tau", "**{:.2f}**")),
    shipped=(TINY / "predictor.json",),
)


def tenths(result: Result) -> Iterator[Row]:
    """A row for each tenth of the thinking."""
    m = result["measurements"]
    for i, (content, *scores) in enumerate(zip(m["content"], *m["along"].values(), strict=True)):
        yield {"tenth": i + 1, "content": content, **dict(zip(m["along"], scores, strict=True))}


def read_texts(result: Result) -> list[str]:
    """What was read, and how much of it is important."""
    m = result["measurements"]
    settings = result["settings"]
    needed = ", ".join(f"{name} {share:.0%}" for name, share in m["needed"].items())
    return [
        f"{m['texts']} problems of `{settings['family']}`, {m['thinking_tokens']:,.0f} thinking tokens each. "
        f"{m['above_mean']['thinking']:.1%} of the thinking tokens are above the mean, and "
        f"{m['above_mean']['question']:.1%} of the question's. The top 30 % have {m['on_top']:.0%} of the "
        f"importance. Needed tokens that are in the top 30 % (30 % by chance) by {needed}.",
        "",
    ]


IMPORTANCE = Table(
    (
        ("tenth", "tenth", "{}"),
        ("attention of the answer, oldest first", "answer", "{:.2f} ×"),
        ("of all later tokens", "hindsight", "{:.2f} ×"),
        ("content tokens, most important first", "content", "{:.0%}"),
    ),
    rows=tenths,
    said=read_texts,
)


def answered(result: Result) -> list[str]:
    """How often each problem was answered, and what the second form of a selection is, if it was measured."""
    settings = result["settings"]
    rows = result["measurements"]["pareto"]
    said = f"{settings['limit']} problems of `{settings['family']}`, each answered {settings['pareto']} times."
    if any("right_anew" in m for m in rows):
        said += " Right: the other tokens are masked. Read anew: the tokens that stay are a new prompt."
    return [said, ""]


PARETO = Table(
    (("thinking tokens that stay", "percent", "{} %"),),
    rows=lambda result: result["measurements"]["pareto"],
    across="way",
    cells=(("{}: right", "right", "{:.0%}"), ("{}: read anew?", "right_anew", "{:.0%}")),
    said=answered,
)


# Times --------------------------------------------------------------------------------------------------------------


def about_levels(result: Result) -> list[str]:
    """What the columns of a length mean, as a sentence."""
    return [
        "Lengths are the middles of equal parts of a generation. MB of the cache and GFLOP of a step are of one "
        "sequence, the mean of all. GFLOP contain the predictor. MB and bounds lack its weights, which all share.",
        "",
    ]


STEP = ("a step", "step_milliseconds", "**{:.2f} ms**")
MANY = ("sequences", "batch", "{:,}")
TIMES = {
    "dynts-requests": Table(
        (
            ("method", "method", "`{}`"),
            MANY,
            STEP,
            ("tokens a second", "tokens_per_second", "{:,.0f}"),
            ("of the limit", "share_of_limit", "{:.0%}"),
            ("of the bound", lambda m: m["bound_milliseconds"] / m["step_milliseconds"], "{:.0%}"),
        ),
        rows=lambda result: of_kind(result, "request"),
        kind="request",
        goals=CASES["dynts"].goals,
    ),
    "dynts-levels": Table(
        (MANY, ("tokens", "level", "{:,}")),
        rows=by_level,
        across="method",
        kind="request",
        said=about_levels,
        cells=(
            ("{}: MB", lambda m: m["cache_bytes"] / m["batch"] / 1e6, "{:,.0f}"),
            ("GFLOP", lambda m: m["flops_in_all"] / m["batch"] / 1e9, "{:.1f}"),
            STEP,
            ("bound", "bound_milliseconds", "{:.2f} ms"),
        ),
    ),
    "dynts-steps": Table(
        (
            ("method", "method", "`{}`"),
            MANY,
            STEP,
            *((part, f"parts_milliseconds.{part}", "{:.3f} ms") for part in ("attention", "eviction", "rest")),
            ("of the limit", "share_of_limit", "{:.0%}"),
        ),
        rows=lambda result: of_kind(result, "step"),
        kind="step",
    ),
}
TABLES = (
    {"predictor": PREDICTOR, "predictor-transfer": TRANSFER}
    | {f"importance-{family}": IMPORTANCE for family in families()}
    | {f"pareto-{family}": replace(PARETO, file=f"importance-{family}") for family in families()}
    | {name: replace(table, file="dynts") for name, table in TIMES.items()}
)
