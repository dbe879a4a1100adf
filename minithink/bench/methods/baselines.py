"""Every policy that evicts, in one table: the papers' baselines, with settings for texts of 600 to 3,000 tokens;
their steps beside a full cache's, and the kernels of policies that remember attention, draw by lot, or score by the
newest queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import chain, product

import torch

from minithink.bench.methods import (
    LAYERS,
    Case,
    Cases,
    Inputs,
    Operation,
    Result,
    Row,
    StandIn,
    StandIns,
    Sweep,
    Table,
)
from minithink.bench.methods.dynts import OTHERS as AT_ONCE
from minithink.bench.methods.rkv import DrawnRkv
from minithink.bench.methods.settings import CHOSEN, RKV, TRIED, at_once, unprotected
from minithink.kv.contract import Edit, Evict, Policy, Step
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

BELOW = "random:protect_prompt=true"  # a policy that chooses should be better than this one
OTHERS = (
    "window:protect_prompt=true",
    "streaming_llm:protect_prompt=true",
    BELOW,
    RKV,
    "crystal_kv",
    "crystal_kv_lite:protect_prompt=true",
    "skipkv:schedule=interval:16,tau=0.9,at=boundary",
    "dynts",
    "thinkv",
)
ALL = (*CHOSEN.values(), "raas:page=16", *OTHERS)
FEW = ("window", "random", "rkv", "snapkv_decode", "raas", "h2o", "skipkv")  # the beginnings of names

SWEEPS = {
    "baselines": Sweep(
        "all policies that evict, the prompt protected",
        ALL,
        budgets=(0.125, 0.25, 0.5, 0.75),
        split="test",
        beside=BELOW,
    ),
    "baselines-needed": Sweep(
        "the same at a quarter of the tokens: what is kept of what the text needs",
        ALL,
        budgets=(0.25,),
        split="test",
        needed=True,
        beside=BELOW,
    ),
    "baselines-settings": Sweep(
        "settings of the policies that others compare with",
        tuple(chain.from_iterable(TRIED.values())),
        budgets=(0.25,),
        problems=64,
    ),
    "lots": Sweep(
        "policies that draw by lot: with a window of the newest tokens and in rounds, and with either alone",
        (
            BELOW,
            "random:schedule=interval:16,protect_prompt=true",
            "random_attention:buffer=1",
            "random_attention:buffer=16,schedule=interval:1",
            "random_attention:buffer=16",
            "random_attention:buffer=64,schedule=interval:1",
            "random_attention:buffer=64",
        ),
        budgets=(0.25,),
        beside=BELOW,
    ),
    "baselines-unprotected": Sweep(
        "policies that may evict the prompt, at a quarter of the tokens",
        tuple(unprotected(policy) for policy in (*CHOSEN.values(), *OTHERS[:4])),
        budgets=(0.25,),
        split="test",
        beside="random",
    ),
    "baselines-sawtooth": Sweep(
        "all at the triggers of DynTS, with as many tokens",
        ("dynts", *AT_ONCE, *(at_once(policy) for policy in CHOSEN.values())),
        budgets=(0.25, 0.5),
        split="test",
        beside=at_once(BELOW),
    ),
    "redundancy": Sweep(
        "problems of `search` that ask for little, some and much repetition",
        tuple(policy for policy in ALL if policy.startswith(FEW)),
        budgets=(0.25, 448),
        split="test",
        datasets=("search:0", "search:1", "search:2"),
        beside=BELOW,
    ),
}

# Steps on synthetic caches ------------------------------------------------------------------------------------------


class ByLot(StandIn, Policy):
    """A policy that evicts by lot while a cache is filled. Afterwards it decides as it always does.

    Its state is empty until then: no decoder runs, so nothing calls `watch`. In the first real step all tokens are
    new to the policy.
    """

    seed = 0

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 2 * self.budget + self.period  # a full lane has been replaced once

    def decide(self, step: Step) -> Iterable[Edit]:
        return self.by_lot(step) if self.filling else super().decide(step)

    def by_lot(self, step: Step) -> Iterator[Edit]:
        """Evict as `random` does, when this policy is due."""
        due, _ = self.due(step)
        if not step.any(due):
            return
        control = Random(self.budget, self.seed, schedule=self.schedule)
        choice = control.choice(step, due)
        yield Evict(control.drop(step, choice, control.scores(step, choice)))


def stand_in(mixin: type[Policy], policy: Policy, share: float, seed: int, layers: int) -> Policy:
    """A copy of the policy, with all its settings, whose class inherits from the mixin first."""
    made = copy(policy)
    made.__class__ = type(type(policy).__name__, (mixin, type(policy)), {"capturable": True})
    return made


# Policies that score with R-KV's `score` draw their scores, as R-KV's stand-in does. So heads that share a budget
# (`ada_snapkv`) get nearly equal parts. `window`, `streaming_llm`, `random` and `random_attention` need no stand-in:
# their decisions do not depend on attention.
STAND_INS: StandIns = {
    **{cls: partial(stand_in, DrawnRkv) for cls in (SnapKVDecode, AdaSnapKV, PyramidKV)},
    **{cls: partial(stand_in, ByLot) for cls in (H2O, Tova, Scissorhands, MorphKV, VaSE, RaaS, LazyEviction)},
}
# Each policy as its authors run it: its defaults. `sepllm` is not here, because it needs a text with separators.
EVERY = (  # policies that decide in every step
    "window",
    "streaming_llm",
    "random",
    "h2o",
    "tova",
    "raas",
    "morphkv",
    "crystal_kv",
    "crystal_kv_lite",
)
LATER = (  # every 32 (`lazy_eviction`), 64 (`random_attention`, `vase`) or 128 tokens of a sequence
    "lazy_eviction",
    "random_attention",
    "vase",
    "scissorhands",
    "snapkv_decode",
    "ada_snapkv",
    "pyramidkv",
    "rkv",
)
METHODS = {
    "full": "full",
    **{name: f"{name}:budget={{budget}}" for name in (*EVERY, *LATER)},
    "skipkv": "skipkv:budget={budget},steering=false",  # every 128, too
    "thinkv": "thinkv:budget={budget}",  # as a segment of 128 tokens ends, or when it needs room
}


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

BOUND = 1.3  # × the time to read weights and cache: no step should be longer. Not a Goal: that compares two cases


def steps(result: Result) -> list[Row]:
    """Steps by batch, in the order of METHODS, beside the full cache's and beside their bounds."""
    own = [m for m in result["measurements"] if m["kind"] == "step"]
    order = [*METHODS]
    full = {m["batch"]: m["step_milliseconds"] for m in own if m["method"] == "full"}
    own.sort(key=lambda m: (m["batch"], order.index(m["method"])))
    rows = list[Row]()
    for m in own:
        took = m["step_milliseconds"]
        of_full = took / full[m["batch"]] if m["batch"] in full else None
        rows.append({**m, "of_full": of_full, "of_bound": took / m["limit_milliseconds"]})
    return rows


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
        (
            ("policy", "method", "`{}`"),
            ("sequences", "batch", "{:,}"),
            ("a step", "step_milliseconds", "**{:.2f} ms**"),
            ("of full's step", "of_full", "{:.2f} ×"),
            ("bound", "limit_milliseconds", "{:.2f} ms"),
            ("of the bound", "of_bound", "**{:.2f} ×**"),
            ("decide", "rates.decision.sequence_steps", "{:pct}"),
            ("attention", "layer_microseconds.attention", "{:us}"),
            ("decision", "layer_microseconds.eviction", "{:us}"),
            ("refresh", "layer_microseconds.refresh", "{:us}"),
            ("flush", "layer_microseconds.flush", "{:us}"),
            ("rest", "layer_microseconds.rest", "{:us}"),
        ),
        rows=steps,
        said=steps_said,
        kind="step",
        file="baselines",
    )
}

# Kernels ------------------------------------------------------------------------------------------------------------

HEADS = 32  # of a layer
KV_HEADS = 8
DIM = 128  # channels of a head
QUERIES = 2  # W − 1, MorphKV's default
SEQUENCES = 64  # that are due together: MorphKV decides in every step


def lanes(rows: int, tokens: int, device: str, layers: int = LAYERS, gone: bool = False) -> Inputs:
    """Attention of whole numbers, positions and lengths of lanes, known positions and scores (of all tokens but the
    newest), and the rows. gone: a known token was evicted, so tokens behind it are one column earlier."""
    shape = layers, rows, KV_HEADS, tokens
    pos = 2 * torch.arange(tokens, dtype=torch.int32, device=device)
    known = pos[:-1]
    at = tokens // 3
    if gone:
        known = torch.cat((known[:at], known[at : at + 1] - 1, known[at:-1]))
    known = known.expand(*shape[:3], -1).contiguous()
    score = torch.randint(1 << 20, known.shape, device=device).float()
    mass = torch.randint(1 << 20, shape, device=device).float()
    held = torch.full(shape[:3], tokens, dtype=torch.int32, device=device)
    return mass, pos.expand(shape).contiguous(), held, (known, score), torch.arange(rows, device=device)


def carried(rows: int, tokens: int, device: str, layers: int = LAYERS) -> Inputs:
    """The inputs of `lanes`, and the tokens that stay: all but one."""
    score, pos, _, known, at = lanes(rows, tokens, device, layers)
    stay = (torch.arange(tokens, device=device) != tokens // 3).expand(pos.shape).contiguous()
    return score, pos, stay, known, at, torch.ones_like(at).bool()


def stamped(rows: int, tokens: int, device: str, layers: int = LAYERS, gone: bool = False) -> Inputs:
    """Half of the tokens are hit, drawn by lot. Two tokens of three came after the prompt."""
    score, pos, held, (known, _), at = lanes(rows, tokens, device, layers, gone)
    known = torch.nn.functional.pad(known, (0, 1), value=2**31 - 1)  # behind the last token an empty entry
    last, gap = (torch.randint(tokens, known.shape, dtype=torch.int32, device=device) for _ in range(2))
    prompt = torch.full((rows,), 2 * tokens // 3, dtype=torch.int32, device=device)
    t = torch.full_like(prompt, 2 * tokens)
    return score < 1 << 19, pos, held, (known, last, gap), at, prompt, t, torch.ones_like(at).bool()


def lots(rows: int, tokens: int, device: str, weighted: bool, layers: int = LAYERS) -> Inputs:
    """A key for each lane, the positions of its tokens, and perhaps their weights."""
    shape = layers, rows, KV_HEADS, tokens
    key = torch.randint(1 << 32, shape[:3], device=device)
    pos = torch.arange(tokens, dtype=torch.int32, device=device).expand(shape).contiguous()
    return (key, pos, torch.rand(shape, device=device)) if weighted else (key, pos)


def window(rows: int, tokens: int, device: str) -> Inputs:
    """Queries and keys of whole numbers, and the tokens before the window.

    Each query looks at one channel, which is large in 1, 2, 4 or 8 tokens and 0 in all others. So every softmax
    has equal parts: 1, 1/2, 1/4 or 1/8.
    """
    older = tokens - QUERIES - 1
    dtype = torch.bfloat16
    channel = torch.arange(DIM, device=device)
    column = torch.arange(tokens, device=device, dtype=torch.int32)
    first = torch.randint(older, (KV_HEADS, 1, DIM), device=device, dtype=torch.int32)
    k = 64 * ((column[:, None] - first) % older < 2 ** (channel % 4)).to(dtype)  # [Hkv, S, D]
    seen = torch.randint(DIM, (rows, HEADS, QUERIES, 1), device=device)
    valid = (column < older).expand(rows, KV_HEADS, tokens).contiguous()
    return 64 * (seen == channel).to(dtype), k.repeat(rows, 1, 1, 1), valid


def remembered(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """The next three: all layers of several sequences. Bytes of each token: attention, position, what is known, and
    the new score."""
    return _of_lanes(lanes, 20, lengths, due, size)


def carryings(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """Bytes: score, position and flag of each token, and what is known of it from now on."""
    return _of_lanes(carried, 17, lengths, due, size)


def stamps(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """Bytes: flag and position of each token, what is known of it, and what is known from now on. Tokens stand in
    their entries, because all replays but the first find them there."""
    return _of_lanes(stamped, 29, lengths, due, size)


def _of_lanes(
    make: Callable[[int, int, str], Inputs], each: int, lengths: Sequence[int], due: Sequence[int], size: int
) -> Iterator[tuple[str, int, list[Inputs]]]:
    for tokens, rows in product(lengths, due):
        own = each * LAYERS * rows * KV_HEADS * tokens
        yield f"{rows} × {tokens:,} tokens", own, [make(rows, tokens, "cuda") for _ in range(-(-size // own))]


def draws(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """All layers of several sequences; bytes: position, perhaps weight, and score of each token."""
    for tokens, rows, weighted in product(lengths, due, (False, True)):
        own = (16 if weighted else 12) * LAYERS * rows * KV_HEADS * tokens
        inputs = [lots(rows, tokens, "cuda", weighted) for _ in range(-(-size // own))]
        yield f"{rows} × {tokens:,} {'weighted tokens' if weighted else 'tokens'}", own, inputs


def windows(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """One layer of several sequences; bytes: queries, keys, flags and scores."""
    for tokens, rows in product(lengths, (*due, SEQUENCES)):
        own = 2 * DIM * rows * (HEADS * QUERIES + KV_HEADS * tokens) + 5 * rows * KV_HEADS * tokens
        inputs = [window(rows, tokens, "cuda") for _ in range(-(-size // own))]
        yield f"{rows} × {tokens:,} tokens, a layer", own, inputs


# Weighted scores differ in their last bits, so whole numbers are compared without weights.
OPERATIONS = {
    "accumulate": Operation(lambda device, tokens: lanes(2, tokens, device, layers=1, gone=True), remembered),
    "carry": Operation(lambda device, tokens: carried(2, tokens, device, layers=1), carryings),
    "stamp": Operation(lambda device, tokens: stamped(2, tokens, device, layers=1, gone=True), stamps),
    "draw": Operation(lambda device, tokens: lots(2, tokens, device, weighted=False, layers=1), draws),
    "window_peak": Operation(lambda device, tokens: window(2, tokens, device), windows),
}
