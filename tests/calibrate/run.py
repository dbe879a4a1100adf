"""A small random model whose attention is sharp enough to be sparse, a few problems, and calibrations of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from minithink.calibrate.__main__ import main
from minithink.checkpoint.calibration import METADATA
from minithink.checkpoint.weights import save_checkpoint
from minithink.engine import load
from tests.evaluate.run import write_model, write_problems

POLICY = "thinkv:tau=4,g=4,block=2,retention=2/1"
QUESTIONS = 5


def write_sharp_model(folder: Path) -> Path:
    """Queries and keys are long: some weights are below 1 % of the largest."""
    decoder = load(write_model(folder), device="cpu").decoder
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.endswith("norm") and weight.dim() == 2:
                weight.mul_(3)
    save_checkpoint(decoder, folder)
    return folder


def write_questions(path: Path) -> Path:
    return write_problems(path, QUESTIONS)


def options(model: Path, problems: Path, /, **changed: Any) -> list[str]:
    """The command line; an option that is None is left out, one that is True has no value."""
    given: dict[str, Any] = {
        "model": model,
        "dataset": problems,
        "num_prompts": QUESTIONS,
        "num_layers": 2,
        "policy": POLICY,
        "budget": 60,
        "compare": 2,
        "max_new_tokens": 16,
        "batch_size": 2,
        "device": "cpu",
        **changed,
    }
    words = ["thoughts"]
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def calibrate(*args: Any, **changed: Any) -> dict[str, Any]:
    """Run to the end → the file, without what says when it was made."""
    assert main(options(*args, **changed)) == 0
    name = "thoughts.json" if changed.get("thoughts", 3) == 3 else "thoughts-2.json"
    values: dict[str, Any] = json.loads((changed.get("output", args[0]) / name).read_text())
    return {k: v for k, v in values.items() if k not in ("date", "command", "commit")}


def words_of(command: str, model: Path, problems: Path, **changed: Any) -> list[str]:
    """The command line of a calibration that reads texts again; an option that is True has no value."""
    given: dict[str, Any] = {
        "model": model,
        "dataset": problems,
        "num_prompts": QUESTIONS,
        "max_new_tokens": 16,
        "batch_size": 2,
        "temperature": 0,
        "device": "cpu",
        **changed,
    }
    out = [command]
    for name, value in given.items():
        out += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return out


def content_of(file: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of such a calibration, and its metadata."""
    with safe_open(folder / file, framework="pt") as found:
        about = json.loads(found.metadata()[METADATA])
        return {name: found.get_tensor(name) for name in found.keys()}, about  # noqa: SIM118
