"""Numbers in ThinKV's rows of docs/fidelity.md are those of the results that are committed.

Bytes, times, bits and errors are computed from the result files. Right answers come from tables in
docs/appendix/thinkv.md, which `python -m minithink.bench tables --check` compares with the pool of runs.

Alone: pytest tests/bench/tables/test_fidelity_thinkv.py
"""

from __future__ import annotations

import json
import re
from functools import cache
from statistics import fmean
from typing import Any

from minithink.bench.fidelity.item import Item
from minithink.bench.fidelity.thinkv import PAPER
from minithink.results import record
from minithink.results.origin import ROOT

PAGE = (ROOT / "docs" / "appendix" / "thinkv.md").read_text("utf-8")

OTHERS = ("kivi", "kivi:bits=4", "pm_kvq:max_len=2048")

Cells = dict[str, str]  # heading → cell


@cache
def result_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.default_path(name).read_text("utf-8"))
    return found


def case(name: str) -> dict[str, Any]:
    """One case of ThinKV's speeds and bytes."""
    [found] = [m for m in result_of("thinkv")["measurements"] if m["case"] == name]
    return dict(found)


def item(beginning: str) -> Item:
    """The row of the paper that begins so."""
    [found] = [one for one in PAPER.items if one.of.startswith(beginning)]
    return found


def table(name: str) -> dict[str, Cells]:
    """A table of the appendix: policy → its cells."""
    found = re.search(rf"<!-- table:{name} -->\n(.*?)\n\n", PAGE, re.DOTALL)
    assert found is not None, name
    heading, _, *rows = [line.strip("| ").split(" | ") for line in found[1].splitlines()]
    budget = ""
    names = []
    for text in heading:  # "25 %: right", then "difference", of the same budget
        if ": right" in text:
            budget = text.partition(":")[0]
        names.append(f"{budget}: {text.removeprefix(f'{budget}: ')}")
    return {row[0].split("`")[1]: dict(zip(names, row, strict=True)) for row in rows}


def number(cell: str) -> float:
    """The first number of a cell, as in "**45.5%** (41.6% to 49.5%)"."""
    found = re.search(r"[+-]?[\d,]+(\.\d+)?", cell)
    assert found is not None, cell
    return float(found[0].replace(",", ""))


def numbers(cells: Cells, column: str) -> list[float]:
    """A column's numbers by budget, in ascending budgets."""
    return [number(cell) for name, cell in cells.items() if name.endswith(f": {column}") and cell != "–"]


def all_hold_zero(cells: Cells) -> bool:
    """Whether the interval of each difference contains 0."""
    found = [re.findall(r"[+-]\d+\.\d", cell) for name, cell in cells.items() if name.endswith(": difference")]
    return bool(found) and all(float(low) <= 0 <= float(high) for _, low, high in found)


def points(values: list[float]) -> str:
    """Distances in points, from the first one to the last one: "13.7 to 56.2"."""
    sizes = sorted(abs(value) for value in values)
    return f"{sizes[0]:.1f} to {sizes[-1]:.1f}"


def assert_said(beginning: str, *texts: str) -> None:
    """A row says all of these."""
    said = item(beginning).here
    for text in texts:
        assert text in said, f"{beginning} does not say {text!r}: {said}"


# Files of results --------------------------------------------------------------------------------------------------


def test_errors_of_the_ternary_scales() -> None:
    rows = result_of("embedded-formats")["measurements"]["formats"]
    error = {row["scale"]: row["values"]["error"] for row in rows if row["format"] == "ternary:group=16"}
    assert_said("§4.2, §D.3: ternary", f"{100 * error['best']:.2f} instead of {100 * error['largest']:.2f} %")


def test_average_precision() -> None:
    bits = {row["policy"]: row for row in result_of("embedded-bits")["measurements"]}
    tbq = bits["tbq"]
    thinkv = bits["thinkv:budget=512"]
    assert_said("Tables 1, 4, 13", f"TBQ has {tbq['codes']:.2f} bits and ThinKV {thinkv['codes']:.2f}")
    assert [round(row["scales"], 2) for row in (tbq, thinkv)] == [0.5, 0.5], "half a bit more"


def test_importance_of_the_types() -> None:
    result = result_of("segments-facts")
    mean = {row["of"]: f"{row['mean']:.2f}" for row in result["measurements"]["importance"]}
    said = f"execution {mean['execution']} nats, reasoning {mean['reasoning']}, transitions {mean['transition']};"
    assert_said("Figure 4, §3.2", said, f"{result['settings']['limit']} problems")


def test_bytes() -> None:
    own = case("bytes/thinkv/T30")
    by_channel = case("bytes/thinkv-channel/T30")
    memory = f"{100 * own['share']:.2f} %; the pool that is reserved takes {100 * own['pool_share']:.2f} %"
    assert_said("Table 2, §6.2: memory", memory)
    said = f"{100 * by_channel['share']:.2f} instead of {100 * own['share']:.2f} %"
    assert_said("§4.2: keys are quantized per channel", said)


def test_throughput() -> None:
    own = case("throughput/thinkv/T30")["tokens_per_second"]
    of_full = own / case("throughput/full")["tokens_per_second"]
    of_peer = own / case("throughput/transformers")["tokens_per_second"]
    of_rkv = own / case("throughput/rkv")["tokens_per_second"]
    beside_full = "Table 2, §6.2: throughput at the largest batch, beside the full cache"
    assert_said(beside_full, f"{of_peer:.0f} × transformers' full cache, {of_full:.1f} × this project's")
    assert_said("Table 2, §6.2: throughput at the largest batch, beside R-KV", f"{of_rkv:.2f} ×")
    assert_said("Table 3", f"{of_full:.1f} × the full cache's")


def test_steps_beside_r_kv() -> None:
    own = case("step/tbe/256/T30")["step_milliseconds"]
    rkv = case("step/rkv/256")["step_milliseconds"]
    every = case("step/rkv-every-overlapped/256")
    assert_said(
        "Table 2: equal batches",
        f"{rkv / own:.2f} × R-KV without gather. {every['step_milliseconds'] / own:.0f} × R-KV that evicts",
        f"{100 * every['overhead']:.1f} % of that step",
    )
    gather = case("step/rkv-gather/64")["parts_shares"]["gather"]
    each = case("step/rkv-every-gather/64")["parts_shares"]["gather"]
    assert_said("§5.1, figure 7", f"{100 * gather:.1f} % of R-KV's step", f"{100 * each:.1f} % if R-KV evicts")


def test_parts_of_a_step() -> None:
    own = case("step/thinkv/64/T30")
    rkv = case("step/rkv/64")
    largest = [x["overhead"] for x in case("throughput/thinkv/T30")["levels"]]
    assert_said(
        "Table 5, figure 18",
        f"{100 * own['overhead']:.1f} % of the mean step of 64 sequences",
        f"up to {100 * max(largest):.0f} % late",
        f"evicts in {100 * own['rates']['eviction']['sequence_steps']:.2f} % of the steps",
        f"R-KV in {100 * rkv['rates']['eviction']['sequence_steps']:.2f} %",
    )


def test_slots_of_a_page() -> None:
    steps = [case(f"step/thinkv{name}/256/T30")["step_milliseconds"] for name in ("", "-block4", "-block32")]
    assert_said("Figure 10 (e)", f"differ by {100 * (max(steps) / min(steps) - 1):.0f} %")


def test_times_of_a_request_and_of_a_small_batch() -> None:
    own = case("request/thinkv/1/T30")["step_milliseconds"]
    of_full = own / case("request/full/1")["step_milliseconds"]
    of_rkv = own / case("request/rkv/1")["step_milliseconds"]
    assert_said("Table 14", f"{100 * (1 - of_full):.0f} % less than the full cache, {100 * (of_rkv - 1):.0f} % more")
    eight = case("step/full/8")["step_milliseconds"] / case("step/thinkv/8/T30")["step_milliseconds"]
    assert_said("Table 12", f"{eight:.2f} × with 8 sequences")


# Tables of right answers -------------------------------------------------------------------------------------------


def test_bits_by_type() -> None:
    found = table("overall-precision")
    four = found["thinkv:precision=R4E4T4"]
    first, second, third = numbers(four, "difference")
    more = [b - a for a, b in zip(numbers(found["thinkv"], "bytes"), numbers(four, "bytes"), strict=True)]
    assert_said("Figure 11 (b)", f"{first:.1f}, {second:.1f} and {third:.1f} points better")
    assert_said("Figure 11 (b)", f"at most {max(more):.1f} points more bytes")
    dropped = found["thinkv:precision=R4E4T0"]
    assert max(numbers(dropped, "difference")) < 0, "T0 is worse than T2"
    assert_said("§3.2, §E.17", f"costs {points(numbers(dropped, 'difference'))} points")
    assert_said("§3.2, §E.17", f"{points(numbers(dropped, 'in a loop'))} % of the texts")


def test_formats_and_axes_of_keys() -> None:
    integers = table("overall-formats")["thinkv:four=int4s,two=int2s"]
    assert all_hold_zero(integers)
    first, second, third = (f"{value:+.1f}".replace("-", "−") for value in numbers(integers, "difference"))
    assert_said("Table 10", f"No difference is shown: {first}, {second} and {third} points, each interval contains 0")
    assert all_hold_zero(table("overall-key-axis")["thinkv:key_axis=channel"])
    assert_said("§4.2: keys are quantized per channel", "no difference to the paper's way")


def test_a_cut_prompt() -> None:
    """The row of the cut prompt is older than that of `thinkv`, so their difference says nothing."""
    assert re.search(r"^\| `snapkv:cap=128\+thinkv` † \|", PAGE, re.MULTILINE)
    assert_said("Table 15", "In the order of averaging before 2026-11-30 17.3 to 20.3 points less")
    assert "Within the earlier order SnapKV cost 17.3, 20.3 and 19.5 points." in PAGE


def test_other_methods() -> None:
    found = table("overall-main")
    own = found["thinkv"]
    below = numbers(own, "difference")
    assert max(below) < 0
    assert_said("Figure 8", f"{points(below)} points below R-KV")
    families = table("sweep-main")
    right = {name: fmean(numbers(families[name], "right")) for name in ("tbq", *OTHERS)}
    kivi, four_bits, pm_kvq = (right[name] for name in OTHERS)
    bytes_of = numbers(families["pm_kvq:max_len=2048"], "of full's bytes")
    assert_said(
        "Table 1, §6.2",
        f"at most {max(numbers(own, 'right')):.1f} %, not told apart from KIVI with 2 bits ({kivi:.1f} %)",
        f"PM-KVQ in {pm_kvq:.1f} % with {points(bytes_of)} % of the bytes",
    )
    assert_said("Figure 2", f"KIVI with 4 bits is right in {four_bits:.1f} %")
    halves = f"`tbq` is right in {right['tbq']:.1f} %, `tbe` in {numbers(found['tbe'], 'right')[-1]:.1f} %"
    assert_said("Table 4", halves)
    longer = [f"{number(families[name]['search: tokens']):,.0f}" for name in ("tbq", "full")]
    assert_said("Figure 10 (d)", f"{longer[0]} instead of {longer[1]} tokens")


def test_keys_and_values_in_two_bits() -> None:
    found = table("sweep-sensitivity")
    usual = numbers(found["tbq:precision=R8E8T8"], "right")
    keys = []
    values = []
    for bits in ("R2E8T8", "R8E2T8", "R8E8T2"):
        of_keys = numbers(found[f"tbq:precision={bits},v_precision=R8E8T8"], "right")
        of_values = numbers(found[f"tbq:precision=R8E8T8,v_precision={bits}"], "right")
        keys += [a - b for a, b in zip(usual, of_keys, strict=True)]
        values += [a - b for a, b in zip(usual, of_values, strict=True)]
    assert_said("Figure 16", f"keys of every type in 2 bits lose {min(keys):.1f} points or more")
    assert max(values) < min(keys), "values hardly matter"
