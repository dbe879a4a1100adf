"""Losses of texts in a comparison (`Sweep.losses`): `evaluate loss`, a policy at a budget at a time.

A run of the pool holds the mean loss of each text, so that policies can be compared in pairs. The full cache is a run
of its own, as it is in a comparison of answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minithink.bench.methods import Sweep
from minithink.engine import PROMPT_TOKENS
from minithink.errors import UsageError
from minithink.evaluate import fixed_texts, loss, loss_summary
from minithink.evaluate.journal import INSTRUMENT, Record
from minithink.evaluate.loss_job import LossJob
from minithink.evaluate.plan import Spec
from minithink.evaluate.texts import LENGTH, REFERENCE, read_texts

AGAIN = "give the same command"  # after Ctrl-C or an error; a sweep goes on by itself
FIXED = "texts"  # beside REFERENCE in `Sweep.datasets`: the texts of `python -m minithink.models texts`
COLUMNS = ("budget_tokens", "texts", "tokens", "loss", "tokens_mean", "tokens_peak", "kv_bytes_mean", "kv_bytes_peak")


def settings_of(sweep: Sweep, name: str, checkpoint: str, limit: int | None) -> dict[str, Any]:
    """The settings that decide the losses of some texts. limit: how many; None: as the comparison says."""
    limit = limit or sweep.problems
    fixed = name == FIXED
    return {
        INSTRUMENT: "loss",
        "checkpoint": checkpoint,
        "dataset": name,
        "limit": limit,
        "problems": _hash_of(name, limit),
        "prompt_tokens": PROMPT_TOKENS if fixed else None,
        "length": LENGTH if fixed else None,
    }


def _hash_of(name: str, limit: int) -> str:
    """16 hexadecimal digits, a hash of all texts."""
    content = fixed_texts.HASHES
    if name == REFERENCE:
        content = {text.name: text.digits for text in read_texts(REFERENCE, limit=limit)}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check(sweep: Sweep, folder: Path | None) -> None:
    """UsageError: the comparison has fixed texts, and the folder that --texts names does not hold them."""
    if folder is not None and FIXED in sweep.datasets:
        fixed_texts.check(folder)


def measure(args: argparse.Namespace, key: Mapping[str, Any], folder: Path, command: str) -> bool:
    """Read the texts of a cell, or the rest of them → False: it was interrupted.

    Args:
        args: of `bench sweep`.
        key: of the cell.
        folder: where the journal lies.
        command: the command line, for the record.
    """
    job = LossJob(
        policies=[Spec(key["policy"])],
        budgets=[] if key["budget"] is None else [key["budget"]],
        beside_full=False,
        texts=REFERENCE if key["dataset"] == REFERENCE else str(args.texts),
        limit=key["limit"],
        model=args.model,
        device=args.device,
        dtype=args.dtype or "auto",
        batch_size=args.batch_size,
    )
    return loss.measure(job, folder, command=command, resume=folder.is_dir(), again=AGAIN) is not None


def row_of(records: Sequence[Record]) -> dict[str, Any]:
    """What the pool keeps of a cell. records: of all texts, with finite losses."""
    [row] = loss_summary.summarize(records)
    ordered = sorted(records, key=lambda record: record.id)
    each = [loss_summary.mean_of(record) for record in ordered]
    return {
        "policy": row.policy,
        "budget": row.budget,
        **{name: getattr(row, name) for name in COLUMNS},
        "losses": each,
    }


def refuse(chosen: Mapping[str, Sweep], what: str) -> None:
    """UsageError: some comparison is of losses."""
    for name, sweep in chosen.items():
        if sweep.losses:
            raise UsageError(f"{what} is for answers, and {name} compares losses: leave one of the two out.")
