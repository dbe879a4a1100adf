"""Targets of docs/appendix/kernel-times.md and findings of docs/kernels.md say what the results say.

Alone: pytest tests/test_kernel_pages.py
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minithink.results import record

DOCS = Path(__file__).resolve().parents[1] / "docs"
BATCHES = (1, 16, 64, 256)
LENGTHS = (1024, 4096, 16384)
SHAPES = [(batch, length) for batch in BATCHES for length in LENGTHS]
ONE = SHAPES[:3]
SIXTEEN = SHAPES[3:6]
SIXTEEN_OR_MORE = SHAPES[3:]
MANY = SHAPES[6:]  # 64 sequences or more


@cache
def microseconds() -> dict[tuple[int, int, str], float]:
    """The time of attention, by sequences, tokens of each and format."""
    measurements = record.read(record.default_path("attention"))["measurements"]
    return {(m["batch"], m["length"], m["format"]): m["microseconds"] for m in measurements}


def faster(format: str, beside: str, shapes: list[tuple[int, int]]) -> list[float]:
    """How many times as fast attention over a format is as over another one, at each shape."""
    times = microseconds()
    return [times[batch, length, beside] / times[batch, length, format] for batch, length in shapes]


def slower(format: str, beside: str, shapes: list[tuple[int, int]]) -> list[float]:
    """How many times as long attention over a format takes as over another one, at each shape."""
    return faster(beside, format, shapes)


def spread(values: list[float]) -> str:
    """The least and the greatest: `0.87 to 0.97`."""
    return f"{min(values):.2f} to {max(values):.2f}"


def more(ratios: list[float]) -> str:
    """How much more time the least and the greatest ratio are, in percent: `11 to 14 %`."""
    return f"{100 * min(ratios) - 100:.0f} to {100 * max(ratios) - 100:.0f} %"


def less(ratios: list[float]) -> str:
    """How much less time the greatest and the least ratio are, in percent: `3 to 8 %`."""
    return f"{100 - 100 * max(ratios):.0f} to {100 - 100 * min(ratios):.0f} %"


def each(values: list[float]) -> str:
    """One value for each length: `1.86 / 2.05 / 2.30`."""
    return " / ".join(f"{value:.2f}" for value in values)


@cache
def targets() -> dict[str, tuple[str, str]]:
    """What was found, and whether the target is reached, by the target's words."""
    page = (DOCS / "appendix" / "kernel-times.md").read_text("utf-8")
    section = page.partition("\n## Goals\n")[2].partition("\n## ")[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith(("| target", "| ---")):
            target, value, verdict = line.strip("| ").split(" | ")
            found[target] = value, verdict
    return found


def target(words: str) -> tuple[str, str]:
    """The row of the target that has these words."""
    rows = [row for name, row in targets().items() if words in name]
    assert len(rows) == 1, words
    return rows[0]


@pytest.mark.parametrize(
    ("words", "format", "batch", "goals"),
    [
        ("NVFP4, 64 sequences of", "nvfp4", 64, (1.8, 2.0, 2.25)),
        ("ternary, the same", "ternary", 64, (1.8, 2.0, 2.25)),
        ("int4, the same", "int4", 64, (1.8, 2.0, 2.25)),
        ("bfloat16, 64 sequences", "bf16", 64, (0.95, 0.95, 0.95)),
        ("bfloat16, one sequence", "bf16", 1, (1.0, 1.0, 1.0)),
    ],
)
def test_targets_beside_torch_at_three_lengths(words: str, format: str, batch: int, goals: tuple[float, ...]) -> None:
    ratios = faster(format, "sdpa", [(batch, length) for length in LENGTHS])
    reached = all(ratio >= goal for ratio, goal in zip(ratios, goals, strict=True))
    found, verdict = target(words)
    assert found.startswith(f"{each(ratios)} × (")
    assert verdict == ("reached" if reached else "missed")


@pytest.mark.parametrize(
    ("words", "format", "goal"),
    [("FP8, 64 sequences", "fp8", 1.5), ("NVFP4 with keys by token, 64", "nvfp4, keys by token", 1.7)],
)
def test_targets_beside_torch_at_4096_tokens(words: str, format: str, goal: float) -> None:
    (ratio,) = faster(format, "sdpa", [(64, 4096)])
    found, verdict = target(words)
    assert found.startswith(f"{ratio:.2f} × (")
    assert verdict == ("reached" if ratio >= goal else "missed")


def test_targets_of_the_mass_and_of_tq4() -> None:
    found, verdict = target("the mass beside")
    assert found.startswith(more(slower("bf16, mass", "bf16", SIXTEEN_OR_MORE)))
    assert verdict == "missed"
    found, verdict = target("`tq4`: at most 1.1")
    assert f"{spread(slower('tq4', 'nvfp4', SIXTEEN_OR_MORE))} × with 16 sequences or more" in found
    assert f"{spread(slower('tq4', 'nvfp4', ONE))} × with one" in found
    assert verdict == "missed"


@pytest.mark.parametrize(
    ("words", "file", "goals"),
    [
        ("a whole step of the 8B Llama", "decode-gpu-8b", (0.85, 0.87)),
        ("the same, 8 sequences", "decode-gpu-16k", (0.90,)),
        ("R-KV, 64 sequences, buffer 128", "decode-gpu-rkv", (0.80,)),
    ],
)
def test_targets_of_whole_steps(words: str, file: str, goals: tuple[float, ...]) -> None:
    measurements: list[Any] = record.read(record.default_path(file))["measurements"]
    shares = [m["ours"]["share_of_limit"] for m in measurements if m["shape"] == "llama-8b"]
    found, verdict = target(words)
    assert found.startswith(" / ".join(f"{100 * share:.0f}" for share in shares) + " % (")
    assert all(share < goal for share, goal in zip(shares, goals, strict=True))
    assert verdict.startswith("missed")


def test_every_target_names_the_date_of_its_file() -> None:
    for found, _ in targets().values():
        for name in ("attention", "decode-gpu-8b", "decode-gpu-16k", "decode-gpu-rkv", "thought-kernels", "append"):
            if f"({name}.json, " in found or f"[{name}.json](" in found:
                date = record.read(record.default_path(name))["date"][:10]
                assert f", {date})" in found


def test_the_page_counts_the_targets() -> None:
    verdicts = [verdict for name, (_, verdict) in targets().items() if not name.startswith("*earlier:*")]
    reached = [verdict for verdict in verdicts if verdict.startswith("reached")]
    missed = [verdict for verdict in verdicts if verdict.startswith("missed")]
    assert (len(verdicts), len(reached), len(missed)) == (20, 4, 15)
    assert verdicts.count("measured") == 1
    page = " ".join((DOCS / "kernels.md").read_text("utf-8").split())
    assert "Of 20 targets four are reached, and 15 are missed.**" in page


def test_findings_about_attention() -> None:
    page = " ".join((DOCS / "kernels.md").read_text("utf-8").split())
    large = [shape for shape in SHAPES if shape[0] * shape[1] >= 262144]
    small = [shape for shape in SHAPES if shape not in large]
    for words in (
        f"NVFP4 is {spread(faster('nvfp4', 'sdpa', MANY))} × as fast as torch",
        f"{spread(faster('nvfp4', 'bf16', MANY))} × as fast as bfloat16",
        f"it is slower than torch ({spread(faster('nvfp4', 'sdpa', ONE))} ×)",
        f"{spread(faster('ternary', 'sdpa', MANY))} ×, {spread(faster('fp8', 'sdpa', MANY))} × and "
        f"{spread(faster('int4', 'sdpa', MANY))} × as fast as torch",
        f"below torch: {spread(faster('bf16', 'sdpa', MANY))} × with 64 sequences or more, "
        f"{spread(faster('bf16', 'sdpa', SIXTEEN))} × with 16, and {spread(faster('bf16', 'sdpa', ONE))} × with one",
        f"`tq4` takes {spread(slower('tq4', 'nvfp4', SIXTEEN_OR_MORE))} × the time of NVFP4",
        f"takes {less(slower('tq2', 'nvfp4', large))} less time",
        f"takes between {100 - 100 * min(slower('tq2', 'nvfp4', small)):.0f} % less and "
        f"{100 * max(slower('tq2', 'nvfp4', small)) - 100:.0f} % more",
        f"at all shapes: {spread(faster('tq3', 'bf16', MANY))} × with 64 sequences or more, "
        f"{spread(faster('tq3', 'bf16', SIXTEEN))} × with 16, {spread(faster('tq3', 'bf16', ONE))} × with one",
        f"with one sequence** ({spread(faster('int2, keys by token', 'bf16', ONE))} ×)",
        f"it is {spread(faster('int2, keys by token', 'bf16', SIXTEEN_OR_MORE))} × as fast as bfloat16",
        f"{more(slower('bf16, mass', 'bf16', SIXTEEN_OR_MORE))} slower with 16 sequences or more, "
        f"{more(slower('bf16, mass', 'bf16', ONE))} with one",
    ):
        assert words in page
