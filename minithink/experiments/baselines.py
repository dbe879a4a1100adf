"""Every policy that evicts, on one table: those that papers compare with, with settings for texts of 600 to 3,000
tokens."""

from __future__ import annotations

from minithink.experiments import Sweep

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
