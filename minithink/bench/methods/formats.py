"""Number formats on models' own keys and values, and the bits of a number under ThinKV.

They are tables of docs/appendix/thinkv.md:

python -m minithink.analysis formats        errors of every format, with two rules for a group's scale
python -m minithink.analysis bits           bits of a number when a text ends
python -m minithink.calibrate thoughts      shares of types, from which the bits of a number as written follow
"""

from __future__ import annotations

from collections.abc import Iterable

from minithink.bench.methods import Column, Result, Row, Table
from minithink.engine import TINY
from minithink.kv.sizes import mean_bits
from minithink.policies import parse

MODELS = ("tiny", "smollm2-think")  # whose calibrations ship beside them
BY_SPARSITY = ("execution", "reasoning", "transition")  # as the paper has them, the densest first
PAPER = (  # where, and the average precision there, in bits
    ("§6.2, figure 8: all models, k from 64 to 4,096", "3.4"),
    ("table 1: R1-Qwen-14B and QwQ-32B, k = 1,024", "3.5 and 3.4"),
    ("table 4: TBQ, GPT-OSS-20B", "3.5"),
    ("table 4: ThinKV, GPT-OSS-20B, k = 1,024", "3.8"),
    ("table 13: Qwen3-8B, k = 1,024 and 2,048", "3.6 and 3.7"),
    ("§E.6: MobileLLM-R1 950M, k = 256", "3.9"),
    ("§E.7: GPT-OSS-120B, k = 1,024", "3.6"),
)


# -- errors of formats


def errors(result: Result) -> Iterable[Row]:
    """A row for each format and rule; the less error in what attention gives, the earlier."""
    rows = result["measurements"]["formats"]
    return sorted(rows, key=lambda row: row["both"]["output"])


def errors_said(result: Result) -> Iterable[str]:
    """What was read, and what the columns mean."""
    m = result["measurements"]
    settings = result["settings"]
    layers = len(m["formats"][0]["values"]["layers"]["error"])
    tokens = sum(text["tokens"] for text in m["texts"])
    yield (
        f"{settings['model']} `{result['checkpoint']}`: {len(m['texts'])} reference traces of {tokens:,} tokens "
        f"together, mean over {layers} layers. Squared error, of the squared numbers themselves; output: of what "
        f"attention gives {settings['queries']} queries of a trace. By token: a scale for a channel of 16 keys, "
        "else for 16 channels of one. Bits: with the share of the scales. All tokens have the format."
    )
    yield ""


def error_column(part: str, kind: str) -> Column:
    """A column of errors. part: of the cache, as keys or values; kind: error or output (`analysis/formats.py`)."""
    heading = part if kind == "error" else f"output: {part}"
    return (heading, lambda row: row.get(part, {}).get(kind), "{:.2%}")


ERRORS = Table(
    (
        ("format", lambda row: row["format"].removesuffix(":group=16"), "`{}`"),
        ("scale of a group", "scale", "{}"),
        ("bits", "bits", "{:g}"),
        error_column("keys", "error"),
        error_column("keys by token", "error"),
        error_column("values", "error"),
        error_column("keys", "output"),
        error_column("keys by token", "output"),
        error_column("values", "output"),
        error_column("both", "output"),
        error_column("both, keys by token", "output"),
    ),
    rows=errors,
    said=errors_said,
)


# -- bits of a number


def bits(result: Result) -> Iterable[Row]:
    """A row for each policy, then one for each figure of the paper."""
    for row in result["measurements"]:
        counts = row["segments"]
        total = sum(counts.values())
        of_types = {kind: counts.get(kind, 0) / total for kind in BY_SPARSITY if total}
        of_texts = [text["codes"] for text in row["texts"] if text["codes"] is not None]
        with_scales = None if row["codes"] is None else row["codes"] + row["scales"]
        about = {"name": f"`{row['policy']}`", "shares": of_types, "with_scales": with_scales}
        yield {**row, **about, "least": min(of_texts, default=None), "most": max(of_texts, default=None)}
    for where, said in PAPER:
        yield {"name": f"the paper, {where}", "paper": said}


def bits_said(result: Result) -> Iterable[str]:
    """What the columns mean."""
    texts = len(result["measurements"][0]["texts"])
    yield (
        f"{result['settings']['model']} `{result['checkpoint']}`, {texts} validation problems, one text of each; "
        "means over texts. As written: by the types of all segments. Held: of the numbers in the pages when the text "
        "ends, the prompt's too, without and with the share of the scales."
    )
    yield ""


def shares(row: Row) -> tuple[float | None, ...]:
    """Of execution, reasoning and transition; None: the row has none."""
    found = row.get("shares", {})
    return tuple(found.get(kind) for kind in BY_SPARSITY)


def calibrated(result: Result) -> Iterable[Row]:
    """The bits as written that follow from the shares of types in each model's calibration."""
    storage = parse("tbq").storage
    for model, one in zip(MODELS, result["each"], strict=True):
        m = one["measurements"]
        under = m["eviction"]
        yield {
            "model": f"{model} `{one['settings']['checkpoint']}`",
            "cache": f"full, {m['prompts']} texts",
            "shares": m["shares_of_types"],
            "bits": mean_bits(storage, m["shares_of_types"]),
        }
        yield {
            "model": "",
            "cache": f"`{one['settings']['policy']}` at {one['settings']['budget']:,}, {under['prompts']} texts",
            "shares": under["shares_of_types"],
            "bits": mean_bits(storage, under["shares_of_types"]),
        }


def calibrated_said(result: Result) -> Iterable[str]:
    """What the columns mean."""
    yield (
        "Types of segments in the models' calibrations, and the bits that follow from them with R4E4T2. Where "
        "the calibration is the fallback, the thresholds were chosen for the shares of the full cache."
    )
    yield ""


E_R_T: Column = ("E / R / T", shares, "{:.0%} / {:.0%} / {:.0%}")
TABLES = {
    "embedded-formats": ERRORS,
    "backbone-formats": ERRORS,
    "embedded-bits": Table(
        (
            ("policy", "name", "{}"),
            ("the paper", "paper", "**{}**"),
            ("right", "right", "{}"),
            ("tokens", "tokens", "{:,.0f}"),
            ("held", "held", "{:,.0f}"),
            E_R_T,
            ("bits as written", "written", "**{:.2f}**"),
            ("bits held", "codes", "**{:.2f}**"),
            ("of a text", ("least", "most"), "{:.2f} to {:.2f}"),
            ("with scales", "with_scales", "{:.2f}"),
        ),
        rows=bits,
        said=bits_said,
    ),
    "thinkv-types-bits": Table(
        (("model", "model", "{}"), ("cache", "cache", "{}"), E_R_T, ("bits as written", "bits", "**{:.2f}**")),
        rows=calibrated,
        said=calibrated_said,
        shipped=tuple(TINY.parent / name / "thoughts.json" for name in MODELS),
    ),
}
