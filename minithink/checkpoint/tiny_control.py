"""Write the folder of the control: the embedded model as it would be without random eviction in its training (17 MB).

What differs from the embedded model lies in `minithink/assets/tiny-control/` of a checkout: the weights, compressed
so that the checkout stays small, the recipe, calibrations and a card. All other files are the embedded model's.

    hashes.json    {"weights": hash of the weights}
"""

from __future__ import annotations

import argparse
import lzma
import shutil
from pathlib import Path

from minithink.checkpoint.weights import checkpoint_hash
from minithink.cli.commands import location
from minithink.config import read_json
from minithink.errors import MinithinkError, escaped, named, reason
from minithink.results.files import new_folder

ASSETS = Path(__file__).parents[1] / "assets"
TINY = ASSETS / "tiny"
CONTROL = ASSETS / "tiny-control"
WEIGHTS = "model.safetensors"
COMPRESSED = f"{WEIGHTS}.xz"
HASHES = "hashes.json"
OF_TINY = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--output", type=location, required=True, help="the new folder")


def run(args: argparse.Namespace, argv: list[str] | None) -> int:
    """Unpack the weights beside the other files. The folder is there only when it is whole."""
    if not (CONTROL / COMPRESSED).is_file():
        raise MinithinkError(
            f"{escaped(CONTROL / COMPRESSED)} is missing: the control is in a checkout of the project and not in "
            "what pip installs, so run this command in a checkout."
        )
    with new_folder(args.output, "The model", "--output") as (folder, _):
        write(folder)
    print(
        f"{args.output}: the embedded model, trained without eviction. "
        f"`python -m minithink.generate --model {args.output} …` uses it."
    )
    return 0


def write(folder: Path) -> None:
    """Make the folder of the control.

    Raises:
        MinithinkError: its weights are damaged, or have another hash than they should have.
    """
    folder.mkdir()
    for name in OF_TINY:
        shutil.copyfile(TINY / name, folder / name)
    for path in sorted(CONTROL.iterdir()):
        if path.is_file() and path.name not in (COMPRESSED, HASHES):
            shutil.copyfile(path, folder / path.name)
    try:
        with lzma.open(CONTROL / COMPRESSED) as packed, (folder / WEIGHTS).open("wb") as weights:
            shutil.copyfileobj(packed, weights)
    except (lzma.LZMAError, EOFError) as error:
        raise MinithinkError(
            f"{escaped(CONTROL / COMPRESSED)} is damaged ({reason(error)}): get all files of its folder again."
        ) from None
    due = read_json(CONTROL / HASHES).get("weights")
    found = checkpoint_hash(folder)
    if found != due:
        raise MinithinkError(
            f"The weights have the hash {found}, and {named(due)} is due: get all files of {escaped(CONTROL)} again."
        )
