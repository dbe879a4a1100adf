"""All policies on several models: which conclusions hold on each of them.

The settings are tried on validation problems of the backbone, three for every policy, at a quarter of the tokens.
Number formats alone have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from minithink.bench.methods import Sweep, Transfer
from minithink.bench.methods.settings import of, protected, unprotected
from minithink.evaluate.texts import REFERENCE

BUDGETS = (0.125, 0.25, 0.5)
FIXED = "texts"  # see `answers/losses.py`
TRACES = 24  # reference traces, eight of each family; of fixed texts all

# Name → policy and the settings that are tried. A buffer of 16 tokens as in `settings.py`: texts have 4,000 tokens.
EVICTING = {
    "window": ("window", "", "schedule=interval:16", "schedule=interval:64"),
    "streaming_llm": ("streaming_llm", "", "sink=10", "schedule=interval:16"),
    "sepllm": ("sepllm", "", "window=0.6", "separators=0.2"),
    "random": ("random", "", "schedule=interval:16", "scope=layer"),
    "random_attention": ("random_attention", "buffer=16", "buffer=32", "buffer=64"),
    "vase": ("vase", "buffer=16", "buffer=16,temperature=0.5", "buffer=16,variant=dkv"),
    "h2o": ("h2o", "", "recent=0.25", "recent=0.75"),
    "tova": ("tova", "", "newest=true", "schedule=interval:16"),
    "scissorhands": ("scissorhands", "history=400,buffer=16", "history=64,buffer=16", "history=64,by=mean,buffer=16"),
    "snapkv_decode": ("snapkv_decode", "buffer=16", "buffer=16,alpha=16", "buffer=64"),
    "ada_snapkv": ("ada_snapkv", "buffer=16", "buffer=16,floor=0.5", "buffer=16,floor=0.8"),
    "pyramidkv": ("pyramidkv", "buffer=16", "buffer=16,beta=5", "buffer=16,beta=2"),
    "raas": ("raas", "", "share=0.25", "share=0.75"),
    "raas:page=16": ("raas", "page=16", "page=16,share=0.25", "page=16,share=0.75"),
    "lazy_eviction": ("lazy_eviction", "window=16", "window=16,alpha=0.001", "window=16,alpha=0.01"),
    "morphkv": ("morphkv", "window=32", "window=16", "window=32,fuse=sum"),
    "rkv": ("rkv", "buffer=16", "buffer=16,lam=0.3", "buffer=64"),
    "skipkv": (
        "skipkv",
        "schedule=interval:16,at=boundary",
        "schedule=interval:16,tau=0.9,at=boundary",
        "schedule=interval:16,alpha_0=0.25,at=boundary",
    ),
    "skipkv:steering=false": (
        "skipkv",
        "steering=false,schedule=interval:16",
        "steering=false,schedule=interval:16,tau=0.9",
        "steering=false,schedule=interval:16,tau=0.98",
    ),
    "crystal_kv": ("crystal_kv", "", "birth=0", "p=0.5"),
    "crystal_kv_lite": ("crystal_kv_lite", "", "birth=0", "p=0.5"),
    "dynts": ("dynts", "", "local=0.2", "ratio=0.5"),
    "tbe": ("tbe", "", "tau=64", "tau=32"),
    "thinkv": ("thinkv", "", "precision=R4E4T4", "tau=64"),
    "thinkv:types=1": ("thinkv", "types=1", "types=1,tau=64", "types=1,tau=32"),
    "keydiff": ("keydiff", "schedule=interval:16", "schedule=interval:16,recent=32", "schedule=interval:64"),
    "knorm": ("knorm", "schedule=interval:16", "schedule=interval:16,recent=32", "schedule=interval:64"),
    "triattention": ("triattention", "buffer=16", "buffer=16,recent=32", "buffer=16,share=layers"),
}
KEEPING = {
    "kivi": ("kivi", "", "residual=64", "residual=32"),
    "kivi:bits=4": ("kivi", "bits=4", "bits=4,residual=64", "bits=4,residual=32"),
    "pm_kvq": ("pm_kvq", "max_len=4096", "max_len=8192", "max_len=2048"),
    "tbq": ("tbq", "", "tau=64", "tau=32"),
    "seal": ("seal", "", "alpha_0=0.5", "alpha_0=0.25"),
}
OF_THEIR_OWN = ("dynts", "tbe", "thinkv", "thinkv:types=1")  # they decide themselves how the prompt is kept
TRIES: dict[str, tuple[str, ...]] = {}
for _name, (_policy, *_settings) in (EVICTING | KEEPING).items():
    _write = of if _name in OF_THEIR_OWN or _name in KEEPING else protected
    TRIES[_name] = tuple(_write(_policy, setting) for setting in _settings)

# What `best` finds on the validation problems of the backbone, where it is not the first try; the command
# `python -m minithink.bench transfer --settings` prints it.
BEST: dict[str, str] = {
    "window": "window:schedule=interval:64,protect_prompt=true",
    "streaming_llm": "streaming_llm:schedule=interval:16,protect_prompt=true",
    "sepllm": "sepllm:window=0.6,protect_prompt=true",
    "random": "random:schedule=interval:16,protect_prompt=true",
    "vase": "vase:buffer=16,variant=dkv,protect_prompt=true",
    "h2o": "h2o:recent=0.75,protect_prompt=true",
    "tova": "tova:schedule=interval:16,protect_prompt=true",
    "scissorhands": "scissorhands:history=64,by=mean,buffer=16,protect_prompt=true",
    "ada_snapkv": "ada_snapkv:buffer=16,floor=0.8,protect_prompt=true",
    "pyramidkv": "pyramidkv:buffer=16,beta=2,protect_prompt=true",
    "raas:page=16": "raas:page=16,share=0.75",
    "rkv": "rkv:buffer=16,lam=0.3,protect_prompt=true",
    "skipkv": "skipkv:schedule=interval:16,tau=0.9,at=boundary",
    "skipkv:steering=false": "skipkv:steering=false,schedule=interval:16,tau=0.9",
    "crystal_kv": "crystal_kv:p=0.5",
    "crystal_kv_lite": "crystal_kv_lite:p=0.5",
    "dynts": "dynts:ratio=0.5",
    "tbe": "tbe:tau=64",
    "thinkv:types=1": "thinkv:types=1,tau=64",
    "keydiff": "keydiff:schedule=interval:16,recent=32,protect_prompt=true",
    "knorm": "knorm:schedule=interval:16,recent=32,protect_prompt=true",
    "triattention": "triattention:buffer=16,share=layers",
    "kivi:bits=4": "kivi:bits=4,residual=32",
    "pm_kvq": "pm_kvq:max_len=8192",
    "seal": "seal:alpha_0=0.5",
}
FIRST = {name: texts[0] for name, texts in TRIES.items()}
CHOSEN = FIRST | BEST

CRYSTAL = ("crystal_kv", *(f"crystal_kv:{setting}" for setting in ("birth=0", "lam=0.8", "lam=1", "p=0.5", "p=0.7")))
FORMATS = ("fp8", "int8", "nvfp4", "int4", "int4s", "int2", "int2s", "ternary", "tq4", "tq3", "tq2", "tq1")
WITHOUT_SETTINGS = (
    *(f"quant:fmt={name}" for name in FORMATS),
    "tbq:precision=R4E4T4",
    "tbq:types=1",
)


def in_few_bits(texts: Mapping[str, str]) -> tuple[str, ...]:
    """Eviction and quantization in one cache. texts: name → policy with the setting of that name."""
    return (
        *(f"{texts[name]}+quant:fmt=nvfp4" for name in ("rkv", "random_attention", "triattention")),
        f"{texts['rkv']}+quant:fmt=tq4",
        f"{texts['triattention']}+quant:fmt=tq4",
        f"{texts['triattention']}+quant:fmt=tq3",
        of("thinkv", "four=tq4", "two=tq2"),
    )


def with_settings(texts: Mapping[str, str]) -> tuple[str, ...]:
    """All policies that are compared. texts: as above."""
    few_bits = in_few_bits(texts)
    # TriAttention protects its prompt, and the baselines of its paper do not protect theirs: here both do neither.
    without_prompt = tuple(unprotected(texts[name]) for name in ("rkv", "triattention"))
    return tuple(dict.fromkeys((*texts.values(), *few_bits, *without_prompt, *CRYSTAL, *WITHOUT_SETTINGS)))


FEW_BITS = in_few_bits(CHOSEN)
ALL = with_settings(CHOSEN)

SWEEPS = {
    "transfer": Sweep(
        "all policies, with settings chosen on the backbone, and number formats alone",
        ALL,
        budgets=BUDGETS,
        split="test",
        beside=CHOSEN["random_attention"],
    ),
    "transfer-first": Sweep(
        "the same, but every policy with the setting that is tried first",
        with_settings(FIRST),
        budgets=BUDGETS,
        split="test",
        beside=FIRST["random_attention"],
    ),
    "transfer-losses": Sweep(
        "the same policies by the loss of reference traces and of fixed texts",
        ALL,
        budgets=BUDGETS,
        problems=TRACES,
        datasets=(REFERENCE, FIXED),
        losses=True,
    ),
    "transfer-settings": Sweep(
        "settings of all policies, three of each",
        tuple(chain.from_iterable(TRIES.values())),
        budgets=(0.25,),
        problems=64,
    ),
}
BACKBONE = "6703513649b7e356"  # hash of the weights of smollm2-think
CONTROL = "bebeaf9a641634e6"  # of tiny-control, the embedded model trained without eviction

EVERY_POLICY = Transfer(
    answers="transfer",
    losses="transfer-losses",
    settings="transfer-settings",
    tuned=("backbone", BACKBONE),
    tries=TRIES,
    ranked={name: CHOSEN[name] for name in EVICTING},
    beside=(CHOSEN["random_attention"], CHOSEN["window"]),
    models={"embedded": "", "control": CONTROL, "backbone": BACKBONE},
    model_steps={"backbone": "backbone-steps"},
)
TRANSFERS = {
    "transfer": EVERY_POLICY,
    # The embedded model has run most policies with their first settings only.
    "first": replace(
        EVERY_POLICY,
        answers="transfer-first",
        ranked={name: FIRST[name] for name in EVICTING},
        beside=(FIRST["window"], FIRST["random_attention"]),
        models={"embedded": ""},
    ),
}
