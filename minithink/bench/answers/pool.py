"""One pool of runs, `docs/results/pool.jsonl.gz`: a policy at a budget on the problems of a family, stored once.

Every table and picture of answers draws from the pool, and `bench sweep` runs only what the pool lacks. A run is a
line of JSON, and the file is compressed (`zcat` shows it):

    key       all settings that decide the generated tokens: weights, policy with all its settings, budget, problems,
              how tokens are drawn, number type, backend, calibration
    source    hashes of the code of the policy, of its number formats, of its twins, of the kernels that it ran on
    row       the summary of all sequences (`evaluate/summary.py`); of texts, their losses (`answers/losses.py`)
    answers   the answers of the first sequences
    right     which sequences were right, so that policies can be compared in pairs
    commit, date, machine, versions, command

A run is a record: it stays in its tables when code changes. It is stale if code that it ran has changed since, of its
policy or formats, or of twins, if it ran them. Tables mark it then, and `bench sweep` offers to run it again. A run
is unchecked if it ran kernels, and they or their twins have changed: `bench sweep --recheck` generates the first
sequences again, and the run is stale if an answer differs. Docstrings, comments and imports do not count as changes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from minithink.cli.commands import location
from minithink.errors import UsageError, unwritable
from minithink.evaluate.journal import INSTRUMENT
from minithink.evaluate.plan import AMPLE, Cell, Spec
from minithink.kv.contract import Policy
from minithink.kv.stack import members
from minithink.results import record
from minithink.results.files import replace, rounded, turn
from minithink.results.pooled import FILE as FILE
from minithink.results.pooled import Run as Run
from minithink.results.pooled import read_file
from minithink.results.pooled import source_of as source_of
from minithink.sampling import DRAWS

PLAIN = "pool.jsonl"  # how earlier versions stored it
ANSWERS = 32  # sequences whose answers are kept, and compared after a change of kernels
MACHINE = ("dtype", "backend", "device")  # parts of a key that the machine decides
PADDED = ("padded_budget", "group")  # parts of a key only where padding is charged (`minithink/evaluate/padding.py`)
SAME_CORES = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}  # they differ in their memory: one kind of machine
WATCHED = ("recall", "needed")  # measured on request; a run with such a measurement also serves a key without it
ALWAYS = ("checkpoint", "dataset", "limit", "problems")  # parts of every key
OF_ANSWERS = ("split", "num_samples", *WATCHED, *DRAWS, "max_new_tokens")
OF_LOSSES = (INSTRUMENT, "prompt_tokens", "length")


def read(folder: Path) -> list[Run]:
    """All runs of a pool; an empty list if there is no file.

    A pool that an earlier version stored uncompressed is read too. MinithinkError: a file cannot be read.
    """
    compressed = read_file(folder / FILE)
    plain = read_file(folder / PLAIN)
    return _newest([*plain, *compressed]) if plain else compressed


def add(folder: Path, runs: Iterable[Run]) -> None:
    """Put runs into a pool; of a key the newest run stays. Several processes may do so at once.

    The file is replaced whole, and equal runs make equal bytes. An uncompressed pool becomes a compressed one.
    MinithinkError: the file cannot be written.
    """
    path = folder / FILE
    try:
        with turn(folder):
            together = _newest([*read(folder), *runs])
            lines = [_text(vars(run)) + "\n" for run in together]
            replace(path, gzip.compress("".join(lines).encode(), mtime=0))
            (folder / PLAIN).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable("The pool", path, error, "--results") from None


def add_results_argument(parser: argparse.ArgumentParser) -> None:
    """The option that says which pool is meant."""
    parser.add_argument(
        "--results",
        type=location,
        default=record.default_path("x").parent,
        metavar="DIR",
        help=f"where {FILE} lies (default: docs/results)",
    )


def _newest(runs: Iterable[Run]) -> list[Run]:
    """Of each key the newest run, of equally old ones the last; in the order of keys."""
    by_key = dict[str, Run]()
    settings = cache(_settings)  # many runs are of one policy
    for run in runs:
        key = _text(_completed(run.key, settings))
        old = by_key.get(key)
        if old is None or run.date >= old.date:
            by_key[key] = run
    return [by_key[key] for key in sorted(by_key)]


def _completed(key: Mapping[str, Any], settings: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any]:
    """A key with the options that are newer than its run, at their defaults: that is how the run was.

    Args:
        key: of a run.
        settings: of a policy now, by its text.
    """
    try:
        now = settings(key["policy"])
    except UsageError:  # there is no such policy or option any more
        return key
    recorded = key["settings"]
    return {**key, "settings": {name: {**now.get(name, {}), **own} for name, own in recorded.items()}}


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(rounded(dict(value)), ensure_ascii=False, sort_keys=True)


def key_of(settings: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    """The key of a run of this cell. settings: those of an evaluation (`runner.py`), with or without the machine, or
    those of losses (`answers/losses.py`)."""
    own = OF_LOSSES if INSTRUMENT in settings else OF_ANSWERS
    key = {name: settings[name] for name in (*ALWAYS, *own)}
    some = MACHINE if cell.budget is None else (*MACHINE, *PADDED)
    key |= {name: settings[name] for name in some if name in settings}
    needed = {member.calibration for member in members(cell.spec.policy(AMPLE))} - {""}
    files = {name: values for name, values in (settings.get("calibration") or {}).items() if name in needed}
    calibration = hashlib.sha256(_text(files).encode()).hexdigest()[:16] if files else None
    return key | {
        "policy": cell.policy,
        "budget": cell.budget,
        "schedule": settings.get("schedule"),
        "calibration": calibration,
        "settings": _settings(cell.policy),
    }


def _settings(policy: str) -> dict[str, dict[str, Any]]:
    """The settings of each member of a policy, by its name. policy: its text."""
    return {member.name: settings_of(member) for member in members(Spec(policy).policy(AMPLE))}


def settings_of(policy: Policy) -> dict[str, Any]:
    """All hyperparameters of a policy but its budget, prompt protection included."""
    found = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init and f.name != "budget"}  # type: ignore[arg-type]
    return found | {"protect_prompt": policy.protect_prompt}


def serves(run: Run, key: Mapping[str, Any]) -> bool:
    """Whether a run has this key. A key without the machine's parts fits runs of any machine.

    An option that is newer than the run is not in the run's key. It stood at its default, as it does now: the text of
    the policy, which is equal, does not name it. An option that is gone fits nothing.
    """
    if any(key.get(name) and not run.key.get(name) for name in WATCHED):
        return False
    if any(key.get(name) != run.key.get(name) for name in PADDED):
        return False
    if "settings" in key and not _same_settings(run.key["settings"], rounded(key["settings"])):
        return False
    others = key.keys() - {*WATCHED, "settings"}
    return all(run.key.get(name) == rounded(key[name]) for name in others)


def _same_settings(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run's settings are those of now, as far as they were recorded."""
    if recorded.keys() != now.keys():
        return False
    return all({**now[name], **own} == now[name] for name, own in recorded.items())


def shows(run: Run, key: Mapping[str, Any]) -> bool:
    """Whether a table shows a run where it wants this key. The run may have had other defaults or another calibration
    than its policy has now: it stays in the table, which marks it."""
    some = {name: value for name, value in key.items() if name not in ("settings", "calibration")}
    return serves(run, some)


def pick(
    runs: Sequence[Run], keys: Sequence[Mapping[str, Any]], fits: Callable[[Run, Mapping[str, Any]], bool] = serves
) -> list[Run | None]:
    """The runs of keys without machines, all from one kind of machine; None: that run is missing.

    Where the keys leave open how tokens are drawn and how many, all runs agree in that, too. Of several kinds of
    machines the one with most of these runs counts; among equals, the one with the newest run. Of several runs of a
    key, one whose answers were not found to differ, then one that says which sequences were right, then one that
    looked for loops, then the newest. None of this depends on the code as it is now.

    Args:
        runs: of a pool.
        keys: without the machine's parts.
        fits: `serves`, or `shows` for a table.
    """
    left_open = [name for name in OF_ANSWERS if any(name not in key for key in keys)]
    by_kind = dict[str, dict[tuple[Any, ...], list[Run]]]()  # then by cell
    for run in runs:
        kind = _machine(run) + _text({name: run.key.get(name) for name in left_open})
        by_kind.setdefault(kind, {}).setdefault(run.cell, []).append(run)
    best: list[Run | None] = [None] * len(keys)
    for by_cell in by_kind.values():
        found = list[Run | None]()
        for key in keys:
            some = by_cell.get((key["dataset"], key["policy"], rounded(key["budget"])), [])
            fitting = [run for run in some if fits(run, key)]
            found.append(max(fitting, key=_worth, default=None))
        best = max(best, found, key=_worth_of_kind)
    return best


def _worth(run: Run) -> tuple[bool, bool, bool, str]:
    """What decides between several runs of a key; the largest wins."""
    return not run.stale, bool(run.right), run.row.get("looped") is not None, run.date


def _worth_of_kind(found: Sequence[Run | None]) -> tuple[int, str]:
    """What decides between kinds of machines: how many runs there are, then the newest run's date."""
    dates = [run.date for run in found if run is not None]
    return len(dates), max(dates, default="")


def _machine(run: Run) -> str:
    """The kind of machine that a run ran on."""
    parts = {name: run.key.get(name) for name in MACHINE}
    gpu = str(run.machine.get("gpu", ""))
    return _text({**parts, "gpu": SAME_CORES.get(gpu, gpu)})


def machine_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The machine of the newest run, with the names of all GPUs."""
    last = max(runs, key=lambda run: run.date)
    names = sorted({str(run.machine["gpu"]) for run in runs if "gpu" in run.machine})
    return last.machine | {"gpu": " and ".join(names)} if names else last.machine
