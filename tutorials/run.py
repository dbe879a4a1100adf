"""Run the tutorials as notebooks, each in a kernel of its own.

python tutorials/run.py                        all of them
python tutorials/run.py 01_decoder.py          some of them
python tutorials/run.py --output executed      keep the executed notebooks
python tutorials/run.py --pages                write docs/tutorials, where they are read without running them
python tutorials/run.py --jobs 1               one after the other, not one for each core
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import jupytext
import nbformat
import pages
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).resolve().parent
TIMEOUT = 300  # seconds that one tutorial may take
QUIET = "--IPKernelApp.log_level=40"  # errors only


class ThisInterpreter(AsyncKernelManager):
    """A kernel of the running interpreter, whatever kernels are registered, or none."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", QUIET]
        return KernelSpec(argv=argv, display_name="Python 3", language="python", name="python3")


class ForPages(ThisInterpreter):
    """A kernel that draws in the resolution of the pages."""

    @property
    def kernel_spec(self) -> KernelSpec:
        spec = super().kernel_spec
        options = {"dpi": pages.DPI, "bbox_inches": "tight"}
        spec.argv.append(f"--InlineBackend.print_figure_kwargs={options}")
        return spec


def execute(
    script: Path, folder: Path, kernel: type[ThisInterpreter] = ThisInterpreter
) -> tuple[nbformat.NotebookNode, str]:
    """Run a tutorial in the empty `folder` → the notebook with its outputs, and what went wrong ("": nothing)."""
    notebook = jupytext.read(script, fmt="py:percent")
    end = time.monotonic() + TIMEOUT
    client = NotebookClient(
        notebook,
        timeout_func=lambda cell: max(1, end - time.monotonic()),
        kernel_name="python3",
        kernel_manager_class=kernel,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError) as error:  # its text holds the cell's source
        return notebook, re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # without colours: it goes into logs
    except DeadKernelError as error:
        begun = [cell.source for cell in notebook.cells if cell.get("execution_count")]
        return notebook, f"{error} in the cell\n\n{begun[-1] if begun else '(none had begun)'}\n"
    if left := sorted(path.name for path in folder.iterdir()):
        return notebook, f"It leaves {', '.join(left)} in the current folder: put that into a temporary one.\n"
    return notebook, ""


def run_alone(
    script: Path, kernel: type[ThisInterpreter] = ThisInterpreter
) -> tuple[nbformat.NotebookNode, str, float]:
    """Run a tutorial in a temporary folder → as `execute`, and the seconds that it took."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        notebook, error = execute(script, Path(folder), kernel)
    return notebook, error, time.perf_counter() - began


def chosen(names: list[str]) -> list[Path]:
    """The named tutorials, or all; a name may be a path or a file name of this folder."""
    if not names:
        return sorted(HERE.glob("[0-9]*.py"))
    scripts = [path if (path := Path(name)).is_file() else HERE / path.name for name in names]
    if missing := [name for name, script in zip(names, scripts, strict=True) if not script.is_file()]:
        known = ", ".join(path.name for path in chosen([]))
        raise SystemExit(f"The tutorial {missing[0]} does not exist; there are {known}.")
    return scripts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the tutorials as notebooks.")
    parser.add_argument("scripts", nargs="*", metavar="FILE", help="tutorials to run (default: all)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the executed notebooks here")
    parser.add_argument("--pages", action="store_true", help="write docs/tutorials")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="at once (default: cores)")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("minithink") is None:  # not installed: use the checkout around this file
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))

    failed = 0
    scripts = chosen(options.scripts)
    run = partial(run_alone, kernel=ForPages if options.pages else ThisInterpreter)
    with ProcessPoolExecutor(max(1, min(options.jobs, len(scripts)))) as pool:
        for script, (notebook, error, seconds) in zip(scripts, pool.map(run, scripts), strict=True):
            print(f"{'FAILED' if error else 'ok':6} {script.name:24} {seconds:6.1f} s", flush=True)
            if error:
                failed += 1
                print(error, file=sys.stderr, flush=True)
            elif options.pages:
                pages.write(notebook, script.stem, pages.machine(), seconds)
            if options.output is not None:
                options.output.mkdir(parents=True, exist_ok=True)
                nbformat.write(notebook, options.output / f"{script.stem}.ipynb")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
