"""Settings of the policies that others compare with: what was tried on validation problems, and what was chosen.

The comparison baselines-settings (`baselines.py`) tries them; `best` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PROTECTED = "protect_prompt=true"
# The settings of each policy that are tried on validation problems. Policies gather 16 tokens before they evict, as
# R-KV in `methods/embedded.py`: 128 tokens would be a large part of the embedded model's texts.
GRID = {
    "h2o": ("", "recent=0.25", "recent=0.75"),
    "tova": ("", "newest=true"),
    "scissorhands": (
        "history=64,buffer=16",
        "history=16,buffer=16",
        "history=400,buffer=16",
        "history=64,by=mean,buffer=16",
    ),
    "snapkv_decode": ("buffer=16", "buffer=16,alpha=16", "buffer=16,alpha=4"),
    "ada_snapkv": ("buffer=16", "buffer=16,floor=0.5", "buffer=16,floor=0.8"),
    "pyramidkv": ("buffer=16", "buffer=16,beta=5", "buffer=16,beta=2"),
    "raas": ("", "share=0.25", "share=0.75"),
    "lazy_eviction": ("window=16,alpha=0.001", "window=16,alpha=0.01", "window=16", "alpha=0.001"),
    "morphkv": ("window=32", "window=16", "window=32,fuse=sum"),
    "random_attention": ("buffer=16", "buffer=32"),
    "vase": ("buffer=16", "buffer=16,temperature=0.5", "buffer=16,variant=dkv"),
    "sepllm": ("", "window=0.6", "fill=true"),
}

# Policies that protect the prompt by default, so that their texts do not say it. The pool names its runs by these
# texts: they stay as they are when a default changes.
PROTECTING = (
    "answer_oracle",
    "crystal_kv",
    "crystal_kv_lite",
    "dynts",
    "hindsight_oracle",
    "needs_oracle",
    "raas",
    "random_attention",
    "skipkv",
    "triattention",
)

RKV = "rkv:buffer=16,protect_prompt=true"  # R-KV in comparisons: GRID's buffer, the prompt stays

# Triggers of DynTS: each policy evicts as often, and keeps as many tokens (SepLLM keeps fewer).
RATIO = 0.3  # r, the default of `policies/dynts.py`
LOCAL = 0.4  # W_l, likewise
SAME = f"schedule=share:{RATIO:g}/{LOCAL:g},{PROTECTED}"


def of(name: str, *options: str) -> str:
    """A policy as on the command line. Empty options are left out."""
    own = [option for option in options if option]
    return f"{name}:{','.join(own)}" if own else name


def protected(name: str, *options: str) -> str:
    """A policy whose prompt stays."""
    return of(name, *options, "" if name in PROTECTING else PROTECTED)


def unprotected(policy: str) -> str:
    """The same policy, the prompt as evictable as the rest."""
    name, _, options = policy.partition(":")
    own = [option for option in options.split(",") if option != PROTECTED]
    return of(name, *own, "protect_prompt=false" if name in PROTECTING else "")


def at_once(policy: str) -> str:
    """The same policy at the triggers of DynTS: it evicts as often, and keeps as many tokens (SepLLM keeps fewer)."""
    name, _, options = policy.partition(":")
    own = [option for option in options.split(",") if option != PROTECTED]
    return of(name, *own, SAME)


def best(rows: Iterable[Mapping[str, Any]], tries: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Name → the text among its tries that has the most right answers of all families; of equals the first. Texts
    that were not measured in every family are left out, and names without any other.

    Args:
        rows: of the comparison that tries the settings, as in the pool of results.
        tries: name → texts of policies.
    """
    right: dict[str, list[float]] = {}
    for row in rows:
        right.setdefault(row["policy"], []).append(row["pass_at_1"])
    most = max(map(len, right.values()))
    whole = {policy: sum(shares) for policy, shares in right.items() if len(shares) == most}
    found = {}
    for name, texts in tries.items():
        own = [text for text in texts if text in whole]
        if own:
            found[name] = max(own, key=whole.__getitem__)
    return found


TRIED = {name: tuple(protected(name, setting) for setting in settings) for name, settings in GRID.items()}
BEST = {  # what `best` finds of TRIED (tested)
    "h2o": "recent=0.75",
    "tova": "",
    "scissorhands": "history=400,buffer=16",
    "snapkv_decode": "buffer=16",
    "ada_snapkv": "buffer=16,floor=0.8",
    "pyramidkv": "buffer=16,beta=2",
    "raas": "",
    "lazy_eviction": "window=16,alpha=0.01",
    "morphkv": "window=32",
    "random_attention": "buffer=16",
    "vase": "buffer=16,variant=dkv",
    "sepllm": "window=0.6",
}
CHOSEN = {name: protected(name, setting) for name, setting in BEST.items()}
