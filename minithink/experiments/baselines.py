"""Every policy that evicts, on one table: those that papers compare with, with settings for texts of 600 to 3,000
tokens."""

from __future__ import annotations

from minithink.evaluate.datasets import LEVELS
from minithink.experiments import Sweep
from minithink.experiments.dynts import OTHERS as AT_ONCE
from minithink.experiments.settings import CHOSEN, GRID, at_once, protected, unprotected

BELOW = "random:protect_prompt=true"  # what a policy that chooses should be better than
OTHERS = (
    "window:protect_prompt=true", "streaming_llm:protect_prompt=true", BELOW, "rkv:buffer=16,protect_prompt=true",
    "crystal_kv", "crystal_kv_lite:protect_prompt=true", "skipkv:schedule=interval:16,tau=0.9,at=boundary", "dynts",
    "thinkv",
)  # fmt: skip
ALL = (*CHOSEN.values(), *OTHERS)
FEW = ("window", "random", "rkv", "snapkv_decode", "raas", "h2o", "skipkv")  # the beginnings of names

SWEEPS = {
    "baselines": Sweep(
        "all policies that evict, the prompt protected", ALL, budgets=(0.125, 0.25, 0.5, 0.75), split="test",
        needed=True, beside=BELOW,
    ),
    "baselines-settings": Sweep(
        "settings of the policies that others compare with",
        tuple(protected(name, setting) for name, settings in GRID.items() for setting in settings), budgets=(0.25,),
        problems=64,
    ),
    "baselines-unprotected": Sweep(
        "policies that may evict the prompt, at a quarter of the tokens",
        tuple(unprotected(policy) for policy in (*CHOSEN.values(), *OTHERS[:4])), budgets=(0.25,), split="test",
        beside="random",
    ),
    "baselines-sawtooth": Sweep(
        "all at the triggers of DynTS, with as many tokens",
        ("dynts", *AT_ONCE, *(at_once(policy) for policy in CHOSEN.values())), budgets=(0.25, 0.5), split="test",
        beside=at_once(BELOW),
    ),
    "redundancy": Sweep(
        "problems of `search` that ask for little, some and much repetition",
        tuple(policy for policy in ALL if policy.startswith(FEW)), budgets=(0.25, 448), split="test",
        datasets=tuple(LEVELS), beside=BELOW,
    ),
}  # fmt: skip
