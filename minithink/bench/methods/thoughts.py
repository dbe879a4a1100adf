"""Types of thoughts: the tables of calibration.md and thinkv-sparsity.md in docs/appendix. Their files come from
`minithink.calibrate`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from minithink.bench.methods import Result, Row, Table
from minithink.engine import TINY
from minithink.text.thoughts import NAMES

FILES = {
    "thoughts": "thoughts.json",
    "thresholds": "thoughts.json",
    "thresholds-2": "thoughts-2.json",
    "thoughts-words": "thoughts.json",
}
BY_SPARSITY = ("execution", "reasoning", "transition")  # as the paper has them, the densest first


def layers(result: Result) -> Iterable[Row]:
    """The layers of a calibration, one row a layer; the layers of L* are bold."""
    m = result["measurements"]
    types = len(result["thresholds"]) + 1
    found = {f"{types} modes, {n} row{'s' if n != '1' else ''}": of for n, of in m["share_by_rows"].items()}
    noise = [*m.get("share_of_noise", {}).items()][-2:]  # of the widest averages
    found |= {f"by chance, {n} rows": of for n, of in noise}
    for look in m["layers"]:
        i = look["layer"]
        words = look["keywords"]
        about = {"layer": f"**{i}**" if i in result["layers"] else f"{i}", **{n: look[n] for n in ("mean", "sd")}}
        about |= {"agree": words["agree"], "kappa": words["kappa"]}
        yield from (about | {"what": what, "of_prompts": of[i]} for what, of in found.items())


def thresholds(result: Result) -> Iterable[Row]:
    """The thresholds of a calibration, compared with keywords and under eviction."""
    m = result["measurements"]
    settings = result["settings"]
    own = {"thresholds": result["thresholds"], "shares": m["shares_of_types"], "other": "keywords"}
    yield {"name": f"**the file ({result['chosen']})**", **own, **m["keywords"]}
    under = m["eviction"]
    if under:
        name = f"the full cache, {under['prompts']} texts"
        other = f"`{settings['policy']}` at {settings['budget']:,}"
        yield {"name": name, **own, "shares": under["shares_of_types"], "other": other, **under}


def thresholds_said(result: Result) -> Iterable[str]:
    """The texts that the calibration read, in numbers."""
    m = result["measurements"]
    words = " / ".join(f"{share:.0%}" for share in by_type({"shares": m["shares_of_keywords"]}))
    yield (
        f"{m['prompts']} problems, {m['right']:.0%} right, {m['tokens']:,} tokens. By keywords, segments are "
        f"{words} (E / R / T). A segment's sparsity and its number correlate: {m['correlation_with_position']:.2f}."
    )
    yield ""


def words(result: Result) -> Iterable[Row]:
    """Segments by their types in two ways, a row for each type by sparsity, the densest first."""
    table = result["measurements"]["keywords"]["confusion"]
    for kind in BY_SPARSITY:
        counts = dict(zip(NAMES, table[NAMES.index(kind)], strict=True))
        yield {"name": kind, "counts": tuple(counts[word] for word in BY_SPARSITY)}


def by_type(m: Row) -> tuple[float, ...]:
    """Shares of execution, reasoning and transition."""
    return tuple(m["shares"][kind] for kind in ("execution", "reasoning", "transition"))


AVERAGED = {  # rules of `calibrate/averaging.py`, in words
    "shares": "shares of tokens, behind the rule",
    "weights": "attention weights, before it: §C.2",
    "scores": "logits, before it: §C.2 in another reading",
}
BESIDE = "types_beside_"  # and the rule with which a result compares the others


def averaging(result: Result) -> Iterable[Row]:
    """The rules by which heads are averaged, one row a rule; the first is the one that the others are compared with.

    That is `weights`; in results of earlier versions it is `shares`, which ThinKV went by then.
    """
    m = result["measurements"]
    [beside] = [of for name, of in m.items() if name.startswith(BESIDE)]
    for name, calibration in m["rules"].items():
        found = calibration["measurements"]
        looks = found["layers"]
        means = [look["mean"] for look in looks]
        yield {
            "averaged": AVERAGED[name],
            "least": min(means),
            "most": max(means),
            "modes": max(look["share"] for look in looks),
            "layers": calibration["layers"],
            "thresholds": calibration["thresholds"],
            "kappa": found["keywords"]["kappa"],
            **{f"{how}_types": of for how, of in beside.get(name, {}).items()},
        }


def averaging_said(result: Result) -> Iterable[str]:
    """The texts that were read and the meaning of the columns, as sentences."""
    found = result["measurements"]["rules"]["weights"]["measurements"]
    yield (
        f"{found['prompts']} problems, {found['tokens']:,} tokens, {found['keywords']['segments']} segments. Three "
        "modes: the share of texts in which the best layer has them. κ: of types and keywords, beyond chance. The "
        "last three columns: how many segments have the type that they have by the first row, and κ. Calibrated "
        "anew: with the rule's own L\\* and thresholds. The same layers: with the L\\* of the first row and new "
        "quantiles. The same file: with the calibration of the first row."
    )
    yield ""


THRESHOLDS = Table(
    (
        ("types by", "name", "{}"),
        ("compared with", "other", "{}"),
        ("thresholds", lambda m: ", ".join(f"{x:.3f}" for x in m["thresholds"]), "{}"),
        ("E / R / T", by_type, "{:.0%} / {:.0%} / {:.0%}"),
        ("segments", "segments", "{:,}"),
        ("agree", "agree", "{:.0%}"),
        ("κ", "kappa", "{:.2f}"),
        ("one type for all", "majority", "{:.0%}"),
    ),
    rows=thresholds,
    said=thresholds_said,
)
TABLES = {
    "thoughts": Table(
        (("layer", "layer", "{}"), ("sparsity", ("mean", "sd"), "{:.2f} ± {:.2f}")),
        rows=layers,
        across="what",
        cells=(("{}", "of_prompts", "{:.0%}"),),
        last=(("agrees with keywords", "agree", "{:.0%}"), ("κ", "kappa", "{:.2f}")),
    ),
    **dict.fromkeys(("thresholds", "thresholds-2"), THRESHOLDS),
    "thinkv-averaging": Table(
        (
            ("what is averaged", "averaged", "{}"),
            ("sparsity of a layer", ("least", "most"), "{:.2f} to {:.2f}"),
            ("three modes", "modes", "{:.0%}"),
            ("L\\*", lambda m: ", ".join(map(str, m["layers"])), "{}"),
            ("thresholds", lambda m: ", ".join(f"{x:.3f}" for x in m["thresholds"]), "{}"),
            ("κ", "kappa", "{:.2f}"),
            ("calibrated anew", ("own_types.agree", "own_types.kappa"), "{:.0%} ({:.2f})"),
            ("the same layers", ("layers_types.agree", "layers_types.kappa"), "{:.0%} ({:.2f})"),
            ("the same file", ("same_types.agree", "same_types.kappa"), "**{:.0%}** ({:.2f})"),
        ),
        rows=averaging,
        said=averaging_said,
    ),
    "thoughts-words": Table(
        (
            ("by sparsity", "name", "{}"),
            ("execution by words", lambda m: m["counts"][0], "{}"),
            ("reasoning", lambda m: m["counts"][1], "{}"),
            ("transition", lambda m: m["counts"][2], "{}"),
        ),
        rows=words,
    ),
}
TABLES |= {name: replace(TABLES[name], shipped=(TINY / file,)) for name, file in FILES.items()}
