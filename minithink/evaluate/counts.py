"""What policies count while they run: one dictionary by name, whatever the policy counts (`Policy.counts`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Counts = dict[str, int]


def total(counts: Iterable[Mapping[str, int] | None]) -> Counts | None:
    """The sum by name, zeros included; None: no sequence has counts."""
    out = Counts()
    for one in counts:
        for name, n in (one or {}).items():
            out[name] = out.get(name, 0) + n
    return out or None


def said(counts: Mapping[str, int] | None) -> str:
    """In words, as "case 1: 7, case 2: 1,200"; –: nothing was counted."""
    return ", ".join(f"{name.replace('_', ' ')}: {n:,}" for name, n in (counts or {}).items()) or "–"
