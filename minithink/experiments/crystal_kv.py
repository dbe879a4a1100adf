"""Crystal-KV: its two variants beside other methods that evict, its decay and hit share, its damping; its steps and
throughput beside a full cache (table I)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import product

from minithink.experiments import Case, Cases, Goal, StandIn, StandIns, Sweep
from minithink.policies.crystal_kv import CrystalKV, CrystalKVLite

# Crystal-KV protects the prompt, and the others by default do not: so they are tried both ways.
OTHERS = (
    "rkv:buffer=16,protect_prompt=true", "rkv:buffer=16", "streaming_llm:protect_prompt=true", "streaming_llm",
    "window:protect_prompt=true", "window", "random:protect_prompt=true", "random",
)  # fmt: skip
LITE = "crystal_kv_lite:protect_prompt=true"  # as in the model's card
DECAYS = (0, 0.5, 0.6, 0.8, 1)  # λ: LRU, all from 0 to ½ (which decide alike), the default, a long memory, LFU
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # p
SMALL = (0.125, 0.25, 0.5)

SWEEPS = {
    "crystal-kv": Sweep(
        "Crystal-KV with moving and with equal budgets, others with and without a protected prompt",
        ("crystal_kv", LITE, *OTHERS, "thinkv"), budgets=(*SMALL, 0.75),
    ),
    "crystal-kv-heat": Sweep(
        "the decay λ and the share p of the attention that makes a hit (figure 5)",
        tuple(f"crystal_kv:lam={lam:g},p={p:g}" for lam, p in product(DECAYS, SHARES)), budgets=(0.25,), problems=64,
    ),
    "crystal-kv-damping": Sweep(
        "algorithm 2 with damping and to the letter, and equal budgets", ("crystal_kv", "crystal_kv:damping=1", LITE),
        budgets=SMALL,
    ),
}  # fmt: skip

# Steps and throughput on synthetic caches --------------------------------------------------------------------------


class FilledLite(StandIn, CrystalKVLite):
    """Crystal-KV Lite where hits are noise: a lane that is full stays as it is, on the whole."""

    recordable = True

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 2 * self.budget  # a lane is full, and as many tokens came and went


class Filled(FilledLite, CrystalKV):
    """Crystal-KV, alike."""

    recordable = True


def _filled(cls: type[CrystalKVLite], policy: CrystalKVLite) -> CrystalKVLite:
    return cls(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})


STAND_INS: StandIns = {
    CrystalKVLite: lambda policy, share, seed, layers: _filled(FilledLite, policy),
    CrystalKV: lambda policy, share, seed, layers: _filled(Filled, policy),
}
METHODS = {
    "full": "full", "window": "window:budget={budget}", "crystal_kv_lite": "crystal_kv_lite:budget={budget}",
    "crystal_kv": "crystal_kv:budget={budget}", "crystal_kv-tenth": "crystal_kv:budget={tenth}",
}  # fmt: skip
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
            Goal("throughput/crystal_kv", "throughput/full", throughput),
        ),
        as_many=("full",),
        lines={"full": "#444444", "window": "#E69F00", "crystal_kv_lite": "#56B4E9", "crystal_kv": "#0072B2"},
    )


# The paper's lengths: --tokens 9350, and --tokens 18700 --tenth 1870.
CASES = {"crystal-kv": _table_1(2.8), "crystal-kv-16k": _table_1(5.5)}
