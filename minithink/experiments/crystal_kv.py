"""Crystal-KV: its two variants beside other methods that evict, its decay and hit share, its damping."""

from __future__ import annotations

from itertools import product

from minithink.experiments import Sweep

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
