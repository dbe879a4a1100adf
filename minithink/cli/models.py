"""The options that say which model a command loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from minithink.cli.commands import location


def model_name(model: str, adapter: Path | None) -> str:
    """How a record names a model, with what was merged into it."""
    return model if adapter is None else f"{model} --adapter {adapter}"


def add_model_arguments(parser: argparse.ArgumentParser, default: str | None = "tiny") -> None:
    """Add --model and --adapter.

    default: of `args.model`; None: the command must know whether the user named a model.
    """
    add = parser.add_argument
    add("--model", default=default, help="folder, GGUF file or Hugging Face id (default: the embedded model, tiny)")
    add(
        "--adapter",
        type=location,
        metavar="FOLDER",
        help="of a LoRA adapter in PEFT's format, which is merged into the model's weights",
    )
