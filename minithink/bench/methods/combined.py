"""TriAttention and TurboQuant, alone and together: which tokens stay, and in how many bits.

The policies and their settings are those of `methods/transfer.py`, so their runs are in the pool once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from minithink.bench.methods import Result, Row, Table, transfer
from minithink.bench.methods.settings import unprotected
from minithink.bench.methods.transfer import CHOSEN, FEW_BITS
from minithink.evaluate.summary import FULL, budget_text

RKV = CHOSEN["rkv"]
TRIATTENTION = CHOSEN["triattention"]
RANDOM_ATTENTION = CHOSEN["random_attention"]
EVICTING = (RKV, TRIATTENTION, RANDOM_ATTENTION, CHOSEN["thinkv"], CHOSEN["thinkv:types=1"])
# It stands beside the others in few bits, which take about as many bytes at its budget.
FOUR_BITS = f"{RKV}+quant:fmt=tq4"
# TriAttention protects its prompt, and the baselines of its paper do not protect theirs.
UNPROTECTED = (unprotected(RKV), unprotected(TRIATTENTION))
KEEPING = (
    CHOSEN["kivi:bits=4"],
    CHOSEN["kivi"],
    *(f"quant:fmt={name}" for name in ("nvfp4", "int4", "tq4", "tq3", "tq2", "tq1")),
)
POLICIES = (*EVICTING, *FEW_BITS, *UNPROTECTED, *KEEPING)

SWEEPS = {
    "combined": replace(
        transfer.SWEEPS["transfer"],
        what="eviction and few bits in one cache, TriAttention and TurboQuant among them",
        policies=POLICIES,
        beside=RKV,
    ),
    "combined-losses": replace(
        transfer.SWEEPS["transfer-losses"],
        what="the same by the loss of reference traces and of fixed texts",
        policies=POLICIES,
    ),
}
TRANSFERS = {
    "combined": replace(
        transfer.EVERY_POLICY,
        answers="combined",
        losses="combined-losses",
        ranked={name: CHOSEN[name] for name in ("rkv", "triattention", "random_attention", "thinkv")},
        beside=(RKV, TRIATTENTION, FOUR_BITS),
        models={"backbone": transfer.BACKBONE},
    ),
}


def steps(result: Result) -> Iterable[Row]:
    """A row for each of these policies in a result of `bench model-steps`; the shorter the step, the earlier."""
    measured = {m["policy"]: m for m in result["measurements"] if m["policy"] in (FULL, *POLICIES)}
    for m in sorted(measured.values(), key=lambda m: m["step_milliseconds"]):
        yield m | {
            "of": "" if m["budget"] is None else budget_text(m["budget"]),
            "beside_full": m["step_milliseconds"] / measured[FULL]["step_milliseconds"],
        }


def steps_said(result: Result) -> Iterable[str]:
    """What was decoded, and what could not be."""
    size = result["settings"]
    yield (
        f"{size['batch']} sequences in {size['dtype']}, random prompts of {size['prompt_tokens']:,} tokens. The "
        f"budget is the prompt and that share of {size['tokens']:,} tokens. Timed were {size['steps']:,} steps, in "
        "whose middle the full cache holds as many tokens as it does on average."
    )
    yield ""
    for one in result["left_out"]:
        if one["policy"] in POLICIES:
            yield f"`{one['policy']}` is left out: {one['why']}"
            yield ""


TABLES = {
    "combined-steps": Table(
        (
            ("policy", "policy", "`{}`"),
            ("budget", "of", "{}"),
            ("milliseconds a step", "step_milliseconds", "{:.2f}"),
            ("of the full cache's", "beside_full", "**{:.2f} ×**"),
            ("tokens a second", "tokens_per_second", "{:,.0f}"),
        ),
        file="backbone-steps",
        rows=steps,
        said=steps_said,
    ),
}
