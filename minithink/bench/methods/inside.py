"""The table of `bench hf`: decoding inside transformers' `generate`, by minithink and by kvpress."""

from __future__ import annotations

from collections.abc import Iterable

from minithink.bench.methods import Column, Result, Row, Table

PLAIN = "plain"  # the name of the side that the others are compared with


def sides(result: Result) -> Iterable[Row]:
    """A row for every side and number of sequences, each beside the plain cache of its own environment."""
    for one in result["each"]:
        for m in one["measurements"]:
            if m["side"] == PLAIN:
                continue
            peak = m.get("peak_bytes")  # only on a GPU
            mib = {} if peak is None else {"mib": peak / 2**20}
            yield {**m, **mib, "by": one["settings"]["by"], "least": min(m["ratios"]), "most": max(m["ratios"])}


def sides_said(result: Result) -> Iterable[str]:
    """What was generated, and with which libraries."""
    settings = result["each"][0]["settings"]
    libraries = {
        f"transformers {one['versions']['transformers']} ({one['settings']['by']})": 1 for one in result["each"]
    }
    versions = " and ".join(libraries)
    yield (
        f"{settings['model']} in {settings['dtype']}, random prompts of {settings['prompt']:,} tokens and "
        f"{settings['tokens']:,} new ones, {settings['turns']} turns of each side; {settings['budget']:,} tokens are "
        f"kept, and every {settings['interval']} are gathered before an eviction. Ratios to the plain cache: the "
        f"median, and the least and the most of all turns. {versions}."
    )
    yield ""


COLUMNS: tuple[Column, ...] = (
    ("by", "by", "{}"),
    ("cache", "side", "`{}`"),
    ("sequences", "batch", "{}"),
    ("of the plain cache's speed", ("ratio", "least", "most"), "**{:.2f} ×** ({:.2f} to {:.2f})"),
)
TABLES = {
    "hf-cuda": Table(
        (*COLUMNS, ("memory at most, MiB", "mib", "{:,.0f}")),
        files=("hf-cuda-tensors", "hf-cuda", "hf-kvpress-cuda"),
        rows=sides,
        said=sides_said,
    ),
    "hf-cpu": Table(
        COLUMNS,
        files=("hf-cpu", "hf-kvpress-cpu"),
        rows=sides,
        said=sides_said,
    ),
}
