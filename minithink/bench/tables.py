"""Tables of the documents, made from the result files; --check fails where a document is out of date.

A document says where a table belongs, and everything between the two lines is replaced:

    <!-- table:decode-cpu -->
    <!-- end -->
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minithink import results
from minithink.bench import analysis_tables, thinkv_tables
from minithink.bench.markdown import markdown, short, source
from minithink.bench.sweep import SWEEPS
from minithink.config import ModelConfig
from minithink.engine import DTYPES, TINY
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.summary import FULL, budget_text
from minithink.model import Decoder
from minithink.tasks import families

BEGIN = re.compile(r"<!-- table:(\S+) -->\s*")
END = "<!-- end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench tables`."""
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a document would change")
    parser.add_argument("--root", type=Path, default=results.ROOT, metavar="FOLDER", help="default: this checkout")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Bring README.md and docs/*.md up to date, or check that they are."""
    if not args.root.is_dir():
        raise UsageError(f"--root {args.root} is no folder: give that of the checkout.")
    stale = []
    for path in [args.root / "README.md", *sorted((args.root / "docs").glob("*.md"))]:
        if not path.is_file():
            continue
        before = path.read_text(encoding="utf-8")
        after = fill(before, path.name, args.root / results.RESULTS, path.parent)
        if after != before:
            stale.append(path)
            if not args.check:
                path.write_text(after, encoding="utf-8")
    names = ", ".join(p.relative_to(args.root).as_posix() for p in stale)
    if stale and args.check:
        raise MinithinkError(f"Tables are out of date in {names}: run `python -m minithink.bench tables`.")
    print(f"updated {names}" if stale else "all tables are up to date", file=sys.stderr)
    return 0


def fill(text: str, name: str, where: Path, folder: Path | None = None) -> str:
    """A document with its tables made anew, each with a link to its result.

    Args:
        text: of the document.
        name: of the document, for errors.
        where: the folder of the result files.
        folder: where the document lies; None: beside that folder.
    """
    out: list[str] = []
    lines = iter(enumerate(text.split("\n"), start=1))
    for number, line in lines:
        out.append(line)
        if not (begin := BEGIN.fullmatch(line)):
            continue
        table = begin[1]
        if table not in TABLES:
            raise MinithinkError(f"{name}:{number} wants the table {table!r}; there are {', '.join(TABLES)}.")
        for _, inner in lines:
            if inner.strip() == END:
                break
            if BEGIN.fullmatch(inner):
                raise MinithinkError(f"{name}:{number} begins a table, and the next begins before a line {END}.")
        else:
            raise MinithinkError(f"{name}:{number} begins a table, and no line {END} follows.")
        path = SHIPPED.get(table, where / f"{PARTS.get(table, table)}.json")
        made = TABLES[table](results.read(path))
        link = Path(os.path.relpath(path, folder or where.parent)).as_posix()
        out += [*made[:-1], f"{made[-1]} [{path.name}]({link})", END]
    return "\n".join(out)


def decode(result: dict[str, Any]) -> list[str]:
    """Speed beside transformers, one row a measurement."""
    rows: list[tuple[str, ...]] = [
        ("model", "batch", "minithink", "transformers", "ratio", "decoding alone", "byte limit: ours / theirs")
    ]
    for m in result["measurements"]:
        peer = m.get("peer")
        shares = [_share_of_limit(result, m, side) for side in (m["ours"], peer or {})]
        if m["shape"] == "embedded":
            model = f"embedded, {m['dtype']}, {m['prompt_tokens']} + {m['new_tokens']} tokens"
        else:
            steps = m["shape"] == "embedded-steps"
            shape = "embedded, single steps" if steps else f"{m['shape']} (random weights)"
            held = f"{m['context']:,} tokens held"
            if "policy" in m:
                held = f"`{m['policy']}` after {m['context']:,} tokens"
            model = f"{shape}, {m['dtype']}, {held}"
        rows.append((
            model,
            str(m["batch"]),
            f"{m['ours']['tokens_per_second']:,.0f} tok/s",
            f"{peer['tokens_per_second']:,.0f} tok/s" if peer else "–",
            _ratio(m) if peer else "–",
            f"{m['decode_ratio']:.2f} ×" if "decode_ratio" in m else "–",
            " / ".join(shares) if any(s != "–" for s in shares) else "–",
        ))  # fmt: skip
    for i in (6, 5):  # a column without a figure says nothing
        if all(row[i] == "–" for row in rows[1:]):
            rows = [row[:i] + row[i + 1 :] for row in rows]
    return [*markdown(rows), "", source(result)]


def _ratio(m: dict[str, Any]) -> str:
    """The ratio, and from where to where it went in the pairs of runs whose median it is."""
    pairs = m.get("ratios", [])
    spread = f" ({min(pairs):.2f} to {max(pairs):.2f})" if len(pairs) > 1 else ""
    return f"**{m['ratio']:.2f} ×**{spread}"


def _share_of_limit(result: dict[str, Any], m: dict[str, Any], side: dict[str, Any]) -> str:
    """How near one side comes to reading weights and KV at the bandwidth that was measured in the same run."""
    if "share_of_limit" in side:
        return f"{side['share_of_limit']:.1%}"
    measured = [x["copy_bytes_per_second"] for x in result["measurements"] if "copy_bytes_per_second" in x]
    if m["shape"] != "embedded" or not measured or "decode_tokens_per_second" not in side:
        return "–"
    config, itemsize = ModelConfig.from_folder(TINY), DTYPES[m["dtype"]].itemsize
    with torch.device("meta"):
        weights = sum(p.numel() for p in Decoder(config).parameters()) * itemsize
    held = m["prompt_tokens"] + m["new_tokens"] / 2  # on average
    kv = m["batch"] * held * config.kv_bytes_per_token(itemsize)
    seconds = m["batch"] / side["decode_tokens_per_second"]  # a step
    return f"{(weights + kv) / measured[0] / seconds:.1%}"


def accuracy(result: dict[str, Any]) -> list[str]:
    """Share of right answers, one row a length bin."""
    rows: list[tuple[str, ...]] = [
        ("reference trace", "problems", "right", "95 % interval", "tokens generated", "cut off")
    ]
    for m in result["measurements"]:
        low, high = m["interval"]
        right = f"{m['right']} of {m['n']}: **{m['share']:.1%}**"
        rows.append((
            "all" if m["bin"] == "all" else f"{m['bin']} tokens",
            str(m["problems"]),
            right,
            f"{low:.1%} to {high:.1%}",
            f"{m['mean_tokens']:,.0f}",
            f"{m['cut_off']:.1%}",
        ))  # fmt: skip
    return [*markdown(rows), "", source(result)]


def evaluate(result: dict[str, Any]) -> list[str]:
    """End-to-end speed of evaluations, one row a policy."""
    rows: list[tuple[str, ...]] = [("policy", "sequences", "tokens", "seconds", "tokens a second", "of full", "kept")]
    for m in result["measurements"]:
        speed = f"**{m['tokens_per_second']:,.0f}**"
        share = f"{m['of_full']:.0%}" if "of_full" in m else "–"
        counts = (f"{m['sequences']:,}", f"{m['tokens']:,}", f"{m['seconds']:.1f}")
        rows.append((f"`{m['policy']}`", *counts, speed, share, f"{m['tokens_kept']:,.0f}"))
    return [*markdown(rows), "", source(result)]


def margins(result: dict[str, Any]) -> list[str]:
    """What was counted of near ties, as a sentence."""
    settings, (m,) = result["settings"], result["measurements"]
    sizes = " and ".join(map(str, settings["batch_size"]))
    said = (
        f"{m['sequences']} sequences of the full cache in batches of {sizes} ({settings['dtype']}): of "
        f"{m['draws']:,} draws {m['near']} had a margin below {m['limit']:g} (smallest: {m['smallest_margin']:.1e}); "
        f"{len(m['parted'])} sequences differ, {m['unexplained']} of them at a larger margin."
    )
    return [said, "", source(result)]


def paged(result: dict[str, Any]) -> list[str]:
    """Speed of the paged store beside the plain cache, one row a batch size."""
    rows: list[tuple[str, ...]] = [("batch", "pages", "plain cache", "ratio", "goal")]
    for m in result["measurements"]:
        speeds = (f"{m[side]['tokens_per_second']:,.0f} tok/s" for side in ("paged", "plain"))
        goal = f"{m['target']} ×, {'reached' if m['target_reached'] else 'missed'}" if "target" in m else "–"
        rows.append((str(m["batch"]), *speeds, _ratio(m), goal))
    return [*markdown(rows), "", source(result)]


def memory(result: dict[str, Any]) -> list[str]:
    """Bytes held under each policy, by kind."""
    kinds = [k for k in result["measurements"][0]["kinds"] if any(m["kinds"][k] for m in result["measurements"])]
    rows: list[tuple[str, ...]] = [("policy", "tokens a lane", "held", "of full", *kinds)]
    for m in result["measurements"]:
        sizes = (f"{m['kinds'][kind] / 2**20:,.2f}" if m["kinds"][kind] else "–" for kind in kinds)
        held = f"**{m['held'] / 2**20:,.2f} MiB**"
        rows.append((f"`{m['policy']}`", f"{m['tokens_held']:,}", held, f"{m['share']:.1%}", *sizes))
    return [*markdown(rows), "", source(result)]


def retention(result: dict[str, Any]) -> list[str]:
    """Bytes of a token that ThinKV has kept, one row a number of tokens kept of a segment."""
    of = {(m["bits"], m["kept"], m["key_axis"]): m for m in result["measurements"]}
    kinds = list(dict.fromkeys((bits, axis) for bits, _, axis in of))
    rows: list[tuple[str, ...]] = [
        ("tokens kept of a segment", *(f"{bits} bits, a scale for each {axis}" for bits, axis in kinds))
    ]
    for kept in dict.fromkeys(kept for _, kept, _ in of):
        cells = (of[bits, kept, axis] for bits, axis in kinds)
        rows.append((f"{kept}", *(f"**{m['bytes']:.0f}** ({m['scales']:.0f} of them scales)" for m in cells)))
    tau = result["settings"]["tau"]
    said = f"Bytes of a token and KV head, keys and values, D = 128; K-means keeps some of {tau} tokens of a segment."
    return [*markdown(rows), "", said, "", source(result)]


def attention(result: dict[str, Any]) -> list[str]:
    """Time of decode attention in every format, and how many times as fast it is, one row a shape."""
    names = dict.fromkeys(m["format"] for m in result["measurements"])
    titles = ("torch, contiguous" if name == "sdpa" else name for name in names)
    rows: list[tuple[str, ...]] = [("sequences", "tokens of each", *titles)]
    for batch, length in dict.fromkeys((m["batch"], m["length"]) for m in result["measurements"]):
        of = {m["format"]: m for m in result["measurements"] if (m["batch"], m["length"]) == (batch, length)}
        rows.append((f"{batch}", f"{length:,}", *(_time(of[name]) if name in of else "–" for name in names)))
    return [*markdown(rows), "", *_bandwidths(result), source(result)]


def append(result: dict[str, Any]) -> list[str]:
    """Time of what a new token costs before attention, and its share, one row a batch and format."""
    rows: list[tuple[str, ...]] = [
        ("sequences", "tokens of each", "format", "append", "buffer's share", "attention", "of attention's time")
    ]
    for m in result["measurements"]:
        times = (f"{m[name + '_microseconds']:,.1f} µs" for name in ("append", "buffer", "attention"))
        rows.append((f"{m['batch']}", f"{m['length']:,}", m["format"], *times, f"**{m['share']:.1%}**"))
    return [*markdown(rows), "", source(result)]


def counters(result: dict[str, Any]) -> list[str]:
    """Hardware counters of attention's kernels, one row each."""
    rows: list[tuple[str, ...]] = [
        ("case", "kernel", "bandwidth of memory", "issue slots", "warps", "cycles that a warp waits for memory")
    ]
    for m in result["measurements"]:
        shares = (f"{m[name]:.0f}%" for name in ("dram", "issue", "warps"))
        shape = f"{m['case']}: {m['batch']} × {m['length']:,}"
        rows.append((shape, f"`{m['kernel']}`", *shares, f"{m['waiting_for_memory']:.1f}"))
    return [*markdown(rows), "", source(result)]


def sanitize(result: dict[str, Any]) -> list[str]:
    """What compute-sanitizer found, one row a tool."""
    rows: list[tuple[str, ...]] = [("tool", "errors", "processes", "tests")]
    for tool in dict.fromkeys(m["tool"] for m in result["measurements"]):
        own = [m for m in result["measurements"] if m["tool"] == tool]
        errors, processes = (sum(m[name] for m in own) for name in ("errors", "processes"))
        outcomes = Counter[str]()
        for number, what in re.findall(r"(\d+) (\w+)", " ".join(m["outcome"] for m in own)):
            outcomes[what] += int(number)
        tests = ", ".join(f"{number} {what}" for what, number in outcomes.items())
        rows.append((tool, f"**{errors}**", f"{processes}", tests))
    return [*markdown(rows), "", source(result)]


def _time(m: dict[str, Any]) -> str:
    """A time in microseconds, to three digits or more, and what it gains."""
    digits = next(d for d, least in ((0, 100), (1, 10), (2, 0)) if m["microseconds"] >= least)
    return f"{m['microseconds']:,.{digits}f} µs" + (f", **{m['ratio']:.2f} ×**" if "ratio" in m else "")


def steps(result: dict[str, Any]) -> list[str]:
    """Time of each step of tutorial 05 and its share of the bandwidth, one row a step, two columns a shape."""
    shapes = list(dict.fromkeys((m["batch"], m["length"]) for m in result["measurements"]))
    names = dict.fromkeys(m["step"] for m in result["measurements"])
    rows: list[tuple[str, ...]] = [("", *(x for b, n in shapes for x in (f"{b} × {n:,} tokens", "of bandwidth")))]
    for name in names:
        of = {(m["batch"], m["length"]): m for m in result["measurements"] if m["step"] == name}
        figures = ((_time(of[s]), f"**{_percent(of[s]['share'])}**") if s in of else ("–", "–") for s in shapes)
        rows.append((next(iter(of.values()))["what"], *(x for pair in figures for x in pair)))
    return [*markdown(rows), "", *_bandwidths(result), source(result)]


def thought_kernels(result: dict[str, Any]) -> list[str]:
    """Time of ThinKV's kernels, their share of the bandwidth, and the twins' time, one row a case."""
    rows: list[tuple[str, ...]] = [("kernel", "case", "time", "of bandwidth", "twin")]
    for m in result["measurements"]:
        twin = _time({"microseconds": m["twin_microseconds"]}) if "twin_microseconds" in m else "–"
        rows.append((f"`{m['kernel']}`", m["case"], _time(m), f"**{_percent(m['share'])}**", twin))
    return [*markdown(rows), "", source(result)]


def _percent(share: float) -> str:
    """With one decimal below 10 %, where whole percents would hide what is gained."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _bandwidths(result: dict[str, Any]) -> list[str]:
    """The bandwidths that were measured in the same run, as a paragraph; nothing where none was."""
    kinds = {"read_bytes_per_second": "reading alone", "copy_bytes_per_second": "a copy"}
    speeds = [f"{what} {result[key] / 1e12:.2f} TB/s" for key, what in kinds.items() if key in result]
    return [f"Bandwidth in the same run: {', '.join(speeds)}.", ""] if speeds else []


def trace(result: dict[str, Any]) -> list[str]:
    """What recording costs, one row a policy, and what the page of a long trace takes."""
    rows: list[tuple[str, ...]] = [
        ("policy", "CPU time with a recorder", "its own share", "bytes a step", "evictions and moves")
    ]
    text = list[str]()
    for m in result["measurements"]:
        if m["what"] == "recording":
            share, size = m["recorder_seconds"] / m["seconds"], f"{m['bytes_per_step']:,.0f}"
            rows.append((f"`{m['policy']}`", _ratio(m), f"{share:.1%}", size, f"{m['events']:,}"))
        else:
            text += [
                f"The page of a made-up trace of {m['tokens']:,} tokens, {m['layers']} layers × {m['kv_heads']} heads"
                f" and {m['events']:,} evictions has {m['page_bytes'] / 2**20:.1f} MiB; {m['browser']} opens it in "
                f"**{m['open_seconds']:.2f} s**, the slider's first move takes **{m['first_scrub_seconds']:.3f} s**, "
                f"later ones {m['later_scrub_seconds']:.3f} s (goal: below {m['target']:g} s, "
                f"{'reached' if m['target_reached'] else 'missed'}).",
                "",
            ]
    return [*markdown(rows), "", *text, source(result)]


def thoughts(result: dict[str, Any]) -> list[str]:
    """What calibration found, one row a layer; those of L* in bold."""
    m, types = result["measurements"], len(result["thresholds"]) + 1
    averages = [f"{types} modes, {n} row{'s' if n != '1' else ''}" for n in m["share_by_rows"]]
    found = [*m["share_by_rows"].values()]
    for n, shares in [*m.get("share_of_noise", {}).items()][-2:]:  # of the widest averages
        averages.append(f"by chance, {n} rows")
        found.append(shares)
    rows: list[tuple[str, ...]] = [("layer", "sparsity", *averages, "agrees with keywords", "κ")]
    for look in m["layers"]:
        i, words = look["layer"], look["keywords"]
        shares = (f"{of[i]:.0%}" for of in found)
        name, sparsity = f"**{i}**" if i in result["layers"] else f"{i}", f"{look['mean']:.2f} ± {look['sd']:.2f}"
        rows.append((name, sparsity, *shares, f"{words['agree']:.0%}", f"{words['kappa']:.2f}"))
    return [*markdown(rows), "", source(result)]


def thresholds(result: dict[str, Any]) -> list[str]:
    """The thresholds of a calibration and what else was tried, one row each, beside keywords and under eviction."""
    m, settings = result["measurements"], result["settings"]
    rows: list[tuple[str, ...]] = [
        ("types by", "compared with", "thresholds", "E / R / T", "segments", "agree", "κ", "one type for all")
    ]

    def row(name: str, other: str, theta: list[float], shares: dict[str, float], of: dict[str, Any]) -> None:
        agree = (f"{of['segments']:,}", f"{of['agree']:.0%}", f"{of['kappa']:.2f}", f"{of['majority']:.0%}")
        rows.append((name, other, ", ".join(f"{x:.3f}" for x in theta), _types(shares), *agree))

    theta = result["thresholds"]
    row(f"**the file ({result['chosen']})**", "keywords", theta, m["shares_of_types"], m["keywords"])
    for other in m["by_count"]:
        if other["layers"] != result["layers"]:
            name = f"layers {', '.join(map(str, other['layers']))} ({other['chosen']})"
            row(name, "keywords", other["thresholds"], other["shares"], other)
    for way in m["candidates"]:
        row(f"{way['way']}, set on one half", "keywords, other half", way["thresholds"], way["shares"], way)
    if under := m["eviction"]:
        name = f"the full cache, {under['prompts']} texts"
        row(name, f"`{settings['policy']}` at {settings['budget']:,}", theta, under["shares_of_types"], under)
    said = (
        f"{m['prompts']} problems, {m['right']:.0%} right, {m['tokens']:,} tokens. By keywords, segments are "
        f"{_types(m['shares_of_keywords'])} (E / R / T). A segment's sparsity and its number correlate: "
        f"{m['correlation_with_position']:.2f}."
    )
    return [*markdown(rows), "", said, "", source(result)]


def _types(shares: dict[str, float]) -> str:
    return " / ".join(f"{shares[kind]:.0%}" for kind in ("execution", "reasoning", "transition"))


def _spread(x: dict[str, Any]) -> str:
    """A mean with the spread of the segments' means; –: no segment is mostly of this kind."""
    return "–" if x["sd_of_segments"] is None else f"{x['mean']:.2f} ± {x['sd_of_segments']:.2f}"


def premises(result: dict[str, Any]) -> list[str]:
    """What full-cache traces say of three premises: one row a layer, the rest in words."""
    m = result["measurements"]
    kinds = list(dict.fromkeys(x["kind"] for x in m["sparsity"]))
    of = {(x["kind"], x["layer"]): x for x in m["sparsity"]}
    rows: list[tuple[str, ...]] = [
        ("layer", *(f"sparsity, {kind}" for kind in kinds), "answer's attention to thinking", "of it, far back")
    ]
    answer = m["answer_attention"]
    for layer, (on, far) in enumerate(zip(answer["on_thinking"]["layers"], answer["far"]["layers"], strict=True)):
        cells = (_spread(of[kind, layer]) for kind in kinds)
        rows.append((f"{layer}", *cells, f"{on:.0%}", f"{far:.0%}"))
    rows.append(
        ("mean", *["" for _ in kinds], f"{answer['on_thinking']['mean']:.0%}", f"{answer['far']['mean']:.0%}")
    )
    full, two = m["full_cache"], m["separability"].get("two_thresholds")
    best = ", ".join(
        f"{' and '.join(x['kinds'])} {x['auc']:.2f} (layer {x['layer']})" for x in m["separability"]["auc"]
    )
    said = (
        f"{full['problems']} validation problems, {full['right']:.0%} right, {full['tokens']:,.0f} tokens and "
        f"{full['doubts']:.1f} doubts each. Sparsity: mean ± standard deviation of the means of segments of "
        f"{result['settings']['tau']} tokens."
    )
    if best:
        said += (
            " How well it tells two kinds of segments in the same third of a text apart, at the best layer, as the "
            f"area under the curve: {best}."
        )
    if two:
        said += (
            f" Two thresholds in layer {two['layer']}, chosen on one half of the traces, name {two['accuracy']:.0%} "
            "of the other half's segments rightly; always the commonest kind would be right for "
            f"{two['majority']:.0%}."
        )
    steered: list[tuple[str, ...]] = [("steered away from doubts", "strength", "right", "tokens", "doubts")]
    for x in m.get("steering", {}).get("runs", []):
        where = {"nowhere": "nowhere", "boundary": "at blank lines", "every": "at every token"}[x["at"]]
        steered.append(
            (where, f"{x['strength']:g}", f"{x['right']:.0%}", f"{x['tokens']:,.0f}", f"{x['doubts']:.1f}")
        )
    return [*markdown(rows), "", said, "", *markdown(steered), "", source(result)]


def pilot(result: dict[str, Any]) -> list[str]:
    """Sketches of policies, one row each, two columns a budget."""
    budgets = list(dict.fromkeys(m["budget"] for m in result["measurements"] if m["policy"] != "full"))
    of = {(m["policy"], m["budget"]): m for m in result["measurements"]}
    rows: list[tuple[str, ...]] = [("sketch", *(x for b in budgets for x in (f"right at {b:.0%}", "tokens")))]
    for name in dict.fromkeys(m["policy"] for m in result["measurements"]):
        cells = [of[name, 1.0 if name == "full" else b] for b in budgets]
        rows.append((name, *(x for m in cells for x in (f"{m['right']:.0%}", f"{m['tokens']:,.0f}"))))
    said = f"{result['settings']['limit']} validation problems; budgets are shares of what the full cache generated."
    commits = {m.get("commit", result["commit"]) for m in result["measurements"]}
    if earlier := [commit[:10] for commit in sorted(commits - {result["commit"]})]:
        said += f" The run was interrupted and completed; its first rows are of commit {', '.join(earlier)}."
    return [*markdown(rows), "", said, "", source(result)]


def sweep(result: dict[str, Any]) -> list[str]:
    """A comparison of policies: one row a policy and budget, columns by family."""
    ms, settings = result["measurements"], result["settings"]
    families = list(dict.fromkeys(m["family"] for m in ms))
    counted = any(m["case_1"] is not None for m in ms)
    names = ["tokens", "of full's bytes", *(["recall"] if any(m["recall"] is not None for m in ms) else [])]
    columns = (x for family in families for x in (f"{family}: right", *names))
    rows: list[tuple[str, ...]] = [("policy", "budget", *columns, *(("case 1 / case 2",) if counted else ()))]
    full = {m["family"]: m["kv_bytes_peak"] for m in ms if m["policy"] == FULL}
    for policy, budget in dict.fromkeys((m["policy"], m["budget"]) for m in ms):
        own = {m["family"]: m for m in ms if (m["policy"], m["budget"]) == (policy, budget)}
        cells = [f"`{policy}`", budget_text(budget)]
        for family in families:
            if (m := own.get(family)) is None:  # not measured yet
                cells += ["–"] * (len(names) + 1)
                continue
            right = f"**{m['pass_at_1']:.1%}** ({m['pass_at_1_low']:.1%} to {m['pass_at_1_high']:.1%})"
            cells += [right, f"{m['generated_mean']:,.0f}", f"{m['kv_bytes_peak'] / full[family]:.1%}"]
            if "recall" in names:
                cells.append("–" if m["recall"] is None else f"{m['recall']:.1%}")
        if counted:
            cases = [(m["case_1"], m["case_2"]) for m in own.values() if m["case_1"] is not None]
            cells.append(" / ".join(f"{sum(n):,}" for n in zip(*cases, strict=True)) or "–")
        rows.append(tuple(cells))
    said = (
        f"{settings['limit']} {settings['split']} problems of each family × {settings['samples']}; budgets are the "
        "prompt and that share of what the full cache generates. Bytes: the mean of peaks. Case 1 and 2: how often "
        "segments were annealed as a transition ended, and for room, in all sequences of all families."
    )
    older: dict[str, list[str]] = {}
    for m in ms:
        if "commit" in m and m["policy"] not in older.setdefault(short(m["commit"]), []):
            older[short(m["commit"])].append(m["policy"])
    joined = (f" {' and '.join(f'`{p}`' for p in policies)}: commit {commit}." for commit, policies in older.items())
    return [*markdown(rows), "", said + "".join(joined), "", source(result)]


# tables of a result that has several
PARTS = dict.fromkeys(thinkv_tables.TABLES, "thinkv")
# tables whose results ship with the model
SHIPPED = {
    "thoughts": TINY / "thoughts.json",
    "thresholds": TINY / "thoughts.json",
    "thresholds-2": TINY / "thoughts-2.json",
}
TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "decode-cpu": decode,
    "decode-gpu": decode,
    "decode-gpu-steps": decode,
    "decode-gpu-16k": decode,
    "decode-gpu-rkv": decode,
    **{"accuracy" if family == "facts" else f"accuracy-{family}": accuracy for family in families()},
    "evaluate": evaluate,
    "margins": margins,
    **{f"sweep-{name}": sweep for name in SWEEPS},
    **{f"{table.__name__}-{family}": table for table in (premises, pilot) for family in families()},
    "cache-speed": paged,
    "cache-bytes": memory,
    "retention-bytes": retention,
    "attention": attention,
    "append": append,
    "steps": steps,
    "thought-kernels": thought_kernels,
    "counters": counters,
    "sanitize": sanitize,
    "trace": trace,
    **thinkv_tables.TABLES,
    **analysis_tables.TABLES,
    "thoughts": thoughts,
    "thresholds": thresholds,
    "thresholds-2": thresholds,
}
