"""A small random model that stops now and then, a few problems, and runs of the evaluation over them."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from minithink.evaluate.__main__ import main
from minithink.evaluate.journal import read
from tests.fixtures_checkpoint import write_checkpoint

QUESTIONS = ["Who sits?", "a", "Alpha sits left of Bravo.", "b c", "left " * 9, "12 34", "Who sits third?"]
STOPS = [0, *range(40, 50)]  # one token in thirty
NEW = 24  # tokens at most
needs_math = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs the extra math")


def write_model(folder: Path) -> Path:
    generation = {"eos_token_id": STOPS, "temperature": 0.9, "do_sample": True}
    return write_checkpoint(folder, generation=generation, shape={"head_dim": 16})


def write_problems(path: Path, n: int = len(QUESTIONS)) -> Path:
    rows = [{"id": f"p{i}", "question": q, "answer": "1", "group": "gh"[i % 2]} for i, q in enumerate(QUESTIONS[:n])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(model: Path, problems: Path, folder: Path, /, **changed: Any) -> list[str]:
    """The command line; an option that is None is left out, one that is True has no value."""
    given: dict[str, Any] = {
        "model": model,
        "dataset": problems,
        "output_dir": folder,
        "device": "cpu",
        "batch_size": 3,
        "max_new_tokens": NEW,
        **changed,
    }
    words = []
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def evaluate(*args: Any, **changed: Any) -> dict[Any, dict[str, Any]]:
    """Run to the end → what was recorded of each sequence."""
    assert main(options(*args, **changed)) == 0
    return recorded(args[2])


def recorded(folder: Path) -> dict[Any, dict[str, Any]]:
    """By the sequences' keys, all but the time they took."""
    return {r.key: {**asdict(r), "seconds": None} for r in read(folder).records}
