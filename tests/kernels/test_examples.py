"""The examples of the kernels' files, and the files that each of them names as all that it needs.

To run it alone: pytest tests/kernels/test_examples.py
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from minithink.results.origin import ROOT
from tests.kernels.device import DEVICE
from tests.test_imports import imports_of, sources

KERNELS = ROOT / "kernels"
FILES = [path.stem for path in sorted(KERNELS.glob("*.py"))]
FIRST_SCREEN = 40  # lines
PUBLIC = [name for name in FILES if not name.startswith("_")]
ALONE = re.compile(r"To use it alone, copy this file(.*?)\. With the GPU as torch's default device:")
USED = re.compile(r"Used by (`.*?\.py`)\.")


def docstring(name: str) -> str:
    """What a file of `kernels/` says about itself."""
    return str(import_module(f"minithink.kernels.{name}").__doc__)


def named(name: str, sentence: re.Pattern[str]) -> set[str]:
    """The files that a sentence of a docstring names."""
    found = sentence.search(" ".join(docstring(name).split()))
    assert found, f"kernels/{name}.py lacks the sentence {sentence.pattern!r}"
    return set(re.findall(r"`(\w+)\.py`", found[1]))


def imports_of_kernels() -> dict[str, set[str]]:
    """What each file of `kernels/` imports of the project: bare names of its neighbours, full names of others."""
    imports = imports_of({name: path.read_text(encoding="utf-8") for name, path in sources().items()})
    found = {}
    for name in FILES:
        targets = imports[f"minithink.kernels.{name}"] - {"minithink", "minithink.kernels"}
        found[name] = {target.removeprefix("minithink.kernels.") for target in targets}
    return found


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tensors are made where the kernels run."""
    torch.manual_seed(0)
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_gives_what_it_says(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(docstring(name), {}, name, f"kernels/{name}.py", 0)
    calls = [one for one in test.examples if f"{name}(" in one.source]
    assert calls, "the example calls the kernel"
    assert test.examples[-1].want, "the example ends with what it gives"
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not result.failed, "".join(said)


def test_the_example_is_on_the_first_screen() -> None:
    """The whole example is among the first lines of its file."""
    for name in PUBLIC:
        lines = (KERNELS / f"{name}.py").read_text(encoding="utf-8").splitlines()
        example = [i for i, line in enumerate(lines, start=1) if line.startswith(("    >>> ", "    ... "))]
        assert max(example) < FIRST_SCREEN, f"kernels/{name}.py"


def test_the_named_files_are_those_that_it_imports() -> None:
    imports = imports_of_kernels()
    for name in PUBLIC:
        needed = set[str]()
        new = {name}
        while new:
            needed |= new
            new = set.union(*(imports[one] for one in new)) - needed
        assert named(name, ALONE) == needed - {name}, f"kernels/{name}.py"


def test_helpers_name_the_files_that_use_them() -> None:
    imports = imports_of_kernels()
    assert "Used by every kernel." in docstring("_common")
    assert all("_common" in imports[name] for name in PUBLIC)
    for helper in set(FILES) - {*PUBLIC, "_common"}:
        users = {name for name in FILES if helper in imports[name]}
        assert named(helper, USED) == users, f"kernels/{helper}.py"


RUN = """
import doctest, importlib, sys, torch
sys.modules["minithink"] = None  # an import of it fails
torch.set_default_device(sys.argv[1])
for name in sys.argv[2:]:
    torch.manual_seed(0)
    kernel = importlib.import_module(f"alone_{name}.{name}")
    result = doctest.testmod(kernel)
    assert result.attempted and not result.failed, name
print("all of them run")
"""


def test_a_copy_of_the_named_files_runs_the_example(tmp_path: Path) -> None:
    """Each kernel is in a folder with the files that it names and nothing else."""
    for name in PUBLIC:
        folder = tmp_path / f"alone_{name}"
        folder.mkdir()
        for file in {name, *named(name, ALONE)}:
            source = (KERNELS / f"{file}.py").read_text(encoding="utf-8")
            copy = source.replace("minithink.kernels", folder.name)
            (folder / f"{file}.py").write_text(copy, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, DEVICE.type, *PUBLIC],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "all of them run\n", done.stdout + done.stderr


def test_the_page_lifts_a_kernel_out(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert section.startswith("Lift one kernel out\n"), "the page opens with it"
    [commands] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    [example] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["MINITHINK"] = str(ROOT)
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, env=environment, check=True)
    done = subprocess.run(
        [sys.executable, "-c", example.replace('"cuda"', f'"{DEVICE.type}"')],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n", done.stderr
