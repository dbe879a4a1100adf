"""Kernels are compiled without a GPU in every form that launches use.

Alone: python -m pytest tests/bench/speed/test_compile.py
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from minithink.bench.__main__ import main
from minithink.bench.speed import compile as compile_
from minithink.bench.speed.compile import ALLOWED, SPILLING, TRITON, modules, title

triton = pytest.importorskip("triton")

# Flags that are compiled one way only. The other way, the kernel does less of the same; WIDEN is for the interpreter.
ONE_WAY = {
    "_max_logit IN_PLACE": True,
    "_append QUERIES": True,
    "_dequantize SATURATE": True,
    "_by_token VALID": True,
    "_few_rows WIDEN": False,
    "_layer WIDEN": False,
}


def variants() -> Iterator[Any]:
    for name in modules():
        yield from importlib.import_module(f"minithink.kernels.{name}").variants()


def test_every_flag_of_a_kernel_is_compiled_both_ways() -> None:
    """Code behind a flag that no example sets would never be compiled before it runs on a GPU."""
    compiled = dict[str, set[bool]]()
    for variant in variants():
        for name, value in variant.constexprs.items():
            if isinstance(value, bool):
                compiled.setdefault(f"{variant.kernel.fn.__name__} {name}", set()).add(value)
    one_way = {flag: values.pop() for flag, values in compiled.items() if len(values) == 1}
    assert one_way == ONE_WAY


def test_every_argument_of_a_kernel_has_a_type_or_a_value() -> None:
    """Without a type an argument would be taken for a constant, and without a value it would be none."""
    for variant in variants():
        given = variant.signature.keys() | variant.constexprs.keys()
        assert given >= {*variant.kernel.arg_names}, variant


def test_known_spills_are_those_of_kernels_that_exist() -> None:
    titles = set[str]()
    for name in modules():
        module = importlib.import_module(f"minithink.kernels.{name}")
        titles.update(title(name, variant) for variant in module.variants())
    assert titles >= SPILLING.keys()
    assert all(known > ALLOWED and reason for known, reason in SPILLING.values())


class Here:
    """Computes in this process, so that what is replaced here is seen."""

    processes = 0  # that the newest one would have

    def __init__(self, processes: int, *_: object) -> None:
        Here.processes = processes

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    map = staticmethod(map)


@pytest.mark.parametrize(("installed", "code"), [("3.8.1", 1), ("3.9.0", 0)])
def test_spills_are_errors_with_the_version_they_are_known_of(
    installed: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(compile_, "check", lambda name, arch: (f"{name} sm_{arch}", [], ["a thread spills"]))
    monkeypatch.setattr(triton, "__version__", installed)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["compile", "rope", "--arch", "90"]) == code


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("draw rope swiglu", 5),
        ("draw rope swiglu --jobs 2", 2),
        ("draw rope swiglu --jobs 9", 6),
        ("draw --arch 90", 1),
    ],
)
def test_there_is_a_process_for_each_core_or_as_many_as_asked_for(
    words: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never more than modules and architectures to compile."""
    monkeypatch.setattr(compile_, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(compile_, "check", lambda name, arch: (f"{name} sm_{arch}", [], []))
    monkeypatch.setattr(compile_, "cores", lambda: 5)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["compile", *words.split()]) == 0
    assert Here.processes == processes


# Each process leaves a file with its number in its name.
ENDLESS = """
import os
import sys
import time
from pathlib import Path
from minithink.bench.__main__ import main
from minithink.bench.speed import compile

def check(name, arch):
    Path(f"{os.getpid()} {name}.began").touch()
    if name != "draw":
        time.sleep(600)
    return f"{name} sm_{arch}", [], []

if __name__ == "__main__":
    compile.check = check
    sys.exit(main(["compile", "draw", "rope", "swiglu", "--arch", "90", "--jobs", "3"]))
"""


LOADING = """
import os
import time
from pathlib import Path

if __name__ != "__main__":
    Path(f"{os.getpid()} loading.began").touch()
    time.sleep(600)
"""


# A signal comes from within, when the second of three processes has begun and is not known yet.
STARTING = """
import os
import signal
from multiprocessing import util

start = util.spawnv_passfds
started = []

def with_a_signal(path, args, fds):
    number = start(path, args, fds)
    if any(b"spawn_main" in os.fsencode(word) for word in args):
        started.append(number)
        if len(started) == 2:
            os.kill(os.getpid(), signal.NAME)
    return number

util.spawnv_passfds = with_a_signal
"""


@contextmanager
def running(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A script in a session of its own, as in a terminal. Whatever of it is left in the end is killed.

    Without OMP_NUM_THREADS libraries begin threads, to which the system may hand a signal.
    """
    path = folder / "endless.py"
    path.write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = subprocess.Popen(
        [sys.executable, str(path)],
        cwd=folder,
        env=environment | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(compile_.__file__).parents[3])},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def assert_interrupted(run: subprocess.Popen[str], code: int) -> None:
    """It has ended in one sentence, and all its processes with it: they hold its pipes open."""
    out, errors = run.communicate(timeout=120)
    assert run.returncode == code
    assert not out
    assert errors.strip().startswith("minithink.bench: interrupted")
    assert "Traceback" not in errors


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_processes_are_started(name: str, code: int, tmp_path: Path) -> None:
    """It ends all of them, also the one that is half started."""
    with running(STARTING.replace("NAME", name) + ENDLESS, tmp_path) as run:
        assert_interrupted(run, code)


@pytest.mark.parametrize("script", [ENDLESS, LOADING + ENDLESS], ids=["compiling", "loading"])
@pytest.mark.parametrize(("number", "to_all", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_a_signal_ends_all_processes_at_once(
    number: int, to_all: bool, code: int, script: str, tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to all processes. SIGTERM reaches the first one alone. Both may come while processes
    still load their modules."""
    with running(script, tmp_path) as run:
        assert run.stdout is not None
        if script == ENDLESS:
            assert run.stdout.readline() == "draw sm_90\n"
        late = time.monotonic() + 120
        while len(list(tmp_path.glob("*.began"))) < 3 and time.monotonic() < late:
            time.sleep(0.1)
        began = list(tmp_path.glob("*.began"))
        assert len(began) == 3
        if to_all:
            for file in began:
                os.kill(int(file.name.split()[0]), number)
            time.sleep(1)  # what they would print must come before the first one ends them
        os.kill(run.pid, number)
        assert_interrupted(run, code)


def test_without_triton_it_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["compile"]) == 2
    assert "Kernels need Triton, which is not installed (it exists for Linux only)." in capsys.readouterr().err


@pytest.mark.skipif(not triton.__version__.startswith(TRITON), reason=f"known for Triton {TRITON}x")
def test_attention_with_keys_by_token_has_registers_for_few_lanes() -> None:
    """A kernel that spills is an error, and so is this one at the limit that it once had."""
    code = """
from dataclasses import replace
from minithink.bench.speed.compile import check, title
from minithink.kernels import paged_attention
named = "paged_attention._attend, int 2, by token"
variant = next(v for v in paged_attention.variants() if title("paged_attention", v) == named)
print(variant.constexprs["BLOCK_T"], variant.arch)
for options in variant.options, {**variant.options, "maxnreg": 128}:
    paged_attention.variants = lambda: [replace(variant, options=options)]
    said, errors, spills = check("paged_attention", 90)
    print("spilled" in said, len(errors), *(spill.split(" sm_90")[0] for spill in spills))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "64 90",
        "False 0",
        "True 0 paged_attention._attend, int 2, by token, maxnreg 128",
    ]
