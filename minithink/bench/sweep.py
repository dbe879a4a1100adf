"""Comparisons whose tables and plots the documents show: which policies, at which budgets, on which problems.

Each has a name (`SWEEPS`) and is run as by `python -m minithink.evaluate`, on all embedded families, one after the
other; a run that was interrupted is resumed. Several at once share a run where their problems and budgets are the
same, so that what is in all of them is generated once. What comes out is one file a comparison for all families,
with a line for every family, policy and budget. Settings are chosen on validation problems; the test split is for
`main` alone.

Where a machine is lent for minutes only, a run may not end: --finished generates nothing and takes the lines whose
sequences are all there, on any machine; --join takes the lines that are missing from earlier results, and each of
them says of which commit it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from minithink import results
from minithink.commands import INTERRUPTED, location, positive
from minithink.engine import TINY, device_of
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate import journal, plots, runner
from minithink.evaluate.plan import plan
from minithink.evaluate.summary import FULL, Row, summarize
from minithink.figures import need_matplotlib
from minithink.tasks import families
from minithink.weights import checkpoint_hash, resolve


@dataclass(frozen=True)
class Sweep:
    """A comparison."""

    what: str  # is compared
    policies: tuple[str, ...]  # beside full
    budgets: tuple[float, ...] = (0.25, 0.5, 0.75)  # shares of what the full cache generates, beside the prompt; ():
    # of policies that have none
    split: str = "validation"
    problems: int = 200
    samples: int = 1
    recall: bool = False  # is measured, too
    needed: bool = False  # likewise: how much of what statements need is kept

    @property
    def shared(self) -> tuple[Any, ...]:
        """What sweeps have in common that can be one run."""
        return self.budgets, self.split, self.problems, self.samples, self.recall, self.needed


def _of_thinkv(*options: str) -> tuple[str, ...]:
    return tuple(f"thinkv:{option}" if option else "thinkv" for option in options)


def _of_layers() -> tuple[str, ...]:
    """ThinKV with other numbers of layers, as the embedded model's calibration has them, and with the file's own."""
    calibration = json.loads((TINY / "thoughts.json").read_text(encoding="utf-8"))
    found = []
    for one in calibration["measurements"].get("by_count", []):
        layers, thresholds = ("/".join(map(str, one[name])) for name in ("layers", "thresholds"))
        own = one["layers"] == calibration["layers"]
        found.append("thinkv" if own else f"thinkv:layers={layers},thresholds={thresholds}")
    return tuple(found)


PRECISIONS = ("R8E8T8", "R8E4T2", "R4E4T4", "R4E2T2", "R2E4T2", "R4E4T0", "R2E2T2")  # beside R4E4T2
EIGHT = "R8E8T8"
SENSITIVE = [EIGHT.replace(f"{kind}8", f"{kind}{bits}") for kind in "RET" for bits in (4, 2)]  # one type's bits
RETENTIONS = ("64", "64/32", "64/32/16", "64/32/16/8", "64/32/16/8/4/2", "64/32/16/8/4/0")  # beside 64/32/16/8/4

# Prompts are kept; R-KV decides more often, for these texts are short.
CARD = (
    "window:protect_prompt=true", "random:protect_prompt=true", "rkv:buffer=16,protect_prompt=true",
    "crystal_kv_lite:protect_prompt=true", "kivi", "kivi:bits=4", "thinkv:types=1", "thinkv",
)  # fmt: skip

SWEEPS = {
    "main": Sweep(
        "ThinKV, its two halves and other methods",
        (
            "thinkv", "thinkv:types=1", "tbq", "tbe", "rkv", "kivi", "kivi:bits=4", "pm_kvq",
            "pm_kvq:max_len=2048", "crystal_kv_lite",
        ),
        budgets=(0.125, 0.25, 0.5, 0.75), split="test", samples=2,
    ),
    "recall": Sweep(
        "of the tokens that full attention looks at most, how many are held", ("thinkv", "tbe", "rkv"),
        budgets=(0.125, 0.25, 0.5, 0.75), recall=True,
    ),
    "formats": Sweep("floating points and integers of 4 and 2 bits", _of_thinkv("", "four=int4s,two=int2s")),
    "precision": Sweep(
        "bits by thought type",
        _of_thinkv("", *(f"precision={p}" for p in PRECISIONS)),
    ),
    "sensitivity": Sweep(
        "bits of the keys, or of the values, of one type, with 8 for all others and no eviction",
        (
            f"tbq:precision={EIGHT}",
            *(f"tbq:precision={one},v_precision={EIGHT}" for one in SENSITIVE),
            *(f"tbq:precision={EIGHT},v_precision={one}" for one in SENSITIVE),
        ),
        budgets=(),
    ),
    "tau": Sweep("the tokens of a segment, τ", _of_thinkv("tau=32", "tau=64", "", "tau=256")),
    "types": Sweep("the number of types, |T|", _of_thinkv("types=1", "types=2", "")),
    "layers": Sweep("the number of measured layers, |L*|", _of_layers()),
    "retention": Sweep(
        "the last number of the retention schedule",
        _of_thinkv(*(f"retention={r}" for r in RETENTIONS), ""),
    ),
    "block": Sweep("slots of a page", _of_thinkv("block=4", "", "block=16", "block=32")),
    "key-axis": Sweep(
        "a scale for each channel of a group of keys, or for each key",
        (
            *_of_thinkv("", "key_axis=channel", "precision=R4E2T2", "precision=R4E2T2,key_axis=channel"),
            "tbq", "tbq:key_axis=channel",
        ),
    ),
    "snapkv": Sweep("a prompt that is cut, too", ("thinkv", "snapkv:cap=128+thinkv")),
    "card": Sweep("the policies of the embedded model's card", CARD, budgets=(0.25, 0.5), needed=True),
    "robustness": Sweep(
        "what training under random eviction changes; with --model, of the model without it", CARD[:-2],
        budgets=(0.25, 0.5), needed=True,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sweep`."""
    add = parser.add_argument
    add("names", nargs="+", choices=tuple(SWEEPS), metavar="NAME", help=f"which comparisons: {', '.join(SWEEPS)}")
    add("--model", default="tiny", help="folder of another model that knows the families (default: the embedded one)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--families", nargs="+", default=families(), choices=families(), help="default: all")
    add("--limit", type=positive, metavar="N", help="fewer problems, for a quick look")
    add("--batch-size", type=positive, metavar="N", help="as of minithink.evaluate")
    add("--max-new-tokens", type=positive, metavar="N", help="as of minithink.evaluate")
    add(
        "--runs", type=location, default=Path("runs"), metavar="DIR", help="where unfinished runs lie (default: runs)"
    )
    add("--plot", type=location, metavar="DIR", help="draw accuracy by bytes, or recall by budget, "
        "DIR/sweep-NAME-FAMILY.svg")  # fmt: skip
    add("--plot-only", action="store_true", help="run nothing: draw what the results hold")
    add("--finished", action="store_true", help="generate nothing: take what the runs have finished")
    add(
        "--join", type=location, nargs="+", default=[], metavar="FILE",
        help="with --finished: take the lines that are missing from these results",
    )  # fmt: skip
    add(
        "--results", type=location, default=results.default_path("x").parent, metavar="DIR",
        help="where sweep-NAME.json goes (default: docs/results)",
    )  # fmt: skip


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Evaluate, write, draw."""
    chosen = {name: SWEEPS[name] for name in dict.fromkeys(args.names)}
    paths = {name: args.results / f"sweep-{name}.json" for name in chosen}
    if args.plot_only and args.plot is None:
        raise UsageError("--plot-only draws to the folder that --plot names: give it.")
    if args.plot is not None:
        need_matplotlib()
    if args.plot_only:
        for name, path in paths.items():
            result = results.read(path)
            if (result.get("benchmark"), result.get("settings", {}).get("name")) != ("sweep", name):
                raise MinithinkError(f"{path} is no result of the sweep {name}: run it, or name another folder.")
            draw(name, result, args.plot)
        return 0
    if args.join and not args.finished:
        raise UsageError("--join fills in what --finished has not found: give both.")
    device = torch.device("cpu") if args.finished else device_of(args.device)
    for name, sweep in chosen.items():
        results.check(paths[name], "--results")
        spare(paths[name], new(args, argv, name, device), args.finished)
        plan(policies_of([sweep]), sweep.budgets)
    earlier = [(path, results.read(path)) for path in args.join]
    for shared in dict.fromkeys(sweep.shared for sweep in chosen.values()):
        together = {name: sweep for name, sweep in chosen.items() if sweep.shared == shared}
        found = {name: new(args, argv, name, device) for name in together}
        generated: list[dict[str, Any]] = []
        for family in args.families:
            rows = finished(args, together, family) if args.finished else evaluated(args, together, family)
            if rows is None:
                return INTERRUPTED
            generated += sources(folder_of(args, together, family), sum(r.samples for r in rows))
            for name, sweep in together.items():
                own = [row for row in rows if row.policy in policies_of([sweep])]
                found[name]["measurements"] += [{"family": family, **asdict(row)} for row in own]
                if any(part[x] != found[name][x] for part in generated for x in ("commit", "machine")):
                    found[name]["sources"] = generated  # not all here and now
                found[name]["complete"] = family == args.families[-1]
                if not args.finished:
                    results.write(paths[name], found[name])
        for name in together:
            if args.finished:
                fill(found[name], chosen[name], args.families, earlier)
                results.write(paths[name], found[name])
            if args.plot is not None:
                draw(name, results.read(paths[name]), args.plot)  # from its rounded figures, as --plot-only does
            print(f"written to {paths[name]}", file=sys.stderr)
    return 0


def new(args: argparse.Namespace, argv: list[str], name: str, device: torch.device) -> dict[str, Any]:
    """The beginning of a sweep's result."""
    sweep = SWEEPS[name]
    result = results.new("sweep", argv, device)
    settings = {"name": name, **asdict(sweep), "limit": args.limit or sweep.problems}
    return result | {"embedded_model": model_of(args.model), "settings": settings, "measurements": []}


def model_of(name: str) -> str:
    """The hash of the weights."""
    return checkpoint_hash(TINY if name == "tiny" else resolve(name))


def spare(path: Path, result: dict[str, Any], finished: bool) -> None:
    """UsageError: a quick look, on fewer problems or another machine, would replace what documents show."""
    if not path.exists():
        return
    other = results.read(path)
    theirs, ours = (x.get("settings", {}).get("limit") for x in (other, result))
    machines = (x.get("machine", {}) for x in (other, result))
    there, here = (machine.get("gpu") or machine.get("cpu") for machine in machines)
    if theirs != ours or (there != here and not finished):
        raise UsageError(
            f"{path} is of {theirs} problems on {there}, and this is of {ours} on {here}: give another --results, or "
            "delete the file."
        )


def draw(name: str, result: dict[str, Any], folder: Path) -> None:
    """Accuracy by bytes, of each family; recall by budget, where that was measured."""
    what, known = "recall" if SWEEPS[name].recall else "bytes", {field.name for field in fields(Row)}
    for family in dict.fromkeys(m["family"] for m in result["measurements"]):
        own = [{k: x for k, x in m.items() if k in known} for m in result["measurements"] if m["family"] == family]
        plots.draw_one([Row(**m) for m in own], what, folder / f"sweep-{name}-{family}.svg")


def policies_of(sweeps: Iterable[Sweep]) -> list[str]:
    """Of all of them, once; with the full cache, which is first."""
    return list(dict.fromkeys([FULL, *(policy for sweep in sweeps for policy in sweep.policies)]))


def folder_of(args: argparse.Namespace, sweeps: Iterable[str], family: str) -> Path:
    """Where the run of these sweeps lies."""
    return Path(args.runs / f"sweep-{'-'.join(sweeps)}-{family}")


def finished(args: argparse.Namespace, sweeps: Mapping[str, Sweep], family: str) -> list[Row]:
    """The rows of one family whose sequences are all there; nothing is generated."""
    sweep, run = next(iter(sweeps.values())), journal.read(folder_of(args, sweeps, family))
    ours = {"dataset": family, "split": sweep.split, "limit": args.limit or sweep.problems, "recall": sweep.recall}
    ours |= {"num_samples": sweep.samples, "needed": sweep.needed, "checkpoint": model_of(args.model)}
    if changed := journal.differences(run.settings, ours, run.settings.keys() - ours.keys()):
        raise UsageError(f"{run.folder} is a run of something else: {changed}.")
    rows = summarize(run.records, policies=policies_of(sweeps.values()), budgets=sweep.budgets)
    return [row for row in rows if row.group is None and row.samples == ours["limit"] * sweep.samples]


def fill(
    result: dict[str, Any], sweep: Sweep, families: Sequence[str], earlier: Sequence[tuple[Path, dict[str, Any]]]
) -> None:
    """Put the lines that are missing in their places, from earlier results of the same comparison, the last one's.
    UsageError: it is another one's."""
    alike = ("name", "split", "problems", "samples", "recall", "needed", "limit")
    for path, other in earlier:
        theirs, model = other.get("settings", {}), other.get("embedded_model")
        if [theirs.get(x) for x in alike] != [result["settings"][x] for x in alike]:
            raise UsageError(f"{path} is a result of something else, or of other problems: name another file.")
        if model != result["embedded_model"]:
            raise UsageError(f"{path} is of another embedded model, {model}: name another file.")
    here = result["commit"]
    there = {
        (m["family"], m["policy"], m["budget"]): m
        if other["commit"] == here
        else {"commit": other["commit"], "date": other["date"]} | m
        for _, other in earlier
        for m in other["measurements"]
    } | {(m["family"], m["policy"], m["budget"]): m for m in result["measurements"]}
    cells = [(family, *cell) for family in families for cell in plan(policies_of([sweep]), sweep.budgets)]
    result["measurements"] = [there[cell] for cell in cells if cell in there]
    if parts := [part for _, other in earlier if other["commit"] == here for part in other.get("sources", [])]:
        result["sources"] = [*result.get("sources", []), *parts]
    result["missing"] = [list(cell) for cell in cells if cell not in there]
    result["complete"] = not result["missing"]


def sources(folder: Path, used: int) -> list[dict[str, Any]]:
    """How the run there was started and resumed: commit, machine, and how many sequences it then generated; of which
    so many are used, of a run that has not ended and was of one commit on one kind of machine."""
    run = journal.read(folder)
    ends = [*(start["sequences_before"] for start in run.runs[1:]), len(run.records)]
    parts = [
        {name: start[name] for name in ("commit", "date", "machine")} | {"sequences": end - start["sequences_before"]}
        for start, end in zip(run.runs, ends, strict=True)
        if end > start["sequences_before"]
    ]
    if parts and all(part[x] == parts[0][x] for part in parts for x in ("commit", "machine")):
        return [parts[-1] | {"sequences": used}]
    return parts


def evaluated(args: argparse.Namespace, sweeps: Mapping[str, Sweep], family: str) -> list[Row] | None:
    """The rows of one family, over all its problems; None: interrupted. sweeps: by name, with the same settings."""
    sweep, folder = next(iter(sweeps.values())), folder_of(args, sweeps, family)
    words: list[Any] = ["--policies", ",".join(policies_of(sweeps.values()))]
    words += ["--budgets", ",".join(map(str, sweep.budgets))] if sweep.budgets else []
    words += ["--num-samples", sweep.samples]
    words += ["--dataset", family, "--split", sweep.split, "--device", args.device]
    words += ["--limit", args.limit or sweep.problems, "--output-dir", folder, "--resume"]
    words += ["--model", args.model]
    words += [f"--{name}" for name in ("recall", "needed") if getattr(sweep, name)]
    for name in ("batch_size", "max_new_tokens"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value]
    rows = runner.evaluate_words([str(word) for word in words])
    return None if rows is None else [row for row in rows if row.group is None]
