"""Tables of kernels on a GPU: attention, appending, the steps of tutorial 05, counters, compute-sanitizer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from minithink.bench.methods import Result, Row, Table


def bandwidths(result: Result) -> Iterable[str]:
    """The bandwidths that were measured in the same run, as a paragraph; nothing if there are none."""
    kinds = {"read_bytes_per_second": "reading alone", "copy_bytes_per_second": "a copy"}
    speeds = [f"{what} {result[key] / 1e12:.2f} TB/s" for key, what in kinds.items() if key in result]
    return [f"Bandwidth in the same run: {', '.join(speeds)}.", ""] if speeds else []


def tools(result: Result) -> Iterable[Row]:
    """The processes of compute-sanitizer added up, one row a tool."""
    for tool in dict.fromkeys(m["tool"] for m in result["measurements"]):
        own = [m for m in result["measurements"] if m["tool"] == tool]
        outcomes = Counter[str]()
        for number, what in re.findall(r"(\d+) (\w+)", " ".join(m["outcome"] for m in own)):
            outcomes[what] += int(number)
        tests = ", ".join(f"{number} {what}" for what, number in outcomes.items())
        yield {"tool": tool, "tests": tests} | {name: sum(m[name] for m in own) for name in ("errors", "processes")}


def main_figures(result: Result) -> Iterable[Row]:
    """Attention of one sequence and of 64, in the formats that most want to compare."""
    for m in result["measurements"]:
        if m["batch"] in (1, 64) and m["format"] in ("sdpa", "bf16", "fp8", "nvfp4", "int4"):
            yield m


TIME = "{:us}[, **{:.2f} ×**]"
TABLES = {
    "attention": Table(
        (("sequences", "batch", "{}"), ("tokens of each", "length", "{:,}")),
        across="format",
        cells=(("{}", ("microseconds", "ratio"), TIME),),
        titles={"sdpa": "torch, contiguous"},
        said=bandwidths,
    ),
    "attention-main": Table(
        (("sequences", "batch", "{}"), ("tokens of each", "length", "{:,}")),
        rows=main_figures,
        across="format",
        cells=(("{}", ("microseconds", "ratio"), TIME),),
        titles={"sdpa": "torch, contiguous"},
        file="attention",
    ),
    "append": Table(
        (
            ("sequences", "batch", "{}"),
            ("tokens of each", "length", "{:,}"),
            ("format", "format", "{}"),
            ("append", "append_microseconds", "{:,.1f} µs"),
            ("buffer's share", "buffer_microseconds", "{:,.1f} µs"),
            ("attention", "attention_microseconds", "{:,.1f} µs"),
            ("of attention's time", "share", "**{:.1%}**"),
        )
    ),
    "steps": Table(
        (("", "what", "{}"),),
        across=("batch", "length"),
        cells=(("{} × {:,} tokens", ("microseconds", "ratio"), TIME), ("of bandwidth", "share", "**{:pct}**")),
        said=bandwidths,
    ),
    "thought-kernels": Table(
        (
            ("kernel", "kernel", "`{}`"),
            ("case", "case", "{}"),
            ("time", "microseconds", "{:us}"),
            ("of bandwidth", "share", "**{:pct}**"),
            ("twin", "twin_microseconds", "{:us}"),
            ("twin, captured?", "twin_recorded_microseconds", "{:us}"),
        )
    ),
    "counters": Table(
        (
            ("case", ("case", "batch", "length"), "{}: {} × {:,}"),
            ("kernel", "kernel", "`{}`"),
            ("bandwidth of memory", "dram", "{:.0f}%"),
            ("issue slots", "issue", "{:.0f}%"),
            ("warps", "warps", "{:.0f}%"),
            ("cycles that a warp waits for memory", "waiting_for_memory", "{:.1f}"),
        )
    ),
    "sanitize": Table(
        (
            ("tool", "tool", "{}"),
            ("errors", "errors", "**{}**"),
            ("processes", "processes", "{}"),
            ("tests", "tests", "{}"),
        ),
        rows=tools,
    ),
}
