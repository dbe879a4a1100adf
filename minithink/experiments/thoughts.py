"""Types of thoughts: tables of calibrations, and of what analyses find out about segments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from minithink import counts
from minithink.engine import TINY
from minithink.experiments import Result, Row, Table
from minithink.policies.thinkv import NAMES
from minithink.tasks import families

TYPES = tuple(reversed(NAMES))  # the most important first
FILES = {"thoughts": "thoughts.json", "thresholds": "thoughts.json", "thresholds-2": "thoughts-2.json"}


def layers(result: Result) -> Iterable[Row]:
    """What calibration found, one row a layer; those of L* are bold."""
    m, types = result["measurements"], len(result["thresholds"]) + 1
    found = {f"{types} modes, {n} row{'s' if n != '1' else ''}": of for n, of in m["share_by_rows"].items()}
    noise = [*m.get("share_of_noise", {}).items()][-2:]  # of the widest averages
    found |= {f"by chance, {n} rows": of for n, of in noise}
    for look in m["layers"]:
        i, words = look["layer"], look["keywords"]
        about = {"layer": f"**{i}**" if i in result["layers"] else f"{i}", **{n: look[n] for n in ("mean", "sd")}}
        about |= {"agree": words["agree"], "kappa": words["kappa"]}
        yield from (about | {"what": what, "of_prompts": of[i]} for what, of in found.items())


def thresholds(result: Result) -> Iterable[Row]:
    """The thresholds of a calibration and what else was tried, beside keywords and under eviction."""
    m, settings = result["measurements"], result["settings"]
    own = {"thresholds": result["thresholds"], "shares": m["shares_of_types"], "other": "keywords"}
    yield {"name": f"**the file ({result['chosen']})**", **own, **m["keywords"]}
    for one in m["by_count"]:
        if one["layers"] != result["layers"]:
            name = f"layers {', '.join(map(str, one['layers']))} ({one['chosen']})"
            yield {"name": name, "other": "keywords", **one}
    for way in m["candidates"]:
        yield {"name": f"{way['way']}, set on one half", "other": "keywords, other half", **way}
    if under := m["eviction"]:
        name = f"the full cache, {under['prompts']} texts"
        other = f"`{settings['policy']}` at {settings['budget']:,}"
        yield {"name": name, **own, "shares": under["shares_of_types"], "other": other, **under}


def thresholds_said(result: Result) -> Iterable[str]:
    """What the calibration read."""
    m = result["measurements"]
    words = " / ".join(f"{share:.0%}" for share in by_type({"shares": m["shares_of_keywords"]}))
    yield (
        f"{m['prompts']} problems, {m['right']:.0%} right, {m['tokens']:,} tokens. By keywords, segments are "
        f"{words} (E / R / T). A segment's sparsity and its number correlate: {m['correlation_with_position']:.2f}."
    )
    yield ""


def by_type(m: Row) -> tuple[float, ...]:
    """Shares of execution, reasoning and transition."""
    return tuple(m["shares"][kind] for kind in ("execution", "reasoning", "transition"))


def typed(m: Row) -> tuple[Any, ...]:
    """Segments by type, and their shares; None: the policy knows no types."""
    segments = [m["thoughts"].get(name, 0) for name in TYPES] if m.get("thoughts") else [None] * 3
    total = max(1, sum(n or 0 for n in segments))
    return *segments, *((n or 0) / total for n in segments)


def by_source(result: Result) -> Iterable[Row]:
    """Importance of segments, by what types come from."""
    for by, groups in result["measurements"]["by_type"]["suppressed"].items():
        yield from ({"by": by, **m} for m in groups)


def pairs(result: Result) -> Iterable[Row]:
    """Association of segments, by types; pairs that do not occur have no value."""
    for by, found in result["measurements"]["types"].items():
        of = {(m["earlier"], m["later"]): m["mean"] for m in found}
        yield from ({"by": by, "later": later, **{e: of.get((e, later)) for e in TYPES}} for later in TYPES)


def since(result: Result) -> Iterable[str]:
    """Association by the number of transitions since."""
    found = [
        f"by {by} " + ", ".join(f"{m['mean']:.3g} with {m['transitions']} in between" for m in found[:4])
        for by, found in result["measurements"]["transitions"].items()
    ]
    return [f"Nats, mean over pairs. By the transitions since: {'; '.join(found)}.", "", *texts(result)]


def texts(result: Result) -> list[str]:
    """How many texts there are, and what is left out."""
    m, tau = result["measurements"], result["settings"]["tau"]
    left = f", {m['unanswered']} more came to no answer" if m.get("unanswered") else ""
    return [f"{len(m['texts'])} validation problems{left}; segments of {tau} tokens.", ""]


def curve_said(result: Result) -> list[str]:
    """Which problems, at which budget."""
    settings = result["settings"]
    return [f"{settings['limit']} validation problems, a budget of {settings['budget']:,} tokens a lane.", ""]


THRESHOLDS = Table(
    (("types by", "name", "{}"), ("compared with", "other", "{}"),
     ("thresholds", lambda m: ", ".join(f"{x:.3f}" for x in m["thresholds"]), "{}"),
     ("E / R / T", by_type, "{:.0%} / {:.0%} / {:.0%}"), ("segments", "segments", "{:,}"),
     ("agree", "agree", "{:.0%}"),
     ("κ", "kappa", "{:.2f}"), ("one type for all", "majority", "{:.0%}")),
    rows=thresholds, said=thresholds_said,
)  # fmt: skip
FOUND = {
    "curve": Table(
        (("policy", "policy", "`{}`"), ("right", "right", "{:.0%}"), ("tokens", "generated", "{:,.0f}"),
         ("held at most", "most_held", "{:,}"), ("steps with an eviction", "evicting_steps", "{:.2%}"),
         ("segments: R / E / T", typed, "{:,} / {:,} / {:,} ({:.0%} / {:.0%} / {:.0%})"),
         ("counted?", lambda m: counts.said(m["counts"]) if m.get("counts") else None, "{}")),
        said=curve_said,
    ),
    "importance": Table(
        (("types by", "by", "{}"), ("type", "type", "{}"), ("segments", "segments", "{:,}"),
         ("mean, nats", "mean", "**{:.3g}**"), ("median", "median", "{:.3g}"),
         ("quartiles", ("lower_quartile", "upper_quartile"), "{:.3g} to {:.3g}"), ("largest", "largest", "{:.3g}")),
        rows=by_source, said=texts,
    ),
    "association": Table(
        (("types by", "by", "{}"), ("later segment", "later", "{}"),
         *((f"without an earlier {name}", name, "{:.3g}") for name in TYPES)),
        rows=pairs, said=since,
    ),
}  # fmt: skip
TABLES = {
    "thoughts": Table(
        (("layer", "layer", "{}"), ("sparsity", ("mean", "sd"), "{:.2f} ± {:.2f}")), rows=layers, across="what",
        cells=(("{}", "of_prompts", "{:.0%}"),),
        last=(("agrees with keywords", "agree", "{:.0%}"), ("κ", "kappa", "{:.2f}")),
    ),
    **dict.fromkeys(("thresholds", "thresholds-2"), THRESHOLDS),
    **{f"{name}-{family}": table for name, table in FOUND.items() for family in families()},
}  # fmt: skip
TABLES |= {name: replace(TABLES[name], shipped=TINY / file) for name, file in FILES.items()}
