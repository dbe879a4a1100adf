"""Every policy that evicts, on one table: those that papers compare with, with settings for texts of 600 to 3,000
tokens; their steps beside a full cache's, and the kernels of those that remember attention or draw by lot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import product
from typing import Any, cast

import torch

from minithink.experiments import LAYERS, Case, Cases, Inputs, Operation, Result, Row, StandIn, StandIns, Sweep, Table
from minithink.experiments.rkv import DrawnRkv
from minithink.kv.contract import Edit, Policy, Step
from minithink.policies.ada_snapkv import AdaSnapKV
from minithink.policies.h2o import H2O
from minithink.policies.lazy_eviction import LazyEviction
from minithink.policies.morphkv import MorphKV
from minithink.policies.pyramidkv import PyramidKV
from minithink.policies.raas import RaaS
from minithink.policies.random import Random
from minithink.policies.scissorhands import Scissorhands
from minithink.policies.snapkv_decode import SnapKVDecode
from minithink.policies.tova import Tova
from minithink.policies.vase import VaSE

# Of the embedded model's texts 128 tokens are a large part. Heads of R-KV gather 16 tokens (`experiments/rkv.py`), so
# these gather as many. Nothing here was tuned.
BASELINES = (
    "h2o:protect_prompt=true", "tova:protect_prompt=true", "scissorhands:history=64,buffer=16,protect_prompt=true",
    "snapkv_decode:buffer=16,protect_prompt=true", "ada_snapkv:buffer=16,protect_prompt=true",
    "pyramidkv:buffer=16,protect_prompt=true", "raas", "lazy_eviction:window=16,alpha=0.001,protect_prompt=true",
)  # fmt: skip
DRAWN = ("random_attention:buffer=16", "vase:buffer=16,protect_prompt=true")
MORE = ("sepllm:protect_prompt=true", "raas:page=16", "morphkv:window=32,protect_prompt=true")
OTHERS = (
    "window:protect_prompt=true", "random:protect_prompt=true", "rkv:buffer=16,protect_prompt=true", "crystal_kv",
    "crystal_kv_lite:protect_prompt=true", "skipkv:schedule=interval:16,tau=0.9,at=boundary", "thinkv",
)  # fmt: skip

SWEEPS = {
    "baselines": Sweep(
        "policies that go by attention, beside others, the prompt protected", (*BASELINES, *OTHERS), budgets=(0.25,),
        split="test",
    ),
    "baselines-more": Sweep(
        "policies that draw by lot, go by separators or by pages", (*DRAWN, *MORE), budgets=(0.25,), split="test",
        needed=True,
    ),
    "baselines-half": Sweep(
        "the same at half of the tokens", (*BASELINES, *DRAWN, *MORE, *OTHERS), budgets=(0.5,), split="test",
    ),
}  # fmt: skip

# Steps on synthetic caches ------------------------------------------------------------------------------------------


class ByLot(StandIn, Policy):
    """A policy that evicts by lot while a cache is filled. Afterwards it decides as it always does.

    What it remembers of tokens is empty until then: no decoder runs, so nothing calls `watch`. In the first real step
    all tokens are new to it.
    """

    seed = 0

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 2 * self.budget + self.period  # a lane is full, and as many tokens came and went

    def decide(self, step: Step) -> Iterable[Edit]:
        return Random.decide(cast(Any, self), step) if self.filling else super().decide(step)


class Roomy(DrawnRkv):
    """R-KV's stand-in for PyramidKV, with a pool for the longest text in every lane. A pool for what lanes hold on
    average is too small: upper layers keep few tokens, but these keep most of the pages that were full before."""

    average = None


def stand_in(mixin: type[Policy], policy: Policy, share: float, seed: int, layers: int) -> Policy:
    """A copy of the policy, with all its settings, whose class inherits from the mixin first."""
    made = copy(policy)
    made.__class__ = type(type(policy).__name__, (mixin, type(policy)), {"recordable": True})
    return made


# Policies that score with R-KV's `score` draw their scores, as R-KV's stand-in does. So heads that share a budget
# (`ada_snapkv`) get nearly equal parts. `window`, `streaming_llm`, `random` and `random_attention` need no stand-in:
# their decisions do not depend on attention.
STAND_INS: StandIns = {
    **{cls: partial(stand_in, DrawnRkv) for cls in (SnapKVDecode, AdaSnapKV)},
    PyramidKV: partial(stand_in, Roomy),
    **{cls: partial(stand_in, ByLot) for cls in (H2O, Tova, Scissorhands, MorphKV, VaSE, RaaS, LazyEviction)},
}
# Each policy as its authors run it: its defaults. `sepllm` is not here, because the host follows the text for it and
# decides between recorded steps.
EVERY = (  # policies that decide in every step
    "window", "streaming_llm", "random", "h2o", "tova", "raas", "morphkv", "crystal_kv", "crystal_kv_lite",
)  # fmt: skip
LATER = (  # every 32 (`lazy_eviction`), 64 (`random_attention`, `vase`) or 128 tokens of a sequence
    "lazy_eviction", "random_attention", "vase", "scissorhands", "snapkv_decode", "ada_snapkv", "pyramidkv", "rkv",
)  # fmt: skip
METHODS = {
    "full": "full", **{name: f"{name}:budget={{budget}}" for name in (*EVERY, *LATER)},
    "skipkv": "skipkv:budget={budget},steering=false",  # every 128, too
    "thinkv": "thinkv:budget={budget}",  # as a segment of 128 tokens ends, or when it needs room
}  # fmt: skip


def cases(batches: Sequence[int], shares: Sequence[float], pool: float = 1.0) -> list[Case]:
    """Steps of every method."""
    each = product(batches, METHODS)
    return [Case("step", method, batch, shares[0] if method == "thinkv" else None) for batch, method in each]


CASES = {
    "baselines": Cases(
        "Steps of every policy that evicts, beside a full cache that holds as many tokens.",
        METHODS,
        {"budget": (1024, "tokens of a lane")},
        cases,
        as_many=("full",),
        parts=("attention", "refresh", "eviction", "flush", "rest"),
        lines={"full": "#444444", "h2o": "#E69F00", "snapkv_decode": "#56B4E9", "raas": "#0072B2"},
    )
}

BOUND = 1.3  # × what weights and cache take to be read: no step should be longer. No Goal, which compares two cases


def steps(result: Result) -> list[Row]:
    """Steps by batch, in the order of METHODS, beside the full cache's and beside their bounds."""
    own, order = [m for m in result["measurements"] if m["kind"] == "step"], [*METHODS]
    full = {m["batch"]: m["step_milliseconds"] for m in own if m["method"] == "full"}
    own.sort(key=lambda m: (m["batch"], order.index(m["method"])))
    return [
        {**m, "of_full": m["step_milliseconds"] / full[m["batch"]] if m["batch"] in full else None,
         "of_bound": m["step_milliseconds"] / m["limit_milliseconds"]}
        for m in own
    ]  # fmt: skip


def steps_said(result: Result) -> list[str]:
    """The meaning of the parts, and how many policies reach the goal, as sentences."""
    rows = [m for m in steps(result) if m["method"] != "full"]
    reached = sum(m["of_bound"] <= BOUND for m in rows)
    return [
        "*Bound*: weights and cached tokens are read once, at the speed of a copy; what a policy remembers beside "
        "them is not counted. *Decide*: the share of a sequence's steps in which the policy decides. Parts are those "
        "of a layer, averaged over all steps. *Rest*: projections, MLP, logits, and what a policy does in every step "
        "beside its decision (attention that is told to it, stamps). "
        f"{reached} of {len(rows)} steps of policies take at most {BOUND:g} × their bounds.",
        "",
    ]


TABLES = {
    "baselines-steps": Table(
        (("policy", "method", "`{}`"), ("sequences", "batch", "{:,}"),
         ("a step", "step_milliseconds", "**{:.2f} ms**"), ("of full's step", "of_full", "{:.2f} ×"),
         ("bound", "limit_milliseconds", "{:.2f} ms"), ("of the bound", "of_bound", "**{:.2f} ×**"),
         ("decide", "rates.decision.sequence_steps", "{:pct}"),
         *((title, f"layer_microseconds.{part}", "{:us}") for title, part in
           (("attention", "attention"), ("decision", "eviction"), ("refresh", "refresh"), ("flush", "flush"),
            ("rest", "rest")))),
        rows=steps, said=steps_said, kind="step", file="baselines",
    )
}  # fmt: skip

# Kernels ------------------------------------------------------------------------------------------------------------

KV_HEADS = 8  # of a layer


def lanes(rows: int, tokens: int, device: str, layers: int = LAYERS, gone: bool = False) -> Inputs:
    """Attention of whole numbers, positions and lengths of lanes, what is known of their tokens but the newest, and
    the rows. gone: a known token is there no more, so that tokens behind it stand one column earlier."""
    shape = layers, rows, KV_HEADS, tokens
    pos = 2 * torch.arange(tokens, dtype=torch.int32, device=device)
    known, at = pos[:-1], tokens // 3
    if gone:
        known = torch.cat((known[:at], known[at : at + 1] - 1, known[at:-1]))
    known = known.expand(*shape[:3], -1).contiguous()
    score = torch.randint(1 << 20, known.shape, device=device).float()
    mass = torch.randint(1 << 20, shape, device=device).float()
    held = torch.full(shape[:3], tokens, dtype=torch.int32, device=device)
    return mass, pos.expand(shape).contiguous(), held, (known, score), torch.arange(rows, device=device)


def lots(rows: int, tokens: int, device: str, weighted: bool, layers: int = LAYERS) -> Inputs:
    """A key for each lane, the positions of its tokens, and perhaps their weights."""
    shape = layers, rows, KV_HEADS, tokens
    key = torch.randint(1 << 32, shape[:3], device=device)
    pos = torch.arange(tokens, dtype=torch.int32, device=device).expand(shape).contiguous()
    return (key, pos, torch.rand(shape, device=device)) if weighted else (key, pos)


def remembered(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """All layers of several sequences; bytes: attention, position, what is known, and the new score of each token."""
    for tokens, rows in product(lengths, due):
        own = 20 * LAYERS * rows * KV_HEADS * tokens
        yield f"{rows} × {tokens:,} tokens", own, [lanes(rows, tokens, "cuda") for _ in range(-(-size // own))]


def draws(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """All layers of several sequences; bytes: position, perhaps weight, and score of each token."""
    for tokens, rows, weighted in product(lengths, due, (False, True)):
        own = (16 if weighted else 12) * LAYERS * rows * KV_HEADS * tokens
        inputs = [lots(rows, tokens, "cuda", weighted) for _ in range(-(-size // own))]
        yield f"{rows} × {tokens:,} {'weighted tokens' if weighted else 'tokens'}", own, inputs


# Weighted scores differ in their last bits, so whole numbers are compared without weights. `carry` and `stamp` return
# nothing, they change their inputs; `bench/ops.py` compares what is returned, so they are not listed.
OPERATIONS = {
    "accumulate": Operation(lambda device, tokens: lanes(2, tokens, device, layers=1, gone=True), remembered),
    "draw": Operation(lambda device, tokens: lots(2, tokens, device, weighted=False, layers=1), draws),
}
