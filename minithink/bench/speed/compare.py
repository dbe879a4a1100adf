"""How fast cases are beside each other, and what was aimed at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from minithink.bench.methods import Goal, Row
from minithink.bench.tables.markdown import markdown


@dataclass(frozen=True)
class Comparison:
    """How fast a case is beside another, and what was aimed at."""

    ours: str
    theirs: str
    ratio: float  # of their tokens per second
    goal: float  # of the ratio; if there is a bound, of its share
    bound: float | None = None  # the ratio that their bounds have

    def __str__(self) -> str:
        if self.bound is None:
            return f"{self.ours} / {self.theirs}: {self.ratio:.2f} (target {self.goal:g})"
        share = f"by their bounds {self.bound:.2f}, {self.ratio / self.bound:.0%} (target {self.goal:.0%})"
        return f"{self.ours} / {self.theirs}: {self.ratio:.2f}; {share}"


def comparisons(goals: Sequence[Goal], measurements: Iterable[Row]) -> list[Comparison]:
    """Cases beside others, where both were measured alike; with each pool."""
    of = {m["case"]: m for m in measurements}
    out = []
    for goal in goals:
        for ours in of:
            if f"{ours}/".startswith(f"{goal.ours}/") and _alike(of, ours, goal.theirs):
                a = of[ours]
                b = of[goal.theirs]
                bound = a["bound_tokens_per_second"] / b["bound_tokens_per_second"] if goal.of_bound else None
                ratio = a["tokens_per_second"] / b["tokens_per_second"]
                out.append(Comparison(ours, goal.theirs, ratio, goal.ratio, bound))
    return out


def lines(goals: Sequence[Goal], measurements: Sequence[Row], kind: str, title: Callable[[Row], str]) -> list[str]:
    """A table of the comparisons of one kind of cases; nothing where there are none. title: of a case."""
    of = {m["case"]: m for m in measurements}
    rows: list[tuple[str, ...]] = [
        ("sequences", "method", "beside", "as fast", "by their bounds", "aimed at", "measured in"),
    ]
    for x in comparisons(goals, measurements):
        ours = of[x.ours]
        if ours["kind"] == kind:
            batch = f"{ours['batch']:,} / {of[x.theirs]['batch']:,}"
            bound = f"{x.bound:.2f} ×; measured: {x.ratio / x.bound:.0%} of it" if x.bound else "–"
            goal = f"{x.goal:.0%} of that" if x.bound else f"{x.goal:g} ×"
            runs = "one run" if ours["date"] == of[x.theirs]["date"] else "two runs"
            rows.append((batch, title(ours), title(of[x.theirs]), f"**{x.ratio:.2f} ×**", bound, goal, runs))
    return [*markdown(rows), ""] if rows[1:] else []


def _alike(of: Mapping[str, Row], *names: str) -> bool:
    """Whether all these cases were measured, with the same settings, as far as they have them in common; how many
    steps are averaged, how large ThinKV's pool is, and what its steps need beside the cache, may differ."""
    if not all(name in of for name in names):
        return False
    first, second = (of[name]["settings"] for name in names)
    return all(first[x] == second[x] for x in first.keys() & second.keys() - {"steps", "pool", "headroom"})
