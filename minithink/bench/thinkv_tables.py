"""The tables of `bench thinkv`'s result: steps, their parts, bytes, requests, throughput."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from minithink.bench.markdown import markdown, short, source
from minithink.bench.steady import BLOCKS, METHODS
from minithink.bench.thinkv import ABOUT, PEER, THINKV, comparisons
from minithink.policies.thinkv import ThinKV

Result = dict[str, Any]
PARTS = ("attention", "refresh", "eviction", "gather", "flush", "rest")
SEQUENCES = (64, 256)  # of the steps whose parts are shown


def steps(result: Result) -> list[str]:
    """A step's time, one row a case."""
    rows: list[tuple[str, ...]] = [
        ("method", "sequences", "a step", "tokens a second", "of the limit", "refresh + eviction", "gather",
         "case 1 / case 2"),
    ]  # fmt: skip
    for m in _of(result, "step"):
        rows.append((
            _name(m), f"{m['batch']:,}", f"**{m['step_milliseconds']:.2f} ms**", f"{m['tokens_per_second']:,.0f}",
            f"{m['share_of_limit']:.0%}", f"{m['overhead']:.1%}", f"{m['parts_shares']['gather']:.1%}", _cases(m),
        ))  # fmt: skip
    counts = [m["settings"]["steps"] for m in _of(result, "step")]
    usual = statistics.mode(counts) if counts else 0
    other = (f"{_name(m)}, {m['batch']}: {n}" for m in _of(result, "step") if (n := m["settings"]["steps"]) != usual)
    said = f"Means of {usual} steps" + "".join(f"; {text}" for text in other) + "."
    return [*markdown(rows), "", said, "", *_compared(result, "step"), _sources(result, "step")]


def parts(result: Result) -> list[str]:
    """What a step of so many SEQUENCES does in a layer, and who is called how often, one row a case (table 5)."""
    calls = ("refresh", "eviction", "flush")
    rows: list[tuple[str, ...]] = [
        ("method", "sequences", *PARTS, *(f"steps with {call}" for call in calls), "case 1 / case 2"),
    ]
    for m in _of(result, "step"):
        if m["batch"] in SEQUENCES:
            shares = (m["rates"].get(call, {}).get("sequence_steps", 0) for call in calls)
            times = (f"{m['layer_microseconds'][part]:,.1f} µs" for part in PARTS)
            called = (f"{share:.2%}" if share else "–" for share in shares)
            rows.append((_name(m), f"{m['batch']}", *times, *called, _cases(m)))
    said = "Times of one layer. Steps are those of one sequence, in which it is called."
    return [*markdown(rows), "", said, "", _sources(result, "step")]


def blocks(result: Result) -> list[str]:
    """ThinKV's step by the slots of a page, one row a size (the paper's figure 10e)."""
    own = [m for m in result["measurements"] if m["kind"] == "step" and m["method"] in BLOCKS]
    batches, shares = {m["batch"] for m in own}, {m["transitions"] for m in own}
    own += [m for m in _of(result, "step") if m["method"] == "thinkv" and m["batch"] in batches]
    rows: list[tuple[str, ...]] = [
        ("slots of a page", "sequences", "a step", "tokens a second", "attention of a layer", "case 1 / case 2"),
    ]
    for m in sorted(own, key=lambda m: BLOCKS.get(m["method"], ThinKV.block)):
        if m["transitions"] in shares:
            rows.append((
                f"{BLOCKS.get(m['method'], ThinKV.block)}", f"{m['batch']:,}", f"**{m['step_milliseconds']:.2f} ms**",
                f"{m['tokens_per_second']:,.0f}", f"{m['layer_microseconds']['attention']:,.1f} µs", _cases(m),
            ))  # fmt: skip
    return [*markdown(rows), "", _sources(result, "step", own)]


def sizes(result: Result) -> list[str]:
    """Bytes of a sequence, one row a case."""
    rows: list[tuple[str, ...]] = [
        ("method", "of the full cache", "a sequence", "codes", "scales", "buffers", "tables and the rest",
         "whole pool", "pages used", "case 1 / case 2"),
    ]  # fmt: skip
    for m in _of(result, "bytes"):
        own = m["kinds"]
        rest = m["bytes"] - sum(own[kind] for kind in ("payload", "scales", "buffers"))
        sizes = (m["bytes"], own["payload"], own["scales"], own["buffers"], rest)
        mib = (f"{size / 2**20:,.1f} MiB" for size in sizes)
        rows.append(
            (_name(m), f"**{m['share']:.2%}**", *mib, f"{m['pool_share']:.2%}", f"{m['pages_share']:.0%}", _cases(m))
        )
    said = [
        f"After {m['length']:,} tokens, of which a lane holds {m['held_tokens']:,}. *Whole pool*: with all that is "
        "reserved, of the full cache. *Pages used*: of those that are "
        "needed if, at worst, all thoughts are of one type, whichever that is."
        for m in _of(result, "bytes")[:1]
    ]
    return [*markdown(rows), "", *said, "", _sources(result, "bytes")]


def throughput(result: Result) -> list[str]:
    """Whole generations at the largest batch, one row a method."""
    rows: list[tuple[str, ...]] = [
        ("method", "sequences", "a step", "tokens a second", "a request", "of the limit", "of the bound",
         "case 1 / case 2"),
    ]  # fmt: skip
    for m in _of(result, "throughput"):
        bound = m.get("bound_milliseconds")
        rows.append((
            _name(m), f"{m['batch']:,}", f"{m['step_milliseconds']:.1f} ms", f"**{m['tokens_per_second']:,.0f}**",
            _request(m), f"{m['share_of_limit']:.0%}", f"{bound / m['step_milliseconds']:.0%}" if bound else "–",
            _cases(m),
        ))  # fmt: skip
    return [*markdown(rows), "", *_compared(result, "throughput"), _sources(result, "throughput")]


def levels(result: Result) -> list[str]:
    """What ThinKV decides while texts grow: 64 sequences, and the largest batch; one row a length."""
    rows: list[tuple[str, ...]] = [
        ("method", "sequences", "tokens", "a step", "attention", "refresh + eviction", "of the step",
         "sequences that decide", "case 1 / case 2"),
    ]  # fmt: skip
    own = [m for m in _of(result, "request") if m["batch"] > 1 and m["method"] in THINKV]
    own += [m for m in _of(result, "throughput") if m["method"] in THINKV]
    own = [m for m in own if all("overhead" in x for x in m["levels"])]
    for m in own:
        for x in m["levels"]:
            took = x["parts_milliseconds"]
            rows.append((
                _name(m), f"{m['batch']:,}", f"{x['level']:,}", f"{x['step_milliseconds']:.2f} ms",
                f"{took['attention']:.2f} ms", f"{took['refresh'] + took['eviction']:.2f} ms",
                f"**{x['overhead']:.1%}**", f"{x['rates']['decision']['sequence_steps']:.1%}", _cases(m | x),
            ))  # fmt: skip
    parts = len(own[0]["levels"]) if own else 0
    said = (
        f"Lengths are the middles of {parts} equal parts of a generation. Both cases: of all sequences, in the steps "
    )
    return [*markdown(rows), "", said + "that were measured.", "", _sources(result, "request", own)]


def requests(result: Result) -> list[str]:
    """Whole generations of one sequence, one row a method (the paper's table 14)."""
    rows: list[tuple[str, ...]] = [("method", "a request", "a step", "of the limit", "case 1 / case 2")]
    own = [m for m in _of(result, "request") if m["batch"] == 1]
    for m in own:
        step = f"{m['step_milliseconds']:.2f} ms"
        rows.append((_name(m), f"**{_request(m)}**", step, f"{m['share_of_limit']:.0%}", _cases(m)))
    return [*markdown(rows), "", _sources(result, "request", own)]


def _request(m: dict[str, Any]) -> str:
    """How long a sequence waits for all its tokens."""
    return f"{m['step_milliseconds'] / 1e3 * m['settings']['tokens']:,.0f} s"


def _of(result: Result, kind: str) -> list[dict[str, Any]]:
    """By batch, then by method, in whatever order they were measured."""
    order = [*METHODS, PEER]
    found = [m for m in result["measurements"] if m["kind"] == kind and m["method"] not in BLOCKS]
    return sorted(found, key=lambda m: (m["batch"] if kind == "step" else 0, order.index(m["method"])))


def _name(m: dict[str, Any]) -> str:
    types = f", T {m['transitions']:.0%}" if m["method"] in THINKV else ""
    pool = m["settings"]["pool"]
    return f"{m['method']}{types}" + (f", pool of {pool:.0%}" if pool != 1 and m["method"] in THINKV else "")


def _cases(m: dict[str, Any]) -> str:
    return "{:,} / {:,}".format(*m["cases"]) if m["method"] in THINKV else "–"


def _compared(result: Result, kind: str) -> list[str]:
    """How fast methods are beside each other, and what was aimed at; one row a comparison."""
    of = {m["case"]: m for m in result["measurements"]}
    rows: list[tuple[str, ...]] = [
        ("sequences", "method", "beside", "as fast", "by their bounds", "aimed at", "measured in"),
    ]
    for x in comparisons(result["measurements"]):
        if (ours := of[x.ours])["kind"] == kind:
            batch = f"{ours['batch']:,} / {of[x.theirs]['batch']:,}"
            bound = f"{x.bound:.2f} ×, reached {x.ratio / x.bound:.0%}" if x.bound else "–"
            goal = f"{x.goal:.0%} of that" if x.bound else f"{x.goal:g} ×"
            runs = "one run" if ours["date"] == of[x.theirs]["date"] else "two runs"
            rows.append((batch, _name(ours), _name(of[x.theirs]), f"**{x.ratio:.2f} ×**", bound, goal, runs))
    return [*markdown(rows), ""] if rows[1:] else []


def _sources(result: Result, kind: str, cases: Iterable[dict[str, Any]] | None = None) -> str:
    """The run of these cases, by default of all of a kind, or that there are several; and what was not measured."""
    own = sorted(_of(result, kind) if cases is None else cases, key=lambda m: m["date"])
    about = {name: own[-1][name] for name in ABOUT} if own else {}
    if len({m["command"] for m in own}) > 1:
        kinds = " ".join(f"'{name}/*'" for name in sorted({m["kind"] for m in own}))
        about["command"] = (
            f"python -m minithink.bench thinkv --device {own[-1]['settings']['device']} --cases {kinds}"
        )
    line = source(result | about | {"complete": True})
    commits = sorted({short(m["commit"]) for m in own} - {short(own[-1]["commit"])}) if own else []
    several = ""
    if commits or len({m["command"] for m in own}) > 1:
        others = f"; commits: {', '.join(commits)}, too" if commits else ""
        several = f" In several runs, the command of each beside its cases{others}."
    left = sum(name.startswith(f"{kind}/") for name in result["missing"]) if cases is None else 0
    return line + several + (f" Of such cases {left} were not measured (`missing`)." if left else "")


TABLES: dict[str, Callable[[Result], list[str]]] = {
    "thinkv-steps": steps,
    "thinkv-parts": parts,
    "thinkv-blocks": blocks,
    "thinkv-bytes": sizes,
    "thinkv-requests": requests,
    "thinkv-levels": levels,
    "thinkv-throughput": throughput,
}
