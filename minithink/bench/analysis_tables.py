"""The tables of what `python -m minithink.analysis` finds: curves, importance, association."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minithink.bench.markdown import markdown, source
from minithink.policies.thinkv import NAMES
from minithink.tasks import families

Result = dict[str, Any]
TYPES = tuple(reversed(NAMES))  # the most important first


def curve(result: Result) -> list[str]:
    """What policies held at most, how often they evicted, and the types of their segments, one row a policy."""
    rows: list[tuple[str, ...]] = [
        ("policy", "right", "tokens", "held at most", "steps with an eviction", "segments: R / E / T",
         "case 1 / case 2"),
    ]  # fmt: skip
    for m in result["measurements"]:
        types = m.get("thoughts")
        counts = [types.get(name, 0) for name in TYPES] if types else []
        shares = " / ".join(f"{n / max(1, sum(counts)):.0%}" for n in counts)
        rows.append((
            f"`{m['policy']}`", f"{m['right']:.0%}", f"{m['generated']:,.0f}", f"{m['most_held']:,}",
            f"{m['evicting_steps']:.2%}", f"{' / '.join(f'{n:,}' for n in counts)} ({shares})" if types else "–",
            f"{m['case_1']:,} / {m['case_2']:,}" if types else "–",
        ))  # fmt: skip
    settings = result["settings"]
    said = f"{settings['limit']} validation problems, a budget of {settings['budget']:,} tokens a lane."
    return [*markdown(rows), "", said, "", source(result)]


def importance(result: Result) -> list[str]:
    """How much the answer changes without a segment, by type, one row a type, as each source of types has them."""
    rows: list[tuple[str, ...]] = [("types by", "type", "segments", "mean, nats", "median", "quartiles", "largest")]
    for by, groups in result["measurements"]["by_type"]["suppressed"].items():
        for m in groups:
            quartiles = f"{m['lower_quartile']:.3g} to {m['upper_quartile']:.3g}"
            cells = (f"**{m['mean']:.3g}**", f"{m['median']:.3g}", quartiles, f"{m['largest']:.3g}")
            rows.append((by, m["type"], f"{m['segments']:,}", *cells))
    return [*markdown(rows), "", *_texts(result), source(result)]


def association(result: Result) -> list[str]:
    """How much segments of a type change without an earlier one of another, one row a type of the later."""
    rows: list[tuple[str, ...]] = [("types by", "later segment", *(f"without an earlier {name}" for name in TYPES))]
    for by, found in result["measurements"]["types"].items():
        of = {(m["earlier"], m["later"]): f"{m['mean']:.3g}" for m in found}
        rows += [(by, later, *(of.get((earlier, later), "–") for earlier in TYPES)) for later in TYPES]
    since = [
        f"by {by} " + ", ".join(f"{m['mean']:.3g} with {m['transitions']} in between" for m in found[:4])
        for by, found in result["measurements"]["transitions"].items()
    ]
    said = f"Nats, mean over pairs. By the transitions since: {'; '.join(since)}."
    return [*markdown(rows), "", said, "", *_texts(result), source(result)]


def _texts(result: Result) -> list[str]:
    """How many there are, and what is left out."""
    m, tau = result["measurements"], result["settings"]["tau"]
    left = f", {m['unanswered']} more came to no answer" if m.get("unanswered") else ""
    return [f"{len(m['texts'])} validation problems{left}; segments of {tau} tokens.", ""]


TABLES: dict[str, Callable[[Result], list[str]]] = {
    f"{table.__name__}-{family}": table for table in (curve, importance, association) for family in families()
}
