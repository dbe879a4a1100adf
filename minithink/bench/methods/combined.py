"""TriAttention and TurboQuant, alone and together: which tokens stay, and in how many bits.

The policies and their settings are those of `methods/transfer.py`, so their runs are in the pool once.
"""

from __future__ import annotations

from dataclasses import replace

from minithink.bench.methods import transfer
from minithink.bench.methods.settings import unprotected
from minithink.bench.methods.transfer import CHOSEN, FEW_BITS

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
