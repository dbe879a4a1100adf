"""The embedded model: its card's comparisons, and the speed of decoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from minithink.bench.methods import Result, Row, Sweep, Table
from minithink.bench.methods.settings import RKV
from minithink.config import ModelConfig
from minithink.engine import DTYPES, TINY
from minithink.evaluate import margins
from minithink.model import Decoder

# All policies keep the prompt. R-KV decides more often than by default, because these texts are short.
UNCALIBRATED = (
    "window:protect_prompt=true",
    "random:protect_prompt=true",
    RKV,
    "crystal_kv_lite:protect_prompt=true",
    "kivi",
    "kivi:bits=4",
)
CARD = (*UNCALIBRATED, "thinkv:types=1", "thinkv", "thinkv:precision=R4E4T4")  # the last shows what T's 2 bits cost
ROBUSTNESS = Sweep(
    "what training under random eviction changes; --model names the model without it",
    UNCALIBRATED,
    budgets=(0.25, 0.5),
    needed=True,
)
SWEEPS = {
    "card": Sweep("the policies of the embedded model's card", CARD, budgets=(0.25, 0.5), needed=True),
    "robustness": ROBUSTNESS,
    "robustness-without": replace(
        ROBUSTNESS, what="the same, for the model without it", checkpoint="6eb485c5ae85e1c6"
    ),
    "robustness-wide": replace(
        ROBUSTNESS, what="the same, for a model with heads of 128 channels", checkpoint="5dbcccde07803ba4"
    ),
}

SPREAD = "**{:.2f} ×**[ ({:.2f} to {:.2f})]"  # a median, the smallest and the largest value


def ratio(m: Row) -> tuple[Any, ...]:
    """For SPREAD: the ratio, which is the median of pairs of runs, and the least and the largest of these pairs."""
    pairs = m.get("ratios", [])
    return m.get("ratio"), *((min(pairs), max(pairs)) if len(pairs) > 1 else (None, None))


def decoding(result: Result) -> Iterable[Row]:
    """Measurements of `bench decode` with a title, and each side's share of what the bandwidth allows."""
    measured = [x["copy_bytes_per_second"] for x in result["measurements"] if "copy_bytes_per_second" in x]
    for m in result["measurements"]:
        if m["shape"] == "embedded":
            title = f"embedded, {m['dtype']}, {m['prompt_tokens']} + {m['new_tokens']} tokens"
        else:
            steps = m["shape"] == "embedded-steps"
            shape = "embedded, single steps" if steps else f"{m['shape']} (random weights)"
            held = f"`{m['policy']}` after {m['context']:,} tokens" if "policy" in m else ""
            title = f"{shape}, {m['dtype']}, {held or '{:,} tokens held'.format(m['context'])}"
        shares = [share_of_limit(m, m.get(side, {}), measured) for side in ("ours", "peer")]
        said = " / ".join("–" if share is None else f"{share:.1%}" for share in shares)
        limits = None if shares == [None, None] else said
        yield {**m, "title": title, "limits": limits, "ratio": m["ratio"] if m.get("peer") else None}


def share_of_limit(m: Row, side: Row, measured: list[float]) -> float | None:
    """One side's speed as a share of the byte limit: reading weights and KV at the bandwidth of the same run."""
    if "share_of_limit" in side:
        return float(side["share_of_limit"])
    if m["shape"] != "embedded" or not measured or "decode_tokens_per_second" not in side:
        return None
    config = ModelConfig.from_folder(TINY)
    itemsize = DTYPES[m["dtype"]].itemsize
    with torch.device("meta"):
        weights = sum(p.numel() for p in Decoder(config).parameters()) * itemsize
    held = m["prompt_tokens"] + m["new_tokens"] / 2  # on average
    kv = m["batch"] * held * config.kv_bytes_per_token(itemsize)
    return (weights + kv) / measured[0] / (m["batch"] / side["decode_tokens_per_second"])


def near_ties(result: Result) -> Iterable[str]:
    """The counts of `evaluate margins`, as a sentence."""
    settings = result["settings"]
    (m,) = result["measurements"]
    sizes = " and ".join(map(str, settings["batch_size"]))
    yield (
        f"{m['sequences']} sequences of the full cache in batches of {sizes} ({settings['dtype']}): of "
        f"{m['draws']:,} draws {m['near']} had a margin below {m['limit']:g} (smallest: {m['smallest_margin']:.1e}); "
        f"{margins.said_of(len(m['parted']))}, {m['unexplained']} of them at a larger margin."
    )
    yield ""


def loads(result: Result) -> Iterable[str]:
    """Of `bench busy`: how busy the machine was by itself, as a sentence."""
    before = [m["load_before"] for m in result["measurements"] if m["load_before"] is not None]
    if before:
        cores = result["settings"]["cores"]
        yield f"Medians; load average before the lines: {min(before):.1f} to {max(before):.1f}, on {cores} cores."
        yield ""


def premises(result: Result) -> Iterable[str]:
    """How well sparsity tells kinds of thought apart, and where answers look, as sentences."""
    m = result["measurements"]
    settings = result["settings"]
    pairs = (f"{' and '.join(x['kinds'])} {x['auc']:.2f} (layer {x['layer']})" for x in m["separability"]["auc"])
    text = f"{settings['limit']} problems of `{settings['family']}`. "
    steering = m["steering"]
    if steering.get("in_sample", True):  # results of older versions do not say it
        text += "The vector is fitted on the problems that it steers (in-sample), and "
    else:
        text += f"The vector is fitted on the first {steering['fitted_on']} of them, steers the others, and "
    text += f"acts behind layer {settings['layer']}. "
    text += f"Kinds of thought told apart by the sparsity of {settings['tau']} tokens, area under the curve: "
    text += f"{', '.join(pairs)}."
    far, on = (m["answer_attention"][name] for name in ("far", "on_thinking"))
    if on["mean"] is not None:  # at least one trace answered
        text += f" Of the answer's attention {on['mean']:.0%} is on the thinking; {far['mean']:.0%} of that is more "
        text += f"than {far['beyond']} tokens back."
    return [text, ""]


DECODE = Table(
    (
        ("model", "title", "{}"),
        ("batch", "batch", "{}"),
        ("minithink", "ours.tokens_per_second", "{:,.0f} tok/s"),
        ("transformers", "peer.tokens_per_second", "{:,.0f} tok/s"),
        ("ratio", ratio, SPREAD),
        ("decoding alone?", "decode_ratio", "{:.2f} ×"),
        ("byte limit: ours / theirs?", "limits", "{}"),
    ),
    rows=decoding,
)
PREMISES = Table(
    (
        ("added at", "at", "{}"),
        ("strength", "strength", "{:g}"),
        ("right", "right", "**{:.1%}**"),
        ("doubts", "doubts", "{:.2f}"),
        ("tokens", "tokens", "{:,.0f}"),
        ("cut off", "cut_off", "{:.1%}"),
    ),
    rows=lambda result: result["measurements"]["steering"]["runs"],
    said=premises,
)
TABLES = {
    **dict.fromkeys(
        (
            "decode-cpu",
            "decode-gpu",
            "decode-gpu-steps",
            "decode-gpu-8b",
            "decode-gpu-16k",
            "decode-gpu-rkv",
            "decode-gpu-smollm2",
        ),
        DECODE,
    ),
    "premises-search": PREMISES,
    "margins": Table((), said=near_ties),
    "caches-cpu": Table(
        (
            ("policy", "policy", "`{}`"),
            ("sequences", "batch", "{}"),
            ("one buffer a sequence?", "ms.auto", "{:.2f} ms"),
            ("plain", "ms.plain", "**{:.2f} ms**"),
            ("paged", "ms.paged", "{:.2f} ms"),
            ("paged / plain", lambda m: m["ms"]["paged"] / m["ms"]["plain"], "{:.2f}"),
        )
    ),
    "busy-cpu": Table(
        (
            ("sequences", "batch", "{}"),
            ("cores held", "held", "{}"),
            ("as commands set it", "speeds.commands", "**{:,.0f}**"),
            ("OpenMP's default", "speeds.default", "{:,.0f}"),
            ("`GOMP_SPINCOUNT=1000`?", "speeds.spin 1000", "{:,.0f}"),
            ("`GOMP_SPINCOUNT=100000`?", "speeds.spin 100000", "{:,.0f}"),
            ("`OMP_WAIT_POLICY=PASSIVE`", "speeds.passive", "{:,.0f}"),
            ("one thread", "speeds.one thread", "{:,.0f}"),
        ),
        said=loads,
    ),
}
