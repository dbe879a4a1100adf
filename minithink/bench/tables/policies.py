"""The README's table of policies: a line for each one of `POLICIES`, with its paper and a link to its file.

What a policy does is its `summary`, as in `--list-policies`, without the name in brackets at the end. The README has
room for ten words, so longer summaries have a shorter text here. It is found by the summary that it stands for: when
the summary changes, a test asks for a new text.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from minithink.bench.fidelity.lines import of_cells
from minithink.bench.methods import Table
from minithink.policies import POLICIES, summary_of
from minithink.results import origin

ARXIV = "https://arxiv.org/abs/"


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from."""

    name: str
    paper: str = ""  # a number of arXiv, or a whole address; "": there is none


THINKV = "https://openreview.net/forum?id=M3CeHnZKNC"
ORACLE = Origin("an oracle, as a control")
ORIGINS = {  # name of a policy → where it comes from
    "full": Origin("the baseline"),
    "window": Origin("StreamingLLM, figure 1b", "2309.17453"),
    "streaming_llm": Origin("StreamingLLM", "2309.17453"),
    "sepllm": Origin("SepLLM", "2412.12094"),
    "random": Origin("a control"),
    "random_attention": Origin("Random Attention", "2609.03430"),
    "vase": Origin("VaSE", "2606.03928"),
    "snapkv": Origin("SnapKV", "2404.14469"),
    "h2o": Origin("H2O", "2306.14048"),
    "tova": Origin("TOVA", "2401.06104"),
    "scissorhands": Origin("Scissorhands", "2305.17118"),
    "snapkv_decode": Origin("SnapKV, as R-KV runs it", "2505.24133"),
    "ada_snapkv": Origin("Ada-KV", "2407.11550"),
    "pyramidkv": Origin("PyramidKV", "2406.02069"),
    "raas": Origin("RaaS", "2502.11147"),
    "lazy_eviction": Origin("LazyEviction", "2506.15969"),
    "morphkv": Origin("MorphKV", "2503.00979"),
    "keydiff": Origin("KeyDiff", "2504.15364"),
    "knorm": Origin("Knorm", "2406.11430"),
    "triattention": Origin("TriAttention", "2604.04921"),
    "rkv": Origin("R-KV", "2505.24133"),
    "skipkv": Origin("SkipKV", "2512.07993"),
    "seal": Origin("SEAL", "2504.07986"),
    "crystal_kv": Origin("Crystal-KV", "2601.16986"),
    "crystal_kv_lite": Origin("Crystal-KV", "2601.16986"),
    "dynts": Origin("DynTS", "2601.18383"),
    "answer_oracle": ORACLE,
    "hindsight_oracle": ORACLE,
    "needs_oracle": ORACLE,
    "thinkv": Origin("ThinKV", THINKV),
    "tbe": Origin("ThinKV's eviction alone", THINKV),
    "tbq": Origin("ThinKV's bits alone", THINKV),
    "quant": Origin("a baseline: NVFP4, FP8, ternary, …"),
    "kivi": Origin("KIVI", "2402.02750"),
    "pm_kvq": Origin("PM-KVQ", "2505.18610"),
}
SHORTER = {  # a summary without its brackets → the same in at most ten words
    "keep the prompt and the newest tokens, and draw the others by lot": (
        "keep prompt and newest tokens, draw the others by lot"
    ),
    "keep values of a large range, and draw others by attention": (
        "keep values of a large range, draw others by attention"
    ),
    "keep of the prompt what its end attends to, and all that is generated": (
        "cut the prompt once, to what its end attends to"
    ),
    "keep tokens with the most attention so far, and recent ones": (
        "keep recent tokens and those with most attention so far"
    ),
    "keep tokens that the newest queries attend to, again and again": (
        "keep what the newest queries attend to, again and again"
    ),
    "keep tokens that the newest queries attend to; heads of a layer share a budget": (
        "as `snapkv_decode`, but heads of a layer share a budget"
    ),
    "keep tokens that the newest queries attend to, more of them in lower layers": (
        "as `snapkv_decode`, but lower layers get larger budgets"
    ),
    "evict what has not been attended to for the longest time": "evict what has gone without attention the longest",
    "keep keys that suit the centre of the queries before RoPE": (
        "keep keys that suit the queries' centre before RoPE"
    ),
    "keep tokens that are attended to and do not repeat others": (
        "keep what is attended to and does not repeat others"
    ),
    "keep tokens that attention hits often and recently, LRFU; budgets move between heads": (
        "as `crystal_kv_lite`, but budgets move between heads"
    ),
    "keep tokens that attention hits often and recently, LRFU": "keep tokens that attention hits often and recently",
    "keep the thinking tokens that a predictor expects the answer to need": (
        "keep what a predictor expects the answer to attend to"
    ),
    "keep what the answer attends to, known from a recorded text": ("keep what a recorded text's answer attends to"),
    "keep what all later tokens attend to, known from a recorded text": (
        "keep what a recorded text's later tokens attend to"
    ),
    "keep what the text may still read by the rules of the task families": (
        "keep what the puzzle's rules say is still needed"
    ),
    "keep everything in 2 bits, keys per channel, values per token": ("keep all in 2 bits, grouping keys by channel"),
    "keep everything in 16, 8, 4, then 2 bits as the cache grows": ("keep all, in fewer bits as the cache grows"),
}


def lines() -> list[str]:
    """The table in Markdown. Links are those of a page at the project's root."""
    rows = [["policy", "what it does", "where it is from"]]
    for name, source in ORIGINS.items():
        rows.append([f"[`{name}`]({file_of(name)})", words_of(name), link_to(source)])
    return of_cells(rows)


def words_of(name: str) -> str:
    """What a policy does, in few words."""
    words = without_brackets(summary_of(POLICIES[name]))
    return SHORTER.get(words, words)


def without_brackets(summary: str) -> str:
    """A summary without the brackets at its end, which hold a method's name or examples."""
    return re.sub(r" \([^()]*\)$", "", summary)


def file_of(name: str) -> str:
    """The path of a policy's file below the root."""
    path = Path(inspect.getfile(POLICIES[name])).resolve()
    return path.relative_to(origin.ROOT).as_posix()


def link_to(source: Origin) -> str:
    """The name of a paper, with a link to it if there is one."""
    if not source.paper:
        return source.name
    address = source.paper if source.paper.startswith("https://") else ARXIV + source.paper
    return f"[{source.name}]({address})"


TABLES = {"policies": Table((), written=lines)}
